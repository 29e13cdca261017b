"""Whole episodes of rlio's sources, packed as RLlib's states by the tasks of a Ray cluster.

The processes of these tasks import this module, which therefore does not import RLlib.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import pyarrow as pa

from rlio.batch import SampleBatch, concat_samples
from rlio.batch.columns import Columns, is_per_sequence
from rlio.batch.episode import Episode
from rlio.conversion.episodes import EpisodeCutter, Episodes, StoredEpisodes, episode_key
from rlio.conversion.report import ends_of
from rlio.dataset.part_reader import PartReader
from rlio.distributed.ray_data.read_dataset import part_readers
from rlio.errors import MissingExtra
from rlio.formats.rllib.episodes import episode_state
from rlio.formats.rllib.sinks import with_final_obs
from rlio.formats.rllib.states import pack, space_to_rllib
from rlio.query.filters import RowFilter
from rlio.query.splits import Split
from rlio.read_options import ReadOptions
from rlio.storage.paths import is_uri

try:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ModuleNotFoundError as _error:
    raise MissingExtra("ray[rllib]", "rllib") from _error

__all__ = ["Packing", "packed_episodes"]

#: Rows of an episode, after the index of their writer among the parts of the source.
_Piece: TypeAlias = tuple[int, SampleBatch]

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
    episodes = ((part, rows) for _, rows in found.of_part(part) if isinstance(rows, SampleBatch))
    return _tables(packing, episodes, f"{part}")


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
    """The same, read by the tasks of `read_dataset`, which share the shards of each writer.

    parts          a a b  |  b b a   |  a c
    packed there          |  b       |           if their first step is there, too
    pieces         a b    |  b. a    |  a. c.    put together by more tasks, of which each has its pieces
    """
    options = {**found.options}
    if (split := options.pop("split", None)) is not None:
        other = options.get("filter")
        options["filter"] = RowFilter.on_side(Split.of(split), other and RowFilter.of_option(other))
    read = ReadOptions(columns=options.pop("columns", None), on_error=options.pop("on_error", "raise"))
    parts = part_readers(found.dataset, read, policy=found.policy, **options)
    place = _where_stored(found.uri)
    how = (ray.put(packing), {writer: part for part, writer in enumerate(found.writers)})
    task = ray.remote(_of_rows).options(num_returns="streaming", scheduling_strategy=place)
    index: list[Sequence[tuple[str, bool]]] = []
    pieces = []
    running: list[Any] = [task.remote(*how, part, f"{number}") for number, part in enumerate(parts)]
    for results in running:
        for counts in results:
            said = _result(counts)
            if isinstance(said, tuple):
                yield *said, next(results)
            else:
                index.append(said)
                pieces.append(next(results))
    join = ray.remote(_joined).options(num_returns=2, scheduling_strategy=place)
    joining = []
    for number, episodes in enumerate(_episodes_of(index)):
        if episodes:
            needed = sorted({part for chain in episodes for part, _ in chain})
            own = [pieces[part] for part in needed]
            joining.append(join.remote(how[0], f"{number}-of-pieces", episodes, needed, *own))
    for counts, table in joining:
        yield *_result(counts), table


def _of_rows(packing: Packing, parts: Mapping[str, int], part: PartReader, number: str) -> Iterator[Any]:
    """The counts of each table of whole episodes, and then the table; last, the pieces of the others.

    An error comes in the place of counts.
    """
    pieces: list[_Piece] = []
    for rows, episodes, table in _tables(packing, _cut(part, parts, pieces), number):
        yield rows, episodes
        yield table
    yield [(repr((of, episode_key(piece))), bool(ends_of(piece)[-1])) for of, piece in pieces]
    yield pieces


def _cut(part: PartReader, parts: Mapping[str, int], pieces: list[_Piece]) -> Iterator[_Piece]:
    """Cut rows into episodes; those of which other tasks may have steps go to ``pieces``."""
    for own in part.rows:
        of, cutter = parts[own.writer], EpisodeCutter("mixed")
        known: set[tuple[Any, ...]] = set()
        for batch in replace(part, rows=[own]).batches():
            assert isinstance(batch, SampleBatch)
            names = [name for name in batch if not is_per_sequence(name)]
            for episode in cutter.add(SampleBatch({name: batch[name] for name in names})):
                key = episode_key(episode)
                if key in known or (Columns.T in episode and int(episode[Columns.T][0]) == 0):
                    yield of, episode
                else:
                    pieces.append((of, episode))
                known.add(key)
        pieces += ((of, episode) for episode in cutter.finish())


def _episodes_of(index: Sequence[Sequence[tuple[str, bool]]]) -> list[list[list[tuple[int, int]]]]:
    """For each part, the episodes whose last piece is there; of each, the (part, number) of its pieces."""
    waiting: dict[str, list[tuple[int, int]]] = {}
    found: list[list[list[tuple[int, int]]]] = [[] for _ in index]
    for part, pieces in enumerate(index):
        for number, (episode, ends) in enumerate(pieces):
            waiting.setdefault(episode, []).append((part, number))
            if ends:
                found[part].append(waiting.pop(episode))
    for chain in waiting.values():
        found[chain[-1][0]].append(chain)
    return found


def _joined(
    packing: Packing,
    number: str,
    episodes: Sequence[Sequence[tuple[int, int]]],
    needed: Sequence[int],
    *pieces: Sequence[_Piece],
) -> tuple[tuple[int, int], Any]:
    """The counts and the table of episodes that are in pieces."""
    read = dict(zip(needed, pieces, strict=True))
    chains = ([read[part][piece] for part, piece in chain] for chain in episodes)
    whole = ((chain[0][0], concat_samples([rows for _, rows in chain])) for chain in chains)
    steps, count, table = next(_tables(packing, whole, number, most=None))
    return (steps, count), table


def _tables(
    packing: Packing,
    episodes: Iterable[_Piece],
    number: str,
    *,
    most: int | None = _BLOCK_BYTES,
) -> Iterator[tuple[int, int, Any]]:
    """(rows, episodes, table) of episodes, in tables of about ``most`` bytes; None: in one."""
    packed: list[bytes] = []
    steps = size = 0
    for of_number, (part, rows) in enumerate(episodes):
        packed.append(packing.packed(rows, part, f"{number}-{of_number}"))
        size += len(packed[-1])
        steps += len(rows)
        if most is not None and size > most:
            yield steps, len(packed), _table(packed)
            packed, steps, size = [], 0, 0
    if packed:
        yield steps, len(packed), _table(packed)


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
