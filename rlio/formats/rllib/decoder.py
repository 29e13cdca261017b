"""RLlib's records: one JSON object a line, turned into a batch.

It reads every form that RLlib has written since 2019: with and without ``type``, one step a line, wrapped in
``value``, multi-agent, packed columns, ``dones``. ``spaces`` restore the dtypes and structure that JSON
loses. Without them lists become arrays as NumPy makes them (int64, float64, bool), and text and infos object
arrays.

Not here: the source of lines (`rlio.readers.json_reader`), the content of packed columns
(`rlio.formats.files.packed`).

Example:
    >>> line = b'{"type": "SampleBatch", "obs": [[0.5], [1.0]], "dones": [false, true]}'
    >>> RllibDecoder().decode(line)
    SampleBatch(2 steps: obs float64 (2, 1), terminateds bool (2,))
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Batch, MultiAgentBatch, SampleBatch
from rlio.batch.arrays import object_column
from rlio.batch.columns import (
    DEFAULT_POLICY_ID,
    STATE_IN_PREFIX,
    Columns,
    is_per_sequence,
    with_possible_validity,
)
from rlio.batch.nested import leaves, map_structure
from rlio.batch.other_names import did_you_mean
from rlio.batch.ragged import Ragged, item_type
from rlio.errors import (
    CorruptData,
    MissingColumn,
    OptionError,
    SchemaError,
    UnknownLayout,
    UnsafeData,
    excerpt,
)
from rlio.formats.files.allowance import Allowance
from rlio.formats.files.inputs import in_column
from rlio.formats.files.json_files import list_of_records
from rlio.formats.files.packed import is_packed, unpack
from rlio.formats.files.space_arrays import fit_space, space_of
from rlio.formats.files.step_columns import check_other_names
from rlio.formats.files.value_arrays import FLOATS, stack_rows, standard_dtype, text_extent
from rlio.formats.format import format_of_json
from rlio.formats.rllib.columns import (
    INFO_COLUMNS,
    INFO_KEYS,
    NEXT_INFOS,
    ActionScaling,
    DoneFlags,
    InfoOrder,
)
from rlio.formats.rllib.json_arrays import parse_arrays
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.schemas.json_columns import check_containers
from rlio.support.options import refuse_unknown
from rlio.support.spaces import Spaces, check_spaces

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = [
    "LISTS_WAY",
    "STEP_NUMBERS",
    "RllibDecoder",
    "wanted_columns",
]

Array: TypeAlias = NDArray[Any]
#: Returns the next record, or its line; None: there is none, or it cannot be read.
NextRecord: TypeAlias = Callable[[], Mapping[str, Any] | None]
NextLine: TypeAlias = Callable[[], bytes | None]

# The padding of an array of texts may take this fraction of a record's bytes.
_MAX_PADDED = 4

#: A record of one step has numbers in these columns; others have lists.
STEP_NUMBERS = (
    *(Columns.REWARDS, Columns.DONES, Columns.TERMINATEDS, Columns.TRUNCATEDS),
    *(Columns.T, Columns.EPS_ID, Columns.UNROLL_ID, Columns.AGENT_INDEX),
)
_EXPECTED = frozenset((Columns.OBS, Columns.ACTIONS, *STEP_NUMBERS))
#: What to do about lists that begin to differ in length after the first record.
LISTS_WAY: Final = "; if rows have any number of items, pass format_options={'lists': [...]} with the column"
# Bytes that a text or object counts as.
_OBJECT_BYTES = 64
_SPECIALFLOATS = {"NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}
# Columns of infos, which are objects.
_INFOS = (Columns.INFOS, NEXT_INFOS)
_EMPTY_INFOS = re.compile(rb'"infos": ?\[(?:\{\}(?:, ?)?)*\]')
# Half of a surrogate pair, escaped: Python reads it, but cannot encode it again.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_line(line: bytes, limits: Limits = DEFAULT_LIMITS) -> dict[str, Any]:
    """Parse the JSON object in ``line``.

    Raises:
        CorruptData: The line is not a JSON object in UTF-8, or has a key twice.
        UnsafeData: The object would take many times its size in memory.
    """
    check_containers(line, limits)
    try:
        record = json.loads(line.decode("utf-8"), object_pairs_hook=_unique)
        if _SURROGATE.search(line):
            json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise CorruptData(
            f"not text in UTF-8: {error.reason if hasattr(error, 'reason') else error}"
        ) from error
    except RecursionError as error:
        raise UnsafeData("JSON nested too deeply to be a record") from error
    except ValueError as error:
        raise CorruptData(f"not a JSON record: {excerpt(str(error))}; found {excerpt(line, 80)}") from error
    if isinstance(record, list) and record and all(isinstance(one, dict) for one in record):
        raise list_of_records(record[0])
    if not isinstance(record, dict):
        raise CorruptData(f"expected a JSON object of columns, found a {type(record).__name__}")
    return record


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, checked for unique keys: of two values for one column, neither can be trusted."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise CorruptData(f"the key {excerpt(key)} occurs twice in one object")
            seen.add(key)
    return found


def wanted_columns(columns: list[str] | None) -> frozenset[str] | None:
    """The columns to decode for the requested ``columns``; None: all."""
    if columns is None:
        return None
    wanted = set(with_possible_validity(columns))
    if Columns.DONES in wanted:
        wanted |= {Columns.TERMINATEDS, Columns.TRUNCATEDS}
    if wanted & {Columns.TERMINATEDS, Columns.TRUNCATEDS}:
        wanted |= {Columns.DONES, Columns.INFOS}  # older files store the flags in these
    if any(name.startswith(STATE_IN_PREFIX) for name in wanted):
        wanted.add(Columns.SEQ_LENS)  # it assigns recurrent states to rows
    return frozenset(wanted)


@dataclass(frozen=True)
class _Record:
    """Facts about a record while its columns are converted."""

    one_step: bool
    #: Whether the record spells out infinities. Otherwise an infinity is a number that was too large.
    infinite: bool
    #: The remaining allowance of its packed columns.
    allowance: Allowance
    #: The columns whose rows have any number of items.
    lists: frozenset[str]


class RllibDecoder:
    """Turns RLlib's records into batches.

    Args:
        columns: Columns to decode; others are not even unpacked. None: all.
        spaces: (observation space, action space), or policy id -> such a pair: obs, new_obs, actions and
            prev_actions get their structure and dtypes.
        limits: Limits on a record's demands.
        unnormalise_actions: Whether actions and prev_actions are scaled from [-1, 1] to the bounds of their
            space; None: they are not scaled, and this is logged once if it matters.
        format_options: ``{"infos": "obs"}`` or ``{"infos": "new_obs"}``: what infos belong to, see
            `rlio.formats.rllib.columns.InfoOrder`. ``{"lists": ["tokens"]}``: columns, or parts of them
            (``obs/tokens``), whose rows have any number of items, also if those of the first record do not
            differ.
        source: Name of the input in messages.

    Raises:
        OptionError: ``spaces`` or ``format_options`` are none, or ``unnormalise_actions`` is set without
            spaces.
    """

    def __init__(
        self,
        columns: list[str] | None = None,
        *,
        spaces: Spaces | None = None,
        limits: Limits = DEFAULT_LIMITS,
        unnormalise_actions: bool | None = None,
        format_options: Mapping[str, Any] | None = None,
        source: str = "",
    ) -> None:
        check_spaces(spaces)
        own = dict(format_options or {})
        refuse_unknown(own, ("infos", "lists"), of="format_options of RLlib's records")
        self.lists: frozenset[str] = _names(own.pop("lists", ()))
        self.infos: InfoOrder = InfoOrder(own, of="RLlib's records")
        self.flags: DoneFlags = DoneFlags(columns, source)
        self.scaling: ActionScaling = ActionScaling(spaces, unnormalise_actions, source)
        self._asked = columns
        self._wanted = wanted_columns(columns)
        #: Those, and the columns that tell which row has which info.
        self._read = self._wanted
        if self._wanted is not None and Columns.INFOS in self._wanted:
            self._read = self._wanted | {*INFO_COLUMNS}
        # The next record, which was parsed for its infos, and its line.
        self._parsed: tuple[bytes, dict[str, Any]] = (b"", {})
        self._spaces = spaces
        self._limits = limits
        #: Options that change the batches, as JSON values.
        self.details: dict[str, Any] = {"spaces": None if spaces is None else repr(spaces)}
        if unnormalise_actions:
            self.details["unnormalise_actions"] = True
        if self.infos.given is not None:
            self.details["format_options"] = {"infos": self.infos.given}
        if self.lists:
            self.details["lists"] = sorted(self.lists)

    def decode(self, line: bytes, next_line: NextLine | None = None) -> Batch:
        """Decode the batch in one line.

        Args:
            line: The line.
            next_line: Returns the next line of the recording, which may have the infos of last rows.

        Raises:
            CorruptData: The line is damaged. (UnsafeData: it asks for more than data may.)
            SchemaError: Its columns do not fit each other or ``spaces``. (MissingColumn: one is absent.)
            UnknownLayout: Another library wrote the line, or a column may stand for an absent one.
        """
        (known, record), self._parsed = self._parsed, (b"", {})  # The caller gets its arrays.
        if known != line:
            record = self._parse(line)
        following = None if next_line is None else partial(self._parse_next, next_line)
        return self.decode_record(record, infinite=b"Infinity" in line, following=following)

    def _parse(self, line: bytes) -> dict[str, Any]:
        """The record in a line; lists of numbers are arrays already where that is certain."""
        # Lists may be parts of a space, as well as rows.
        found = parse_arrays(line, self._limits, objects=_INFOS) if self._spaces is None else None
        if found is None or any(
            type(v) is str and k != "type" and not is_packed(v) for k, v in found.items()
        ):
            return parse_line(line, self._limits)
        return found

    def _parse_next(self, next_line: NextLine) -> Mapping[str, Any] | None:
        """The next record, if it has infos; it is kept for the call that decodes it."""
        line = next_line()
        if not line or not _has_infos(line):
            return None
        if self._parsed[0] != line:
            self._parsed = line, self._parse(line)
        return self._parsed[1]

    def decode_record(
        self, record: Mapping[str, Any], *, infinite: bool = True, following: NextRecord | None = None
    ) -> Batch:
        """Decode the batch in a parsed record; see `decode`."""
        record = _unwrapped(record)
        kind = record.get("type")
        if not _EXPECTED & record.keys() and (found := format_of_json(record)) and found.reader is None:
            raise found.refusal()
        if kind == "MultiAgentBatch":
            return self._multi_agent(record, infinite, following)
        if kind not in (None, "SampleBatch"):
            raise CorruptData(
                f"a record of type {excerpt(kind)}: expected 'SampleBatch', 'MultiAgentBatch' or no type"
            )
        columns = {name: value for name, value in record.items() if name != "type"}
        return self._batch(columns, DEFAULT_POLICY_ID, infinite, Allowance(self._limits), following)

    def _multi_agent(
        self, record: Mapping[str, Any], infinite: bool, following: NextRecord | None
    ) -> MultiAgentBatch:
        steps, policies = record.get("count"), record.get("policy_batches")
        if type(steps) is not int or not 0 <= steps < 2**48:
            raise CorruptData(f"count is {excerpt(steps)}: expected the record's number of environment steps")
        if not isinstance(policies, dict) or not all(
            isinstance(b, dict) for b in policies.values() if b is not None
        ):
            raise CorruptData(f"policy_batches is {excerpt(policies, 80)}: expected policy id -> columns")
        batches, allowance = {}, Allowance(self._limits)
        for policy, columns in policies.items():
            if columns is not None:
                batches[policy] = self._batch(columns, policy, infinite, allowance, following)
        return MultiAgentBatch(batches, steps)

    def _batch(
        self,
        columns: Mapping[str, Any],
        policy: str,
        infinite: bool,
        allowance: Allowance,
        following: NextRecord | None,
    ) -> SampleBatch:
        columns = {name: value for name, value in columns.items() if value is not None}
        self._check_parts(columns)
        if self._asked is None:
            check_other_names(columns)
        if not _EXPECTED & columns.keys():
            names = ", ".join(excerpt(name, 40) for name in list(columns)[:8]) or "nothing"
            raise CorruptData(
                f"not a record of experience: found {names}; expected obs, actions, rewards and the like"
            )
        context = _Record(_is_one_step(columns), infinite, allowance, self.lists)
        spaces = space_of(self._spaces, policy)
        arrays = {
            name: self._column(name, value, spaces.get(name), context)
            for name, value in columns.items()
            if self._read is None or name in self._read
        }
        self._check_parts(arrays)
        self._settle_infos(arrays, policy, context, following)
        self.flags.settle(arrays)
        self.scaling.scale(arrays, policy)
        check_asked(self._asked, arrays, columns)
        rows = _check_rows(arrays)
        if rows > self._limits.group_rows:
            raise UnsafeData(f"a record of {rows} rows, more than {self._limits.group_rows}")
        return _make_batch(arrays, rows)

    def _settle_infos(
        self, arrays: dict[str, Any], policy: str, context: _Record, following: NextRecord | None
    ) -> None:
        """Align infos with ``new_obs``, and drop columns that were read for this alone."""
        more = None if following is None else partial(self._first_infos, following, policy, context)
        self.infos.settle(arrays, is_batch=not context.one_step, following=more)
        if self._wanted is not None:
            for name in arrays.keys() - self._wanted:
                del arrays[name]

    def _first_infos(self, following: NextRecord, policy: str, context: _Record) -> Mapping[str, Any] | None:
        """The infos of the next record, and the columns that say whose they are; None: they are not there."""
        # Damage is reported when the record is served.
        with contextlib.suppress(CorruptData, SchemaError, UnknownLayout):
            found = following()
            record: Any = None if found is None else _unwrapped(found)
            if record is not None and record.get("type") == "MultiAgentBatch":
                policies = record.get("policy_batches")
                record = policies.get(policy) if isinstance(policies, dict) else None
            if isinstance(record, dict):
                one = replace(context, one_step=_is_one_step(record), allowance=Allowance(self._limits))
                names = [name for name in (Columns.INFOS, *INFO_KEYS) if record.get(name) is not None]
                return {name: self._column(name, record[name], None, one) for name in names}
        return None

    def _check_parts(self, columns: Mapping[str, Any]) -> None:
        """Refuse too many columns, counting parts of nested ones, and columns that are nested too deeply."""
        count, limits = 0, self._limits
        if len(columns) > limits.columns:
            raise UnsafeData(f"a record of {len(columns)} columns, more than {limits.columns}")
        pending = [(value, 0) for name, value in columns.items() if name not in _INFOS]
        while pending:
            value, depth = pending.pop()
            parts = value.values() if isinstance(value, dict) else value if type(value) is tuple else ()
            if parts and depth == limits.nesting:
                raise UnsafeData(f"a column nested more than {limits.nesting} deep")
            count += not parts
            if count + len(pending) > limits.columns:
                raise UnsafeData(f"a record of more than {limits.columns} columns")
            pending += [(part, depth + 1) for part in parts]

    # ---- one column ----

    def _column(self, name: str, value: Any, space: gym.Space[Any] | None, context: _Record) -> Any:
        with in_column(name):
            value = self._unpacked(value, context)
            if space is not None:
                return fit_space(value, space, lambda leaf: _to_array(name, leaf, context))
            return _convert(name, value, context, name)

    def _unpacked(self, value: Any, context: _Record) -> Any:
        """Replace packed text in ``value`` by arrays; arrays of a one-step record get a row axis."""
        if is_packed(value):
            found = unpack(value, allowance=context.allowance)
            return map_structure(lambda leaf: np.asarray(leaf)[None], found) if context.one_step else found
        if isinstance(value, list) and value and is_packed(value[0]) and all(map(is_packed, value)):
            # One blob a row, the form that RLlib's `compress()` writes.
            allowance = context.allowance
            return stack_rows([unpack(item, allowance=allowance) for item in value], allowance)
        if isinstance(value, dict):
            return {key: self._unpacked(item, context) for key, item in value.items()}
        return value


def _has_infos(line: bytes) -> bool:
    """Whether a line has infos that are not all empty. Without parsing it: RLlib always writes infos."""
    at = line.find(b'"infos"')
    while at >= 0:
        if not _EMPTY_INFOS.match(line, at):
            return True
        at = line.find(b'"infos"', at + 1)
    return False


def _unwrapped(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """A record without the object around it that older versions of Ray Data wrote."""
    if record.keys() == {"value"} and isinstance(record["value"], dict):
        return record["value"]
    return record


def _is_one_step(columns: Mapping[str, Any]) -> bool:
    """Whether a record is one step, not a batch of steps."""
    return any(
        type(columns[name]) in (bool, int, float) or (type(columns[name]) is str and name == Columns.EPS_ID)
        for name in STEP_NUMBERS
        if name in columns
    )


def _names(value: object) -> frozenset[str]:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise OptionError(f"format_options['lists']={excerpt(value)}: expected a list of names of columns")
    return frozenset(value)


def _convert(name: str, value: Any, context: _Record, path: str) -> Any:
    """Convert a column without a space, nested as it was written; ``path`` names the part of it."""
    if isinstance(value, dict) and not (context.one_step and name in _INFOS):
        if not value and context.one_step:
            return object_column([value])
        return {_key(key): _convert(name, item, context, f"{path}/{key}") for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_convert(name, item, context, f"{path}/{at}") for at, item in enumerate(value))
    array = _to_array(name, value, context)
    return _as_lists(array, path) if path in context.lists else array


def _key(key: Any) -> str:
    if type(key) is not str:
        raise SchemaError(f"a nested column has the key {excerpt(key)}: expected text")
    return key


def _to_array(name: str, value: Any, context: _Record) -> Array:
    """A leaf with its row axis first."""
    if isinstance(value, np.ndarray):
        array = value
        if array.ndim == 0 or (array.dtype == object and array.ndim > 1):
            raise SchemaError(f"an array of shape {array.shape} and dtype {array.dtype} has no rows")
    else:
        if context.one_step:
            value = [value]
        elif not isinstance(value, list):
            raise SchemaError(f"expected a list with one item a row, found {excerpt(value, 80)}")
        array = object_column(value) if name in _INFOS else _from_list(name, value, context)
        context.allowance.spend(_OBJECT_BYTES * len(array) if array.dtype == object else array.nbytes)
    return standard_dtype(name, array)


def _from_list(name: str, rows: list[Any], context: _Record) -> Array:
    count, longest = text_extent(rows)
    if 4 * count * longest > context.allowance.limits.group_bytes // _MAX_PADDED:
        # An array of text gives each value the room of the longest.
        if all(type(row) is str for row in rows):
            return object_column(rows)
        raise UnsafeData(f"a text of {longest} characters among {count} values")
    try:
        array = np.array(rows)
    except (ValueError, OverflowError) as error:
        if (lists := _of_any_length(name, rows, context)) is not None:
            return lists
        raise SchemaError(
            f"rows of different shapes, {excerpt(rows, 80)}: expected rows of one shape, or lists of numbers "
            "whose lengths differ; if the column is a tuple of parts, pass spaces="
        ) from error
    kind = array.dtype.kind
    if kind == "U":
        return _from_text(name, rows, array, context)
    if kind == "O":
        if array.ndim == 1 and not any(isinstance(row, (int, float)) for row in rows):
            return object_column(rows)
        raise SchemaError(
            f"numbers beside null or other values, or integers of more than 64 bits: {excerpt(rows, 80)}; "
            "write NaN for a missing number"
        )
    if kind == "f" and array.size:
        return _check_floats(rows, array, context)
    return array


def _of_any_length(name: str, rows: list[Any], context: _Record) -> Array | None:
    """Lists of different lengths as rows of a `Ragged`; None: they are not of numbers of one shape."""
    if name in STEP_NUMBERS or is_per_sequence(name) or not all(type(row) is list for row in rows):
        return None
    items = [item for row in rows for item in row]
    try:
        values = np.array(items)
    except (ValueError, OverflowError):
        return None
    if values.dtype.kind not in "biuf":
        return None
    context.allowance.spend(values.nbytes)
    values = _check_floats(items, values, context) if values.dtype.kind == "f" else values
    return Ragged(standard_dtype(name, values), np.cumsum([0, *map(len, rows)])).rows()


def _as_lists(array: Array, path: str) -> Array:
    """Rows that may have any number of items, as those of a `Ragged`, also if they have one length."""
    if array.dtype == object and (item_type(array) is not None or not len(array)):
        return array
    if array.ndim < 2 or array.dtype.kind not in "biuf":
        raise SchemaError(
            f"format_options lists: found {array.dtype} rows of shape {array.shape[1:]}, expected lists of "
            "numbers",
            column=path,
        )
    return Ragged.from_padded(array, np.ones(array.shape[:2], np.bool_)).rows()


def _from_text(name: str, rows: list[Any], array: Array, context: _Record) -> Array:
    """Text, one string a row; or floats with some words for NaN and infinities, which JSON does not have."""
    words = np.isin(array, tuple(_SPECIALFLOATS))
    if array.ndim == 1 and all(type(row) is str for row in rows) and not (name in FLOATS and words.all()):
        return object_column(rows)
    flat = np.array(rows, object).ravel()
    found = [_SPECIALFLOATS.get(item, item) if type(item) is str else item for item in flat]
    numbers = np.array(found).reshape(array.shape)
    if numbers.dtype.kind != "f":
        raise SchemaError(f"text among numbers: {excerpt(rows, 80)}")
    return _check_floats(rows, numbers, replace(context, infinite=True))


def _check_floats(rows: list[Any], array: Array, context: _Record) -> Array:
    """Refuse values that became floats: integers of more than 64 bits, and numbers too large for a float."""
    with np.errstate(invalid="ignore"):
        large = np.abs(array) >= 2.0**63
    if not large.any():
        return array
    if not context.infinite and np.isinf(array).any():
        raise CorruptData("a number too large for a float")
    flat = np.array(rows, object).ravel()[large.ravel()]
    if any(type(item) is int for item in flat):
        whole = np.array(rows, object).ravel()
        if all(type(item) is int and 0 <= item < 2**64 for item in whole):
            return np.array(rows, np.uint64)
        raise SchemaError(f"integers of more than 64 bits: {excerpt(rows, 80)}")
    return array


# ---- the batch ----


def check_asked(asked: list[str] | None, columns: Mapping[str, Any], known: Collection[str] = ()) -> None:
    """Raise MissingColumn unless ``columns`` has all requested columns; ``known``: those of the record."""
    for name in asked or ():
        found = name in columns or (
            name == Columns.DONES and bool({Columns.TERMINATEDS, Columns.TRUNCATEDS} & columns.keys())
        )
        if not found:
            there = sorted({*columns, *known})
            raise MissingColumn(
                f"a requested column is missing; the record has {excerpt(there)}{did_you_mean(name, there)}",
                column=name,
            )


def _check_rows(arrays: Mapping[str, Any]) -> int:
    """Number of rows; raises SchemaError if columns differ."""
    first: tuple[str, int] | None = None
    for name, column in arrays.items():
        if is_per_sequence(name):
            continue
        for _, leaf in leaves(column):
            if first is None:
                first = (name, len(leaf))
            elif len(leaf) != first[1]:
                raise SchemaError(
                    f"{len(leaf)} rows where column {excerpt(first[0], 40)} has {first[1]}; if the column "
                    "is a tuple of parts, pass spaces=",
                    column=name,
                )
    return 0 if first is None else first[1]


def _make_batch(arrays: dict[str, Any], rows: int) -> SampleBatch:
    lengths = arrays.get(Columns.SEQ_LENS)
    if lengths is not None and lengths.dtype.kind in "iu" and len(lengths) and rows != int(lengths.sum()):
        longest, over = divmod(rows, len(lengths))
        if not over and int(lengths.max()) <= longest:
            # RLlib did not mark padded batches: here each sequence has equally many rows.
            return SampleBatch(arrays, zero_padded=True, max_seq_len=longest)
    return SampleBatch(arrays)
