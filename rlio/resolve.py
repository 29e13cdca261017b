"""Turns a user's input or output argument into a reader or writer.

An input is a reader; a function of `IOContext`; a registered name; ``"sampler"``; a path, URI or glob, or a
list of those; an open `Dataset`; a table in memory; or a mixture of all these with weights. An output is a
writer; a function of `IOContext`; a registered name; ``"logdir"``; a path or URI; or None. `register_input`
and `register_output` register names; so does an installed package through its entry points in the groups
``rlio.readers`` and ``rlio.writers``. A registered name wins over a path; write ``./name`` for the path. A
path may contain any letters.

Example:
    >>> from rlio.resolve import IOContext
    >>> from rlio.readers.mixed_input import MixedInput
    >>> resolve_output(None, IOContext())
    NoopOutput(0 rows received, 0 published)
    >>> register_output("nowhere", lambda context: resolve_output(None, context))
    >>> resolve_output("nowhere", IOContext()).rows_received
    0
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import wraps
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeAlias, TypeVar, cast

from rlio.batch.arrays import is_table, refuse_columns
from rlio.errors import DataNotFound, OptionError, UnknownLayout, excerpt
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.reader import InputReader
from rlio.storage.paths import mask_secrets
from rlio.support.options import option_names, refuse_mapped_columns, refuse_replaced, refuse_unknown
from rlio.writer import OutputWriter

if TYPE_CHECKING:
    import gymnasium as gym

    from rlio.batch.join import Unlike
    from rlio.look.stats import Normalise
    from rlio.mapping import Mapping as ColumnMapping
    from rlio.query.filters import RowFilter, RowFunction
    from rlio.readers.stored_pass import Cache
    from rlio.replay.n_step import NStep
    from rlio.replay.sequences import Sequences, WholeEpisodes
    from rlio.source.joined import Snapshots

__all__ = [
    "IOContext",
    "read",
    "register_input",
    "register_output",
    "registered_input",
    "registered_output",
    "resolve_input",
    "resolve_output",
]


@dataclass(frozen=True, kw_only=True)
class IOContext:
    """Context that an input or output creator gets: small and frozen, never a config object.

    Attributes:
        worker_index: 0 for a local worker, 1..num_workers for remote ones.
        num_workers: Number of remote workers; 0 if there is only the local one.
        log_dir: Folder for ``output="logdir"``; None if the worker has none.
        seed: The worker's seed; None if it draws one.
        order_seed: Seed for the order of stored rows: the same in all workers that share them. None: `seed`.
        spaces: Policy id -> (observation space, action space).
        options: The user's ``input_options`` or ``output_options``.
        made_by: Origin of the data, for outputs that store it: ``env``, ``policy``, ``seed``, where known.
        default_sampler_input: Makes the worker's own sampler, for inputs that mix in live experience.
    """

    worker_index: int = 0
    num_workers: int = 0
    log_dir: str | None = None
    seed: int | None = None
    order_seed: int | None = None
    spaces: Mapping[str, tuple[gym.Space[Any], gym.Space[Any]]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    made_by: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    default_sampler_input: Callable[[], InputReader] | None = None

    def __post_init__(self) -> None:
        if self.worker_index < 0 or self.num_workers < 0 or 0 < self.num_workers < self.worker_index:
            raise OptionError(
                f"found worker_index={self.worker_index}, num_workers={self.num_workers}: expected 0 for the "
                "local worker, or 1 to num_workers for a remote one"
            )
        if self.order_seed is None:
            object.__setattr__(self, "order_seed", self.seed)

    @property
    def rank(self) -> int:
        """Index of this worker among those that read: worker_index - 1, or 0 for a local worker."""
        return self.worker_index - 1 if self._is_remote else 0

    @property
    def world(self) -> int:
        """Number of workers that share the reading; 1 for a local worker, which reads alone."""
        return self.num_workers if self._is_remote else 1

    @property
    def _is_remote(self) -> bool:
        return self.worker_index > 0 and self.num_workers > 0


InputCreator: TypeAlias = Callable[[IOContext], InputReader]
OutputCreator: TypeAlias = Callable[[IOContext], OutputWriter]
P = ParamSpec("P")
T = TypeVar("T")

_HEADER = "_rlio.json"
# The reader class for each kind of file, by name, because only the class that is used is imported.
_DATASET_READER = "rlio.readers.dataset_reader:DatasetReader"
_JSON_READER = "rlio.readers.json_reader:JsonReader"
_READERS = {
    _JSON_READER: (".json", ".jsonl", ".zip"),
    "rlio.readers.d4rl_reader:D4RLReader": (".hdf5", ".h5"),
    "rlio.readers.foreign_parquet:ForeignParquetReader": (".parquet",),
}
_TABLE_READER = "rlio.readers.table_reader:read_table"
_EPISODE_READER = "rlio.readers.episode_reader:EpisodeReader"
_MIXED_INPUT = "rlio.readers.mixed_input:MixedInput"
_PARQUET_WRITER = "rlio.writers.parquet_writer:ParquetWriter"
_PROVENANCE = "rlio.schemas.provenance:Provenance"
_NOOP_OUTPUT = "rlio.writers.noop_output:NoopOutput"

# Options of a mixture; all others go to the readers that it opens. The type of `columns` decides its target.
_MIX_OPTIONS = ("batch_size", "end", "source_column")
# RLlib's words for inputs and outputs that are no names here, and what to pass instead.
_NO_OUTPUTS = {
    "dataset": "RLlib's word for files of Ray Data; pass the path, for Parquet, or rlio.JsonWriter(path)",
    "sampler": "the name of an input; pass a path, a writer or None",
}
_NO_INPUTS = {
    "dataset": "'dataset' is RLlib's word for files of Ray Data: pass their path",
    "logdir": "'logdir' is the name of an output: pass the path of the folder",
}
# Default number of steps in a mixture's batch: as many as one fragment of RLlib's rollouts.
_MIX_BATCH_SIZE = 200


class _Registry(Generic[T]):
    """The creators of readers or writers, by name."""

    def __init__(self, kind: Any, noun: str, group: str, *, reserved: str) -> None:
        # Any: for type[T], mypy would accept no abstract class.
        self.kind = kind
        self.noun = noun
        self.group = group
        self.reserved = reserved
        self._creators: dict[str, Callable[..., Any]] = {}

    def register(self, name: str, creator: Callable[..., Any]) -> None:
        if not isinstance(name, str) or not name or name == self.reserved:
            raise OptionError(
                f"{excerpt(name)} cannot be the name of {self.noun}: use any text but '' and "
                f"{self.reserved!r}"
            )
        if not callable(creator):
            raise OptionError(
                f"{self.noun} {name!r} needs a function of IOContext, or a class, not {excerpt(creator)}"
            )
        self._creators[name] = creator

    def names(self) -> list[str]:
        """All names that are registered now."""
        return sorted(
            {self.reserved, *self._creators, *(point.name for point in entry_points(group=self.group))}
        )

    def find(self, name: str) -> Callable[..., Any] | None:
        """The creator of ``name``: registered in this process, or else by an installed package."""
        if creator := self._creators.get(name):
            return creator
        # Entry points are not searched for an obvious path: the search takes milliseconds.
        if not _may_be_name(name):
            return None
        points = {point.value: point for point in entry_points(group=self.group, name=name)}
        if len(points) > 1:
            owners = ", ".join(f"{point.value} of {_owner(point)}" for point in points.values())
            raise OptionError(
                f"several packages register {self.noun} {name!r}: {owners}; pass the class itself"
            )
        for point in points.values():
            return self._load(point)
        return None

    def _load(self, point: EntryPoint) -> Callable[..., Any]:
        try:
            creator = point.load()
        except (ImportError, AttributeError) as error:
            raise OptionError(
                f"{self.noun} {point.name!r} of {_owner(point)} cannot be loaded from {point.value}: {error}"
            ) from error
        if not callable(creator):
            raise OptionError(f"{point.value} of {_owner(point)} is {excerpt(creator)}, not {self.noun}")
        return creator  # type: ignore[no-any-return]  # the package may return anything; checked to be callable

    def create(self, creator: Callable[..., Any], context: IOContext, origin: str) -> T:
        """Call ``creator`` and check the result."""
        if isinstance(creator, type) and issubclass(creator, self.kind):
            refuse_unknown(context.options, option_names(creator), of=creator.__name__)
            made = creator(**context.options)
        else:
            made = creator(context)
        if not isinstance(made, self.kind):
            raise OptionError(f"{origin} gave {excerpt(made)}: expected {self.noun}, a {self.kind.__name__}")
        return cast("T", made)


_inputs: _Registry[InputReader] = _Registry(InputReader, "an input", "rlio.readers", reserved="sampler")
_outputs: _Registry[OutputWriter] = _Registry(OutputWriter, "an output", "rlio.writers", reserved="logdir")


def register_input(name: str, creator: InputCreator | type[InputReader]) -> None:
    """Register ``name`` as an input in this process. A second registration replaces the first.

    Args:
        name: Any text but ``"sampler"``.
        creator: A function of `IOContext` that returns a reader, or a reader class, which is called with the
            options as keywords.

    Raises:
        OptionError: ``name`` or ``creator`` is not valid.
    """
    _inputs.register(name, creator)


def register_output(name: str, creator: OutputCreator | type[OutputWriter]) -> None:
    """Register ``name`` as an output in this process. A second registration replaces the first.

    Args:
        name: Any text but ``"logdir"``.
        creator: A function of `IOContext` that returns a writer, or a writer class, which is called with the
            options as keywords.

    Raises:
        OptionError: ``name`` or ``creator`` is not valid.
    """
    _outputs.register(name, creator)


def registered_input(name: str) -> InputCreator | type[InputReader] | None:
    """The creator that `register_input` or an installed package registered; None: not registered."""
    return _inputs.find(name)


def registered_output(name: str) -> OutputCreator | type[OutputWriter] | None:
    """The creator that `register_output` or an installed package registered; None: not registered."""
    return _outputs.find(name)


def _opens(signature: Callable[P, InputReader]) -> Callable[P, InputReader]:
    """Make the function of a signature that lists options: it passes on those given, and no default."""

    @wraps(signature)
    def opened(value: Any, **options: Any) -> InputReader:
        return resolve_input(value, IOContext(options=MappingProxyType(options)))

    return cast("Callable[P, InputReader]", opened)


@_opens
def read(  # type: ignore[empty-body]  # `_opens` has it.
    value: Any,
    *,
    mapping: ColumnMapping | None = None,
    batch_size: int | None = None,
    epochs: int | None = None,
    shuffle: bool = False,
    seed: int | None = None,
    shard: tuple[int, int] = (0, 1),
    columns: Sequence[str] | Unlike | None = None,
    draw: NStep | Sequences | WholeEpisodes | None = None,
    policy: str | None = None,
    filter: str | RowFunction | RowFilter | None = None,
    split: tuple[Literal["train", "test"], float] | None = None,
    derive: Sequence[str] = (),
    normalise: Normalise | None = None,
    views: bool = False,
    indexes: bool = False,
    drop_last: bool = False,
    on_error: Literal["raise", "skip"] = "raise",
    missing: Literal["error", "drop", "fill"] = "error",
    at: Snapshots | None = None,
    cache: Cache = "auto",
    format: str | None = None,
    format_options: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    limits: Limits = DEFAULT_LIMITS,
    **others: Any,
) -> InputReader:
    """Open an input without a worker. Takes every value of a worker's ``input=`` except ``"sampler"``.

    An option that the reader of ``value`` does not take raises `rlio.errors.UnknownName`.

    Args:
        value: A path, URI or glob, a list of those, an open `rlio.Dataset`, a table in memory, a registered
            name, a reader class, or a mixture: a dict of any of these -> weight. See
            `rlio.resolve.resolve_input`. For data that grows, pass a `rlio.FollowReader`, or the class with
            ``root`` among the options.
        mapping: What the columns of a table mean; None: their names are rlio's.
        batch_size: Rows (sequences, episodes, joint steps) of a batch; None: the reader's own.
        epochs: Passes over the data; None: endless.
        shuffle: Whether the order is a seeded permutation; otherwise as recorded.
        seed: Seed of the order; None: one from the OS.
        shard: (rank, world): which part of the rows is read.
        columns: Names of the columns to read; None: all. "intersect" or "fill" is for files and sources with
            different columns (a mixture's default is "intersect").
        draw: What a unit is: `rlio.NStep`, `rlio.Sequences`, `rlio.WholeEpisodes`; None: a row.
        policy: The policy whose rows are read; None: joint steps of all.
        filter: Which rows are read, such as ``"rewards > 0"``.
        split: ("train", share) or ("test", share): the episodes of one side.
        derive: Columns to add: "returns_to_go", "mc_return(0.99)", "episode_return", "episode_length".
        normalise: How columns are scaled: "mean_std", "min_max", or by column.
        views: Whether columns may be views, which is faster.
        indexes: Whether batches have the column ``batch_indexes``.
        drop_last: Whether to drop a short batch at the end.
        on_error: What to do with damaged rows: "raise", or "skip" and count them.
        missing: What to do with columns that only some writers of a data set have.
        at: A snapshot of a data set; of a list of data sets, one for each, or None.
        cache: Where rows are kept: "memory", "disk", "none" or "auto".
        format: Name of the format of another library; None: recognise it.
        format_options: Options of the format, see docs/foreign.md.
        storage_options: For fsspec.
        limits: Limits on the data's demands.
        others: Options of one kind of input. RLlib's recordings: ``spaces``, ``unnormalise_actions``. Parquet
            of other libraries: ``extension_types``. D4RL: ``max_episode_steps``. Mixtures: ``end``,
            ``source_column``; they take these, ``batch_size`` and a text as ``columns``, and the readers that
            they open the rest. A reader class, or a registered reader: its own.

    Returns:
        The reader; close it, or use it in a ``with`` block.

    Raises:
        DataNotFound: Nothing is stored there, and no input has that name.
        OptionError: ``value`` is of an unknown kind, or an option is illegal.
    """


def resolve_input(
    value: Any, context: IOContext, *, wrap: Callable[[InputReader], InputReader] | None = None
) -> InputReader:
    """Make the reader that ``value`` describes.

    Args:
        value: A reader; a function of `IOContext`, or a reader class, which gets ``context.options`` as
            keywords, and the worker's ``shard`` and seed if it takes them; a registered name; ``"sampler"``;
            a path, URI or glob, a list of those, an open `Dataset`, or a table in memory, read in shards by
            ``context.rank``; or a mixture: a dict of any of these -> weight, or a list of pairs.
        context: Passed to functions; also holds the options of the reader.
        wrap: Applied to each reader except ``"sampler"``, also inside a mixture: a worker adapts experience
            that it did not make itself.

    Returns:
        The reader, owned by the caller.

    Raises:
        DataNotFound: Nothing is stored there, and no input has that name.
        OptionError: ``value`` is of an unknown kind, nothing takes one of the options, or the folders hold
            no files of a known kind, or files of several kinds.
    """
    refuse_columns(value)
    if not is_table(value) and (pairs := _pairs(value)):
        return _mixture(pairs, context, wrap)
    reader = _single(value, context)
    return reader if wrap is None or _is_sampler(value) else wrap(reader)


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    """The sources and weights of a mixture; [] if ``value`` is not a mixture."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, Sequence) and all(isinstance(item, tuple) and len(item) == 2 for item in value):
        return list(value)
    return []


def _single(value: Any, context: IOContext) -> InputReader:
    """The reader that ``value``, which is not a mixture, describes."""
    if is_table(value):
        return _class(_TABLE_READER)(value, **_read_options(context))  # type: ignore[no-any-return]  # found by name
    if isinstance(value, InputReader):
        _refuse_options(context, f"the input is a {type(value).__name__} already")
        return value
    if isinstance(value, str):
        if _is_sampler(value):
            _refuse_options(context, "the sampler has its own configuration")
            return _sampler(context)
        if creator := _inputs.find(value):
            return _inputs.create(creator, _sharing(creator, context), f"the input {value!r}")
    elif callable(value):
        return _inputs.create(value, _sharing(value, context), f"the input {excerpt(value)}")
    if isinstance(value, (str, os.PathLike)):
        return _stored([value], context)
    if isinstance(value, Sequence) and value and all(isinstance(v, (str, os.PathLike)) for v in value):
        return _stored(list(value), context)
    from rlio.opening import OtherFiles, is_list
    from rlio.source.snapshot import DatasetSnapshot

    if isinstance(value, OtherFiles):
        options = MappingProxyType({**value.options, **context.options})
        return _single(value.inputs, replace(context, options=options))
    if isinstance(value, DatasetSnapshot) or is_list(value):
        return _class(_DATASET_READER)(value, **_read_options(context))  # type: ignore[no-any-return]  # found by name
    raise OptionError(
        f"the input is {excerpt(value)}: expected a reader, a function of IOContext, one of the names "
        f"{', '.join(_inputs.names())}, a path, a list of paths, an open Dataset, a table, or a dict or "
        "pairs of those with weights"
    )


def resolve_output(value: Any, context: IOContext) -> OutputWriter:
    """Make the writer that ``value`` stands for.

    Args:
        value: A writer; a function of `IOContext`, or a class of writers, which gets ``context.options`` as
            keywords; a registered name; ``"logdir"``, a data set in ``context.log_dir``; a path or URI, a
            data set there; or None, which keeps nothing.
        context: What functions get, and the options of the writer.

    Returns:
        The writer, owned by the caller.

    Raises:
        OptionError: ``value`` is of an unknown kind, or nothing takes one of the options.
    """
    if value is None:
        _refuse_options(context, "there is no output")
        return _class(_NOOP_OUTPUT)()  # type: ignore[no-any-return]  # found by name
    if isinstance(value, OutputWriter):
        _refuse_options(context, f"the output is a {type(value).__name__} already")
        return value
    if isinstance(value, str) and value != "logdir" and (creator := _outputs.find(value)):
        return _outputs.create(creator, context, f"the output {value!r}")
    if callable(value):
        return _outputs.create(value, context, f"the output {excerpt(value)}")
    if isinstance(value, str) and (instead := _NO_OUTPUTS.get(value)):
        raise OptionError(f"output={value!r}: {instead}; for a folder of that name pass './{value}'")
    if not isinstance(value, (str, os.PathLike)):
        raise OptionError(
            f"the output is {excerpt(value)}: expected a writer, a function of IOContext, one of the names "
            f"{', '.join(_outputs.names())}, a path, or None"
        )
    if value == "logdir":
        if context.log_dir is None:
            raise OptionError(
                "output='logdir' needs a folder: pass place=rlio.sampling.WorkerPlace(log_dir=...), or a "
                "path as output"
            )
        value = context.log_dir
    options = {"worker_index": context.worker_index, **context.options}
    if context.spaces:
        options.setdefault("spaces", context.spaces)
    if context.made_by:
        options.setdefault("provenance", _class(_PROVENANCE)(**context.made_by))
    writer = _class(_PARQUET_WRITER)
    return writer(value, **options)  # type: ignore[no-any-return]  # found by name


def _class(place: str) -> Any:
    """The class at ``module:Class``."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def _may_be_name(text: str) -> bool:
    return not any(letter in text for letter in "/\\*?[")


def _owner(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "a package"


def _refuse_options(context: IOContext, reason: str) -> None:
    if context.options:
        raise OptionError(f"options {', '.join(map(repr, context.options))} have no effect: {reason}")


def _sampler(context: IOContext) -> InputReader:
    if context.default_sampler_input is None:
        raise OptionError(
            "'sampler' needs a worker that steps an environment: rlio.RolloutWorker(env, policy)"
        )
    return context.default_sampler_input()


# ---- mixtures ----


def _mixture(
    pairs: Sequence[tuple[Any, Any]],
    context: IOContext,
    wrap: Callable[[InputReader], InputReader] | None,
) -> InputReader:
    """A MixedInput of the readers of all pairs; if one fails, closes the readers opened here."""
    own = {key: value for key, value in context.options.items() if key in _MIX_OPTIONS}
    rest = {key: value for key, value in context.options.items() if key not in _MIX_OPTIONS}
    if isinstance(rest.get("columns"), str):
        own["columns"] = rest.pop("columns")
    else:
        # Recordings and samplers have extra columns; the columns that are left out are logged.
        own["columns"] = "intersect"
    taker = next((value for value, _ in pairs if not _takes_no_options(value)), None)
    if rest and taker is None:
        raise OptionError(f"options {', '.join(map(repr, rest))} have no effect: the mixture opens no reader")
    inner = replace(context, options=MappingProxyType(rest))
    bare = replace(context, options=MappingProxyType({}))
    readers: dict[str, InputReader] = {}
    weights = {}
    places: set[str] = set()
    with ExitStack() as opened:
        for number, (value, weight) in enumerate(pairs):
            name = f"source_{number}"
            if isinstance(value, (str, os.PathLike)):
                place = os.fspath(value)
                # Names are stored: in states and in the column `source`.
                masked = mask_secrets(place)
                if place in places:
                    raise OptionError(
                        f"{masked!r} is a source of the mixture twice: pass it once, with both weights added"
                    )
                places.add(place)
                if masked not in readers:
                    name = masked
            readers[name] = resolve_input(value, bare if _takes_no_options(value) else inner, wrap=wrap)
            weights[name] = weight
            if not isinstance(value, InputReader):
                opened.callback(readers[name].close)
        mixed = _class(_MIXED_INPUT)(
            readers, weights=weights, **{"batch_size": _MIX_BATCH_SIZE, "seed": context.seed, **own}
        )
        opened.pop_all()
    return mixed  # type: ignore[no-any-return]  # found by name


def _takes_no_options(value: object) -> bool:
    return isinstance(value, InputReader) or _is_sampler(value)


def _is_sampler(value: object) -> bool:
    return isinstance(value, str) and value == "sampler"


# ---- stored data ----


def _read_options(context: IOContext) -> dict[str, Any]:
    """The options of a reader of stored data: the worker's share and seed, unless options say otherwise."""
    # Before anything is looked for: the data may not exist.
    refuse_replaced(context.options, of="a reader of stored data")
    refuse_mapped_columns(context.options.get("columns"))
    return _shared(context)


def _sharing(creator: Any, context: IOContext) -> IOContext:
    """The context, with the worker's share and seed among the options if a reader class takes them."""
    if not isinstance(creator, type) or not issubclass(creator, InputReader):
        return context
    taken = {*context.options, *(option_names(creator) or ())}
    options = {name: value for name, value in _shared(context).items() if name in taken}
    return replace(context, options=MappingProxyType(options))


def _shared(context: IOContext) -> dict[str, Any]:
    """The options, with the worker's share and seed, unless they say otherwise."""
    options = dict(context.options)
    # A share that the user chose may be one of several workers with seeds of their own: the reader then asks
    # for a seed that all of them have.
    chosen = "shard" in options and options["shard"] not in ((0, 1), [0, 1])
    if context.world > 1:
        options.setdefault("shard", (context.rank, context.world))
    if options.get("shuffle") and context.order_seed is not None and not chosen:
        options.setdefault("seed", context.order_seed)
    return options


def _stored(values: list[str | os.PathLike[str]], context: IOContext) -> InputReader:
    """The reader for the files that ``values`` name."""
    from rlio.opening import are_roots

    options = _read_options(context)
    storage_options = options.get("storage_options")
    alone = len(values) == 1
    if options.get("mapping") is None:
        options.pop("mapping", None)
    else:
        inputs = values[0] if alone else values
        return _class(_TABLE_READER)(inputs, **options)  # type: ignore[no-any-return]  # found by name
    if are_roots(values, storage_options):
        # A single path is passed unchanged, because messages and states show it.
        return _class(_DATASET_READER)(values[0] if alone else values, **options)  # type: ignore[no-any-return]  # found by name
    place, inputs = _reader_of(values, storage_options)
    return _class(place)(inputs, **options)  # type: ignore[no-any-return]  # found by name


def _counts(paths: list[str]) -> dict[str, int]:
    """How many of the files each reader class reads, by their endings."""
    return {
        place: sum(path.lower().endswith(suffixes) for path in paths) for place, suffixes in _READERS.items()
    }


def _is_zip(values: list[str | os.PathLike[str]]) -> bool:
    from rlio.storage.inputs import is_zip

    return len(values) == 1 and is_zip(os.fspath(values[0]))


def _reader_of(
    values: list[str | os.PathLike[str]], storage_options: Mapping[str, Any] | None
) -> tuple[str, Any]:
    """The place of the reader class for files outside our data sets, and what to pass to it.

    The format decides, where the content is recognised; otherwise the endings of the names do.
    """
    from rlio.formats.files.partitions import expand_with_partitions
    from rlio.formats.format import refuse_known, titles_of_read
    from rlio.formats.place import Recognised, recognise_inputs
    from rlio.storage.filesystem import Storage

    known = recognise_inputs(values, storage_options)
    # A single path is passed unchanged, because messages show it.
    inputs = values if len(values) > 1 else values[0]
    if known is not None and known.format.source is not None:
        return _EPISODE_READER, Recognised(inputs, known)
    if known is not None and known.format.reader is not None and _is_zip(values):
        return known.format.reader, inputs
    if known is not None and known.format.reader is not None and known.folder:
        # Folders of runs, one level or two below, as RLlib leaves them.
        ending = known.format.marks.endings[0]
        return known.format.reader, f"{os.fspath(values[0]).rstrip('/')}/**/*{ending}"
    try:
        files = expand_with_partitions(values, storage_options)
    except DataNotFound as error:
        refuse_known(values, storage_options, error)
        if len(values) == 1 and isinstance(values[0], str) and _may_be_name(values[0]):
            instead = _NO_INPUTS.get(values[0])
            raise DataNotFound(
                f"{error}; no input has that name either: "
                + (instead or f"the names are {', '.join(_inputs.names())}")
            ) from error
        raise
    counts = _counts([file.path for file in files])
    if _is_zip(values):
        # JSON in zip files is read by its reader, whatever lies beside it; it also says what else is there.
        inside = _counts(
            [entry.path for entry in Storage.open(values[0], storage_options=storage_options).list()]
        )
        counts = inside if any(inside.values()) and not inside[_JSON_READER] else counts
    found = [place for place, count in counts.items() if count]
    what = ", ".join(f"{counts[place]} for {place.rpartition(':')[2]}" for place in found)
    if len(found) == 1:
        return found[0], inputs
    names = [file.uri.rpartition("/")[2] for file in files]
    unknown = UnknownLayout(
        f"{excerpt([os.fspath(value) for value in values])} holds {len(files)} files, "
        f"{what or 'of no kind that is known'} ({excerpt(names[:10])}): expected a data set ({_HEADER}) or "
        f"files of one kind ({titles_of_read()}); pass a glob that matches one kind, or pass a reader; a "
        "table of steps is read by mapping=rlio.Mapping(columns=...) (docs/mapping.md)"
    )
    refuse_known(values, storage_options, unknown)
    raise unknown
