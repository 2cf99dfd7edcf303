"""Lists in error messages: the first few names, and what differs between two records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def some(items: Sequence[str], limit: int = 10, separator: str = ", ") -> str:
    """The first few items, and how many more there are."""
    shown = separator.join(items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], form: str = "{name}: {old} before, {new} now"
) -> list[str]:
    """One text per key whose value differs, in the order of the keys; an absent key counts as None.

    Args:
        old: One record.
        new: The other.
        form: Text of one difference, with the fields name, old and new.
    """
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return [form.format(name=name, old=old.get(name), new=new.get(name)) for name in names]


def counted(number: int, thing: str) -> str:
    """`1 document`, `2 documents`."""
    return f"{number} {thing}" + ("" if number == 1 else "s")
