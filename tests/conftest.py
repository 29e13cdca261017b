"""Fixtures for more than one test file, the order of tests, and how many real servers ran."""

import contextlib
import ctypes
import functools
import gc
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray_cluster as local_ray
import servers
import typer
import typer.testing
from fsspec.implementations.memory import MemoryFileSystem
from further import leave_permutations

from rlio.writer import _written_writers

ROOT = Path(__file__).resolve().parents[1]

# A garbage collection in a forked child would look at all that the tests hold, and so copy its pages.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=gc.freeze)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Test processes of a new checkout compile a part of the test files each, instead of all of them.

    Each begins to import at a part of its own, and finds what others have compiled in the meantime. Pytest
    compiles the files of this checkout, with their assertions, in half a minute.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    gc.disable()  # Until all is collected: what is imported and made by then stays.
    if session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    names = sorted(file.stem for file in (ROOT / "tests").glob("test_*.py"))
    start = len(names) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for name in names[start:] + names[:start]:
        # Collection comes to each file again, and reports what fails or is skipped.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(name)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Groups begin first, Ray's before all: what one process must do alone is not left for the end."""
    leave_permutations(items)
    if hasattr(config, "workerinput"):
        items.sort(key=_turn)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Hide items and imported modules from the garbage collector, which would scan them again and again.

    Then it looks at new objects once in 7,000, not in 700.
    """
    # Torch's 40 loggers do not propagate. Pytest adds its handlers to each of these six times a test, 0.2 ms.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and not logger.name.startswith("rlio"):
            logger.propagate = True
    global _modules
    _modules = len(sys.modules)
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(7000, *gc.get_threshold()[1:])


_modules = 0


@pytest.fixture(autouse=True, scope="module")
def _hides_what_stays() -> None:
    """Hide what tests have imported since: a full collection of it takes longer than most tests."""
    global _modules
    if len(sys.modules) > _modules + 50:
        _modules = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A test that ends its process fails, and the others go on."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from after_crash import EachOnce

    return EachOnce(config, log)


# Linux's number of it, which Python 3.11 does not name.
_MADV_COLLAPSE = 25
_HUGE_PAGE = 2 << 20
_GROWTH = 256 << 20
_resident = 0


@pytest.fixture(autouse=True, scope="module")
def _huge_pages(request: pytest.FixtureRequest) -> None:
    """Keep what a test process holds in pages of 2 MiB, where Linux can (6.1 and later).

    A fork copies an entry for each page of the process. Of 1 GiB in pages of 4 KiB, it takes the parent and
    the child 45 ms each; in huge pages, 2 ms.
    """
    global _resident
    if not hasattr(request.config, "workerinput") or sys.platform != "linux":
        return
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if resident < _resident + _GROWTH:
        return
    _resident = resident
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, mode, _, _, _, *name = line.split(maxsplit=5)
        begin, end = (int(address, 16) for address in addresses.split("-"))
        begin = -(-begin // _HUGE_PAGE) * _HUGE_PAGE
        if mode == "rw-p" and name in ([], ["[heap]"]) and end - begin >= _HUGE_PAGE:
            # What fails stays as it is.
            madvise(begin, (end - begin) // _HUGE_PAGE * _HUGE_PAGE, _MADV_COLLAPSE)


def _turn(item: pytest.Item) -> int:
    group = item.get_closest_marker("xdist_group")
    if group is None:
        return 2
    return int(group.args != ("ray",))


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are written at one time, so that equal rows make equal bytes."""
    monkeypatch.setattr("rlio.schemas.row_groups.utc_ms", lambda: 1_764_320_000_123)


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The repository's top folder."""
    return ROOT


@pytest.fixture(autouse=True, scope="session")
def _own_spool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Logs of writers to remote roots, built stores and small files lie in the test run's folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLIO_SPOOL", str(tmp_path_factory.mktemp("spool")))
        patch.setenv("RLIO_CACHE", str(tmp_path_factory.mktemp("cache") / "stores"))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("kept")))  # Statistics and such.
        yield


@pytest.fixture(autouse=True, scope="session")
def _built_once() -> Iterator[None]:
    """Typer builds all commands of an app whenever one is called, which takes longer than most of them."""
    build = functools.cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.main.get_command", build)
        patch.setattr("typer.testing._get_command", build)
        yield


@pytest.fixture(autouse=True)
def _memory_forgets(request: pytest.FixtureRequest) -> Iterator[None]:
    """Drop what a test function stored in memory://, where listing one root looks at the objects of all.

    Classes share roots among their tests, and fixtures of a wider scope have stored theirs before.
    """
    objects, folders = set(MemoryFileSystem.store), list(MemoryFileSystem.pseudo_dirs)
    yield
    if request.cls is None:
        for path in MemoryFileSystem.store.keys() - objects:
            del MemoryFileSystem.store[path]
        MemoryFileSystem.pseudo_dirs[:] = folders


