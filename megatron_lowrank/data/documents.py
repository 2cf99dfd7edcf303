"""Text files -> documents, with every line that is not one counted and located.

The work is cut into shards by a rule that looks at names and sizes alone, so any number of workers, and a run that
was killed and started again, read the same documents in the same order. A shard is a list of pieces: a whole file, or
the lines of an uncompressed .jsonl file that begin within a byte range.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import os
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import IO, Any

from megatron_lowrank.data.cut import cut_text
from megatron_lowrank.data.out import is_result, is_work_folder

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".json.gz", ".json.zst")
"""Files taken from a folder; .json means one object per line, as C4 ships."""
BUILT_IN = "built-in:pydoc_data.topics"
"""Name of the text that Python itself carries: the documentation of its topics, some 470 KB."""
BAD_LINES_KEPT = 20
"""Locations kept per piece; the counts are always complete."""
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A file, or the lines of one that begin within a byte range."""

    path: str
    """File, or BUILT_IN."""
    size: int
    """Bytes of the whole file on disk."""
    modified: int
    """Time of change in nanoseconds; tells a resumed run that the file is still the same."""
    start: int = 0
    """First byte."""
    end: int = 0
    """Byte behind the last."""


@dataclass(kw_only=True)
class Report:
    """What reading one piece met."""

    path: str
    """The file."""
    lines: int = 0
    """Lines read; a .txt file and a built-in topic is one."""
    empty: int = 0
    """Documents without text; they are left out."""
    bad: dict[str, int] = field(default_factory=dict)
    """Reason -> number of lines."""
    where: list[tuple[int, str]] = field(default_factory=list)
    """(line within the piece, reason) of the first bad lines."""
    text_bytes: int = 0
    """UTF-8 bytes of the documents."""
    sha256: str = ""
    """Hash of the lines read, decompressed."""

    def add_bad(self, reason: str, detail: str = "") -> None:
        """Counts the current line as bad."""
        self.bad[reason] = self.bad.get(reason, 0) + 1
        if len(self.where) < BAD_LINES_KEPT:
            self.where.append((self.lines, f"{reason} ({detail})" if detail else reason))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def list_inputs(paths: tuple[str, ...]) -> list[Piece]:
    """Every file below the given files and folders, folders recursively and in sorted order.

    Args:
        paths: files and folders; none: the built-in text.

    Raises:
        ValueError: a path is missing, has an unknown suffix, or is a folder without a known file.
    """
    if not paths:
        size = sum(len(text.encode()) for text in _topics())
        return [Piece(path=BUILT_IN, size=size, modified=0, end=size)]
    found: list[str] = []
    for path in paths:
        if os.path.isdir(path):
            found += _below(path)
        elif not os.path.exists(path):
            what = f"{path}, a link to nothing" if os.path.islink(path) else f"no file or folder {path}"
            raise ValueError(f"--input: found {what}")
        elif not path.endswith(SUFFIXES):
            raise ValueError(
                f"--input: found {path}, allowed: files ending in {' '.join(SUFFIXES)}, or a folder of them"
            )
        elif not os.path.isfile(path):
            raise ValueError(f"--input: found {path}, a pipe or device, allowed: regular files, or a folder of them")
        else:
            found.append(path)
    repeated = [path for path, times in Counter(map(os.path.realpath, found)).items() if times > 1]
    if repeated:
        raise ValueError(f"--input: {repeated[0]} is given more than once")
    status = [(path, os.stat(path)) for path in found]
    return [Piece(path=path, size=s.st_size, modified=s.st_mtime_ns, end=s.st_size) for path, s in status]


def _below(top: str) -> list[str]:
    """Regular files of a folder, sorted, without the results of `prepare` itself; links to nothing are a warning."""

    def refuse(error: OSError) -> None:
        raise ValueError(f"--input: cannot read folder {error.filename} ({error.strerror})") from error

    found: list[str] = []
    for folder, folders, names in os.walk(top, onerror=refuse):
        folders[:] = [name for name in folders if not is_work_folder(folder, name)]
        found += [os.path.join(folder, n) for n in names if n.endswith(SUFFIXES) and not is_result(folder, n)]
    # A pipe would be waited for without end.
    odd = sorted(path for path in found if not os.path.isfile(path))
    if odd:
        entries = "entry that is" if len(odd) == 1 else "entries that are"
        warnings.warn(f"--input: left out {len(odd)} {entries} no regular file, the first {odd[0]}", stacklevel=3)
    if len(odd) == len(found):
        raise ValueError(f"--input: folder {top} holds no text, allowed: files ending in {' '.join(SUFFIXES)}")
    return sorted(set(found) - set(odd))


