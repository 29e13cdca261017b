"""`FollowReader`: reads a data set of rlio while other processes are still writing it.

Not here: how a growing data set is followed (`rlio.following.follow`), and drawing from one
(`rlio.FollowingReplay`).

Example:
    >>> import numpy as np, rlio
    >>> with rlio.ParquetWriter("memory://follow-reader-example") as writer:
    ...     writer.write(rlio.SampleBatch(t=np.arange(5)))
    >>> with FollowReader("memory://follow-reader-example") as reader:
    ...     [batch["t"].tolist() for batch in reader]
    [[0, 1, 2, 3, 4]]
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypedDict, Unpack

from rlio.dataset.dataset import Dataset
from rlio.errors import OptionError, excerpt
from rlio.following.follow import FollowPass
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.look.stats import Normaliser, Stats
from rlio.opening import refuse_open_options
from rlio.read_options import ReadOptions
from rlio.readers.source_reader import SourceReader
from rlio.storage.filesystem import Storage
from rlio.support.options import checked_keywords

__all__ = ["FollowReader"]


class FollowKeywords(TypedDict, total=False):
    """The options of a `FollowReader` that it shares with other readers, with defaults."""

    batch_size: Annotated[int | None, None]
    shard: Annotated[tuple[int, int], (0, 1)]
    columns: Annotated[list[str] | None, None]
    on_error: Annotated[Literal["raise", "skip"], "raise"]
    drop_last: Annotated[bool, False]


class FollowReader(SourceReader):
    """Reads the data set under ``root``, which may still grow, or may not exist yet, in one pass.

    It serves every row once, in order within each writer, also while the data set is compacted. `sample`
    waits for rows. The data ends when every writer is closed (sealed) and served, or after ``idle_timeout``
    seconds without a row. The end is final; a fresh reader that loads the state continues from there. Writers
    are served in turns, in the order of their ids; new writers join when they appear. The order is not
    shuffled: `rlio.ShuffledInput` shuffles the batches of any reader.

    With ``shard=(rank, world)``, each rank follows its own writers: those whose CRC-32 of the id, modulo
    world, equals rank. Each rank then has its own state.

    In a worker, pass the class: ``input=rlio.FollowReader, input_options={"root": root}``. The workers of a
    group then share the writers.

    Several threads may call it: see `rlio.InputReader`.

    Args:
        root: Folder of the data set: a path or any fsspec URL; or an open `rlio.Dataset`.
        idle_timeout: Seconds to wait for the next row; None: no limit, 0: no waiting.
        poll_seconds: Least seconds between two listings while no rows are available; at least ten times the
            duration of a listing.
        missing: What to do with columns that only some writers have: "error", or "fill" them with zeros, from
            the point on where a writer adds them.
        normalise: Brings columns to one range, as float32, by the statistics of recorded data
            (`rlio.Dataset.stats`), for the floats of ``obs`` by "mean_std", or by their ``normaliser(...)``;
            those of data that grows would change. None: values as recorded.
        storage_options: For fsspec.
        limits: Limits on the data's demands.
        keywords: ``columns``, ``on_error`` and ``drop_last``: see `rlio.DatasetReader`. ``shard``: see above.
            ``batch_size``: None gives the rows that are available, up to 4,096.

    Raises:
        CorruptData: Rows are damaged; with ``on_error="skip"`` they are counted in `skipped`.
        HoleError: Rows are missing; otherwise like CorruptData, its base class.
        SchemaConflict: A new writer's columns contradict those read so far.
        OptionError: An option is illegal.
    """

    # Before it had a class of its own, a reader that follows was a DatasetReader.
    _earlier_names: ClassVar[tuple[str, ...]] = ("DatasetReader",)

    @checked_keywords
    def __init__(
        self,
        root: str | os.PathLike[str] | Dataset,
        *,
        idle_timeout: float | None = None,
        poll_seconds: float = 1.0,
        missing: Literal["error", "fill"] = "error",
        normalise: Normaliser | Stats | None = None,
        storage_options: Mapping[str, Any] | None = None,
        limits: Limits = DEFAULT_LIMITS,
        **keywords: Unpack[FollowKeywords],
    ) -> None:
        self.options: ReadOptions = ReadOptions(**keywords)
        self.drop_last: bool = self.options.drop_last
        if not isinstance(normalise, Normaliser | Stats | None):
            raise OptionError(
                f"normalise={excerpt(normalise)}: the statistics of data that grows change with it; pass "
                "those of a snapshot, normalise=dataset.stats()"
            )
        if isinstance(root, Dataset):
            refuse_open_options(storage_options, limits)
            storage = root.storage
        else:
            storage = Storage.open(root, storage_options=storage_options, limits=limits)
        self._uri = storage.uri
        self._pass: FollowPass = FollowPass(
            storage, self.options, missing, idle_timeout=idle_timeout, poll_seconds=poll_seconds
        )
        if normalise is not None:
            self._normaliser = Normaliser.of(normalise, None, columns=self.options.columns)

    @property
    def dataset(self) -> Dataset:
        """The data set, as listed last.

        Raises:
            DataNotFound: It does not exist yet.
        """
        return self._pass.dataset

    def _endless(self) -> None:
        """It ends, or its rows are live."""
        return
