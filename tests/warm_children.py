"""Runs pieces of code in processes that end as real ones do, forked from one that has imported everything.

As a script it is that process: it reads tasks from standard input, JSON, and writes what became of them.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Called at the very end of the interpreter, after the library's own handlers.
at_the_end: list[Any] = []

# Children that take longer are killed, and fail their tests.
LIMIT = 60.0


@dataclass(frozen=True)
class Ended:
    """What became of a child.

    Attributes:
        status: Its exit status; negative, the signal that killed it.
        output: What it said.
        seconds: From where the code called ``leaving()`` until all handlers at its exit had been called; 0
            where it did not come so far.
    """

    status: int
    output: str
    seconds: float


def run_all(
    tasks: dict[str, str], folder: Path, *, jobs: int = 4, modules: tuple[str, ...] = ()
) -> dict[str, Ended]:
    """Run each piece of code in a process of its own, ``jobs`` at a time; those that never end are killed.

    The process that they are forked from has imported ``modules`` too.
    """
    order = {"tasks": tasks, "folder": str(folder), "jobs": jobs, "modules": modules}
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(order), capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return {name: Ended(**found) for name, found in json.loads(done.stdout).items()}


def _serve() -> str | None:
    """In the parent: run the tasks and print the results. In a child: give its code."""
    order = json.load(sys.stdin)
    for name in order["modules"]:
        importlib.import_module(name)
    gc.freeze()  # A collection in a child would copy the pages of all that this process holds.
    folder, waiting = Path(order["folder"]), list(order["tasks"].items())
    running: dict[int, tuple[str, float]] = {}
    results: dict[str, dict[str, Any]] = {}
    while waiting or running:
        while waiting and len(running) < order["jobs"]:
            name, code = waiting.pop(0)
            begun = time.monotonic()
            pid = os.fork()
            if pid == 0:
                _redirect(folder, name)
                return str(code)
            running[pid] = (name, begun)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            for late, (_, begun) in running.items():
                if time.monotonic() - begun > LIMIT:
                    os.kill(late, signal.SIGKILL)
            time.sleep(0.02)
        elif pid in running:
            name, _ = running.pop(pid)
            left, end = folder / f"{name}.left", folder / f"{name}.end"
            results[name] = {
                "status": os.waitstatus_to_exitcode(status),
                "output": (folder / f"{name}.out").read_text(errors="replace"),
                "seconds": _time(end) - _time(left) if left.exists() and end.exists() else 0.0,
            }
    print(json.dumps(results))  # noqa: T201
    return None


def _time(file: Path) -> float:
    return float(file.read_text())


def _redirect(folder: Path, name: str) -> None:
    fd = os.open(folder / f"{name}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    scope["leaving"] = lambda: (folder / f"{name}.left").write_text(str(time.monotonic()))
    at_the_end.append(lambda: (folder / f"{name}.end").write_text(str(time.monotonic())))


class _NoPandas:
    """Arrow imports pandas where it can: an import of half a second, and as much at the end of each child."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name, name=name)


scope: dict[str, Any] = {"__name__": "__main__", "at_the_end": at_the_end}

if __name__ == "__main__":
    # Registered before the library's, and so called after it.
    atexit.register(lambda: [call() for call in at_the_end])
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    sys.meta_path.insert(0, _NoPandas)  # type: ignore[arg-type]  # A class does, too.
    import lifecycle_steps

    code = _serve()
    if code is not None:
        scope.update(vars(lifecycle_steps))
        exec(compile(code, "child", "exec"), scope)
