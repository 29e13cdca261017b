"""The command line app `rlio`, and the list of its commands.

Each command has its own module and is registered at the end of this one. Command modules import slow
libraries inside their functions, so that `rlio --help` is fast.
"""

from __future__ import annotations

import json
import platform
import signal
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import Final, NoReturn

import typer

import rlio
from rlio.cli.convert import convert
from rlio.cli.demo import demo
from rlio.cli.evaluate import evaluate
from rlio.cli.failures import Command
from rlio.cli.maintenance import compact, gc, trim
from rlio.cli.options import Json
from rlio.cli.recover import recover
from rlio.cli.status import status
from rlio.cli.verify import verify

__all__ = ["app", "main"]

#: Libraries that `rlio version` shows, for bug reports.
_REPORTED = ("numpy", "pyarrow", "gymnasium", "torch", "fsspec", "zstandard", "ray")

app: typer.Typer = typer.Typer(
    name="rlio",
    help="Record reinforcement-learning experience, replay it, and mix logged with live experience.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _options() -> None:
    """Keep commands named even if only one exists."""


def show_version(
    as_json: Json = False,
) -> None:
    """Print the versions of rlio, Python and the libraries that rlio uses."""
    versions = {"rlio": rlio.__version__, "python": platform.python_version()}
    for name in _REPORTED:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue  # Extras that are not installed are not listed.
    if as_json:
        typer.echo(json.dumps(versions))
    else:
        width = max(map(len, versions))
        for name, text in versions.items():
            typer.echo(f"{name:<{width}}  {text}")


#: Examples at the end of a command's help, if it is more than the command with a data set. Tests run them.
_EXAMPLES: Final = {
    "convert": "rlio convert runs/cartpole cartpole.h5 --to d3rlpy --prove",
    "demo": "rlio demo --quick",
    "evaluate": "rlio evaluate runs/cartpole --policy my_policies:even --gamma 0.99 --drop-incomplete",
    "gc": "rlio gc runs/cartpole --grace 7d",
    "trim": "rlio trim runs/cartpole --keep-rows 1000",
    "verify": "rlio verify runs/cartpole --level quick",
}

app.command("version", epilog="Example: rlio version")(show_version)
for _command in (compact, convert, demo, evaluate, gc, recover, status, trim, verify):
    _name = _command.__name__
    _example = _EXAMPLES.get(_name, f"rlio {_name} runs/cartpole")
    app.command(_name, cls=Command, epilog=f"Example: {_example}")(_command)


def main() -> None:
    """Run the command line.

    SIGTERM ends a command like Ctrl-C: writers close and publish. The library itself installs no signal
    handlers.
    """
    signal.signal(signal.SIGTERM, _terminate)
    app()


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Unwind the stack, so that every ``with`` block closes its resources."""
    raise SystemExit(128 + number)
