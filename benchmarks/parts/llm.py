"""Rollouts of a language model, written and read: rlio beside JSON lines and ``torch.save``.

Batches of 256 rows with a prompt, tokens, a log-probability and a flag a token, a reward, a group and a
policy version (docs/llm_rollouts.md). Every contender reads the tokens of each row as arrays.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

import rlio
from benchmarks import machine
from benchmarks.results import Section
from benchmarks.scales import Setup
from benchmarks.timing import Case, interleave

__all__ = ["run"]

_BATCH, _ANSWERS, _LONGEST = 256, 8, 800
_TOKENS = {"tokens": np.int32, "logps": np.float32, "loss_mask": np.bool_}


class _Files(Protocol):
    """A contender: writes batches, reads what it wrote, and returns the numbers of rows and tokens."""

    def write(self) -> None: ...

    def read(self) -> tuple[int, int]: ...


class _Rlio:
    """With its defaults: `write` returns once a kill cannot lose the rows."""

    def __init__(self, folder: Path, batches: list[rlio.SampleBatch]) -> None:
        self._folder, self._batches = folder, batches

    def write(self) -> None:
        with rlio.ParquetWriter(self._folder) as writer:
            for batch in self._batches:
                writer.write(batch)

    def read(self) -> tuple[int, int]:
        rows = tokens = 0
        with rlio.read(self._folder, epochs=1, batch_size=_BATCH) as reader:
            for batch in reader:
                found = [rlio.Ragged.of(batch[name]) for name in _TOKENS]
                rows, tokens = rows + len(batch), tokens + len(found[0].values)
        return rows, tokens


class _JsonLines:
    """A row a line, flushed after each batch."""

    def __init__(self, folder: Path, batches: list[rlio.SampleBatch]) -> None:
        self._folder, self._batches = folder, [_rows(batch) for batch in batches]

    def write(self) -> None:
        self._folder.mkdir(parents=True)
        with open(self._folder / "rows.jsonl", "w", encoding="utf-8") as file:
            for rows in self._batches:
                for row in rows:
                    listed = {name: row[name].tolist() for name in _TOKENS}
                    file.write(json.dumps({**row, **listed}) + "\n")
                file.flush()

    def read(self) -> tuple[int, int]:
        rows = tokens = 0
        with open(self._folder / "rows.jsonl", encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                row |= {name: np.array(row[name], dtype) for name, dtype in _TOKENS.items()}
                rows, tokens = rows + 1, tokens + len(row["tokens"])
        return rows, tokens


class _TorchSave:
    """A file a batch, with a dict of tensors a row."""

    def __init__(self, folder: Path, batches: list[rlio.SampleBatch]) -> None:
        self._folder = folder
        self._batches: list[Any] = [
            [row | {name: torch.from_numpy(row[name]) for name in _TOKENS} for row in _rows(batch)]
            for batch in batches
        ]

    def write(self) -> None:
        self._folder.mkdir(parents=True)
        for number, rows in enumerate(self._batches):
            torch.save(rows, self._folder / f"{number:06d}.pt")

    def read(self) -> tuple[int, int]:
        rows = tokens = 0
        for file in sorted(self._folder.iterdir()):
            for row in torch.load(file, weights_only=True):  # Tensors only: no code of the file runs.
                rows, tokens = rows + 1, tokens + len(row["tokens"].numpy())
        return rows, tokens


class _TorchSaveJoined(_TorchSave):
    """A file a batch, with the tokens of all its rows in one tensor, cut apart after reading."""

    def __init__(self, folder: Path, batches: list[rlio.SampleBatch]) -> None:
        self._folder, self._batches = folder, [_joined(batch) for batch in batches]

    def read(self) -> tuple[int, int]:
        rows = tokens = 0
        for file in sorted(self._folder.iterdir()):
            found = torch.load(file, weights_only=True)  # Likewise.
            cut = [found[name].split(found["lengths"].tolist()) for name in _TOKENS]
            rows, tokens = rows + len(cut[0]), tokens + sum(map(len, cut[0]))
        return rows, tokens


def _joined(batch: rlio.SampleBatch) -> dict[str, Any]:
    """A tensor a column; texts as a list."""
    ragged = {name: rlio.Ragged.of(batch[name]) for name in _TOKENS}
    others = {name: values for name, values in batch.items() if name not in _TOKENS}
    return {
        **{k: v.tolist() if v.dtype == object else torch.from_numpy(v) for k, v in others.items()},
        **{name: torch.from_numpy(rows.values) for name, rows in ragged.items()},
        "lengths": torch.from_numpy(ragged["tokens"].lengths),
    }


def _rows(batch: rlio.SampleBatch) -> list[dict[str, Any]]:
    """A dict a row, with numbers of Python."""
    columns = {name: values.tolist() for name, values in batch.items()}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def run(setup: Setup) -> Section:
    """Write and read the same rollouts in three ways."""
    count = max(setup.scale.recorded_rows // 40, _ANSWERS)
    batches = _rollouts(count)
    tokens = sum(len(row) for batch in batches for row in batch["tokens"])
    section = Section(
        "llm", f"Rollouts of a language model: {count:,} rows of {tokens / count:.0f} tokens on average"
    )
    section.facts["tokens a row"] = tokens / count
    folder = setup.scratch / "llm"
    makers = {
        "rlio": _Rlio,
        "JSON lines": _JsonLines,
        "torch.save, a row": _TorchSave,
        "torch.save, joined rows": _TorchSaveJoined,
    }
    contenders: dict[str, _Files] = {name: make(folder / name, batches) for name, make in makers.items()}
    writes = [
        Case(name, each.write, count, before=partial(_clear, folder / name), once=True)
        for name, each in contenders.items()
    ]
    reads = [
        Case(name, partial(_read, name, each, (count, tokens)), count, once=True)
        for name, each in contenders.items()
    ]
    for work, cases in (("write", writes), ("read", reads)):
        taken = interleave(cases, rounds=setup.scale.rounds, seconds=0)
        section.add_taken(f"{work} rollouts", taken)
        for name in list(makers)[1:]:
            section.compare(f"{work} rollouts", case=f"{work} rollouts", ours="rlio", beside=name)
    for name in contenders:
        section.facts[f"{name}: bytes a token"] = machine.folder_bytes(folder / name) / tokens
        figures = [section.find(f"{work} rollouts", name) for work in ("write", "read")]
        for work, figure in zip(("written", "read"), figures, strict=True):
            assert figure is not None
            section.facts[f"{name}: tokens {work} a second"] = figure.rate * tokens / count
        _clear(folder / name)
    return section


def _clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _read(name: str, contender: _Files, expected: tuple[int, int]) -> None:
    if (found := contender.read()) != expected:
        raise ValueError(f"{name} read {found} rows and tokens of {expected}")


def _rollouts(count: int) -> list[rlio.SampleBatch]:
    """Batches of rollouts; few tokens are frequent, as the words of a language are."""
    rng = np.random.default_rng(0)
    batches = []
    for start in range(0, count, _BATCH):
        rows = min(_BATCH, count - start)
        lengths = rng.integers(10, _LONGEST, rows)
        ends, total = np.cumsum([0, *lengths]), int(lengths.sum())
        batches.append(
            rlio.SampleBatch(
                prompt=[f"Question {start + row}: what follows?" for row in range(rows)],
                tokens=rlio.Ragged(np.minimum(rng.zipf(1.3, total), 50_000).astype(np.int32), ends),
                logps=rlio.Ragged(-rng.exponential(size=total).astype(np.float32), ends),
                loss_mask=rlio.Ragged(rng.random(total) < 0.8, ends),
                rewards=rng.random(rows).astype(np.float32),
                eps_id=(start + np.arange(rows)) // _ANSWERS,
                t=np.arange(rows) % _ANSWERS,
                weights_seq_no=np.full(rows, start // _BATCH),
            )
        )
    return batches
