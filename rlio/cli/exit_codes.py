"""The exit codes of all commands, in one table: `rlio --help` and docs/commands.md show it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

__all__ = ["CLOSED", "EXIT_CODES", "FAILED", "INTERRUPTED", "OK", "OUR_FAULT", "TERMINATED", "WRONG"]

#: The command succeeded.
OK: Final = 0
#: The data has a problem: it is damaged, does not fit its schema, differs, or work is left.
WRONG: Final = 1
#: The data set does not exist, the store does not answer, or an option is wrong. Click's own errors use this
#: too.
FAILED: Final = 2
#: An error that rlio does not raise on purpose; `EX_SOFTWARE` of BSD's sysexits.
OUR_FAULT: Final = 70
#: 128 and the number of the signal, as shells count.
INTERRUPTED: Final = 130
CLOSED: Final = 141
TERMINATED: Final = 143

#: Exit code -> what it means.
EXIT_CODES: Final[Mapping[int, str]] = MappingProxyType(
    {
        OK: "the command succeeded",
        WRONG: "something is wrong with the data",
        FAILED: "it could not run: no data set, no answer of the store, a wrong option",
        OUR_FAULT: "a bug of rlio; the traceback is on standard error",
        INTERRUPTED: "Ctrl-C; writers are closed and publish first",
        CLOSED: "the reader of the output closed it, such as `head`",
        TERMINATED: "SIGTERM; writers are closed and publish first",
    }
)
