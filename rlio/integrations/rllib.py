"""RLlib trains from rlio's data sets and records into them. It needs the extra ``rlio[rllib]``.

With RLlib's new stack, `RlioOfflineData` reads and `RecordingEnvRunner` writes:

    config.offline_data(input_="runs/cartpole", offline_data_class=RlioOfflineData)

    config.env_runners(env_runner_cls=RecordingEnvRunner)
    config.offline_data(output="runs/cartpole", output_write_episodes=False)

With its old stack, `input_creator` and `output_creator` do:

    config.offline_data(input_=input_creator("runs/cartpole"), output=output_creator("runs/copy"))

They read anything that `rlio.read` opens, of one agent.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlio.batch import Batch, MultiAgentBatch, SampleBatch, concat_samples
from rlio.batch.arrays import object_column, to_numpy
from rlio.batch.columns import DEFAULT_POLICY_ID, Columns, is_per_sequence
from rlio.batch.episode import Episode
from rlio.batch.nested import map_structure
from rlio.dataset.arrow_tables import WRITER
from rlio.distributed.ray_data.blocks import Assembler
from rlio.distributed.ray_data.read_dataset import read_dataset
from rlio.errors import DataNotFound, MissingExtra, OptionError, PublishError, RlioError, excerpt
from rlio.formats.episodes import EpisodeCutter, Episodes, StoredEpisodes, episode_key, open_episodes
from rlio.formats.report import ends_of
from rlio.formats.rllib_episodes import episode_state
from rlio.formats.rllib_sinks import with_final_obs
from rlio.formats.rllib_states import pack, space_to_rllib, unpack
from rlio.limits import DEFAULT_LIMITS
from rlio.log.recovery import recover
from rlio.readers.rllib_columns import infos_of_next_obs, infos_of_obs
from rlio.replay.filters import RowFilter
from rlio.replay.splits import Split
from rlio.resolve import read
from rlio.storage.paths import is_uri
from rlio.writers.parquet_writer import ParquetWriter
from rlio.writers.storable_rows import write_storable

try:
    import ray
    from ray.rllib.core import DEFAULT_MODULE_ID
    from ray.rllib.env import INPUT_ENV_SINGLE_SPACES
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode
    from ray.rllib.offline.input_reader import InputReader
    from ray.rllib.offline.offline_data import OfflineData
    from ray.rllib.offline.offline_prelearner import OfflinePreLearner
    from ray.rllib.offline.output_writer import OutputWriter
    from ray.rllib.policy.sample_batch import MultiAgentBatch as RllibMultiAgentBatch
    from ray.rllib.policy.sample_batch import SampleBatch as RllibSampleBatch
    from ray.rllib.utils import flatten_dict
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ModuleNotFoundError as _error:
    raise MissingExtra("ray[rllib]", "rllib") from _error

__all__ = [
    "EpisodePreLearner",
    "RecordingEnvRunner",
    "RlioOfflineData",
    "input_creator",
    "output_creator",
]

logger: logging.Logger = logging.getLogger("rlio")

# The longest wait for nodes to publish what dead runners left.
_RECOVERY_SECONDS = 60.0
# Bytes of episodes in one block of Ray's.
_BLOCK_BYTES = 16 << 20
#: The metric of a `RecordingEnvRunner`: rows that it has recorded.
ROWS_RECORDED = "rlio_rows_recorded"


# ---- the new stack, reading ----


class EpisodePreLearner(OfflinePreLearner):
    """Makes training batches of whole episodes, so that advantages run to the end of each.

    RLlib's own makes an episode of each row, or draws single steps from a buffer of episodes.
    """

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Run the learner's connectors on the episodes of ``batch["item"]``."""
        states = (unpack(bytes(item), limits=DEFAULT_LIMITS) for item in batch["item"])
        found = self._learner_connector(
            rl_module=self._module,
            batch={},
            episodes=[SingleAgentEpisode.from_state(state) for state in states],
            shared_data={},
            metrics=None,
        )
        kept = {
            module: columns
            for module, columns in found.items()
            if self._should_module_be_updated(module, found)
        }
        flat: dict[str, Any] = flatten_dict(kept)
        return flat


