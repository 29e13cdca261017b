"""The columns of one policy, and the check that a batch has them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.arrays import object_column
from rlio.batch.columns import DEFAULT_POLICY_ID, Columns, is_per_sequence
from rlio.batch.encoded_picture import EncodedPicture
from rlio.batch.infos import NOTES, REST, info_objects, is_typed, mask_path
from rlio.batch.nested import Path, leaves, path_text
from rlio.batch.other_names import did_you_mean
from rlio.batch.picture_codecs import encode_column
from rlio.batch.ragged import item_type
from rlio.errors import MissingColumn, OptionError, SchemaConflict, SchemaError, excerpt
from rlio.schemas.column import TEXTS, ColumnSpec
from rlio.schemas.info_columns import InfoForm
from rlio.schemas.json_values import check_text, dump_value
from rlio.schemas.leaves import (
    EPISODE_KEYS,
    KEY,
    READ_WHOLE,
    Leaf,
    column_of_name,
    info_array,
    is_named,
    leaf_array,
    leaf_name,
    missing_in,
)
from rlio.support.forks import cached_property

__all__ = ["PolicySchema", "advice_for_column", "with_validity"]


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

    def holds(self, other: PolicySchema) -> bool:
        """See `rlio.schemas.schema.Schema.holds`."""
        own = {(leaf.column, leaf.path): leaf for leaf in self.leaves}
        for leaf in other.leaves:
            found = own.pop((leaf.column, leaf.path), None)
            is_empty = (leaf.column, leaf.path, leaf.spec.kind) == (Columns.INFOS, REST, "none")
            if found != (replace(leaf, spec=found.spec) if is_empty and found is not None else leaf):
                return False
        new = {column for column, _ in own} - {Columns.NEXT_OBS_VALID}
        if self.infos is None or other.infos is None:
            return not new
        return new <= {Columns.INFOS} and other.infos.keys.items() <= self.infos.keys.items()

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
        plain = self._arrays
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
            if type(value) is np.ndarray and column in plain:
                name, dtype, shape = plain[column]
                if value.dtype == dtype and value.shape[1:] == shape:
                    arrays[name] = value
                    continue
            missing = missing_in(batch) if column == Columns.NEXT_OBS else None
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
        """Add the leaves of infos; the residual of a row is JSON text, "" if it is empty."""
        column = batch._raw(Columns.INFOS)
        if not is_typed(column):
            column = info_array(column)
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
                f"{READ_WHOLE if column == Columns.INFOS else ''}",
                column=column,
            )
        for leaf in wanted:
            array = leaf_array(found[leaf.path], leaf.name)
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
                if column in EPISODE_KEYS:
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
                    raise SchemaError(f"found {excerpt(value)}, expected {KEY} per row", column=name)

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
        """Return the residuals of infos as JSON texts, "" for an empty one.

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


def advice_for_column(name: str, known: Iterable[str], policies: Iterable[PolicySchema]) -> str:
    """What to do about a column that no policy has: which may be meant, or where a key of infos may be."""
    if column_of_name(name) == Columns.INFOS and any(policy.may_have_more_keys for policy in policies):
        return f"; other keys are in 'infos' alone, to be read whole{did_you_mean(name, known)}"
    return did_you_mean(name, known)
