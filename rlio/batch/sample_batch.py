"""`SampleBatch`: rows of experience as a mapping from column name to array.

Import it from `rlio.batch` or `rlio`. Joining is in `rlio.batch.concat`. Compression, tensors and
operations on rows have their own modules, which the methods here call.

Example:
    >>> batch = SampleBatch(obs=[[0.0], [1.0], [2.0]], rewards=[1.0, 1.0, 0.5])
    >>> batch
    SampleBatch(3 steps: obs float64 (3, 1), rewards float64 (3,))
    >>> batch[1:]["rewards"]
    array([1. , 0.5])
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    MutableMapping,
    Sequence,
    ValuesView,
)
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import numpy as np

from rlio.batch import rows
from rlio.batch.arrays import (
    Column,
    SwappedArray,
    as_column,
    copy_leaf,
    equal_columns,
    is_tensor,
    row_count,
    size_bytes,
    slice_leaf,
    table_columns,
    to_numpy,
)
from rlio.batch.checks import check_layout
from rlio.batch.columns import DEFAULT_POLICY_ID, Columns, is_per_sequence
from rlio.batch.compressed_rows import compress_column, decompress_column
from rlio.batch.infos import info_objects, is_typed, typed_rows
from rlio.batch.join import Unlike, join
from rlio.batch.multi_agent import MultiAgentBatch, check_batch
from rlio.batch.nested import leaves, map_structure, path_text
from rlio.batch.other_names import did_you_mean
from rlio.batch.rows import boundaries, sequence_range
from rlio.batch.shown import column_table
from rlio.batch.tensors import Dtypes, to_tensors
from rlio.errors import MissingColumn, OptionError, SchemaError, excerpt
from rlio.support.html import panel
from rlio.support.words import counted

if TYPE_CHECKING:
    import torch


__all__ = ["SampleBatch"]

# `slice` and `rows` are also methods: in annotations inside the class, the names would mean those.
_Slice = slice
_SEQ_LENS = Columns.SEQ_LENS
_DONES = Columns.DONES
_INFOS = Columns.INFOS


class SampleBatch(Columns, MutableMapping[str, Column]):
    """Rows of experience: a mutable mapping from column name to array; all columns have the same rows.

    A column is an array, a torch tensor, or a dict or tuple of columns. Without ``seq_lens`` each row is a
    step. With ``seq_lens``, rows are concatenated sequences: ``seq_lens`` and ``state_in_k`` have one row a
    sequence, and other columns ``sum(seq_lens)`` rows. If ``zero_padded``, other columns have ``max_seq_len``
    rows a sequence, of which the last are padding. If ``time_major`` too, they have the shape
    ``(max_seq_len, sequences, ...)``.

    ``len(batch)`` and ``batch.count`` are the number of steps without padding, computed from the columns on
    every call. No method changes its batch, except item assignment and deletion, `set_training` and
    `set_get_interceptor`. Equality is identity; `equals` compares.

    Reading ``batch["dones"]`` gives terminated OR truncated, if the batch has at least one of the two. It is
    not a column and cannot be written.

    The class has the names of `Columns` as constants, such as ``SampleBatch.OBS``, as in RLlib.

    Args:
        columns: A mapping, (name, column) pairs, or a table: a data frame of pandas or Polars, or an Arrow
            table. Arrays and tensors are kept, not copied; lists, numbers and the columns of tables become
            arrays (`rlio.batch.arrays.as_column`). ``seq_lens`` that is None or ``[]`` is left out.
        time_major: Columns are (T, B, ...); implies ``zero_padded``.
        zero_padded: Each sequence takes ``max_seq_len`` rows.
        max_seq_len: Rows of a padded sequence, or an upper bound on sequence lengths; None: the longest
            sequence.
        num_grad_updates: Number of updates of the policy that made the rows, to judge their age.
        episode_starts: When episodes of the rows began: ``eps_id`` -> milliseconds since 1970-01-01 UTC.
            Recorders and runners set it, and writers store it.
        more: Columns as keywords.

    Raises:
        SchemaError: Columns differ in rows (the message names two and their lengths) or do not fit
            ``seq_lens``, or a value is not a column.
    """

    __slots__ = (
        "__weakref__",
        "_columns",
        "_intercepted",
        "_interceptor",
        "_is_training",
        "_max_seq_len",
        "_time_major",
        "_zero_padded",
        "episode_starts",
        "num_grad_updates",
    )

    # Names that RLlib's SampleBatch also has; rlio gives them no meaning.
    CUR_OBS: Final = Columns.OBS
    ACTION_DIST: Final = "action_dist"
    OBS_EMBEDS: Final = "obs_embeds"
    RETURNS_TO_GO: Final = "returns_to_go"
    ATTENTION_MASKS: Final = "attention_masks"

    def __init__(
        self,
        columns: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
        /,
        *,
        time_major: bool = False,
        zero_padded: bool = False,
        max_seq_len: int | None = None,
        num_grad_updates: float | None = None,
        episode_starts: Mapping[int | str, int] | None = None,
        **more: Any,
    ) -> None:
        given = columns._columns if isinstance(columns, SampleBatch) else columns
        raw = {**({} if given is None else table_columns(given)), **more}
        made = {}
        for name, value in raw.items():
            if type(value) is np.ndarray and value.ndim and name != _DONES:
                made[name] = value
            elif name == _SEQ_LENS and (value is None or (isinstance(value, list) and not value)):
                continue
            else:
                made[name] = _named_column(name, value)
        self._set_state(
            made,
            time_major,
            zero_padded or time_major,
            max_seq_len,
            num_grad_updates,
            episode_starts=episode_starts,
        )
        self._check(made)

    # ---- making batches without checks ----

    def _set_state(
        self,
        columns: dict[str, Column],
        time_major: bool = False,
        zero_padded: bool = False,
        max_seq_len: int | None = None,
        num_grad_updates: float | None = None,
        is_training: bool = False,
        episode_starts: Mapping[int | str, int] | None = None,
    ) -> None:
        self._columns = columns
        self._interceptor: Callable[[Any], Any] | None = None
        self._intercepted: dict[str, Any] = {}
        self._time_major = time_major
        self._zero_padded = zero_padded
        self._max_seq_len = max_seq_len
        self.num_grad_updates: float | None = num_grad_updates
        self.episode_starts: Mapping[int | str, int] | None = episode_starts
        self._is_training = is_training

    def _check(self, columns: dict[str, Column]) -> None:
        check_layout(columns, self._time_major, self._zero_padded, self._max_seq_len)

    @classmethod
    def _trusted(cls, columns: dict[str, Column]) -> Self:
        """A batch of ``columns`` that are known to be consistent; keeps the dict itself."""
        batch = cls.__new__(cls)
        batch._set_state(columns)
        return batch

    def _like(self, columns: dict[str, Column]) -> Self:
        """A batch of other rows in the layout of this batch."""
        batch = self.__class__.__new__(self.__class__)
        batch._set_state(
            columns,
            self._time_major,
            self._zero_padded,
            self._max_seq_len,
            self.num_grad_updates,
            self._is_training,
            self.episode_starts,
        )
        return batch

    def _map(self, fn: Callable[[Any], Any]) -> dict[str, Column]:
        """Apply ``fn`` to every leaf of every column."""
        return {name: map_structure(fn, column) for name, column in self._columns.items()}

    def _map_rows(
        self, per_step: Callable[[Any], Any], per_sequence: Callable[[Any], Any]
    ) -> dict[str, Column]:
        """Apply one function to leaves with a row a step, another to leaves with a row a sequence."""
        return {
            name: map_structure(per_sequence if is_per_sequence(name) else per_step, column)
            for name, column in self._columns.items()
        }

    def __getstate__(self) -> dict[str, Any]:
        # Interceptors are mostly closures over a device, so they do not leave their process.
        return {
            "columns": self._map(SwappedArray.wrap),
            "time_major": self._time_major,
            "zero_padded": self._zero_padded,
            "max_seq_len": self._max_seq_len,
            "num_grad_updates": self.num_grad_updates,
            "is_training": self._is_training,
            "episode_starts": self.episode_starts,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._set_state(**state)
        if not all(type(column) is np.ndarray for column in self._columns.values()):
            self._columns = self._map(SwappedArray.unwrap)

    # ---- the mapping ----

    def __getitem__(self, key: Any) -> Any:
        """A column (str), or a batch: the rows of a slice (views), an index array or a bool mask (copies).

        A slice may have a step. It shares every array with the batch, and the dicts of infos if
        ``batch["infos"]`` was asked for before; else it makes its own. In a batch with ``seq_lens``, a slice
        counts steps and must fall on the
        boundaries of sequences; index arrays and masks are refused.

        Raises:
            MissingColumn: The batch lacks the column; also a KeyError.
            SchemaError: A slice cuts a sequence; the message names the nearest boundaries.
            OptionError: The key is an int, or an index lies outside the batch.
        """
        if isinstance(key, str):
            if self._interceptor is None and key != _INFOS:  # Nearly always: without a further call.
                column = self._columns.get(key)
                if column is not None:
                    return column
            return self._read(key)
        if isinstance(key, slice):
            return self._slice(key)
        if isinstance(key, int | np.integer) and not isinstance(key, bool):
            raise OptionError(
                f"batch[{key}]: expected a column name, slice, mask or index array; for one row, use "
                f"batch[{key}:{key + 1}] or a dict from batch.rows()"
            )
        return rows.take(self, key)

    def _raw(self, key: str) -> Column:
        """A column as the batch has it: infos may be in the typed form (`rlio.batch.infos`)."""
        return self._columns[key]

    @property
    def _made(self) -> dict[str, Column]:
        """The columns, with objects in place of infos in the typed form; they are made once."""
        infos = self._columns.get(_INFOS)
        if is_typed(infos):
            self._columns = {**self._columns, _INFOS: info_objects(infos)}
        return self._columns

    def _read(self, key: str) -> Column:
        column = self._made.get(key) if key == _INFOS else self._columns.get(key)
        if column is None:
            column = self._dones() if key == _DONES else None
            if column is None:
                known = ", ".join(map(excerpt, self._columns)) or "none"
                raise MissingColumn(
                    f"there is no column {excerpt(key)}; the batch has {known}"
                    f"{did_you_mean(key, self._columns)}"
                )
        if self._interceptor is None:
            return column
        if key not in self._intercepted:
            self._intercepted[key] = self._interceptor(column)
        return self._intercepted[key]

    def _dones(self) -> Column | None:
        names = (Columns.TERMINATEDS, Columns.TRUNCATEDS)
        flags = [self._columns[name] for name in names if name in self._columns]
        if not flags:
            return None
        # Fresh memory even for one flag: writing into the result must not change the flag.
        flags = [flag != 0 if is_tensor(flag) else flag.astype(bool) for flag in flags]
        return flags[0] if len(flags) == 1 else flags[0] | flags[1]

    def __setitem__(self, key: str, value: Any) -> None:
        """Set a column; it is kept, not copied.

        Raises:
            SchemaError: Its rows do not fit the batch, or it is ``dones``. The batch is unchanged then.
        """
        columns = {**self._columns, key: _named_column(key, value)}
        self._check(columns)
        self._columns = columns
        self._forget(key)

    def __delitem__(self, key: str) -> None:
        if key not in self._columns:
            raise MissingColumn(
                f"there is no column {excerpt(key)} to delete{did_you_mean(key, self._columns)}"
            )
        columns = {name: column for name, column in self._columns.items() if name != key}
        if key == _SEQ_LENS:
            self._check(columns)
        self._columns = columns
        self._forget(key)

    def _forget(self, key: str) -> None:
        """Drop the interceptor's results for ``key``, and for ``dones``, which may depend on it."""
        self._intercepted.pop(key, None)
        self._intercepted.pop(_DONES, None)

    def clear(self) -> None:
        """Delete every column."""
        self._columns, self._intercepted = {}, {}

    def __contains__(self, key: object) -> bool:
        if key == _DONES:
            return Columns.TERMINATEDS in self._columns or Columns.TRUNCATEDS in self._columns
        return key in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def get(self, key: str, default: Any = None) -> Any:
        """Column ``key``, through `__getitem__`, or ``default``."""
        return self._read(key) if key in self else default

    # The mixins of MutableMapping would use len(batch) as the number of columns.
    def keys(self) -> KeysView[str]:
        return self._columns.keys()

    def values(self) -> ValuesView[Column]:
        """The columns as stored: no interceptor is applied."""
        return self._made.values()

    def items(self) -> ItemsView[str, Column]:
        """Names and columns as stored: no interceptor is applied."""
        return self._made.items()

    # Identity: `equals` compares values.
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return object.__eq__(self, other)

    def set_get_interceptor(self, fn: Callable[[Any], Any] | None) -> None:
        """Pass each column read by name through ``fn`` once; the result is kept until the column is set.

        `copy` keeps the interceptor; slices, other derived batches and pickles do not.
        """
        if fn is not self._interceptor:
            self._interceptor, self._intercepted = fn, {}

    def __len__(self) -> int:
        return self.count

    def equals(self, other: object) -> bool:
        """Whether ``other`` is a batch with the same columns, in any order, and the same layout.

        Columns are equal if their structure, dtype, shape and every value are equal; NaN equals NaN.
        """
        return (
            isinstance(other, SampleBatch)
            and self._columns.keys() == other._columns.keys()
            and self._time_major == other._time_major
            and self._zero_padded == other._zero_padded
            and self.max_seq_len == other.max_seq_len
            and all(equal_columns(column, other._made[name]) for name, column in self._made.items())
        )

    def __repr__(self) -> str:
        texts = []
        for name, column in self._columns.items():
            if name == _INFOS and is_typed(column):
                texts.append(f"{name} object ({typed_rows(column)},)")
                continue
            parts = [(path_text(path), f"{leaf.dtype} {tuple(leaf.shape)}") for path, leaf in leaves(column)]
            inner = ", ".join(f"{path}: {text}" for path, text in parts)
            shown = name if name.isprintable() and len(name) < 100 else excerpt(name)
            texts.append(
                f"{shown} {parts[0][1]}" if [p for p, _ in parts] == [""] else f"{shown} {{{inner}}}"
            )
        lens = f", {len(self._columns[_SEQ_LENS])} sequences" if _SEQ_LENS in self._columns else ""
        layout = ", time-major" if self._time_major else ", padded" if self._zero_padded else ""
        return f"{type(self).__name__}({self.count} steps{lens}{layout}: {', '.join(texts)})"

    def _repr_html_(self) -> str:
        return panel(f"{type(self).__name__}: {counted(self.count, 'step')}", column_table(self._made))

    # ---- sizes and flags ----

    @property
    def count(self) -> int:
        """Steps: the sum of ``seq_lens`` if the batch has it, else the number of rows."""
        if _SEQ_LENS in self._columns:
            return int(self._lens().sum())
        for column in self._columns.values():
            if type(column) is np.ndarray:  # The fast path, because callers read it several times a batch.
                return len(column)
            rows = row_count(column)
            if rows is not None:
                return rows
        return 0

    def agent_steps(self) -> int:
        """Same as ``count``: each row is one agent's step."""
        return self.count

    def env_steps(self) -> int:
        """Same as ``count``: each row is one step of the environment."""
        return self.count

    def size_bytes(self) -> int:
        """Memory of all columns in bytes; see `rlio.batch.arrays.size_bytes`."""
        return sum(size_bytes(column) for column in self._columns.values())

    @property
    def time_major(self) -> bool:
        """Whether columns are (T, B, ...)."""
        return self._time_major

    @property
    def zero_padded(self) -> bool:
        """Whether each sequence takes ``max_seq_len`` rows."""
        return self._zero_padded

    @property
    def max_seq_len(self) -> int | None:
        """As given, else the length of the longest sequence; None without sequences."""
        if self._max_seq_len is not None or _SEQ_LENS not in self._columns:
            return self._max_seq_len
        return int(self._lens().max(initial=0))

    @property
    def is_training(self) -> bool:
        """Whether the batch is meant for a training pass; a flag for models, without effect here."""
        return self._is_training

    def set_training(self, training: bool = True) -> None:
        """Set `is_training`."""
        self._is_training = training

    def is_terminated_or_truncated(self) -> bool:
        """Whether the last step ends an episode; False for an empty batch. Needs one of the two flags."""
        dones = rows.steps(self, self["dones"])
        return bool(dones[-1]) if len(dones) else False

    def is_single_trajectory(self) -> bool:
        """Whether no step before the last ends an episode, and all rows share one ``eps_id``, if any."""
        if bool(rows.steps(self, self["dones"])[:-1].any()):
            return False
        ids = rows.steps(self, self._columns[Columns.EPS_ID]) if Columns.EPS_ID in self else np.zeros(0)
        return bool(np.all(ids[1:] == ids[:-1]))

    # ---- rows ----

    def _lens(self) -> np.ndarray:
        return to_numpy(self._columns[_SEQ_LENS])

    def _slice(self, key: _Slice) -> Self:
        if key.step == 0:
            raise OptionError("a slice with step 0: expected any other step")
        if _SEQ_LENS in self._columns:
            return self._sequences(*sequence_range(self._lens(), key))
        return self._like(
            {
                name: column[key] if type(column) is np.ndarray else _sliced(column, key)
                for name, column in self._columns.items()
            }
        )

    def _sequences(self, first: int, end: int) -> Self:
        if self._time_major:
            return self._like(self._map_rows(lambda leaf: leaf[:, first:end], lambda leaf: leaf[first:end]))
        if self._zero_padded:
            length = self.max_seq_len or 0
            start, stop = first * length, end * length
        else:
            bounds = boundaries(self._lens())
            start, stop = int(bounds[first]), int(bounds[end])
        return self._like(self._map_rows(lambda leaf: leaf[start:stop], lambda leaf: leaf[first:end]))

    def sequences(self, start: int | None = None, stop: int | None = None) -> Self:
        """The sequences ``start`` to ``stop`` (as in a slice), as views.

        Raises:
            MissingColumn: The batch has no ``seq_lens``.
        """
        if _SEQ_LENS not in self._columns:
            raise MissingColumn("a batch without seq_lens has no sequences", column=_SEQ_LENS)
        first, end, _ = slice(start, stop).indices(len(self._lens()))
        return self._sequences(first, max(first, end))

    def slice(
        self, start: int, end: int, state_start: int | None = None, state_end: int | None = None
    ) -> Self:
        """Steps ``start`` to ``end``, which may lie in the middle of sequences.

        ``seq_lens`` and ``state_in_k`` are those of the sequences touched, with lengths reduced to the
        selected steps. A sequence that loses its first steps keeps its ``state_in_k``, the state at its old
        beginning.

        Args:
            start: First step; below 0, that many zero steps are inserted before the first step, as part of
                its sequence.
            end: The step after the last; larger values mean the end.
            state_start: First sequence to take lengths and states from; None: the sequence of ``start``.
            state_end: The sequence after the last; required with ``state_start``.

        Returns:
            Views; copies if ``start`` is negative.

        Raises:
            SchemaError: The batch is padded (`unpad` first), or the chosen sequences are shorter than the
                rows.
        """
        return rows.cut(self, start, end, state_start, state_end)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Each step as a dict from column to value (nested columns: to nested values), without padding.

        ``seq_lens`` is 1 in each row; ``state_in_k`` is set on the first step of its sequence, and None
        elsewhere.
        """
        return rows.iterate(self)

    def columns(self, keys: Sequence[str]) -> list[Column]:
        """The columns ``keys``, in that order."""
        return [self[key] for key in keys]

    def timeslices(self, size: int | None = None, num_slices: int | None = None) -> list[Self]:
        """Cut into parts of ``size`` steps (the last maybe shorter), or into ``num_slices`` similar parts.

        Parts are views; joined, they give the batch again. With ``seq_lens``, parts consist of whole
        sequences: as many as fit into ``size`` steps, or one longer sequence. With ``num_slices``, some parts
        are empty if there are fewer steps, or sequences, than parts.
        """
        return rows.timeslices(self, size, num_slices)

    def split_by_episode(self, key: str | None = None) -> list[Self]:
        """Cut into episodes, or the parts of them in the batch, as views in the batch's order.

        Args:
            key: ``"eps_id"``: cut at each change of the id, so interleaved episodes give many parts;
                ``"dones"``: cut after each step that terminates or truncates, and return the remaining steps
                as the last part; None: ``eps_id`` if the batch has it, else ``dones``.

        Raises:
            MissingColumn: The batch has neither, or lacks the one named.
        """
        return rows.split_by_episode(self, key)

    # ---- transformations: each gives a new batch ----

    def shuffle(self, seed: int | np.random.Generator | None = None) -> Self:
        """The rows, or whole sequences, in random order: one permutation for every column, infos included.

        Unlike RLlib's method, this one does not change the batch: it returns a new batch in fresh memory.

        Args:
            seed: A seed or a generator; None draws a seed from the OS and logs it.
        """
        return rows.shuffle(self, seed)

    def right_zero_pad(
        self, max_seq_len: int, exclude_states: Literal[True] = True, *, time_major: bool = False
    ) -> Self:
        """Lay out each sequence in ``max_seq_len`` rows; rows after its end are zeros, None for objects.

        Args:
            max_seq_len: Rows a sequence.
            exclude_states: True, because ``state_in_k`` have one row a sequence, which cannot be padded.
            time_major: Return columns of shape (max_seq_len, sequences, ...) instead of (sequences *
                max_seq_len, ...).

        Returns:
            A batch in fresh memory with ``zero_padded`` set. ``count`` is unchanged, because it excludes
            padding.

        Raises:
            MissingColumn: The batch has no ``seq_lens``.
            SchemaError: A sequence is longer than ``max_seq_len``.
            OptionError: ``exclude_states`` is not True.
        """
        if exclude_states is not True:
            raise OptionError(
                f"exclude_states={excerpt(exclude_states)}: state_in_k have one row a sequence, not one a "
                "step, and are never padded; leave it out"
            )
        return rows.pad(self, max_seq_len, time_major=time_major)

    zero_pad = right_zero_pad

    def unpad(self) -> Self:
        """The inverse of `right_zero_pad`: concatenated sequences, in fresh memory.

        If the batch is not padded, returns a shallow copy.
        """
        return rows.unpad(self) if self._zero_padded else self.copy(shallow=True)

    def _each(self, fn: Callable[[SampleBatch], SampleBatch]) -> SampleBatch:
        """A batch of ``fn`` of each policy's rows, as in a `MultiAgentBatch`."""
        return fn(self)

    @staticmethod
    def concat_samples(
        samples: Sequence[SampleBatch | MultiAgentBatch], *, columns: Unlike = "error"
    ) -> SampleBatch | MultiAgentBatch:
        """All of ``samples`` joined; see `rlio.batch.concat_samples`."""
        if any(isinstance(sample, MultiAgentBatch) for sample in samples):
            return MultiAgentBatch.concat_samples(samples, columns=columns)
        plain = [sample for sample in samples if isinstance(sample, SampleBatch)]
        if len(plain) < len(samples):
            for i, sample in enumerate(samples):
                check_batch(i, sample)
        return join(plain or [SampleBatch()], columns=columns)

    def concat(self, other: SampleBatch) -> SampleBatch:
        """This batch and ``other`` joined; see `rlio.batch.concat_samples`."""
        if not isinstance(other, SampleBatch):
            raise SchemaError(f"cannot join a SampleBatch with {excerpt(other)}: expected a SampleBatch")
        return join([self, other])

    def copy(self, shallow: bool = False) -> Self:
        """A copy with its own arrays and infos; if ``shallow``, its own mapping over shared arrays."""
        batch = self._like(self._map((lambda leaf: leaf) if shallow else copy_leaf))
        batch._interceptor = self._interceptor
        return batch

    def to_torch(
        self,
        device: torch.device | str | None = None,
        *,
        dtype: Dtypes | None = None,
        pin_memory: bool = False,
        non_blocking: bool = False,
    ) -> dict[str, Any]:
        """The columns as a dict of tensors, with the same nesting; columns that torch cannot hold stay NumPy.

        On the CPU, tensors share the memory of writable arrays; read-only arrays are copied once. Columns in
        one block of memory go to another device in one copy; see `rlio.batch.tensors.to_tensors`.

        Args:
            device: Device of the tensors; None: the CPU.
            dtype: The dtype of all floats, such as ``torch.float32``; or a dict of column, or part
                (``obs/position``) -> dtype of any kind. None: as they are.
            pin_memory: Copy through pinned memory, which is reused; without a device, return pinned tensors.
            non_blocking: Start copies without waiting for them; useful only with ``pin_memory``.

        Raises:
            OptionError: ``pin_memory`` without an accelerator that torch can pin memory for; or ``dtype`` is
                none, or is for all floats and not floating.
            MissingColumn: ``dtype`` names a column that is absent.
        """
        return to_tensors(self._made, device, dtype=dtype, pin_memory=pin_memory, non_blocking=non_blocking)

    def to_device(
        self,
        device: torch.device | str,
        framework: Literal["torch"] = "torch",
        *,
        dtype: Dtypes | None = None,
        pin_memory: bool = False,
        non_blocking: bool = False,
        stream: torch.cuda.Stream | None = None,
    ) -> Self:
        """A batch with tensors on ``device`` as columns; columns that torch cannot hold stay NumPy.

        ``dtype`` is as in `to_torch`.
        """
        if framework != "torch":
            raise OptionError(f"framework={framework!r}: expected 'torch'")
        return self._like(
            to_tensors(
                self._made,
                device,
                dtype=dtype,
                pin_memory=pin_memory,
                non_blocking=non_blocking,
                stream=stream,
            )
        )

    def compress(self, bulk: bool = False, columns: Iterable[str] = ("obs", "new_obs")) -> Self:
        """A batch with ``columns`` compressed in memory; the other columns are shared.

        Args:
            bulk: Compress a column as one block; False: row by row.
            columns: Names of the columns; absent columns are ignored. Object arrays and tensors in them are
                not compressed.
        """
        chosen = _names(columns)
        return self._like(
            {
                name: compress_column(column, bulk=bulk) if name in chosen else column
                for name, column in self._made.items()
            }
        )

    def decompress_if_needed(self, columns: Iterable[str] | None = None) -> Self:
        """A batch with ``columns`` (None: all) decompressed; uncompressed columns are shared."""
        chosen = self._columns.keys() if columns is None else _names(columns)
        return self._like(
            {
                name: decompress_column(column) if name in chosen else column
                for name, column in self._columns.items()
            }
        )

    def policies(self) -> Mapping[str, SampleBatch]:
        """Policy id -> its rows, as in a `MultiAgentBatch`: this batch, under ``default_policy``."""
        return {DEFAULT_POLICY_ID: self}

    def as_multi_agent(self, policy_id: str = DEFAULT_POLICY_ID) -> MultiAgentBatch:
        """This batch as the only policy of a `MultiAgentBatch`; each row is an environment step."""
        return MultiAgentBatch({policy_id: self}, self.count)

    def get_single_step_input_dict(
        self,
        view_requirements: Mapping[str, tuple[str, int | Sequence[int]]],
        index: int | Literal["last"] = "last",
    ) -> dict[str, Column]:
        """The input, one row, that a policy needs to act at step ``index``.

        Args:
            view_requirements: Name of an input -> (column, shift). The input is the column's row at ``index``
                plus ``shift``; several shifts add one axis after the row axis. Steps before the first are
                zeros. (For RLlib's ViewRequirement objects, pass their ``data_col`` and ``shift``.)
            index: A step, or ``"last"``: the one after the last row, whose ``obs`` is the last ``new_obs``.

        Returns:
            Fresh arrays; and ``seq_lens`` of a single 1 if a ``state_in_k`` is among the inputs.

        Raises:
            MissingColumn: A column is absent, or the last observation is unknown.
            OptionError: A step lies outside the batch.
        """
        return rows.step_inputs(self, view_requirements, index)


def _sliced(column: Any, key: slice) -> Any:
    """The rows of a nested column, or of a tensor."""
    if type(column) is dict:  # Without `map_structure`, in half the time.
        return {
            name: part[key] if type(part) is np.ndarray else _sliced(part, key)
            for name, part in column.items()
        }
    return map_structure(lambda leaf: slice_leaf(leaf, key), column)


def _names(columns: Iterable[str]) -> set[str]:
    if isinstance(columns, str):
        raise OptionError(f"columns={columns!r}: expected a list of names, not one str")
    return set(columns)


def _named_column(name: Any, value: Any) -> Column:
    """Convert ``value`` to column ``name``; accepts and checks any objects."""
    if not isinstance(name, str):
        raise SchemaError(
            f"found a column name {excerpt(name)} ({type(name).__name__}): a column's name is a str"
        )
    if name == _DONES:
        raise SchemaError(
            "dones cannot be written, because it is read as terminateds OR truncateds: write one of these",
            column=_DONES,
        )
    if name == _SEQ_LENS and isinstance(value, list):
        return np.asarray(value, np.int32)
    return as_column(name, value)
