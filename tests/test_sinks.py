"""Sinks of metrics: a list of dicts, JSON lines, TensorBoard."""

from __future__ import annotations

import builtins
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlio.errors import ClosedError, MissingExtra, OptionError
from rlio.rollout.metrics import MetricsCollector
from rlio.rollout.sinks import JsonLinesSink, ListSink, MetricsSink, TensorBoardSink, flat

PICTURE = np.zeros((4, 5, 3), np.uint8)
SUMMARY: dict[str, Any] = {
    "mean": np.float32(1.5),
    "n": 3,
    "unknown": math.nan,
    "inner": {"deep": {"x": 2.0}, "flag": True},
    "hist_stats": {"returns": [1.0, 2.0, math.nan]},
    "episode_media": {"frames": [PICTURE], "other": [object()]},
    "text": "t",
}


def test_flat_names_hold_the_numbers() -> None:
    numbers = flat(SUMMARY)
    assert math.isnan(numbers.pop("unknown"))
    assert numbers == {"mean": 1.5, "n": 3, "inner/deep/x": 2.0}


def test_a_list_keeps_one_plain_dict_a_summary() -> None:
    collector = MetricsCollector()
    collector.episodes_ended([5.0], [7])
    sink = ListSink()
    sink.write(collector.drain().summarise(), step=100)
    sink.write({"a": {"b": 1}}, step=np.int64(200))
    assert sink.rows[0]["step"] == 100
    assert sink.rows[0]["episode_return_mean"] == 5.0
    assert sink.rows[1] == {"step": 200, "a/b": 1}


def test_json_lines_are_there_at_once_and_appended(tmp_path: Path) -> None:
    path = tmp_path / "inner" / "metrics.jsonl"
    for step in (1, 2):
        with JsonLinesSink(path) as sink:
            sink.write(SUMMARY, step=step)
            assert len(path.read_text().splitlines()) == step
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.pop("step") for line in lines] == [1, 2]
    assert lines[0] == {
        "mean": 1.5,
        "n": 3,
        "unknown": None,
        "inner": {"deep": {"x": 2.0}, "flag": True},
        "hist_stats": {"returns": [1.0, 2.0, None]},
        "episode_media": {},
        "text": "t",
    }


def test_tensorboard_gets_scalars_histograms_and_pictures(tmp_path: Path) -> None:
    """Read back with TensorBoard's own reader."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with TensorBoardSink(tmp_path) as sink:
        for step in (10, 20):
            sink.write(SUMMARY, step=step)
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"mean", "n", "inner/deep/x"}
    assert [(event.step, event.value) for event in events.Scalars("inner/deep/x")] == [(10, 2.0), (20, 2.0)]
    first = events.Histograms("hist_stats/returns")[-1]
    assert (first.histogram_value.num, first.histogram_value.sum) == (2, 3.0)
    assert (events.Images("episode_media/frames/0")[0].height, len(events.Tags()["images"])) == (4, 1)


def test_without_tensorboard_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **keywords: Any) -> Any:
        if name.startswith(("tensorboard", "torch.utils.tensorboard")):
            raise ImportError(name)
        return real(name, *args, **keywords)

    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(MissingExtra, match=r"rlio\[tensorboard\]"):
        TensorBoardSink(tmp_path)


def test_a_closed_sink_takes_nothing(tmp_path: Path) -> None:
    sinks: list[MetricsSink] = [ListSink(), JsonLinesSink(tmp_path / "m.jsonl")]
    for sink in sinks:
        sink.close()
        sink.close()
        with pytest.raises(ClosedError):
            sink.write({}, step=0)
    with pytest.raises(OptionError, match="a whole number"):
        ListSink().write({}, step=1.5)  # type: ignore[arg-type]  # what a user may do
