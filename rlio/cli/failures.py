"""Errors, warnings and exit codes, the same for all commands.

Exit codes: 0, success; `EXIT_WRONG`, the data has a problem; `EXIT_FAILED`, the command could do nothing.
With ``--json``, an error is also one JSON object on standard output:
``{"error": {"type": ..., "message": ..., "uri": ..., "record": ..., "column": ...}}``.
"""

from __future__ import annotations

import json
import logging
from typing import Any, Final

import typer
from typer.core import TyperCommand

from rlio.errors import CorruptData, LedgerError, RlioError, SchemaError

__all__ = ["EXIT_FAILED", "EXIT_WRONG", "Command", "print_json"]

#: The data has a problem: it is damaged, does not fit its schema, or work is left.
EXIT_WRONG: Final = 1
#: The data set does not exist, the store does not answer, or an option is wrong. Click's own errors use this
#: too.
EXIT_FAILED: Final = 2

_WRONG: Final = (CorruptData, LedgerError, SchemaError)


#: Warnings of the running command, from all of its threads: a process runs one command at a time.
_warned: list[str] = []


class _Warnings(logging.Handler):
    """Prints rlio's warnings on standard error, and keeps them for the JSON."""

    def emit(self, record: logging.LogRecord) -> None:
        _warned.append(record.getMessage())
        typer.echo(f"rlio: {record.levelname.lower()}: {record.getMessage()}", err=True)


class Command(TyperCommand):
    """A command that reports errors as messages and exit codes instead of tracebacks."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command with the common error handling."""
        logger, warnings = logging.getLogger("rlio"), _Warnings(logging.WARNING)
        _warned.clear()
        logger.addHandler(warnings)
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # The reader of the output closed it: Click exits silently.
        except (RlioError, OSError, ImportError) as error:
            typer.echo(f"rlio: {type(error).__name__}: {error}", err=True)
            if ctx.params.get("as_json"):
                print_json({"error": _told(error)})
            raise typer.Exit(EXIT_WRONG if isinstance(error, _WRONG) else EXIT_FAILED) from error
        finally:
            logger.removeHandler(warnings)


def print_json(report: dict[str, Any]) -> None:
    """Print ``report`` as one JSON object; adds ``warnings``, a list of texts, if the command warned."""
    typer.echo(json.dumps({**report, "warnings": _warned} if _warned else report))


def _told(error: Exception) -> dict[str, Any]:
    places = {name: getattr(error, name, None) for name in ("uri", "record", "column")}
    return {"type": type(error).__name__, "message": str(error), **places}
