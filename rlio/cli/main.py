"""`rlio`, the command: the app, and the list of its commands.

A command lives in a module of its own and is registered at the foot of this one. Modules of commands import
what is slow inside their functions, so that `rlio --help` is quick.
"""

from __future__ import annotations

import json
import platform
import signal
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import Annotated, NoReturn

import typer

import rlio
from rlio.cli.demo import demo
from rlio.cli.evaluate import evaluate
from rlio.cli.failures import Command
from rlio.cli.maintenance import compact, gc, trim
from rlio.cli.recover import recover
from rlio.cli.verify import verify

__all__ = ["app", "main"]

#: Shown by `rlio version`: what a bug report needs.
_REPORTED = ("numpy", "pyarrow", "gymnasium", "torch", "fsspec", "zstandard", "ray")

app = typer.Typer(
    name="rlio",
    help="Record reinforcement-learning experience, replay it, and mix logged with live experience.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _options() -> None:
    """Keep commands named even while there is only one of them."""


@app.command("version")
def show_version(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the versions of rlio, Python and the libraries that rlio stands on."""
    versions = {"rlio": rlio.__version__, "python": platform.python_version()}
    for name in _REPORTED:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue  # an extra that is not installed is not part of this installation
    if as_json:
        typer.echo(json.dumps(versions))
    else:
        width = max(map(len, versions))
        for name, text in versions.items():
            typer.echo(f"{name:<{width}}  {text}")


for command in (compact, demo, evaluate, gc, recover, trim, verify):
    app.command(command.__name__, cls=Command)(command)


def main() -> None:
    """Run the command line.

    SIGTERM ends a command as Ctrl-C does: writers close and publish. The library itself installs no handlers.
    """
    signal.signal(signal.SIGTERM, _terminate)
    app()


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Unwind the stack, so that every ``with`` on it closes what it opened."""
    raise SystemExit(128 + number)
