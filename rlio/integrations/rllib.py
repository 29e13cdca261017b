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
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from rlio.batch import Batch, MultiAgentBatch, SampleBatch, concat_samples
from rlio.batch.arrays import object_column, to_numpy
from rlio.batch.columns import DEFAULT_POLICY_ID, Columns
from rlio.batch.episode import Episode
from rlio.batch.nested import map_structure
from rlio.conversion.episodes import open_episodes
from rlio.errors import DataNotFound, MissingExtra, OptionError, PublishError, RlioError, excerpt
from rlio.formats.files.allowance import Allowance
from rlio.formats.rllib.columns import infos_of_next_obs, infos_of_obs
from rlio.formats.rllib.states import unpack
from rlio.integrations.rllib_packing import Packing, packed_episodes
from rlio.resolve import read
from rlio.writers.parquet_writer import ParquetWriter
from rlio.writers.recovery import recover
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
#: The metric of a `RecordingEnvRunner`: rows that it has recorded.
ROWS_RECORDED = "rlio_rows_recorded"


# ---- the new stack, reading ----


class EpisodePreLearner(OfflinePreLearner):
    """Makes training batches of whole episodes, so that advantages run to the end of each.

    RLlib's own makes an episode of each row, or draws single steps from a buffer of episodes.
    """

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Run the learner's connectors on the episodes of ``batch["item"]``."""
        states = (unpack(bytes(item), allowance=Allowance()) for item in batch["item"])
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
    set of rlio in the parts of `rlio.distributed.read_dataset`, many tasks a writer, on all nodes if the data
    set is a URI
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
        with open_episodes(source, read_options=config.input_config) as found:
            packing = Packing(found, str(number), repeats=config.ignore_final_observation)
            for rows, episodes, table in packed_episodes(found, packing):
                self.rows += rows
                self.episodes += episodes
                yield table


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
            with open_episodes(src, read_options=options) as source:
                for number, (_, episode) in enumerate(source):
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
