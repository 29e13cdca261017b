"""The command line app `rlio`, and the list of its commands.

Each command has its own module and is registered at the end of this one. Command modules import slow
libraries inside their functions, so that `rlio --help` is fast.
"""

from __future__ import annotations

import json
import signal
import sys
from types import FrameType, TracebackType
from typing import Annotated, Final, NoReturn

import typer

from rlio import __version__
from rlio.cli.convert import convert
from rlio.cli.demo import demo
from rlio.cli.evaluate import evaluate
from rlio.cli.exit_codes import EXIT_CODES, OUR_FAULT, TERMINATED
from rlio.cli.failures import Command, Group
from rlio.cli.look import episodes, head, info, stats
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
    cls=Group,
    help="Record reinforcement-learning experience, replay it, and mix logged with live experience.",
    epilog="\b\nExit codes:\n" + "\n".join(f"  {code:<5}{text}" for code, text in EXIT_CODES.items()),
    no_args_is_help=True,
    rich_markup_mode=None,  # Plain help: Rich takes more time to import than everything else that help needs.
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rlio {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version of rlio, and exit."
        ),
    ] = False,
) -> None:
    """Take the options before the command."""


def show_version(
    as_json: Json = False,
) -> None:
    """Print the versions of rlio, Python and libraries."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    versions = {"rlio": __version__, "python": platform.python_version()}
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


#: What `rlio --help` says of a command, if the first sentence of its help is too long for a line.
_SHORT: Final = {
    "compact": "Merge small shards into large ones.",
    "convert": "Convert data of any format, and report what looks wrong.",
    "demo": "Record, replay and mix experience of CartPole.",
    "episodes": "Show episodes: the best, the longest, those that pass a filter.",
    "head": "Show the first rows, or write frames as PNG files.",
    "info": "Show what the data is and holds.",
    "stats": "Show mean, deviation, range and quantiles of columns.",
    "evaluate": "Estimate a policy's return from recorded episodes.",
    "gc": "Remove files that no reader needs.",
    "recover": "Publish the rows in the logs of dead writers.",
    "status": "Show what writers and followers do.",
    "trim": "Remove the oldest rows permanently.",
    "verify": "Check every byte, row and episode, and repair.",
}
#: Examples at the end of a command's help, if it is more than the command with a data set. Tests run them.
_EXAMPLES: Final = {
    "convert": "rlio convert runs/cartpole cartpole.h5 --to d3rlpy --prove",
    "demo": "rlio demo --quick",
    "episodes": "rlio episodes runs/cartpole --sort return --top 10 --where 'length > 20'",
    "head": "rlio head runs/cartpole -n 3 --column obs --column rewards",
    "evaluate": "rlio evaluate runs/cartpole --policy my_policies:even --gamma 0.99 --drop-incomplete",
    "gc": "rlio gc runs/cartpole --grace 7d",
    "trim": "rlio trim runs/cartpole --keep-rows 1000",
    "verify": "rlio verify runs/cartpole --level quick",
}

app.command("version", epilog="Example: rlio version")(show_version)
for _command in (
    *(info, head, episodes, stats),
    *(convert, evaluate, demo),
    *(status, verify, recover, compact, trim, gc),
):
    _name = _command.__name__
    _example = _EXAMPLES.get(_name, f"rlio {_name} runs/cartpole")
    # "\b": the example is copied, so it stays on one line.
    app.command(_name, cls=Command, epilog=f"\b\nExample: {_example}", short_help=_SHORT.get(_name))(_command)


def main() -> None:
    """Run the command line.

    SIGTERM ends a command like Ctrl-C: writers close and publish. The library itself installs no signal
    handlers.
    """
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app()
    except Exception:  # It is raised again: the hook reports it. Typer puts its own there as an app begins.
        sys.excepthook = _report_bug
        raise


def _report_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an error that nothing caught; the exit code says whose fault it is."""
    sys.__excepthook__(kind, error, trace)
    if issubclass(kind, Exception):
        raise SystemExit(OUR_FAULT)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Unwind the stack, so that every ``with`` block closes its resources."""
    raise SystemExit(TERMINATED)