class RlioOfflineData(OfflineData):
    """Reads what ``config.input_`` names (a path, URI or glob, or a list) by whole episodes.

    The data is read once, when the algorithm is built, into Ray's object store, one episode a row: of a data
    set of rlio by `rlio.distributed.read_dataset`, many tasks a writer, on all nodes if the data set is a URI
    (with a filter of whole episodes, such as ``episode_return >= 200``, one task a writer); of other formats
    in this process.
    ``config.input_config`` has keywords of `rlio.read`. An episode whose final observation is not stored is
    refused, unless ``config.ignore_final_observation`` is set: the last observation then stands in for it.

    Attributes:
        rows: Steps that were read.
        episodes: Episodes that were read.

    Raises:
        DataNotFound: There is no data.
        SchemaError: Rows are not trajectories, or a final observation is missing.
        OptionError: Rows are of several policies.
    """

    def __init__(self, config: Any) -> None:
        self.rows: int = 0
        self.episodes: int = 0
        sources = config.input_ if isinstance(config.input_, list) else [config.input_]
        fed = config.copy(copy_frozen=False)
        # RLlib's own constructor opens the tables with Ray.
        fed.input_ = [
            table for number, source in enumerate(sources) for table in self._tables(number, source, config)
        ]
        if not self.episodes:
            raise DataNotFound(f"no episode with a step in {excerpt(sources)}")
        fed.input_read_method, fed.input_read_method_kwargs = "from_arrow_refs", {}
        super().__init__(fed)
        self.config = config
        self.prelearner_class: type[OfflinePreLearner] = config.prelearner_class or EpisodePreLearner
        wanted = config.train_batch_size_per_learner * self.episodes / self.rows
        self.data_read_batch_size: Any = config.input_read_batch_size or max(1, round(wanted))
        logger.info("RlioOfflineData: %d rows in %d episodes of %s", self.rows, self.episodes, sources)

    def _tables(self, number: int, source: Any, config: Any) -> Iterator[Any]:
        """References of Arrow tables with a column ``item``, one episode a row."""
        found = open_episodes(source, read_options=config.input_config)
        packed: Callable[[Any, _Packing], Iterator[tuple[int, int, Any]]] = _packed
        # Other processes do not see this one's memory; of other formats, other nodes may lack the files.
        if isinstance(found, StoredEpisodes) and not found.uri.startswith("memory:"):
            packed = _packed_by_writer if found.needs_store else _packed_by_rows
        for rows, episodes, table in packed(found, _Packing(found, str(number), config)):
            self.rows += rows
            self.episodes += episodes
            yield table


class _Packing:
    """Packs episodes for RLlib, in any process.

    RLlib adds up columns by id, so no two episodes have the same: each has its number after ``prefix``.
    """

    def __init__(self, found: Episodes, prefix: str, config: Any) -> None:
        self._prefix, self._repeats = prefix, config.ignore_final_observation
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


def _table(packed: list[bytes]) -> Any:
    return pa.table({"item": pa.array(packed, pa.binary())})


def _packed(found: Episodes, packing: _Packing) -> Iterator[tuple[int, int, Any]]:
    """(rows, episodes, reference of the table), read in this process."""
    for part in range(len(found.parts)):
        for rows, episodes, table in _tables_of(found, part, packing):
            yield rows, episodes, ray.put(table)


def _tables_of(found: Episodes, part: int, packing: _Packing) -> Iterator[tuple[int, int, Any]]:
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


def _packed_by_writer(found: StoredEpisodes, packing: _Packing) -> Iterator[tuple[int, int, Any]]:
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


def _streamed(found: Episodes, part: int, packing: _Packing) -> Iterator[Any]:
    """The counts of each table, and then the table: an error comes in the place of counts."""
    for rows, episodes, table in _tables_of(found, part, packing):
        yield rows, episodes
        yield table


def _packed_by_rows(found: StoredEpisodes, packing: _Packing) -> Iterator[tuple[int, int, Any]]:
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
    how: tuple[_Packing, Mapping[str, int]],
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


# ---- the new stack, recording ----