@pytest.fixture(autouse=True)
def _writers_end(_memory_forgets: None) -> Iterator[None]:
    """Close the writers with rows that a test left open: if their store fails, they log into later tests."""
    before = set(_written_writers)
    yield
    for writer in _written_writers - before:
        writer.close()


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What rlio logs in this test: not what threads of earlier tests say, nor other libraries' finalizers."""
    others = set(threading.enumerate()) - {threading.main_thread()}

    def is_of_this_test(record: logging.LogRecord) -> bool:
        return record.name.startswith("rlio") and threading.current_thread() not in others

    caplog.handler.addFilter(is_of_this_test)
    yield caplog
    caplog.handler.removeFilter(is_of_this_test)


@pytest.fixture(scope="session")
def recordings() -> Path:
    """Folder of real RLlib recordings beside the checkout; tests that need it are skipped without it."""
    folder = ROOT.parent / "shared" / "data" / "rllib"
    if not folder.is_dir():
        pytest.skip("the RLlib recordings are not beside this checkout (../shared/data/rllib)")
    return folder


@pytest.fixture(scope="session")
def _running() -> Iterator[Callable[[str], servers.Server]]:
    """Starts a server when it is first asked for; all of them stop with the test run."""
    found: dict[str, servers.Server | servers.Unavailable] = {}

    def run(name: str) -> servers.Server:
        if name not in found:
            try:
                found[name] = stack.enter_context(servers.SERVERS[name]())
            except servers.Unavailable as error:
                found[name] = error
        server = found[name]
        if isinstance(server, servers.Unavailable):
            raise server
        return server

    with contextlib.ExitStack() as stack:
        yield run


_RAY = pytest.StashKey[contextlib.ExitStack]()
_FAILED = pytest.StashKey[bool]()
# Ten times what the longest test with Ray takes.
_RAY_SECONDS = 120.0


@pytest.fixture(scope="session")
def ray_cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ray runs on this machine, with 8 logical processors; tests with it are of ``xdist_group("ray")``."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'rlio[ray]'")
    with contextlib.ExitStack() as stack:
        stack.enter_context(local_ray.cluster())
        request.config.stash[_RAY] = stack
        yield


def _needs_ray(item: pytest.Item) -> bool:
    return "ray_cluster" in getattr(item, "fixturenames", ())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note a test with Ray that failed."""
    report = yield
    if report.failed and _needs_ray(item):
        item.config.stash[_FAILED] = True
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """End a test that hangs in Ray, where ``ray.get`` swallows what pytest-timeout raises."""
    if not _needs_ray(item):
        return (yield)
    hung = []

    def interrupt(*_: object) -> None:
        hung.append(True)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, interrupt)
    timer = threading.Timer(_RAY_SECONDS, signal.pthread_kill, (threading.get_ident(), signal.SIGVTALRM))
    timer.start()
    try:
        return (yield)
    except KeyboardInterrupt:
        if not hung:
            raise
        pytest.fail(f"it hung with Ray for {_RAY_SECONDS:.0f} s")
    finally:
        timer.cancel()
        signal.signal(signal.SIGVTALRM, before)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """After a test with Ray that failed, start Ray again: what hangs in it would keep its processors."""
    stash = item.config.stash
    if _needs_ray(item) and _RAY in stash and stash.get(_FAILED, False):
        stash[_FAILED] = False
        stash[_RAY].close()
        stash[_RAY].enter_context(local_ray.cluster())


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop Ray after the last test of its group: idle, it takes a tenth of a processor."""
    # Under --dist loadgroup alone, which names groups so, is the group run in one go.
    is_last = item.nodeid.endswith("@ray") and nextitem is not None and not nextitem.nodeid.endswith("@ray")
    if is_last and _RAY in item.config.stash:
        item.config.stash[_RAY].close()


@pytest.fixture
def serve(
    request: pytest.FixtureRequest, _running: Callable[[str], servers.Server]
) -> Callable[[str], servers.Server]:
    """Give a running server by its name in `servers.SERVERS`, or skip the test with the reason."""

    def give(name: str) -> servers.Server:
        try:
            server = _running(name)
        except servers.Unavailable as error:
            request.node.user_properties.append(("server", (name, False)))
            pytest.skip(f"no server {name!r}: {error}")
        request.node.user_properties.append(("server", (name, True)))
        return server

    return give


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many of the real servers ran: a skip is easily overlooked."""
    seen: dict[str, bool] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for key, value in getattr(report, "user_properties", ()):
                if key == "server":
                    seen[value[0]] = value[1]
    if seen:
        missing = sorted(name for name, ran in seen.items() if not ran)
        said = f"; not: {', '.join(missing)} (-rs says why)" if missing else ""
        terminalreporter.write_line(f"real servers: {sum(seen.values())} of {len(servers.SERVERS)} ran{said}")
