"""Whole episodes of rlio's sources, packed as RLlib's states by the tasks of a Ray cluster.

The processes of these tasks import this module, which therefore does not import RLlib.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlio.batch import SampleBatch, concat_samples
from rlio.batch.arrays import object_column
from rlio.batch.columns import Columns, is_per_sequence
from rlio.batch.episode import Episode
from rlio.dataset.arrow_tables import WRITER
from rlio.distributed.ray_data.blocks import Assembler
from rlio.distributed.ray_data.read_dataset import read_dataset
from rlio.errors import MissingExtra
from rlio.formats.episodes import EpisodeCutter, Episodes, StoredEpisodes, episode_key
from rlio.formats.report import ends_of
from rlio.formats.rllib_episodes import episode_state
from rlio.formats.rllib_sinks import with_final_obs
from rlio.formats.rllib_states import pack, space_to_rllib
from rlio.replay.filters import RowFilter
from rlio.replay.splits import Split
from rlio.storage.paths import is_uri

try:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ModuleNotFoundError as _error:
    raise MissingExtra("ray[rllib]", "rllib") from _error

__all__ = ["Packing", "packed_episodes"]

# Bytes of episodes in one block of Ray's.
_BLOCK_BYTES = 16 << 20


class Packing:
    """Packs episodes for RLlib, in any process.

    RLlib adds up columns by id, so no two episodes have the same: each has its number after ``prefix``.

    Args:
        found: The source.
        prefix: Tells the source from others.
        repeats: Whether the last observation stands in for a final one that is missing.
    """

    def __init__(self, found: Episodes, prefix: str, *, repeats: bool) -> None:
        self._prefix, self._repeats = prefix, repeats
        spaces = [part.origin.spaces or (None, None) for part in found.parts]
        self._described = [
            (space_to_rllib(observation), space_to_rllib(action)) for observation, action in spaces
        ]

    def packed(self, rows: SampleBatch, part: int, number: str) -> bytes:
        """The state of an episode.

        Args:
            rows: Its rows.
            part: The part of the source that they are of.
            number: Tells the episode from all others of the source.

        Raises:
            SchemaError: The rows are not a trajectory, or the final observation is missing.
        """
        id_ = None if Columns.EPS_ID in rows else number
        episode = with_final_obs(Episode.from_batch(rows, id_=id_), repeats=self._repeats)
        state = episode_state(episode, self._described[part])
        return pack({**state, "id_": f"{self._prefix}-{number}"})


def packed_episodes(found: Episodes, packing: Packing) -> Iterator[tuple[int, int, Any]]:
    """(rows, episodes, reference of an Arrow table with a column ``item``: one packed episode a row).

    Raises:
        SchemaError: As for `Packing.packed`.
        CorruptData: Rows are damaged.
    """
    # Other processes do not see this one's memory; of other formats, other nodes may lack the files.
    if not isinstance(found, StoredEpisodes) or found.uri.startswith("memory:"):
        return _packed(found, packing)
    return _packed_by_writer(found, packing) if found.needs_store else _packed_by_rows(found, packing)


def _table(packed: list[bytes]) -> Any:
    return pa.table({"item": pa.array(packed, pa.binary())})


def _packed(found: Episodes, packing: Packing) -> Iterator[tuple[int, int, Any]]:
    """(rows, episodes, reference of the table), read in this process."""
    for part in range(len(found.parts)):
        for rows, episodes, table in _tables_of(found, part, packing):
            yield rows, episodes, ray.put(table)


def _tables_of(found: Episodes, part: int, packing: Packing) -> Iterator[tuple[int, int, Any]]:
    """(rows, episodes, table) of one part of a source."""
    packed: list[bytes] = []
    steps = size = 0
    for number, (_, rows) in enumerate(found.of_part(part)):
        assert isinstance(rows, SampleBatch)
        packed.append(packing.packed(rows, part, f"{part}-{number}"))
        size += len(packed[-1])
        steps += len(rows)
        if size > _BLOCK_BYTES:
            yield steps, len(packed), _table(packed)
            packed, steps, size = [], 0, 0
    if packed:
        yield steps, len(packed), _table(packed)


def _where_stored(uri: str) -> Any:
    """Where tasks run that read: on all nodes, or on this one if other nodes may lack the folder."""
    node = ray.get_runtime_context().get_node_id()
    return "SPREAD" if is_uri(uri) else NodeAffinitySchedulingStrategy(node_id=node, soft=False)


def _packed_by_writer(found: StoredEpisodes, packing: Packing) -> Iterator[tuple[int, int, Any]]:
    """The same, read by one task a writer: a filter of whole episodes needs their rows in one place."""
    source: Any = ray.put(found)
    how = ray.put(packing)
    task = ray.remote(_streamed).options(
        num_returns="streaming", scheduling_strategy=_where_stored(found.uri)
    )
    running: list[Any] = [task.remote(source, part, how) for part in range(len(found.parts))]
    for results in running:
        for counts in results:
            rows, episodes = _result(counts)
            yield rows, episodes, next(results)


def _streamed(found: Episodes, part: int, packing: Packing) -> Iterator[Any]:
    """The counts of each table, and then the table: an error comes in the place of counts."""
    for rows, episodes, table in _tables_of(found, part, packing):
        yield rows, episodes
        yield table


def _packed_by_rows(found: StoredEpisodes, packing: Packing) -> Iterator[tuple[int, int, Any]]:
    """The same, read by `read_dataset`: a writer's shards by many tasks, then each block's episodes by one.

    blocks of the tasks that read       a a b  |  b b a  |  a c
    pieces, and where the last one is   a b    |  b. a   |  a. c.
    episodes of the tasks that pack            |  b      |  a c
    """
    place = _where_stored(found.uri)
    of_writers = all(WRITER not in columns for columns in found.dataset.columns.values())
    options = {**found.options}
    if (split := options.pop("split", None)) is not None:
        other = options.get("filter")
        options["filter"] = RowFilter.on_side(Split.of(split), other and RowFilter.of(other))
    rows = read_dataset(
        found.dataset,
        at=found.dataset.snapshot(),
        policy=found.policy,
        writers=of_writers,
        ray_remote_args={"scheduling_strategy": place},
        **options,
    )
    pieces = rows.map_batches(
        _cut, batch_size=None, batch_format="pyarrow", zero_copy_batch=True, scheduling_strategy=place
    )
    pieces.context.execution_options.preserve_order = True
    try:
        blocks = pieces.to_arrow_refs()
    except ray.exceptions.RayTaskError as error:
        raise _cause(error) from error
    index = ray.remote(_index).options(scheduling_strategy=place)
    where = _episodes_of([_result(index.remote(block)) for block in blocks])
    writers = {writer: part for part, writer in enumerate(found.writers)} if of_writers else {}
    how = ray.put((packing, writers))
    task = ray.remote(_joined).options(num_returns=2, scheduling_strategy=place)
    running = []
    for number, episodes in enumerate(where):
        if episodes:
            needed = sorted({block for chain in episodes for block, _ in chain})
            running.append(task.remote(how, number, episodes, needed, *[blocks[block] for block in needed]))
    for counts, table in running:
        yield *_result(counts), table


def _cut(table: Any) -> dict[str, NDArray[Any]]:
    """Of a block of rows: a row for each piece of an episode in it."""
    cutter, pieces = EpisodeCutter("mixed"), []
    for batch in Assembler().batches([table]):
        assert isinstance(batch, SampleBatch)
        names = [name for name in batch if not is_per_sequence(name)]
        pieces += [*cutter.add(SampleBatch({name: batch[name] for name in names})), *cutter.finish()]
    return {
        "episode": np.array([repr(episode_key(piece)) for piece in pieces], str),
        "ends": np.array([ends_of(piece)[-1] for piece in pieces], bool),
        "rows": object_column(pieces),
    }


def _index(pieces: Any) -> list[tuple[str, bool]]:
    """The episode of each piece, and whether it ends with it."""
    return [*zip(pieces["episode"].to_pylist(), pieces["ends"].to_pylist(), strict=True)]


def _episodes_of(index: Sequence[Sequence[tuple[str, bool]]]) -> list[list[list[tuple[int, int]]]]:
    """For each block, the episodes whose last piece is there; of each, the (block, row) of its pieces."""
    waiting: dict[str, list[tuple[int, int]]] = {}
    found: list[list[list[tuple[int, int]]]] = [[] for _ in index]
    for block, pieces in enumerate(index):
        for row, (episode, ends) in enumerate(pieces):
            waiting.setdefault(episode, []).append((block, row))
            if ends:
                found[block].append(waiting.pop(episode))
    for chain in waiting.values():
        found[chain[-1][0]].append(chain)
    return found


def _joined(
    how: tuple[Packing, Mapping[str, int]],
    number: int,
    episodes: Sequence[Sequence[tuple[int, int]]],
    needed: Sequence[int],
    *blocks: Any,
) -> tuple[tuple[int, int], Any]:
    """The counts and the table of the episodes of a block."""
    packing, writers = how
    columns = {block: table["rows"] for block, table in zip(needed, blocks, strict=True)}
    packed, steps = [], 0
    for of_block, chain in enumerate(episodes):
        rows = concat_samples([columns[block][row].as_py() for block, row in chain])
        part = 0
        if writers:
            part = writers[str(rows[WRITER][0])]
            rows = SampleBatch({name: column for name, column in rows.items() if name != WRITER})
        packed.append(packing.packed(rows, part, f"{number}-{of_block}"))
        steps += len(rows)
    return (steps, len(packed)), _table(packed)


def _result(reference: Any) -> Any:
    """The result of a task, or the error of rlio that it raised."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise _cause(error) from error


def _cause(error: Any) -> Exception:
    """The error in a task, without Ray's around it."""
    while isinstance(error, ray.exceptions.RayTaskError | ray.exceptions.UserCodeException):
        inner = getattr(error, "cause", None) or error.__cause__
        if not isinstance(inner, Exception):
            break
        error = inner
    found: Exception = error
    return found
