"""Python warnings of all ranks on the terminal: each text once, with the number of the rank unless that is 0."""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from typing import Any, TextIO

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def report_warnings(rank: int, store: Any) -> None:
    """From now on, a warning that Python's filters let through is one line of the first rank that meets its text.

    What is shown is the filters' decision alone: Python's, `compat.silence_known_notices`' and the user's `-W`.

    Args:
        rank: This process.
        store: The rendezvous store, through which ranks settle who speaks; None: every rank speaks for itself.
    """

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
        line: str | None = None,
    ) -> None:  # fmt: skip
        text = " ".join(str(message).split())
        digest = hashlib.sha256(f"{category.__name__}: {text}".encode()).hexdigest()
        if not is_first(store, f"warning/{digest}"):
            return
        who = f" (rank {rank})" if rank else ""
        kind = "" if category is UserWarning else f"{category.__name__}: "
        # Our own name a field of the config, which helps more than the line.
        where = "" if filename.startswith(_OURS) else f" ({os.path.basename(filename)}:{lineno})"
        print(f"warning{who}: {kind}{text}{where}", file=file or sys.stderr, flush=True)

    warnings.showwarning = show


def is_first(store: Any, key: str) -> bool:
    """Whether no rank has asked for this key yet; True when nobody can be asked (no store, or one that has gone)."""
    if store is None:
        return True
    try:
        return int(store.add(key, 1)) == 1
    except RuntimeError:  # the store has gone with the rank that held it: better said twice than not at all
        return True
