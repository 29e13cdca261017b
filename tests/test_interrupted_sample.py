"""Ctrl-C in the middle of a `sample()`: no row is lost or doubled, and the state is right."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interrupts import interrupted_at

import rlio
from rlio.errors import EndOfData, StateError

ROWS = 60


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("interrupted") / "root"
    t = np.arange(ROWS)
    with rlio.ParquetWriter(root, roll=rlio.Roll(max_rows=15), spool=None) as writer:
        writer.write(
            rlio.SampleBatch(
                obs=t.astype(np.float32), actions=t, terminateds=t % 10 == 9, eps_id=t // 10, t=t % 10
            )
        )
    return root


def read(root: Path, **options: Any) -> rlio.InputReader:
    return rlio.read(root, batch_size=7, epochs=2, **options)


#: What is read by batches of five rows, which is no reader's own size.
KINDS: dict[str, Callable[[Path], rlio.InputReader]] = {
    "shuffled, no store": lambda root: read(root, shuffle=True, seed=1, cache="none"),
    "shuffled, in memory": lambda root: read(root, shuffle=True, seed=1, cache="memory"),
    "normalised": lambda root: read(root, shuffle=True, seed=1, normalise="mean_std"),
    "windows": lambda root: rlio.ShuffledInput(read(root, cache="none"), 3, seed=1),
    "mixed": lambda root: rlio.MixedInput(
        {"a": read(root, shuffle=True, seed=1), "b": read(root, cache="none")},
        batch_size=7,
        seed=3,
        end="renormalise",
    ),
}


def rest(reader: rlio.InputReader) -> list[list[int]]:
    found = []
    while True:
        try:
            found.append(reader.sample(5)["actions"].tolist())
        except EndOfData:
            return found


# A mixture has three times as many lines.
STRIDES = [(kind, 97 if kind == "mixed" else 29) for kind in KINDS]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "stride"), [*STRIDES, *(pytest.param(kind, 1, marks=pytest.mark.soak) for kind in KINDS)]
)
def test_an_interrupt_at_any_line_of_sample_loses_and_doubles_no_row(
    root: Path, kind: str, stride: int
) -> None:
    """A mixture may say that it cannot go on; an earlier state then leads on."""
    with KINDS[kind](root) as reader:
        wanted = rest(reader)
    interrupted = line = 0
    while True:
        with KINDS[kind](root) as reader:
            assert [reader.sample(5)["actions"].tolist() for _ in range(2)] == wanted[:2]
            before = json.loads(json.dumps(reader.state_dict()))
            # A value is returned without a call: no signal is handled there.
            where = interrupted_at(line, lambda: reader.sample(5), passes=("return batch",))
            if where is None:
                break
            interrupted += 1
            # The lock is released when the batch is complete: it is served, and lost with the call. So is a
            # batch of a mixture once its sources have moved on.
            follows = wanted[3:] if where == "lock.release()" or kind == "mixed" else wanted[2:]
            try:
                state = json.loads(json.dumps(reader.state_dict()))
            except StateError:
                assert kind == "mixed", where
                with pytest.raises(
                    StateError, match=r"was interrupted .* load a state that was saved before"
                ):
                    reader.sample(5)
                reader.load_state_dict(before)
                assert rest(reader) == wanted[2:], where
            else:
                with KINDS[kind](root) as other:
                    other.load_state_dict(state)
                    found = rest(other)
                assert rest(reader) == found, where
                # Within an inner reader of a mixture, the same holds for the batch of that one.
                assert found in (wanted[2:], follows), where
        line += stride
    assert interrupted > 5


def served_until_signalled(reader: rlio.InputReader, seconds: float) -> list[list[int]]:
    """The batches up to a Ctrl-C after some seconds, which may come when all have been served."""
    served: list[list[int]] = []
    timer = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        timer.start()
        while True:
            try:
                served.append(reader.sample(5)["actions"].tolist())
            except EndOfData:
                timer.join()
                signal.raise_signal(signal.SIGINT)  # Python may have swallowed the first, see below.
    except KeyboardInterrupt:
        timer.join()
    return served


# Python swallows what is raised in a finalizer, which may be where the signal comes.
@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["shuffled, no store", "shuffled, in memory", "windows"])
def test_a_signal_in_the_middle_of_a_shuffled_epoch_loses_and_doubles_no_row(root: Path, kind: str) -> None:
    with KINDS[kind](root) as reader:
        wanted = rest(reader)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for attempt in range(0, 20, 2):
            with KINDS[kind](root) as reader:
                reader.sample(5)
                served = served_until_signalled(reader, 0.0005 * attempt)
                state = json.loads(json.dumps(reader.state_dict()))
                with KINDS[kind](root) as other:
                    other.load_state_dict(state)
                    found = rest(other)
                assert rest(reader) == found
                # The signal may come when a batch is complete, and before the loop has it.
                left = wanted[1 + len(served) :]
                assert served + left == wanted[1:]
                assert found in (left, left[1:])
    finally:
        signal.signal(signal.SIGINT, handler)
