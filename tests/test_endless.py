"""Iteration over a reader without `epochs=` says once that it does not end; `sample` says nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlio
import rlio.torch
from rlio.errors import OptionError
from rlio.evaluation.evaluator import evaluate_offline


def steps(rows: int = 12) -> rlio.SampleBatch:
    t = np.arange(rows) % 4
    return rlio.SampleBatch(
        obs=np.ones((rows, 2)),
        actions=np.zeros(rows, np.int64),
        rewards=np.ones(rows),
        terminateds=t == 3,
        eps_id=np.arange(rows) // 4,
        t=t,
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs") / "cartpole"
    with rlio.ParquetWriter(folder) as writer:
        writer.write(steps())
    return str(folder)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "endless" in r.getMessage()]


RECORDS = str(Path(__file__).parent / "golden/formats/rllib-2019/output-2019-10-28_00-00-00_worker-0_0.json")
ITERATED: dict[str, Callable[..., Iterable[Any]]] = {
    "read": lambda root, **o: rlio.read(root, batch_size=4, **o),
    "with a store": lambda root, **o: rlio.read(root, batch_size=4, cache="memory", **o),
    "class": lambda root, **o: rlio.DatasetReader(root, batch_size=4, **o),
    "columns in memory": lambda root, **o: rlio.from_arrays(dict(steps()), batch_size=4, **o),
    "records": lambda root, **o: rlio.read(RECORDS, **o),
    "mixture": lambda root, **o: rlio.read({root: 1.0}, batch_size=4, **o),
    "shuffled": lambda root, **o: rlio.ShuffledInput(rlio.read(root, batch_size=4, **o), 2, seed=0),
    "mapped": lambda root, **o: rlio.MappedInput(rlio.read(root, batch_size=4, **o), lambda batch: batch),
    "read ahead": lambda root, **o: rlio.AsyncInput(rlio.read(root, batch_size=4, **o)),
    "epochs of a store": lambda root, **o: rlio.ReplayStore.open(root).epochs(batch_size=4, **o),
    "prefetch": lambda root, **o: rlio.torch.prefetch(rlio.read(root, batch_size=4, **o)),
    "torch data set": lambda root, **o: rlio.torch.ReplayDataset(root, batch_size=4, **o),
    "torch loader": lambda root, **o: rlio.torch.ReplayDataset(root, batch_size=4, **o).loader(),
}


@pytest.fixture
def iterated(root: str, request: pytest.FixtureRequest) -> Iterator[Callable[..., Iterable[Any]]]:
    opened = []

    def open_(**options: Any) -> Iterable[Any]:
        opened.append(ITERATED[request.param](root, **options))
        return opened[-1]

    yield open_
    for one in opened:
        getattr(one, "close", lambda: None)()


@pytest.mark.few(3)
@pytest.mark.parametrize("iterated", ITERATED, indirect=True)
def test_a_loop_without_epochs_says_once_that_it_is_endless(
    iterated: Callable[..., Iterable[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "rlio")
    reader = iterated()
    assert len(list(islice(reader, 5))) == 5
    list(islice(reader, 2))
    (text,) = said(caplog)
    assert "epochs=1" in text


@pytest.mark.parametrize("iterated", ITERATED, indirect=True)
def test_a_loop_with_epochs_says_nothing(
    iterated: Callable[..., Iterable[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "rlio")
    assert list(iterated(epochs=1))
    assert said(caplog) == []


def test_sample_says_nothing_and_uniform_draws_are_endless_by_their_nature(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "rlio")
    with rlio.read(root, batch_size=4) as reader:
        for _ in range(7):
            reader.sample()
    list(islice(rlio.ReplayStore.open(root).uniform(batch_size=4), 3))
    assert said(caplog) == []


def test_an_evaluation_refuses_a_wrapped_endless_reader(root: str) -> None:
    reader = rlio.ShuffledInput(rlio.read(root, batch_size=4), 2, seed=0)
    with pytest.raises(OptionError, match="epochs=1"):
        evaluate_offline(reader, lambda batch: np.zeros(len(batch)), gamma=0.9)
