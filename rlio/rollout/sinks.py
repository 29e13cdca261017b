"""`MetricsSink`: where summaries of metrics go: a list of plain dicts, a file of JSON lines, TensorBoard.

Example:
    >>> sink = ListSink()
    >>> sink.write({"episode_return_mean": 12.0, "sampler_perf": {"mean_inference_ms": 0.3}}, step=1000)
    >>> sink.rows
    [{'step': 1000, 'episode_return_mean': 12.0, 'sampler_perf/mean_inference_ms': 0.3}]
"""

from __future__ import annotations

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from rlio.errors import ClosedError, MissingExtra, OptionError, excerpt

__all__ = ["JsonLinesSink", "ListSink", "MetricsSink", "TensorBoardSink", "flat"]

# Any: a summary nests dicts of numbers, lists of numbers and media, see `RolloutMetrics.summarise`.


def flat(summary: Mapping[str, Any]) -> dict[str, int | float]:
    """The numbers of ``summary`` by ``outer/inner`` names; lists, texts and media are left out."""
    return {name: value for name, value in _leaves(summary, "") if _is_number(value)}


def _leaves(summary: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in summary.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{name}/")
        else:
            yield name, value.item() if isinstance(value, np.generic) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class MetricsSink(ABC):
    """Takes summaries. To write one, implement `_write`, and `_close` as needed."""

    _closed = False

    @abstractmethod
    def _write(self, summary: Mapping[str, Any], step: int) -> None:
        """Store ``summary``."""

    def _close(self) -> None:  # noqa: B027 - optional hook
        """Release files. Called once."""

    def write(self, summary: Mapping[str, Any], *, step: int) -> None:
        """Store a summary.

        Args:
            summary: What `RolloutMetrics.summarise` gave, or any nested dict of numbers.
            step: When, such as ``num_env_steps_sampled_lifetime``.

        Raises:
            OptionError: ``step`` is no whole number.
            ClosedError: After `close`.
        """
        if self._closed:
            raise ClosedError(f"{type(self).__name__} is closed: write before close(), or make a new one")
        if not isinstance(step, (int, np.integer)) or isinstance(step, bool):
            raise OptionError(f"step={excerpt(step)}: a whole number")
        self._write(summary, int(step))

    def close(self) -> None:
        """Release what the sink holds; may be called again."""
        if not self._closed:
            self._closed = True
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ListSink(MetricsSink):
    """Keeps summaries as plain dicts of numbers, see `flat`.

    Attributes:
        rows: One dict a summary, with its ``step``.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, int | float]] = []

    def _write(self, summary: Mapping[str, Any], step: int) -> None:
        self.rows.append({"step": step} | flat(summary))


class JsonLinesSink(MetricsSink):
    """Appends summaries to a local file, a line of JSON each, which is there when `write` returns.

    Lines are nested as the summaries are. Numbers that JSON lacks (NaN, infinities) become null, media are
    left out.

    Args:
        path: The file; what it holds stays. Its folder is made.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")

    def _write(self, summary: Mapping[str, Any], step: int) -> None:
        self._file.write(json.dumps({"step": step} | _jsonable(summary), allow_nan=False) + "\n")
        self._file.flush()

    def _close(self) -> None:
        self._file.close()


def _jsonable(value: Any) -> Any:
    """``value`` as JSON: of mappings and lists, what JSON has."""
    if isinstance(value, Mapping):
        parts = {str(key): _jsonable(part) for key, part in value.items()}
        return {key: part for key, part in parts.items() if part is not _LEFT_OUT}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim <= 1):
        items = [_jsonable(item) for item in value]
        return _LEFT_OUT if _LEFT_OUT in items else items
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (str, int, float)) else _LEFT_OUT


#: Stands for what JSON lacks: frames, videos, objects.
_LEFT_OUT: Any = object()


class TensorBoardSink(MetricsSink):
    """Writes events for TensorBoard (extra ``rlio[tensorboard]``).

    Numbers become scalars, lists of numbers histograms, and media that are pictures, uint8 (H, W, 1 | 3),
    images; other media are left out, and so are scalars and entries of histograms that are not finite.

    Args:
        folder: Of the events; those that are there stay.

    Raises:
        MissingExtra: ``tensorboard`` is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtra("tensorboard", "tensorboard") from error
        self._events: Any = SummaryWriter(os.fspath(folder))

    def _write(self, summary: Mapping[str, Any], step: int) -> None:
        for name, value in _leaves(summary, ""):
            if _is_number(value):
                if math.isfinite(value):
                    self._events.add_scalar(name, value, step)
            elif isinstance(value, (list, tuple, np.ndarray)):
                self._write_list(name, value, step)
        self._events.flush()

    def _write_list(self, name: str, values: Any, step: int) -> None:
        pictures = [value for value in values if _is_picture(value)]
        for number, picture in enumerate(pictures):
            self._events.add_image(f"{name}/{number}", picture, step, dataformats="HWC")
        if not pictures and all(_is_number(value) or isinstance(value, np.number) for value in values):
            numbers = np.asarray(values, np.float64)
            numbers = numbers[np.isfinite(numbers)]
            if len(numbers):
                self._events.add_histogram(name, numbers, step)

    def _close(self) -> None:
        self._events.close()


def _is_picture(value: Any) -> bool:
    return (
        isinstance(value, np.ndarray)
        and value.dtype == np.uint8
        and value.ndim == 3
        and value.shape[2] in (1, 3)
    )