class RecordingEnvRunner(SingleAgentEnvRunner):
    """Steps environments as RLlib's runner does, and writes every step into ``config.output``.

    ``config.output_config`` has keywords of `rlio.ParquetWriter`. Chunks of episodes are written as they are
    sampled, in any ``batch_mode``. Rows have the observations and actions that the module saw and chose, and
    its outputs; infos are not recorded. Steps that RLlib's runner samples and drops are not recorded (with
    ``batch_mode="complete_episodes"``, unfinished episodes once enough others have ended). The metric
    ``rlio_rows_recorded`` counts the rows. Runners of an evaluation record nothing. A failed write raises in
    `sample`. `stop` closes the writer. The algorithm's own runner publishes the rows that killed runners left
    in their logs, when it starts and when it stops, on all nodes of Ray that are up.

    Attributes:
        rows_recorded: Rows that were written.

    Raises:
        OptionError: ``config.output`` is not a path, but None, a function, ``"dataset"`` or ``"logdir"``.
    """

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        self.rows_recorded: int = 0
        self._writer: ParquetWriter | None = None
        self._records = not config.in_evaluation
        self._root: Any = config.output
        is_word = self._root in ("dataset", "logdir")
        if self._records and (is_word or not isinstance(self._root, (str, os.PathLike))):
            raise OptionError(
                f"found output={excerpt(self._root)}, expected where to record: "
                "config.offline_data(output=path)" + f", or output='./{self._root}'" * is_word
            )
        if self._records and not self.worker_index:
            _recover(self._root, self.config.output_config or {})

    def sample(self, **kwargs: Any) -> list[Any]:
        """Sample, and record the samples.

        Raises:
            PublishError: Steps were sampled, but no row was written.
        """
        samples: list[Any] = super().sample(**kwargs)
        if not self._records:
            return samples
        if self._writer is None:
            options: dict[str, Any] = self.config.output_config or {}
            self._writer = ParquetWriter(
                os.fspath(self._root), **({"spaces": self._spaces_of(samples)} | options)
            )
        before = self.rows_recorded
        for episode in samples:
            if len(episode):
                write_storable(self._writer, _rows_of(episode))
                self.rows_recorded += len(episode)
        if self.rows_recorded == before and any(map(len, samples)):
            raise PublishError("steps were sampled, but no row was recorded", uri=os.fspath(self._root))
        self.metrics.log_value(ROWS_RECORDED, self.rows_recorded - before, reduce="lifetime_sum")
        return samples

    def _spaces_of(self, samples: list[Any]) -> dict[str, tuple[Any, Any]] | None:
        """The module's spaces, or the environment's if connectors left its observations in the episodes."""
        spaces = self.get_spaces()  # type: ignore[no-untyped-call]
        seen = [episode.get_observations(0) for episode in samples[:1]]
        for observation, action in (spaces[DEFAULT_MODULE_ID], spaces[INPUT_ENV_SINGLE_SPACES]):
            if all(map(observation.contains, seen)):
                return {DEFAULT_POLICY_ID: (observation, action)}
        return None

    def stop(self) -> None:
        """Close the environments and the writer."""
        try:
            super().stop()  # type: ignore[no-untyped-call]
        finally:
            if self._writer is not None:
                self._writer.close()
            if self._records and not self.worker_index:
                _recover(self._root, self.config.output_config or {})
        if self._writer is not None:
            logger.info("RecordingEnvRunner: %d rows in %s", self.rows_recorded, self._root)
        elif self._records and self.env is not None:
            logger.warning("RecordingEnvRunner: nothing was sampled, so %s got no row", self._root)


def _recover(root: Any, options: Mapping[str, Any]) -> None:
    """Publish the rows that dead writers left in their logs, on every node that is up; log what stays."""
    given = {name: options[name] for name in ("spool", "storage_options") if name in options}
    if "spool" in given and given["spool"] is None:
        return  # The writers had no log.
    where = os.fspath(root)
    try:
        if not ray.is_initialized():
            found = [_recover_here(where, given)]
        else:
            found = ray.get(_recover_on_nodes(where, given), timeout=_RECOVERY_SECONDS)
    except (RlioError, OSError, ray.exceptions.RayError) as error:
        found = [(0, [excerpt(str(error))])]
    if rows := sum(rows for rows, _ in found):
        logger.warning("%s: recovered %d rows of runners that had died", where, rows)
    for message in (message for _, messages in found for message in messages):
        logger.warning("runners that died may have left rows of %s in their logs: %s", where, message)