def cut_shards(files: list[Piece], shard_bytes: int) -> list[list[Piece]]:
    """Cuts the inputs into shards of about `shard_bytes` on disk; compressed files and .txt files stay whole."""
    pieces: list[Piece] = []
    for file in files:
        if file.path.endswith((".jsonl", ".json")) and file.size > shard_bytes:
            edges = [*range(0, file.size, shard_bytes), file.size]
            pieces += [
                Piece(path=file.path, size=file.size, modified=file.modified, start=a, end=b)
                for a, b in zip(edges[:-1], edges[1:], strict=True)
            ]
        else:
            pieces.append(file)
    shards: list[list[Piece]] = []
    filled = shard_bytes
    for piece in pieces:
        if filled >= shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(piece)
        filled += piece.end - piece.start
    return shards


def read_piece(piece: Piece, json_key: str, report: Report, cut: int | None = None) -> Iterator[str]:
    """The documents of a piece, none of them empty.

    Args:
        piece: what to read.
        json_key: key of the text in a line of JSON.
        report: filled on the way.
        cut: cut a .txt file or built-in topic of more bytes than this into documents of at most as many.
    """
    plain = piece.path.endswith(".txt") or piece.path == BUILT_IN
    digest = hashlib.sha256()
    raw: bytes | str
    for raw in _raw_documents(piece, report):
        if isinstance(raw, str):
            report.add_bad("broken compression", raw)
            continue
        digest.update(raw)
        text = _decode(raw, None if plain else json_key, report)
        if text is None:
            continue
        for document in cut_text(text, cut) if plain and cut is not None else (text,):
            if not document.strip():
                report.empty += 1
                continue
            report.text_bytes += len(document.encode())
            yield document
    report.sha256 = digest.hexdigest()


def _raw_documents(piece: Piece, report: Report) -> Iterator[bytes | str]:
    """Undecoded documents; a str is the message of a decompression that failed. Counts lines, drops blank ones."""
    if piece.path == BUILT_IN or piece.path.endswith(".txt"):
        for raw in [text.encode() for text in _topics()] if piece.path == BUILT_IN else [_read(piece.path)]:
            report.lines += 1
            yield raw
        return
    lines = _lines(piece) if piece.path.endswith((".jsonl", ".json")) else _compressed_lines(piece.path)
    for line in lines:
        report.lines += 1
        if isinstance(line, str) or line.strip():
            yield line


def _decode(raw: bytes, json_key: str | None, report: Report) -> str | None:
    """Text of one document, or None when the line is bad."""
    try:
        text = raw.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        report.add_bad("invalid UTF-8", f"byte {error.start}")
        return None
    if json_key is None:
        return text
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        report.add_bad("invalid JSON", str(error))
        return None
    if not isinstance(record, dict) or json_key not in record:
        report.add_bad("missing key", json_key)
        return None
    value = record[json_key]
    if not isinstance(value, str):
        report.add_bad("text is not a string", type(value).__name__)
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        # JSON may escape half of a surrogate pair, which no encoding of text can hold.
        report.add_bad("text is not Unicode", "lone surrogate")
        return None
    return value


def _lines(piece: Piece) -> Iterator[bytes]:
    """Lines that begin within the piece's byte range, without their newline."""
    with open(piece.path, "rb") as stream:
        if piece.start:
            # The line that contains byte start - 1 belongs to the piece before.
            stream.seek(piece.start - 1)
            stream.readline()
        while stream.tell() < piece.end:
            yield stream.readline().removesuffix(b"\n")


def _compressed_lines(path: str) -> Iterator[bytes | str]:
    """Lines of a .gz or .zst file; a str at the end tells that the file is broken or cut short."""
    rest = b""
    try:
        for chunk in _gzip_chunks(path) if path.endswith(".gz") else _zstd_chunks(path):
            *whole, rest = (rest + chunk).split(b"\n")
            yield from whole
    except (EOFError, OSError, zlib.error) as error:
        # What is left of the last line is incomplete.
        yield str(error)
        return
    if rest:
        yield rest


def _gzip_chunks(path: str) -> Iterator[bytes]:
    with gzip.open(path) as stream:
        # read1, not read: a cut file still yields what came before the cut.
        while chunk := stream.read1(_CHUNK):
            yield chunk


def _zstd_chunks(path: str) -> Iterator[bytes]:
    import zstandard

    stream: IO[bytes]
    with open(path, "rb") as stream:
        # The stream readers of the library end quietly at a cut; the object knows whether its frame was complete.
        frame = None
        while pending := stream.read(_CHUNK):
            while pending:
                frame = frame or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
                try:
                    yield frame.decompress(pending)
                except zstandard.ZstdError as error:
                    raise OSError(str(error)) from error
                pending = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
        if frame is not None:
            raise EOFError("compressed file ended before the end of its frame")


def _read(path: str) -> bytes:
    with open(path, "rb") as stream:
        return stream.read()


def _topics() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]
