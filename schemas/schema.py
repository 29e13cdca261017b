"""The schema of a writer's rows: the columns of each policy, and the physical names that store them.

A logical column ("obs") may be nested; its leaves are stored. A leaf's name is the column and the path joined
by ``/`` (escaped as in JSON Pointer). Its physical name is the same, with two exceptions. `STORED_NEXT_OBS`
replaces ``new_obs``. Where policies disagree on a spec, ``@`` and eight hex digits of the spec follow.
Physical names are private to one schema.

Example:
    >>> from rlio.batch import SampleBatch
    >>> schema = Schema.of(SampleBatch(obs=[[0.5, 1.0]], actions=[1]))
    >>> sorted(schema.columns)
    ['actions', 'obs']
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.batch.arrays import joint_dtype, object_column, to_numpy
from rlio.batch.columns import AGENT_ID, DEFAULT_POLICY_ID, Columns, is_per_sequence
from rlio.batch.encoded_picture import Codec, EncodedPicture, is_encoded
from rlio.batch.infos import NOTES, REST, info_objects, is_typed, mask_path
from rlio.batch.nested import Path, leaves, path_text, unflatten
from rlio.batch.other_names import did_you_mean
from rlio.batch.picture_codecs import encode_column
from rlio.batch.ragged import item_type
from rlio.errors import (
    CorruptData,
    MissingColumn,
    OptionError,
    SchemaConflict,
    SchemaError,
    UnsafeData,
    excerpt,
    raise_at,
)
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.schemas.column import TEXTS, ColumnSpec, FrameStack
from rlio.schemas.info_columns import InfoForm, ParsedInfos
from rlio.schemas.json_values import check_text, dump_value, plain_array
from rlio.schemas.observations import detect_stack
from rlio.schemas.structure import Structure, structure_of_space
from rlio.support.forks import cached_property

__all__ = [
    "FORMAT_VERSION",
    "STORED_NEXT_OBS",
    "Leaf",
    "PolicySchema",
    "Schema",
    "advice_for_column",
    "canonical_json",
    "column_of_name",
    "info_leaves",
    "is_in",
    "is_named",
    "leaf_name",
    "rebuild",
    "with_validity",
]

#: Version 0 may change until the first tagged release.
FORMAT_VERSION = 0

#: The physical column of ``new_obs``. Nearly all its values are null, because they are the ``obs`` of a later
#: row. Under its own name, other tools would take it for the complete next observations.
STORED_NEXT_OBS = "_new_obs"
#: Names of the format's own columns. User columns cannot have these names.
RESERVED = frozenset({"_next", "_stream", "_batch", STORED_NEXT_OBS})
#: The writer of each row in merged data: one text per row, and nothing else under this name.
_WRITER = "_writer"
#: The columns that tell episodes apart. Other values in them would be ignored, and episodes joined.
_EPISODE_KEYS = frozenset((Columns.EPS_ID, Columns.AGENT_INDEX, AGENT_ID, Columns.ENV_ID))
_KEY = "one whole number or text"
# Endings of the columns of older frames, and of Parquet's name for the values of a list.
_RESERVED_ENDS = ("#older", ".list.element")

# One row group decodes to at most this many bytes, which bounds the memory of readers (DESIGN section 4).
_GROUP_BYTES = 8 << 20
# The last row of a group stores its new_obs itself, so a group of few rows stores many pictures twice.
_PICTURE_GROUP_BYTES = 32 << 20
_MAX_GROUP_ROWS = 1 << 16
_MAX_POLICY_CHARACTERS = 512


_READ_WHOLE = (
    "; columns=['infos/x'] reads the arrays of keys: read 'infos' whole to write them beside infos, or write "
    "the arrays as a column of another name"
)


@dataclass(frozen=True)
class Leaf:
    """One array of a logical column: its place in the column and its stored name."""

    column: str
    path: Path
    physical: str
    spec: ColumnSpec

    @property
    def name(self) -> str:
        """The column and the path, as users see them."""
        return leaf_name(self.column, self.path)


@dataclass(frozen=True)
class PolicySchema:
    """Columns of one policy.

    Attributes:
        leaves: In the order of the columns, and of the leaves in each.
        spaces: ``{"observation": ..., "action": ...}`` as `rlio.schemas.spaces` writes them, or None.
    """

    leaves: tuple[Leaf, ...]
    spaces: Mapping[str, Any] | None = None

    @cached_property
    def columns(self) -> dict[str, list[Leaf]]:
        """Logical column -> its leaves."""
        grouped: dict[str, list[Leaf]] = {}
        for leaf in self.leaves:
            grouped.setdefault(leaf.column, []).append(leaf)
        return grouped

    @cached_property
    def names(self) -> frozenset[str]:
        """What may be named to read a part of the data: each column, and each part of a nested one."""
        parts = (
            leaf_name(leaf.column, leaf.path[:n])
            for leaf in self.leaves
            if leaf.column != Columns.INFOS or leaf.path[:1] != (NOTES,)
            for n in range(1, len(leaf.path) + 1)
        )
        return frozenset((*self.columns, *parts))

    @cached_property
    def infos(self) -> InfoForm | None:
        """The form of ``infos``, if its keys are columns; None: it has objects, or is nested by the user."""
        return InfoForm.of({leaf.path: leaf.spec for leaf in self.columns.get(Columns.INFOS, ())})

    @cached_property
    def shown(self) -> PolicySchema:
        """This schema as users see it: infos whose keys are columns are one column of objects."""
        if self.infos is None:
            return self
        leaf = Leaf(Columns.INFOS, (), Columns.INFOS, ColumnSpec("|O", (), "json"))
        columns = {**self.columns, Columns.INFOS: [leaf]}
        return replace(self, leaves=tuple(leaf for leaves in columns.values() for leaf in leaves))

    @cached_property
    def listed(self) -> PolicySchema:
        """This schema as lists of columns show it: keys of infos, and infos if there is more of them."""
        form = self.infos
        if form is None:
            return self
        keys = [leaf for leaf in self.columns[Columns.INFOS] if leaf.path in form.keys]
        if form.has_rest or not keys:
            keys += self.shown.columns[Columns.INFOS]
        columns = {**self.columns, Columns.INFOS: keys}
        return replace(self, leaves=tuple(leaf for leaves in columns.values() for leaf in leaves))

    @property
    def may_have_more_keys(self) -> bool:
        """Whether infos may have keys that are no columns."""
        leaves = self.columns.get(Columns.INFOS, ())
        return any(leaf.path in ((), REST) and leaf.spec.kind == "json" for leaf in leaves)

    @cached_property
    def masks(self) -> dict[str, str]:
        """Physical column of infos -> that of its mask, which is stored as nulls."""
        found = {leaf.path: leaf.physical for leaf in self.columns.get(Columns.INFOS, ())}
        form = self.infos
        return {} if form is None else {found[path]: found[mask_path(path)] for path in form.keys}

    def check_whole_tuples(self, names: Collection[str]) -> None:
        """Refuse ``names`` that choose some places of a tuple: the others would move up.

        Raises:
            OptionError: They do.
        """
        chosen = {
            (leaf.column, *leaf.path[:n])
            for leaf in self.leaves
            if is_named(leaf, names)
            for n in range(len(leaf.path) + 1)
        }
        for leaf in self.leaves:
            for n, token in enumerate(leaf.path):
                before = leaf.column, *leaf.path[:n]
                if isinstance(token, int) and before in chosen and (*before, token) not in chosen:
                    whole = leaf_name(leaf.column, leaf.path[:n])
                    raise OptionError(
                        f"columns={excerpt(sorted(names))}: {excerpt(whole)} is a tuple, of which only "
                        f"some parts are named, and the others would move up: name the whole, {whole!r}",
                        column=leaf.column,
                    )

    @cached_property
    def _arrays(self) -> dict[str, tuple[str, np.dtype[Any], tuple[int, ...]]]:
        """Columns that are one array of numbers (nearly all) -> physical name, dtype and row shape."""
        return {
            column: (leaf.physical, leaf.spec.numpy, leaf.spec.shape)
            for column, (leaf, *others) in self.columns.items()
            if not others and not leaf.path and leaf.spec.kind in ("scalar", "list", "bytes")
        }

    @cached_property
    def per_row(self) -> list[Leaf]:
        """Leaves with one value per row: all except per-sequence and derived ones."""
        return [
            leaf
            for leaf in self.leaves
            if not is_per_sequence(leaf.column) and leaf.column != Columns.NEXT_OBS_VALID
        ]

    @cached_property
    def texts(self) -> list[Leaf]:
        """Leaves whose rows have no fixed size: texts, objects, lists, encoded pictures."""
        return [leaf for leaf in self.per_row if leaf.spec.kind in (*TEXTS, "picture")]

    @cached_property
    def per_sequence(self) -> list[Leaf]:
        """Leaves with one value per sequence."""
        return [leaf for leaf in self.leaves if is_per_sequence(leaf.column)]

    @cached_property
    def linked(self) -> list[tuple[Leaf, Leaf]]:
        """(obs leaf, new_obs leaf) pairs, if ``new_obs`` can refer to the ``obs`` of a later row; else []."""
        obs, new_obs = self.columns.get(Columns.OBS, []), self.columns.get(Columns.NEXT_OBS, [])
        alike = len(obs) == len(new_obs) and all(
            a.path == b.path
            and (a.spec.dtype, a.spec.shape, a.spec.codec, a.spec.items, a.spec.structure)
            == (b.spec.dtype, b.spec.shape, b.spec.codec, b.spec.items, b.spec.structure)
            for a, b in zip(obs, new_obs, strict=True)
        )
        kinds = ("scalar", "list", "bytes", "time", "picture", "ragged", "nested")
        storable = all(leaf.spec.kind in kinds for leaf in obs)
        return list(zip(obs, new_obs, strict=True)) if alike and storable and obs else []

    @property
    def has_sequences(self) -> bool:
        """Whether rows come in sequences (``seq_lens``)."""
        return Columns.SEQ_LENS in self.columns

    def single(self, arrays: Mapping[str, NDArray[Any]], column: str) -> NDArray[Any]:
        """Return the array of a column that is not nested, from arrays by physical name."""
        return arrays[self.columns[column][0].physical]

    def flatten(self, batch: SampleBatch, *, policy: str, first_row: int = 0) -> dict[str, NDArray[Any]]:
        """Check ``batch`` and return its arrays by physical name: views, and objects as JSON text.

        Args:
            batch: Rows of this policy.
            policy: The policy's id, for messages.
            first_row: Number of the first row in the batch that was written, for messages.

        Raises:
            MissingColumn: The batch lacks a column of this schema.
            SchemaError: A column is new, has another dtype or shape, or holds values that cannot be stored.
        """
        arrays: dict[str, NDArray[Any]] = {}
        names, rows = self.columns, _Rows(policy, first_row)
        if not batch.keys() and len(batch) == 0:
            return arrays
        for column, wanted in names.items():
            if column == Columns.INFOS and self.infos is not None and column in batch:
                self._flatten_infos(self.infos, batch, arrays, rows)
                continue
            try:
                value = batch[column]
            except KeyError:
                if column == Columns.NEXT_OBS_VALID and Columns.NEXT_OBS in batch:
                    arrays[column] = np.ones(len(batch), np.bool_)  # An absent column means: all valid.
                    continue
                raise MissingColumn(
                    f"policy {policy!r} was written with column {column!r} before, but this batch has only "
                    f"{sorted(batch.keys())}: give every batch of one writer the same columns",
                    column=column,
                ) from None
            if column in self._arrays and type(value) is np.ndarray:
                name, dtype, shape = self._arrays[column]
                if value.dtype == dtype and value.shape[1:] == shape:
                    arrays[name] = value
                    continue
            missing = _missing_in(batch) if column == Columns.NEXT_OBS else None
            self._flatten_column(column, value, wanted, arrays, rows, missing)
        extra = sorted(set(batch.keys()) - set(names)) if len(names) != len(batch.keys()) else []
        if extra:
            raise SchemaError(
                f"column {extra[0]!r} is new: policy {policy!r} was written with {sorted(names)} before; "
                "give every batch of one writer the same columns, or open another writer",
                column=extra[0],
            )
        return arrays

    def _flatten_infos(
        self, form: InfoForm, batch: SampleBatch, arrays: dict[str, NDArray[Any]], rows: _Rows
    ) -> None:
        """Add the leaves of infos: what is left of a row as JSON text, "" for nothing."""
        column = batch._raw(Columns.INFOS)
        if not is_typed(column):
            column = _info_array(column)
        made = dict(leaves(form.conformed(column)))
        if made[REST].dtype == object:
            if not form.has_rest:
                raise SchemaConflict(
                    "found infos with other keys or types than before: expected those of the first batch",
                    column=Columns.INFOS,
                )
            made[REST] = rows.rest_to_json(made[REST], column)
        for leaf in self.columns[Columns.INFOS]:
            arrays[leaf.physical] = made[leaf.path]

    def _flatten_column(
        self,
        column: str,
        value: Any,
        wanted: list[Leaf],
        arrays: dict[str, NDArray[Any]],
        rows: _Rows,
        missing: NDArray[np.bool_] | None,
    ) -> None:
        """Add the checked leaves of one column to ``arrays``; ``missing``: rows that have no ``new_obs``."""
        plain = len(wanted) == 1 and not wanted[0].path and not isinstance(value, dict | tuple)
        found: dict[Path, Any] = {(): value} if plain else dict(leaves(value))
        if found.keys() != {leaf.path for leaf in wanted}:
            raise SchemaConflict(
                f"column {column!r} nests as {sorted(map(path_text, found))}, but before as "
                f"{sorted(path_text(leaf.path) for leaf in wanted)}"
                f"{_READ_WHOLE if column == Columns.INFOS else ''}",
                column=column,
            )
        for leaf in wanted:
            array = _array(found[leaf.path], leaf.name)
            if leaf.spec.codec == "png" and (array.dtype, array.shape[1:]) == (
                leaf.spec.numpy,
                leaf.spec.shape,
            ):
                array = encode_column(array, known=rows.encoded)
            # The caller may change the arrays in it.
            if (joined := leaf.spec.joined(array, missing)) is not None:
                arrays[leaf.physical] = joined
                continue
            problem = leaf.spec.mismatch(array)
            if problem:
                raise SchemaConflict(f"found {problem}; {_way_out(array, leaf.spec)}", column=leaf.name)
            if leaf.spec.kind == "text" and array.dtype.kind != "S":
                rows.check_texts(array, leaf.name)
            if leaf.spec.kind == "json":
                if column in _EPISODE_KEYS:
                    rows.check_keys(array, column)
                array = rows.to_json(array, leaf.name)
            if leaf.spec.kind == "picture":
                rows.check_pictures(array, leaf, missing)
            arrays[leaf.physical] = array


def _way_out(values: NDArray[Any], spec: ColumnSpec) -> str:
    """What to do with values that do not fit a column."""
    if values.dtype.hasobject and not spec.numpy.hasobject and item_type(values) is not None:
        return (
            "the first batch of a writer decides: give it rows of different lengths as an object array "
            "(rlio.batch.object_column), even if they happen to have one length"
        )
    return "cast it before writing"


@dataclass(frozen=True)
class _Rows:
    """Rows of a written batch whose texts and objects are checked; errors name the row.

    Attributes:
        policy: The policy's id.
        first: Number of the first row.
        encoded: Frames that were encoded, by their bytes: ``new_obs`` has those of ``obs`` again.
    """

    policy: str
    first: int
    encoded: dict[bytes, EncodedPicture] = field(default_factory=dict)

    def check_texts(self, values: NDArray[Any], name: str) -> None:
        """Refuse texts that have no UTF-8 form, because Parquet has no other."""
        listed = values.tolist()
        try:
            check_text("".join(listed), name)
        except SchemaError:
            for row, text in enumerate(listed):
                with self._row(row):
                    check_text(text, name)
            raise

    def check_keys(self, values: NDArray[Any], name: str) -> None:
        """Refuse rows of a column that tells episodes apart, unless they are whole numbers or texts."""
        for row, value in enumerate(values.tolist()):
            if type(value) not in (int, str):
                with self._row(row):
                    raise SchemaError(f"found {excerpt(value)}, expected {_KEY} per row", column=name)

    def check_pictures(self, values: NDArray[Any], leaf: Leaf, missing: NDArray[np.bool_] | None) -> None:
        """Refuse rows without a picture, unless they have no ``new_obs``."""
        for row, picture in enumerate(values.tolist()):
            if picture.is_none and (missing is None or not missing[row]):
                with self._row(row):
                    raise SchemaError("found no picture, expected the bytes of one", column=leaf.name)

    def to_json(self, values: NDArray[Any], name: str) -> NDArray[Any]:
        """Return the JSON texts of objects.

        Raises:
            SchemaError: An object has no stored form; the message names the row and the path in the object.
        """
        try:
            return object_column(map(dump_value, values))
        except SchemaError:
            for row, value in enumerate(values):
                with self._row(row):
                    dump_value(value, name)
            raise

    def rest_to_json(self, rest: NDArray[Any], infos: Any) -> NDArray[Any]:
        """Return the JSON texts of what is left of infos, "" for nothing.

        Raises:
            SchemaError: As in `to_json`.
        """
        try:
            return object_column("" if value is None else dump_value(value) for value in rest.tolist())
        except SchemaError:
            self.to_json(info_objects(infos) if is_typed(infos) else infos, Columns.INFOS)
            raise

    @contextlib.contextmanager
    def _row(self, row: int) -> Iterator[None]:
        """Add the row to an error."""
        try:
            yield
        except SchemaError as error:
            of = "" if self.policy == DEFAULT_POLICY_ID else f" of policy {excerpt(self.policy)}"
            message = str(error).removesuffix(f" [column {error.column}]")
            found = f"row {self.first + row}{of}: {message}"
            raise SchemaError(found, column=error.column) from error.__cause__


@dataclass(frozen=True)
class Schema:
    """The columns of every policy of a writer.

    Attributes:
        policies: Policy id -> its columns.
        multi_agent: Whether rows were written as MultiAgentBatches.
        group_rows: Rows of a row group: a power of two.
        stored: How the data was made: ``{"actions": "raw" | "sent", "observations": "raw" |
            "preprocessed"}``, or some of these keys.
    """

    policies: Mapping[str, PolicySchema]
    multi_agent: bool = False
    group_rows: int = 1
    stored: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def of(
        cls,
        batch: SampleBatch | MultiAgentBatch,
        *,
        spaces: Mapping[str, Mapping[str, Any]] | None = None,
        stored: Mapping[str, str] | None = None,
        pictures: Mapping[str, Codec] | None = None,
        is_written: bool = True,
        info_keys: bool | None = None,
    ) -> Schema:
        """Return the schema of a first batch, which may have no rows.

        Args:
            batch: The batch.
            spaces: Policy id -> its spaces.
            stored: See the class.
            pictures: Leaf (``obs/camera``) -> how its pictures are encoded. ``new_obs`` is as ``obs``.
            is_written: Whether rlio writes it. If not, what reads the batch limits it.
            info_keys: Whether keys of infos are columns; see `extended`.
        """
        multi_agent = isinstance(batch, MultiAgentBatch)
        empty = cls({}, multi_agent=multi_agent, stored=stored or {})
        return empty.extended(
            batch, spaces=spaces, pictures=pictures, is_written=is_written, info_keys=info_keys
        )

    def extended(
        self,
        batch: SampleBatch | MultiAgentBatch,
        *,
        spaces: Mapping[str, Mapping[str, Any]] | None = None,
        pictures: Mapping[str, Codec] | None = None,
        is_written: bool = True,
        info_keys: bool | None = None,
    ) -> Schema:
        """Return this schema with the policies of ``batch`` that it lacks; itself if it lacks none.

        ``new_obs_valid`` may be added later too, because batches have it only if a final observation is
        missing; and what infos need.

        Args:
            batch: The batch.
            spaces: As in `of`.
            pictures: As in `of`.
            is_written: As in `of`.
            info_keys: True: keys of infos are columns, new ones too. False: new ones of known policies are
                left in the rest. None: infos are objects.

        Raises:
            SchemaError: A column, or the columns together, cannot be stored.
        """
        if (
            not self.multi_agent
            and DEFAULT_POLICY_ID in self.policies
            and Columns.NEXT_OBS_VALID not in batch
            and (info_keys is None or Columns.INFOS not in batch)
        ):
            return self  # Nearly every batch.
        parts = batch.policies()
        fresh = {pid: part for pid, part in parts.items() if pid not in self.policies and part.keys()}
        tells = [
            pid
            for pid, part in parts.items()
            if Columns.NEXT_OBS_VALID in part
            and pid in self.policies
            and Columns.NEXT_OBS_VALID not in self.policies[pid].columns
            and Columns.NEXT_OBS in self.policies[pid].columns
        ]
        grown = {} if info_keys is None else self._grown_infos(parts, takes_keys=info_keys)
        if not fresh and not tells and not grown:
            return self
        found = {pid: policy.leaves for pid, policy in self.policies.items()}
        for pid, form in grown.items():
            found[pid] = _with_infos(found[pid], form)
        for pid in tells:
            valid = SampleBatch({Columns.NEXT_OBS_VALID: parts[pid][Columns.NEXT_OBS_VALID]})
            found[pid] += _leaves_of(valid)
        # Split stacks only if every row has the column, because several policies may share one.
        found |= {
            pid: leaves if self.multi_agent else _with_stacks(leaves, part)
            for pid, part in fresh.items()
            for expected in [_structures_of((spaces or {}).get(pid))]
            for leaves in [
                _leaves_of(
                    part,
                    pictures=pictures,
                    is_written=is_written,
                    has_info_keys=info_keys is not None,
                    expected=expected,
                )
            ]
        }
        _check_named(pictures, (leaf for leaves in found.values() for leaf in leaves))
        named = _with_physical_names(found)
        policies = {
            pid: PolicySchema(
                named[pid],
                self.policies[pid].spaces if pid in self.policies else (spaces or {}).get(pid),
            )
            for pid in sorted(named)
        }
        made = replace(self, policies=policies)
        size = _PICTURE_GROUP_BYTES if made.has_pictures else _GROUP_BYTES
        made = replace(made, group_rows=_rows_of(size, made.folded_row_bytes))
        if is_written:
            made._check_limits()
        made._check_storable()
        return made

    def _grown_infos(self, parts: Mapping[str, SampleBatch], *, takes_keys: bool) -> dict[str, InfoForm]:
        """Policy id -> the form that its infos need, if it differs from the one that they have."""
        grown = {}
        for pid, part in parts.items():
            before = self.policies[pid].infos if pid in self.policies and Columns.INFOS in part else None
            if before is not None:
                after = before.grown(_parsed_infos(part._raw(Columns.INFOS)), takes_keys=takes_keys)
                if after != before:
                    grown[pid] = after
        return grown

    def with_validity(self) -> Schema:
        """Return this schema with ``new_obs_valid`` for each policy that has ``new_obs``."""
        leaf = Leaf(Columns.NEXT_OBS_VALID, (), Columns.NEXT_OBS_VALID, ColumnSpec("|b1", (), "scalar"))
        policies = {
            pid: replace(policy, leaves=(*policy.leaves, leaf))
            if Columns.NEXT_OBS in policy.columns and Columns.NEXT_OBS_VALID not in policy.columns
            else policy
            for pid, policy in self.policies.items()
        }
        return replace(self, policies=policies)

    def check_columns(self, columns: Collection[str], *, uri: str | None) -> None:
        """Refuse columns, or parts of columns, that no policy has.

        Raises:
            MissingColumn: No policy has one of ``columns``.
        """
        known = {column for policy in self.policies.values() for column in policy.columns}
        for name in columns:
            if name not in known and not any(name in policy.names for policy in self.policies.values()):
                raise MissingColumn(
                    f"no column {name!r}; the shard has {', '.join(sorted(known))}"
                    f"{advice_for_column(name, known, self.policies.values())}",
                    uri=uri,
                    column=name,
                )

    def _check_limits(self) -> None:
        """Refuse a schema that readers would refuse: they limit schemas, which may be hostile."""
        most = DEFAULT_LIMITS
        if len(self.columns) > most.columns or len(self.policies) > most.policies:
            raise SchemaError(
                f"{len(self.columns)} columns of {len(self.policies)} policies: at most {most.columns} and "
                f"{most.policies}; join columns into arrays"
            )
        if self.group_row_bytes > most.group_bytes:
            raise SchemaError(
                f"rows of {self.group_row_bytes} bytes: at most {most.group_bytes}; store references"
            )
        with contextlib.suppress(UnicodeEncodeError):  # Refused below.
            self.text.encode()
            most.check_json(self.text, "a schema")

    def _check_storable(self) -> None:
        """Refuse names that cannot be stored, or that are stored as those of others."""
        for pid, policy in self.policies.items():
            if len(pid) > _MAX_POLICY_CHARACTERS:
                raise SchemaError(
                    f"policy {excerpt(pid)}: an id has at most {_MAX_POLICY_CHARACTERS} characters, because "
                    "the table of episodes repeats it"
                )
            taken: set[str] = set()
            for leaf in policy.leaves:
                if self.columns[leaf.physical] != leaf.spec or leaf.physical in taken:
                    raise SchemaError(
                        f"policy {pid!r} has a column whose name is the stored name of another; rename yours",
                        column=leaf.name,
                    )
                taken.add(leaf.physical)
        for name in (Columns.EPS_ID, Columns.T) if len(self.policies) > 1 else ():
            self._check_joint(name)
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise SchemaError(
                "a name, or a description of a space, holds half of a surrogate pair; replace it"
            ) from error
        except UnsafeData as error:
            raise SchemaError(f"{error}; store fewer columns, or smaller spaces") from error

    def _check_joint(self, name: str) -> None:
        """Check that every policy has the column ``name``, because (eps_id, t) identifies a joint step."""
        dtypes = []
        for pid, policy in self.policies.items():
            found = policy.columns.get(name, [])
            if len(found) != 1 or found[0].path or found[0].spec.shape:
                raise SchemaError(
                    f"policy {pid!r} has no such column with one value per row: with several policies, "
                    "eps_id and t identify the environment steps",
                    column=name,
                )
            dtypes.append(found[0].spec.numpy)
        if joint_dtype(dtypes) is None:
            kinds = sorted({dtype.str for dtype in dtypes})
            raise SchemaError(f"the policies have {', '.join(kinds)}: give them one dtype", column=name)

    @cached_property
    def columns(self) -> dict[str, ColumnSpec]:
        """Physical column -> spec, sorted by name."""
        return dict(sorted({x.physical: x.spec for p in self.policies.values() for x in p.leaves}.items()))

    @cached_property
    def masks(self) -> dict[str, str]:
        """Physical columns of infos, of all policies -> those of their masks, which are stored as nulls."""
        return {name: mask for policy in self.policies.values() for name, mask in policy.masks.items()}

    @cached_property
    def rests(self) -> frozenset[str]:
        """Physical columns of what is left of infos, with nulls where nothing is."""
        return frozenset(
            leaf.physical
            for policy in self.policies.values()
            for leaf in policy.columns.get(Columns.INFOS, ())
            if leaf.path == REST and leaf.spec.kind == "json"
        )

    @cached_property
    def has_pictures(self) -> bool:
        """Whether a column has encoded pictures."""
        return any(spec.kind == "picture" for spec in self.columns.values())

    @cached_property
    def has_videos(self) -> bool:
        """Whether a column has frames of videos, which are stored beside the shards."""
        return any(spec.codec == "video" for spec in self.columns.values())

    @cached_property
    def has_fixed_rows(self) -> bool:
        """Whether all rows take the same memory, so that row groups are filled to `group_rows`."""
        kinds = {spec.kind for spec in self.columns.values()}
        return kinds <= {"scalar", "list", "bytes", "none"} and not self.stacked

    @cached_property
    def stacked(self) -> dict[str, tuple[str, FrameStack]]:
        """Physical column of stacked ``obs`` -> that of its ``new_obs``, and the stack's axis and depth.

        Empty with several policies, because then not every row has the column.
        """
        policies = list(self.policies.values())
        return {
            obs.physical: (new_obs.physical, obs.spec.stack)
            for policy in policies[: len(policies) == 1]
            for obs, new_obs in policy.linked
            if obs.spec.stack is not None
        }

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row in a batch, of the policy with the largest rows; texts are estimated."""
        parts = (sum(leaf.spec.row_bytes for leaf in p.leaves) for p in self.policies.values())
        return max(parts, default=0)

    @property
    def group_row_bytes(self) -> int:
        """Bytes of a row in a row group in memory: the columns of one policy, and three of structure.

        Writers and readers compare rows of this size with `Limits.group_bytes`.
        """
        return 12 + self.row_bytes

    @property
    def folded_row_bytes(self) -> int:
        """Bytes of a row if each frame is kept once: one frame per stack, and one picture per row."""
        shared = [
            new_obs.spec.row_bytes
            for policy in list(self.policies.values())[: len(self.policies) == 1]
            for _, new_obs in policy.linked
            if new_obs.spec.kind == "picture"
        ]
        shared += [
            2 * self.columns[name].row_bytes - self.columns[name].row_bytes // stack.depth
            for name, (_, stack) in self.stacked.items()
        ]
        return self.row_bytes - sum(shared)

    @property
    def batch_rows(self) -> int:
        """Rows of a batch of the largest row-group size: at most those of a group, fewer with stacks."""
        return min(self.group_rows, _rows_of(_GROUP_BYTES, self.row_bytes))

    @cached_property
    def text(self) -> str:
        """Canonical JSON: equal schemas have equal bytes."""
        return canonical_json(self.to_json())

    @cached_property
    def hash(self) -> str:
        """The name of the schema's file: 16 hex digits of the BLAKE2b of its text."""
        return hashlib.blake2b(self.text.encode(), digest_size=8).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return the written form; see docs/format.md."""
        return {
            "format": FORMAT_VERSION,
            "multi_agent": self.multi_agent,
            "group_rows": self.group_rows,
            "stored": dict(self.stored),
            "columns": {name: spec.to_json() for name, spec in self.columns.items()},
            "policies": {
                pid: {
                    "columns": [[x.column, list(x.path), x.physical] for x in policy.leaves],
                    "spaces": policy.spaces,
                }
                for pid, policy in sorted(self.policies.items())
            },
        }

    @classmethod
    def from_text(
        cls, text: str | bytes, *, uri: str | None = None, limits: Limits = DEFAULT_LIMITS
    ) -> Schema:
        """Parse the written form, which may be hostile.

        Raises:
            CorruptData: It is not a schema, or has a later format. (UnsafeData: it exceeds ``limits``.)
        """
        try:
            limits.check_json(text, "a schema")
            written = json.loads(text)
            version = written["format"]
            if version != FORMAT_VERSION:
                raise CorruptData(
                    f"format {excerpt(version)}: this rlio reads {FORMAT_VERSION}: upgrade rlio",
                    uri=uri,
                )
            columns = {
                name: ColumnSpec.from_json(spec, column=name, uri=uri)
                for name, spec in written["columns"].items()
            }
            if len(columns) > limits.columns or len(written["policies"]) > limits.policies:
                raise UnsafeData(
                    f"{len(columns)} columns, {len(written['policies'])} policies: at most {limits.columns} "
                    f"and {limits.policies}"
                )
            policies = {
                pid: PolicySchema(
                    tuple(
                        Leaf(_checked_name(c), _checked_path(path, limits), name, columns[name])
                        for c, path, name in p["columns"]
                    ),
                    p["spaces"],
                )
                for pid, p in written["policies"].items()
            }
            for policy in policies.values():
                _ = policy.infos  # Raises if its columns do not fit each other.
            group_rows = written["group_rows"]
            if type(group_rows) is not int or not 1 <= group_rows <= _MAX_GROUP_ROWS:
                raise CorruptData(f"group_rows is {excerpt(group_rows)}", uri=uri)
            return cls(policies, bool(written["multi_agent"]), group_rows, dict(written["stored"]))
        except (ValueError, TypeError, KeyError, RecursionError, AttributeError) as error:
            if isinstance(error, CorruptData):
                raise_at(error, uri=uri)
            raise CorruptData(
                f"not a schema: {excerpt(repr(error))}; found {excerpt(text)}", uri=uri
            ) from error


def is_named(leaf: Leaf, names: Collection[str] | None) -> bool:
    """Whether ``names`` has a leaf: by its column, or by a part of the column (``obs/camera``); None: all."""
    return is_in(leaf.column, leaf.path, names)


def is_in(column: str, path: Path, names: Collection[str] | None) -> bool:
    """`is_named` for the leaf of a column at a path."""
    if names is None or column in names:
        return True
    if column == Columns.INFOS and path:
        last = path[-1]
        if path[0] == NOTES:
            return False
        if isinstance(last, str) and last.startswith("_"):  # The mask of a key comes with the key.
            path = (*path[:-1], last[1:])
    return any(leaf_name(column, path[:n]) in names for n in range(1, len(path) + 1))


def with_validity(policies: Iterable[PolicySchema], names: Collection[str]) -> Collection[str]:
    """Return the ``names``, plus ``new_obs_valid`` if they have ``new_obs`` and some rows may lack it.

    Without that column, the zeros of a missing final observation would pass for an observation.
    """
    tells = Columns.NEXT_OBS_VALID not in names and any(
        Columns.NEXT_OBS_VALID in policy.columns
        and any(is_named(leaf, names) for leaf in policy.columns.get(Columns.NEXT_OBS, ()))
        for policy in policies
    )
    return (*names, Columns.NEXT_OBS_VALID) if tells else names


def column_of_name(name: str) -> str:
    """The column of a name such as ``obs/camera``, of a part of a nested column; or of the column itself."""
    return name.partition("/")[0].replace("~1", "/").replace("~0", "~")


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys, no spaces and no NaN: equal values have equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def rebuild(found: list[tuple[Path, Any]]) -> Any:
    """Return a column, rebuilt from its leaves."""
    if len(found) == 1 and not found[0][0]:
        return found[0][1]
    return unflatten([path for path, _ in found], [item for _, item in found])


def _check_named(pictures: Mapping[str, Codec] | None, found: Iterable[Leaf]) -> None:
    """Refuse names of pictures that no policy has."""
    names = {leaf.name for leaf in found}
    for name in pictures or ():
        if name not in names:
            raise MissingColumn(
                f"pictures={{{name!r}: ...}}: the first batch has {excerpt(sorted(names))}"
                f"{did_you_mean(name, names)}",
                column=name,
            )


def _structures_of(spaces: Any) -> dict[str, Structure]:
    """Return leaf -> the structure that the spaces of a policy give its rows, where they have one."""
    found: dict[str, Structure] = {}

    def collect(space: Mapping[str, Any], column: str, path: Path) -> None:
        if space["type"] == "Dict":
            for key, child in space["spaces"]:
                collect(child, column, (*path, key))
        elif space["type"] == "Tuple":
            for number, child in enumerate(space["spaces"]):
                collect(child, column, (*path, number))
        elif (structure := structure_of_space(space)) is not None:
            found[leaf_name(column, path)] = structure

    for kind, column in (("observation", Columns.OBS), ("action", Columns.ACTIONS)):
        if isinstance(spaces, Mapping) and isinstance(spaces.get(kind), Mapping):
            collect(spaces[kind], column, ())
    return {name: each for name, each in found.items() if each.form not in ("array", "rows", "text")}


def _leaves_of(
    batch: SampleBatch,
    *,
    pictures: Mapping[str, Codec] | None = None,
    is_written: bool = True,
    has_info_keys: bool = False,
    expected: Mapping[str, Structure] = MappingProxyType({}),
) -> tuple[Leaf, ...]:
    """Return the leaves of a batch, named as if there were no other policy."""
    found, pictures, missing = [], pictures or {}, _missing_in(batch)
    for column in batch:
        if column in RESERVED:
            raise SchemaError(f"column {column!r} is reserved by the format; rename yours", column=column)
        if column == Columns.INFOS and has_info_keys and _are_objects(infos := batch._raw(column)):
            _check_no_part_of_infos(batch)
            found += info_leaves(InfoForm().grown(_parsed_infos(infos)))
            continue
        _check_nesting(batch[column], column)
        for path, item in leaves(batch[column]):
            name = leaf_name(column, path)
            if is_written and len(path) > DEFAULT_LIMITS.nesting:
                raise SchemaError(f"it nests more than {DEFAULT_LIMITS.nesting} deep", column=name)
            if name.endswith(_RESERVED_ENDS):
                raise SchemaError(
                    f"names that end in {_RESERVED_ENDS} are reserved by the format", column=name
                )
            as_obs = leaf_name(Columns.OBS, path) if column == Columns.NEXT_OBS else name
            array = _array(item, name)
            if (
                missing is not None
                and column == Columns.NEXT_OBS
                and array.dtype == object
                and not is_encoded(array)
            ):
                array = array[~missing]  # Rows that have none may hold anything.
            codec, structure = pictures.get(as_obs), expected.get(as_obs)
            spec = ColumnSpec.of(array, column=name, codec=codec, expected=structure)
            if column == _WRITER and (path or spec.kind != "text" or spec.dtype[1] != "U" or spec.shape):
                raise SchemaError(f"column {column!r} is reserved by the format; rename yours", column=column)
            # (Time-major batches are refused as such, once their rows are cut.)
            if not batch.time_major and (expects := _unlike_standard(column, path, spec)):
                raise SchemaError(
                    f"found {spec.dtype} of shape {spec.shape} per row, expected {expects} per row",
                    column=name,
                )
            found.append(Leaf(column, path, name, spec))
    return tuple(found)


def _unlike_standard(column: str, path: Path, spec: ColumnSpec) -> str | None:
    """What a column should hold by which rlio tells episodes and steps apart; None: it does, or is another.

    Otherwise its rows would be joined by what is left, to wrong episodes.
    """
    is_one = not path and not spec.shape
    if column == Columns.NEXT_OBS_VALID:
        return None if is_one and spec.dtype == "|b1" else "one bool"
    if column in (Columns.TERMINATEDS, Columns.TRUNCATEDS, Columns.T):
        return None if is_one and spec.numpy.kind in "biuf" else "one number"
    if column in _EPISODE_KEYS:
        # Of numbers and texts together, each row is checked.
        is_key = spec.numpy.kind in "iuU" or (spec.numpy.kind == "O" and spec.kind in ("text", "json"))
        return None if is_one and is_key else _KEY
    return None


def _are_objects(infos: Any) -> bool:
    """Whether a column of infos has an object a row, also in the typed form."""
    return is_typed(infos) or (isinstance(infos, np.ndarray) and infos.dtype == object and infos.ndim == 1)


def _info_array(infos: Any) -> NDArray[Any]:
    """Return infos that are not in the typed form.

    Raises:
        SchemaConflict: They are no objects.
    """
    if not _are_objects(infos):
        is_nested = isinstance(infos, dict | tuple)
        found = "nested columns" if is_nested else f"{infos.dtype} {infos.shape}"
        raise SchemaConflict(
            f"found {found}, expected an object a row as before{_READ_WHOLE if is_nested else ''}",
            column=Columns.INFOS,
        )
    array: NDArray[Any] = infos
    return array


def _parsed_infos(infos: Any) -> ParsedInfos:
    return ParsedInfos.of(info_objects(infos) if is_typed(infos) else _info_array(infos))


def info_leaves(form: InfoForm) -> list[Leaf]:
    """Return the leaves of infos in a form, named as if there were no other policy."""
    return [Leaf(Columns.INFOS, path, leaf_name(Columns.INFOS, path), spec) for path, spec in form.leaves()]


def _with_infos(found: tuple[Leaf, ...], form: InfoForm) -> tuple[Leaf, ...]:
    """Return the leaves of a policy with other ones of its infos, in their place."""
    at = next(number for number, leaf in enumerate(found) if leaf.column == Columns.INFOS)
    before, after = found[:at], [leaf for leaf in found[at:] if leaf.column != Columns.INFOS]
    return (*before, *info_leaves(form), *after)


def _check_no_part_of_infos(batch: SampleBatch) -> None:
    """Refuse a column whose name is that of a key of infos."""
    for name in batch:
        if name.startswith(f"{Columns.INFOS}/"):
            raise SchemaError(
                f"the name is that of the key {name.partition('/')[2]!r} of the column 'infos'; rename yours",
                column=name,
            )


def _missing_in(batch: SampleBatch) -> NDArray[np.bool_] | None:
    """Return a mask of the rows that have no ``new_obs``; None: the batch says nothing of it."""
    if isinstance(batch.get(Columns.NEXT_OBS_VALID), dict | tuple | None):
        return None  # Or nested, which is refused.
    found: NDArray[np.bool_] = ~to_numpy(batch[Columns.NEXT_OBS_VALID]).astype(bool)
    return found


def _array(item: Any, column: str) -> NDArray[Any]:
    """Return a leaf as an array."""
    try:
        array = to_numpy(item)
    except (TypeError, RuntimeError) as error:  # NumPy has no form of some tensors, such as bfloat16.
        raise SchemaError(f"found {item.dtype}: {error}; cast it before writing", column=column) from error
    return plain_array(array, column)


def _check_nesting(value: Any, column: str) -> None:
    """Refuse empty dicts and tuples: without a leaf, a file could not restore them."""
    if isinstance(value, dict | tuple):
        if not value:
            raise SchemaError(
                "it holds an empty dict or tuple, which cannot be stored; leave it out", column=column
            )
        for part in value.values() if isinstance(value, dict) else value:
            _check_nesting(part, column)


def _rows_of(size: int, row_bytes: int) -> int:
    """Return the largest power of two of rows that fit into ``size`` bytes, up to a limit."""
    rows = min(_MAX_GROUP_ROWS, max(1, size // max(row_bytes, 1)))
    return 1 << (rows.bit_length() - 1)


def _with_stacks(found: tuple[Leaf, ...], batch: SampleBatch) -> tuple[Leaf, ...]:
    """Mark the leaves of obs, and the matching ones of new_obs, that look like frame stacks."""
    stacks: dict[Path, FrameStack | None] = {}
    if PolicySchema(found).linked:
        following = dict(leaves(batch[Columns.NEXT_OBS]))
        for path, item in leaves(batch[Columns.OBS]):
            stacks[path] = detect_stack(to_numpy(item), to_numpy(following[path]))
    return tuple(
        replace(leaf, spec=replace(leaf.spec, stack=stacks[leaf.path]))
        if leaf.column in (Columns.OBS, Columns.NEXT_OBS)
        and stacks.get(leaf.path)
        and leaf.spec.kind == "bytes"
        else leaf
        for leaf in found
    )


def advice_for_column(name: str, known: Iterable[str], policies: Iterable[PolicySchema]) -> str:
    """What to do about a column that no policy has: which may be meant, or where a key of infos may be."""
    if column_of_name(name) == Columns.INFOS and any(policy.may_have_more_keys for policy in policies):
        return f"; other keys are in 'infos' alone, to be read whole{did_you_mean(name, known)}"
    return did_you_mean(name, known)


def leaf_name(column: str, path: Path) -> str:
    """Return the name of a leaf, with JSON Pointer's escapes, because a key may hold a slash.

    What is left of infos beside their keys has the name of the column.
    """
    if path == REST and column == Columns.INFOS:
        return column
    tokens = [str(token).replace("~", "~0").replace("/", "~1") for token in (column, *path)]
    return "/".join(tokens)


def _stored_name(leaf: Leaf) -> str:
    """Return the physical name of a leaf if all policies agree on its spec."""
    return leaf_name(STORED_NEXT_OBS if leaf.column == Columns.NEXT_OBS else leaf.column, leaf.path)


def _with_physical_names(found: Mapping[str, tuple[Leaf, ...]]) -> dict[str, tuple[Leaf, ...]]:
    """Return policy id -> its leaves, with their physical names in one common schema."""
    specs: dict[str, set[ColumnSpec]] = {}
    for policy_leaves in found.values():
        for leaf in policy_leaves:
            specs.setdefault(_stored_name(leaf), set()).add(leaf.spec)
    named = {}
    for pid, policy_leaves in found.items():
        renamed = []
        for leaf in policy_leaves:
            name = _stored_name(leaf)
            if len(specs[name]) > 1:
                digest = hashlib.blake2b(canonical_json(leaf.spec.to_json()).encode(), digest_size=4)
                name = f"{name}@{digest.hexdigest()}"
            renamed.append(replace(leaf, physical=name))
        named[pid] = tuple(renamed)
    return named


def _checked_name(written: Any) -> str:
    """Return a logical column's name from an untrusted schema."""
    if not isinstance(written, str):
        raise ValueError(f"found the column name {excerpt(written)}, expected a string")
    return written


def _checked_path(path: Any, limits: Limits) -> Path:
    """Return a path of strings and small integers, checked."""
    if not isinstance(path, list) or not all(type(p) in (str, int) for p in path):
        raise ValueError(f"path {excerpt(path)}")
    if len(path) > limits.nesting:
        raise UnsafeData(f"a column nested {len(path)} deep: at most {limits.nesting}")
    return tuple(path)
