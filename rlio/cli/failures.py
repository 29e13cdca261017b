"""How a command ends that could not do what it was asked for, and what it was warned of: the same in all.

Exit codes: 0, done; `EXIT_WRONG`, something is wrong with the data; `EXIT_FAILED`, nothing could be done.
With ``--json``, an error is one JSON object on standard output too: ``{"error": {"type": ..., "message": ...,
"uri": ..., "record": ..., "column": ...}}``.
"""

from __future__ import annotations

import json
import logging
from typing import Any, Final

import typer
from typer.core import TyperCommand

from rlio.errors import CorruptData, LedgerError, RlioError, SchemaError

__all__ = ["EXIT_FAILED", "EXIT_WRONG", "Command", "print_json"]

#: Something is wrong with the data: it is damaged, does not fit its schema, or something is left to be done.
EXIT_WRONG: Final = 1
#: There is no data set, the store does not answer, or an option is wrong. Click's own errors have this too.
EXIT_FAILED: Final = 2

_WRONG: Final = (CorruptData, LedgerError, SchemaError)


#: Warnings of the command that runs, from all of its threads: a process runs one command at a time.
_warned: list[str] = []


class _Warnings(logging.Handler):
    """Shows the warnings of rlio on standard error, and keeps them for the JSON."""

    def emit(self, record: logging.LogRecord) -> None:
        _warned.append(record.getMessage())
        typer.echo(f"rlio: {record.levelname.lower()}: {record.getMessage()}", err=True)


class Command(TyperCommand):
    """A command whose errors are messages and exit codes instead of tracebacks."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command, between what all commands do."""
        logger, warnings = logging.getLogger("rlio"), _Warnings(logging.WARNING)
        _warned.clear()
        logger.addHandler(warnings)
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # Whoever read the output has gone: Click ends without a word.
        except (RlioError, OSError, ImportError) as error:
            typer.echo(f"rlio: {type(error).__name__}: {error}", err=True)
            if ctx.params.get("as_json"):
                print_json({"error": _told(error)})
            raise typer.Exit(EXIT_WRONG if isinstance(error, _WRONG) else EXIT_FAILED) from error
        finally:
            logger.removeHandler(warnings)


def print_json(report: dict[str, Any]) -> None:
    """Print ``report`` as one JSON object; ``warnings`` is a list of texts, if the command gave any."""
    typer.echo(json.dumps({**report, "warnings": _warned} if _warned else report))


def _told(error: Exception) -> dict[str, Any]:
    places = {name: getattr(error, name, None) for name in ("uri", "record", "column")}
    return {"type": type(error).__name__, "message": str(error), **places}
