"""Errors and warnings, the same for all commands.

With ``--json``, an error, also one of usage, is one JSON object on standard output, beside its text:
``{"error": {"type": ..., "message": ..., "uri": ..., "record": ..., "column": ...}}``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from rlio.cli.exit_codes import CLOSED, FAILED, WRONG
from rlio.errors import CorruptData, LedgerError, MissingColumn, RlioError, SchemaError

__all__ = ["Command", "Group", "print_json"]

_OF_DATA: Final = (CorruptData, LedgerError, SchemaError)
#: Arguments of commands that are paths, in which a column's name means nothing.
_PLACES: Final = frozenset(("uri", "src", "dst"))


#: Click's error for unknown names, and wrong or missing values. Newer Typers have a copy of Click.
_USAGE: Final[Any] = typer.BadParameter.__base__
_ARGUMENTS: Final = "rlio.arguments"

#: Warnings of the running command, from all of its threads: a process runs one command at a time.
_warned: list[str] = []


class _Warnings(logging.Handler):
    """Prints rlio's warnings on standard error, each once, and keeps them for the JSON.

    A command may open the same files several times.
    """

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message not in _warned:
            _warned.append(message)
            typer.echo(f"rlio: {record.levelname.lower()}: {message}", err=True)


class Command(TyperCommand):
    """A command that reports errors as messages and exit codes instead of tracebacks."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command with the common error handling."""
        logger, warnings = logging.getLogger("rlio"), _Warnings(logging.WARNING)
        _warned.clear()
        logger.addHandler(warnings)
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            # The reader of the output closed it. What is left in the buffer must not
            # fail again when the process ends.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(CLOSED) from error
        except (RlioError, OSError, ImportError) as error:
            typer.echo(f"rlio: {type(error).__name__}: {error}", err=True)
            if ctx.params.get("as_json"):
                print_json({"error": _told(error)})
            is_of_data = isinstance(error, _OF_DATA) and not _is_asked_for(error, ctx.params)
            raise typer.Exit(WRONG if is_of_data else FAILED) from error
        finally:
            logger.removeHandler(warnings)


class Group(TyperGroup):
    """The commands; a wrong usage of one is JSON, too, if it has ``--json``."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the options before the command."""
        given = tuple(args)  # Parsing takes them out.
        with _usage_as_json(given):
            context = super().make_context(info_name, args, parent, **extra)
        context.meta[_ARGUMENTS] = given
        return context

    def get_help_option(self, ctx: Any) -> Any:
        """Say that ``--help`` is off by default: Typer imports Pydantic to convert a flag that is None."""
        option = super().get_help_option(ctx)
        if option is not None and not option.default:
            option.default = False
        return option

    def invoke(self, ctx: Any) -> Any:
        """Find, parse and run the command."""
        with _usage_as_json(ctx.meta[_ARGUMENTS]):
            return super().invoke(ctx)


@contextlib.contextmanager
def _usage_as_json(arguments: Sequence[str]) -> Iterator[None]:
    """Print a usage error as JSON, if ``--json`` is among the arguments; Typer prints its text."""
    try:
        yield
    except _USAGE as error:
        if "--json" in arguments:
            _warned.clear()  # Of an earlier command of this process.
            told = {"type": type(error).__name__, "message": error.format_message()}
            print_json({"error": {**told, "uri": None, "record": None, "column": None}})
        raise


def _is_asked_for(error: Exception, options: Mapping[str, Any]) -> bool:
    """Whether a column is missing only because an option names it: then the option is wrong."""
    if not isinstance(error, MissingColumn) or error.column is None:
        return False
    values = (value for name, value in options.items() if name not in _PLACES)
    texts = (text for value in values for text in (value if isinstance(value, list) else [value]))
    return any(isinstance(text, str) and error.column in text for text in texts)


def print_json(report: dict[str, Any]) -> None:
    """Print ``report`` as one JSON object; adds ``warnings``, a list of texts, if the command warned."""
    typer.echo(json.dumps({**report, "warnings": _warned} if _warned else report))


def _told(error: Exception) -> dict[str, Any]:
    places = {name: getattr(error, name, None) for name in ("uri", "record", "column")}
    return {"type": type(error).__name__, "message": str(error), **places}