def _recover_on_nodes(root: str, options: Mapping[str, Any]) -> list[Any]:
    """Run `_recover_here` on each node that is up; returns the references of the results."""
    task = ray.remote(_recover_here)
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    pins = [
        NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False) for node in nodes if node["Alive"]
    ]
    return [
        task.options(num_cpus=0, max_retries=0, scheduling_strategy=pin).remote(root, options) for pin in pins
    ]


def _recover_here(root: str, options: Mapping[str, Any]) -> tuple[int, list[str]]:
    """The rows that were recovered on this machine, and what failed."""
    report = recover(root, **options)
    return report.rows, [f"{log.writer}: {log.error}" for log in report.logs if log.outcome == "failed"]


def _rows_of(episode: Any) -> SampleBatch:
    """The steps of a chunk of RLlib's episodes, without its lookback."""
    chunk = episode if episode.is_numpy else SingleAgentEpisode.from_state(episode.get_state()).to_numpy()
    outputs = {
        name: chunk.get_extra_model_outputs(name)
        for name in chunk.extra_model_outputs
        if name not in ("state_in", "state_out")
    }
    return Episode(
        str(chunk.id_),
        observations=chunk.get_observations(),
        actions=chunk.get_actions(),
        rewards=chunk.get_rewards(),
        extra_outputs=outputs,
        terminated=chunk.is_terminated,
        truncated=chunk.is_truncated,
        t_started=chunk.t_started,
    ).to_batch()


# ---- the old stack ----


def input_creator(src: Any, **options: Any) -> Callable[[Any], Any]:
    """Return a function for ``config.offline_data(input_=...)`` of the old stack.

    Each worker reads batches of ``train_batch_size`` rows: its share of the rows, shuffled. With
    ``postprocess_inputs=True`` it reads whole episodes in their order, at least as many rows, and the policy
    postprocesses each of them, which MARWIL's advantages need.

    Infos are RLlib's: those of ``obs``, ``{}`` in the first row of an episode. Shuffled rows have none,
    because theirs are in other rows.

    Args:
        src: Anything that `rlio.read` opens.
        options: Keywords of `rlio.read`. Without ``seed`` the order is that of ``config.seed``; if that is
            None, of a seed drawn here for all workers.
    """
    # RLlib sends the function to all workers, which then shuffle in one order also without config.seed.
    seed = secrets.randbits(63)

    def create(ioctx: Any) -> Any:
        return _Input(src, options, ioctx, shared_seed=seed)

    return create


