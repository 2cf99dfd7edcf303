"""One long text -> several documents, so that a single book can be split into training and validation text."""

from __future__ import annotations


def cut_text(text: str, limit: int) -> list[str]:
    """Cuts a text into pieces of about equal size, none above `limit` bytes of UTF-8; joined they are the text.

    A cut lies behind a line break; in a line longer than the limit behind a blank; without blanks behind a character.
    A single character is never cut, however small the limit.

    Args:
        text: any text.
        limit: bytes per piece, 1 or more.
    """
    raw = text.encode()
    pieces: list[str] = []
    start = 0
    while len(raw) - start > limit:
        rest = len(raw) - start
        aim = -(-rest // -(-rest // limit))  # what is left in equal parts: no crumb at the end
        end = (
            _behind(raw, b"\n", start, start + aim, start + limit)
            or _behind(raw, b" ", start, start + aim, start + limit)
            or _character(raw, start, start + aim)
        )
        pieces.append(raw[start:end].decode())
        start = end
    return [*pieces, raw[start:].decode()]


def _behind(raw: bytes, mark: bytes, start: int, aim: int, last: int) -> int:
    """The place behind a mark that is nearest to `aim`, from `start` + 1 to `last`; 0 without one."""
    before, after = raw.rfind(mark, start, aim) + 1, raw.find(mark, aim, last) + 1
    if before and after:
        return before if aim - before <= after - aim else after
    return before or after


def _character(raw: bytes, start: int, aim: int) -> int:
    """The last end of a character up to `aim`, or the first one behind it if a character reaches over the whole way."""
    end = aim
    while end > start and raw[end] & 0xC0 == 0x80:
        end -= 1
    if end > start:
        return end
    end = aim
    while end < len(raw) and raw[end] & 0xC0 == 0x80:
        end += 1
    return end
