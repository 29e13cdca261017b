"""`rlio_timeout` and `rlio_retries` of ``storage_options``: heeded by who takes those, unseen by clients."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from stored_batches import numbered
from typer.testing import CliRunner

import rlio
from rlio import DatasetReader, JsonReader, JsonWriter, ParquetWriter
from rlio.cli.main import app
from rlio.errors import OptionError
from rlio.storage import Storage
from rlio.storage.call_options import split_options


class Ailing(MemoryFileSystem):  # type: ignore[misc]  # fsspec ships no type information
    """A store that refuses, or never answers, every read; it takes no options but ``size``."""

    protocol = "unwell"
    store: dict[str, Any] = {}  # noqa: RUF012 - as in fsspec, one for all instances
    pseudo_dirs = [""]  # noqa: RUF012
    refuses, hangs, calls = False, False, 0
    released = threading.Event()

    def __init__(self, size: int = 0) -> None:
        super().__init__()

    def _open(self, path: str, mode: str = "rb", **keywords: Any) -> Any:
        if mode == "rb":
            type(self).calls += 1
            if self.hangs:
                self.released.wait(30)
            if self.refuses:
                raise ConnectionResetError(104, "reset")
        return super()._open(path, mode, **keywords)


fsspec.register_implementation("unwell", Ailing, clobber=True)


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a data set with 3 rows."""
    monkeypatch.setattr(Ailing, "calls", 0)
    monkeypatch.setattr(Ailing, "released", threading.Event())
    where = f"unwell://{uuid.uuid4().hex}"
    with ParquetWriter(where, spool=None) as writer:
        writer.write(numbered(3))
    Ailing.calls = 0
    yield where
    Ailing.released.set()


def _verify(root: str, options: dict[str, Any]) -> None:
    result = CliRunner().invoke(app, ["verify", root, "--storage-options", json.dumps(options)])
    assert result.exit_code == 2, result.output
    raise OSError(result.output)


USERS: dict[str, Callable[[str, dict[str, Any]], object]] = {
    "open_dataset": lambda root, options: rlio.open_dataset(root, storage_options=options),
    "DatasetReader": lambda root, options: DatasetReader(root, storage_options=options),
    "verify": lambda root, options: rlio.verify(root, storage_options=options),
    "rlio verify": _verify,
}


@pytest.mark.few(2)
@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("retries", [0, 2])
@pytest.mark.each_value_once
def test_retries_are_those_that_were_asked_for(
    user: str, retries: int, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ailing, "refuses", True)
    with pytest.raises(OSError, match="reset"):
        USERS[user](root, {"rlio_retries": retries})
    assert Ailing.calls == 1 + retries


@pytest.mark.parametrize("user", USERS)
def test_a_call_takes_no_longer_than_was_asked_for(
    user: str, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ailing, "hangs", True)
    # A limit that is not heeded is one of 60 s: the store answers after 30. The header's bytes add 0.25 s;
    # on a busy machine a call before it may come late already.
    with pytest.raises(OSError, match=r"no answer within 0\.(27|1) seconds.*rlio_timeout"):
        USERS[user](root, {"rlio_timeout": 0.02, "rlio_retries": 0})


@pytest.mark.parametrize("make", [ParquetWriter, JsonWriter])
def test_writers_take_them_and_the_client_sees_its_own_alone(make: Any, root: str) -> None:
    options = {"rlio_timeout": 5, "rlio_retries": 1, "size": 7}
    with make(root, storage_options=options, spool=None) as writer:
        writer.write(numbered(3))
    assert len(rlio.open_dataset(root, storage_options=options)) == 6
    assert Storage.open(root, storage_options=options).fs.storage_options == {"size": 7}
    assert options == {"rlio_timeout": 5, "rlio_retries": 1, "size": 7}


def test_a_local_folder_takes_them_and_no_others(tmp_path: Any) -> None:
    with ParquetWriter(tmp_path, storage_options={"rlio_timeout": None, "rlio_retries": 1}) as writer:
        writer.write(numbered(3))
    with pytest.raises(OptionError, match="timeout"):
        ParquetWriter(tmp_path, storage_options={"timeout": 3})


@pytest.mark.parametrize(
    "options",
    [
        {"rlio_timeout": 0},
        {"rlio_timeout": "60"},
        {"rlio_timeout": True},
        {"rlio_timeout": float("nan")},
        {"rlio_retries": -1},
        {"rlio_retries": 1.0},
        {"rlio_retries": True},
        {"rlio_retries": None},
        {"rlio_retry": 1},
    ],
)
def test_illegal_values_and_unknown_names_are_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(OptionError, match=f"{name!r}.* (expected|rlio_retries)"):
        split_options(options)


def test_readers_of_other_files_refuse_them_since_they_could_not_keep_to_them(root: str) -> None:
    with pytest.raises(OptionError, match=r"rlio_timeout.*are for data sets"):
        JsonReader(f"{root}/a.json", storage_options={"rlio_timeout": 3})