class _Input(InputReader):
    """Rows of rlio as RLlib's batches."""

    def __init__(self, src: Any, options: Mapping[str, Any], ioctx: Any, *, shared_seed: int) -> None:
        config, workers = ioctx.config, max(1, ioctx.config.num_env_runners)
        self._size = -(-config.train_batch_size // workers)
        self._worker = ioctx.worker
        shard = (max(0, ioctx.worker_index - 1), workers)
        if config.postprocess_inputs:
            self._batches = self._episodes(src, options, shard)
        else:
            seed = shared_seed if config.seed is None else config.seed
            logger.info("worker %d reads its share in the order of seed %d", ioctx.worker_index, seed)
            given = {"batch_size": self._size, "shuffle": True, "seed": seed, "shard": shard}
            self._batches = _without_infos(read(src, **{**given, **options}))

    def _episodes(self, src: Any, options: Mapping[str, Any], shard: tuple[int, int]) -> Iterator[Batch]:
        policy = next(iter(self._worker.policy_map.values()))
        while True:
            waiting: list[SampleBatch] = []
            rows = found = 0
            for number, (_, episode) in enumerate(open_episodes(src, read_options=options)):
                if number % shard[1] != shard[0]:
                    continue
                assert isinstance(episode, SampleBatch)
                if Columns.INFOS in episode:
                    episode[Columns.INFOS] = infos_of_obs(episode[Columns.INFOS])
                done = policy.postprocess_trajectory(_to_rllib(episode))
                waiting.append(SampleBatch({name: done[name] for name in done}))
                rows += len(episode)
                found += len(episode)
                if rows >= self._size:
                    joined = concat_samples(waiting)
                    waiting, rows = [], 0
                    yield joined
            if not found:
                raise DataNotFound(
                    f"no episode for worker {shard[0] + 1} of {shard[1]} in {excerpt(src)}: expected at "
                    "least an episode for each, so lower num_env_runners"
                )
            if waiting:
                yield concat_samples(waiting)

    def next(self) -> Any:
        """The next batch, as RLlib's."""
        return _to_rllib(next(self._batches))


def output_creator(root: Any, **options: Any) -> Callable[[Any], Any]:
    """Return a function for ``config.offline_data(output=...)`` of the old stack.

    Each worker owns a `rlio.ParquetWriter`, which is closed when the worker stops. ``infos`` are stored as
    rlio has them: those of ``new_obs``. RLlib's batches have those of ``obs``, so the last row of each
    episode and of each fragment gets ``{}``. The rows of workers that were killed are recovered as by
    `RecordingEnvRunner`.

    Args:
        root: Root of the data set.
        options: Keywords of `rlio.ParquetWriter`.
    """

    def create(ioctx: Any) -> Any:
        is_local = ioctx.worker_index == 0
        if is_local:
            _recover(root, options)
        worker = ioctx.worker
        policies = {} if worker is None else dict(worker.policy_map.items())
        spaces = {
            name if len(policies) > 1 else DEFAULT_POLICY_ID: (each.observation_space, each.action_space)
            for name, each in policies.items()
        }
        output = _Output(ParquetWriter(root, **({"spaces": spaces or None} | options)))
        if worker is not None:
            stop = worker.stop

            def stop_and_close() -> None:
                stop()
                output.close()
                if is_local:
                    _recover(root, options)

            worker.stop = stop_and_close  # RLlib closes no output.
        return output

    return create


class _Output(OutputWriter):
    """Writes RLlib's batches into a data set of rlio.

    Attributes:
        writer: Rlio's writer.
    """

    def __init__(self, writer: ParquetWriter) -> None:
        self.writer = writer

    def write(self, sample_batch: Any) -> None:
        """Write the rows; those of a single policy as a `SampleBatch`."""
        write_storable(self.writer, _from_rllib(sample_batch))

    def close(self) -> None:
        """Close the writer."""
        self.writer.close()


def _from_rllib(batch: Any) -> Batch:
    if not isinstance(batch, RllibMultiAgentBatch):
        columns = {name: _column(name, batch[name]) for name in batch if batch[name] is not None}
        if Columns.INFOS in columns:
            columns[Columns.INFOS] = infos_of_next_obs(columns)
        return SampleBatch(columns)
    parts = {policy: _from_rllib(rows) for policy, rows in batch.policy_batches.items()}
    if len(parts) == 1:
        return next(iter(parts.values()))
    singles = {policy: rows for policy, rows in parts.items() if isinstance(rows, SampleBatch)}
    return MultiAgentBatch(singles, batch.env_steps())


def _column(name: str, value: Any) -> Any:
    return map_structure(object_column if name == Columns.INFOS else np.asarray, value)


def _without_infos(batches: Iterable[Batch]) -> Iterator[Batch]:
    warned = False
    for batch in batches:
        for rows in batch.policies().values():
            if rows.pop(Columns.INFOS, None) is not None and not warned:
                warned = True
                logger.warning(
                    "infos are left out: RLlib's belong to obs, and in shuffled rows they are in other rows; "
                    "postprocess_inputs=True reads whole episodes, with infos"
                )
        yield batch


def _to_rllib(batch: Batch) -> Any:
    if isinstance(batch, MultiAgentBatch):
        parts = {policy: _to_rllib(rows) for policy, rows in batch.items()}
        return RllibMultiAgentBatch(parts, batch.env_steps())
    columns = {name: map_structure(to_numpy, column) for name, column in batch.items()}
    return RllibSampleBatch(columns)  # type: ignore[no-untyped-call]
