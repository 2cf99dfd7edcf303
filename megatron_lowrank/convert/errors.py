"""What can go wrong in a conversion, each with a code that scripts can rely on."""

from __future__ import annotations

import errno
from typing import Literal

from megatron_lowrank.disk import DamagedError

Code = Literal[
    "USAGE", "MISSING_KEY", "EXTRA_KEY", "SHAPE", "RANK", "CORRUPT", "NONFINITE", "OVERFLOW", "UNKNOWN_ARCH",
    "NOT_EXPRESSIBLE", "UNSAFE_PATH", "MISSING_FILE", "UNSAFE_PICKLE", "INCOMPLETE", "CHECKSUM", "NO_SPACE", "EXISTS",
    "DST_IN_SRC", "DUPLICATE", "CONFIG", "PERMISSION", "IO",
]  # fmt: skip

EXIT_VERIFICATION: tuple[Code, ...] = ("CHECKSUM",)
"""Codes that end the program with 3: the folder is not what its own manifest says."""
EXIT_IO: tuple[Code, ...] = ("NO_SPACE", "PERMISSION", "IO")
"""Codes that end the program with 4: the disk, not the input. Every other code is a bad input or usage: 2."""


class ConvertError(Exception):
    """A conversion that cannot go on; `str()` is one line without the program's name."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(f"error[{code}]: {' '.join(message.split())}")
        self.code = code

    @property
    def exit_status(self) -> int:
        """Exit status of the command line: 2 bad input or usage, 3 verification failed, 4 I/O."""
        return 3 if self.code in EXIT_VERIFICATION else 4 if self.code in EXIT_IO else 2

    @classmethod
    def from_os_error(cls, error: OSError) -> ConvertError:
        """The error of a failed system call."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return cls("NO_SPACE", f"disk full or quota used up ({error.filename or error.strerror})")
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return cls("PERMISSION", f"{error.strerror} ({error.filename})")
        return cls("IO", f"{error.strerror or error} ({error.filename})")

    @classmethod
    def from_damage(cls, error: DamagedError) -> ConvertError:
        """The error of a file or sealed folder that is not what was written."""
        return cls(error.defect, str(error))
