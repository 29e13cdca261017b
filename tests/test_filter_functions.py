"""Functions as filters: every place that takes `filter=` takes a function, named or not."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlio
from rlio.errors import OptionError, StateError


def steps(rows: int = 20) -> rlio.SampleBatch:
    t = np.arange(rows) % 5
    return rlio.SampleBatch(
        obs=np.arange(rows, dtype=np.float32),
        actions=np.zeros(rows, np.int64),
        rewards=np.arange(rows) * 1.0,
        terminateds=t == 4,
        eps_id=np.arange(rows) // 5,
        t=t,
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs") / "cartpole"
    with rlio.ParquetWriter(folder) as writer:
        writer.write(steps())
    return str(folder)


def kept(reader: rlio.InputReader) -> list[float]:
    with reader:
        return sorted(float(reward) for batch in reader for reward in batch["rewards"])


GOOD = [float(reward) for reward in range(15, 20)]
WAYS: dict[str, Callable[[str, Any], list[float]]] = {
    "memory": lambda root, f: kept(rlio.read(root, filter=f, epochs=1, cache="memory")),
    "disk": lambda root, f: kept(rlio.read(root, filter=f, epochs=1, cache="disk")),
    "none": lambda root, f: kept(rlio.read(root, filter=f, epochs=1, cache="none")),
    "shuffled": lambda root, f: kept(rlio.read(root, filter=f, epochs=1, cache="none", shuffle=True)),
    "split": lambda root, f: kept(rlio.read(root, filter=f, epochs=1, split=("train", 0.9999))),
    "class": lambda root, f: kept(rlio.DatasetReader(root, filter=f, epochs=1)),
    "columns in memory": lambda root, f: kept(rlio.from_arrays(dict(steps()), filter=f, epochs=1)),
    "mixture": lambda root, f: kept(rlio.read({root: 1.0}, filter=f, epochs=1)),
    "epochs of a store": lambda root, f: kept(rlio.ReplayStore.open(root).epochs(filter=f, epochs=1)),
    "uniform": lambda root, f: sorted(
        {float(x) for x in rlio.ReplayStore.open(root).uniform(batch_size=200, filter=f).sample()["rewards"]}
    ),
    "to_arrow": lambda root, f: rlio.open_dataset(root).to_arrow(filter=f)["rewards"].to_pylist(),
}


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLIO_CACHE", str(tmp_path / "cache"))


@pytest.mark.few(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_lambda_filters_rows(root: str, way: str) -> None:
    assert WAYS[way](root, lambda batch: batch["rewards"] >= 15) == GOOD


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_the_name_of_a_function_enters_the_state(root: str, cache: Any) -> None:
    def reader(name: str) -> rlio.InputReader:
        chosen = rlio.RowFilter.of(lambda batch: batch["rewards"] >= 15, name=name)
        return rlio.read(root, filter=chosen, epochs=1, cache=cache, batch_size=2)

    with reader("good") as first:
        first.sample()
        state = first.state_dict()
    assert "function good" in str(state)
    with reader("good") as second:
        second.load_state_dict(state)
        assert kept(second) == GOOD[2:]
    with reader("better") as third, pytest.raises(StateError, match="filter"):
        third.load_state_dict(state)


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_the_state_of_a_lambda_loads_beside_the_same_function_alone(root: str, cache: Any) -> None:
    def make() -> Any:
        return lambda batch: batch["rewards"] >= 15

    def reader(function: Any) -> rlio.InputReader:
        return rlio.read(root, filter=function, epochs=1, cache=cache, batch_size=2)

    good = make()
    with reader(good) as first:
        first.sample()
        state = first.state_dict()
        first.load_state_dict(state)
    with reader(good) as same:
        same.load_state_dict(state)
        assert kept(same) == GOOD[2:]
    with reader(make()) as other, pytest.raises(StateError, match=r"RowFilter\.of\(function, name=\.\.\.\)"):
        other.load_state_dict(state)


def test_a_sampler_advises_to_name_the_function_of_a_state(root: str) -> None:
    store = rlio.ReplayStore.open(root)
    state = store.uniform(batch_size=2, filter=lambda batch: batch["rewards"] >= 15).state_dict()
    other = store.uniform(batch_size=2, filter=lambda batch: batch["rewards"] >= 15)
    with pytest.raises(StateError, match="name it"):
        other.load_state_dict(state)


@pytest.mark.further
def test_a_lambda_has_another_name_in_each_process(root: str) -> None:
    text = f"""
import rlio
with rlio.read({root!r}, filter=lambda batch: batch["rewards"] >= 15, epochs=1) as reader:
    print(reader.state_dict())
"""
    there = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout
    with redirect_stdout(io.StringIO()) as here:
        exec(text, {"__name__": "__main__"})
    assert "without a name" in there
    assert "without a name" in here.getvalue()
    assert there != here.getvalue()


def test_a_filter_that_is_no_text_and_no_function_is_refused(root: str) -> None:
    with pytest.raises(OptionError, match="expected a text"):
        rlio.read(root, filter=3, epochs=1)  # type: ignore[arg-type]


@pytest.mark.further
def test_a_conversion_knows_a_function_by_its_name_in_each_process(root: str) -> None:
    text = f"""
from rlio.conversion.episodes import open_episodes

def good(batch):
    return batch["rewards"] >= 15

print(open_episodes({root!r}, read_options={{"filter": good}}).identity)
"""
    ran = {
        subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(ran) == 1
