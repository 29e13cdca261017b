"""The schema of a writer's rows: the columns of each policy, and the physical names that store them.

A leaf's physical name is its name (see `rlio.schemas.leaves`), with two exceptions. `STORED_NEXT_OBS`
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
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.batch.arrays import joint_dtype, to_numpy
from rlio.batch.columns import DEFAULT_POLICY_ID, Columns
from rlio.batch.encoded_picture import Codec
from rlio.batch.infos import REST
from rlio.batch.nested import Path, leaves
from rlio.batch.other_names import did_you_mean
from rlio.errors import CorruptData, MissingColumn, SchemaError, UnsafeData, excerpt, raise_at
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.schemas.column import ColumnSpec, FrameStack
from rlio.schemas.info_columns import InfoForm
from rlio.schemas.leaves import (
    STORED_NEXT_OBS,
    Leaf,
    info_leaves,
    leaf_name,
    leaves_of,
    parsed_infos,
    structures_of,
)
from rlio.schemas.observations import detect_stack
from rlio.schemas.policy_schema import PolicySchema, advice_for_column
from rlio.support.forks import cached_property

__all__ = ["FORMAT_VERSION", "Schema", "canonical_json"]

#: Version 0 may change until the first tagged release.
FORMAT_VERSION: Final = 0

# One row group decodes to at most this many bytes, which bounds the memory of readers (DESIGN section 4).
_GROUP_BYTES: Final = 8 << 20
# The last row of a group stores its new_obs itself, so a group of few rows stores many pictures twice.
_PICTURE_GROUP_BYTES: Final = 32 << 20
_MAX_GROUP_ROWS: Final = 1 << 16
_MAX_POLICY_CHARACTERS: Final = 512


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
        tells = [pid for pid, part in parts.items() if self._lacks_validity(pid, part)]
        grown = {} if info_keys is None else self._grown_infos(parts, takes_keys=info_keys)
        if not fresh and not tells and not grown:
            return self
        found = {pid: policy.leaves for pid, policy in self.policies.items()}
        for pid, form in grown.items():
            found[pid] = _with_infos(found[pid], form)
        for pid in tells:
            valid = SampleBatch({Columns.NEXT_OBS_VALID: parts[pid][Columns.NEXT_OBS_VALID]})
            found[pid] += leaves_of(valid)
        for pid, part in fresh.items():
            new = leaves_of(
                part,
                pictures=pictures,
                is_written=is_written,
                has_info_keys=info_keys is not None,
                expected=structures_of((spaces or {}).get(pid)),
            )
            # Split stacks only if every row has the column, because several policies may share one.
            found[pid] = new if self.multi_agent else _with_stacks(new, part)
        _check_named(pictures, (leaf for leaves in found.values() for leaf in leaves))
        made = self._with_leaves(found, spaces or {})
        if is_written:
            made._check_limits()
        made._check_storable()
        return made

    def _lacks_validity(self, pid: str, part: SampleBatch) -> bool:
        """Whether a known policy has ``new_obs``, and a batch is the first to say which rows lack it."""
        known = self.policies[pid].columns if pid in self.policies else {}
        return (
            Columns.NEXT_OBS_VALID in part
            and Columns.NEXT_OBS in known
            and Columns.NEXT_OBS_VALID not in known
        )

    def _with_leaves(
        self, found: Mapping[str, tuple[Leaf, ...]], spaces: Mapping[str, Mapping[str, Any]]
    ) -> Schema:
        """Return this schema with other leaves, their physical names, and row groups of a fitting size."""
        policies = {
            pid: PolicySchema(leaves, self.policies[pid].spaces if pid in self.policies else spaces.get(pid))
            for pid, leaves in sorted(_with_physical_names(found).items())
        }
        made = replace(self, policies=policies)
        size = _PICTURE_GROUP_BYTES if made.has_pictures else _GROUP_BYTES
        return replace(made, group_rows=_rows_of(size, made.folded_row_bytes))

    def _grown_infos(self, parts: Mapping[str, SampleBatch], *, takes_keys: bool) -> dict[str, InfoForm]:
        """Policy id -> the form that its infos need, if it differs from the one that they have."""
        grown = {}
        for pid, part in parts.items():
            before = self.policies[pid].infos if pid in self.policies and Columns.INFOS in part else None
            if before is not None:
                after = before.grown(parsed_infos(part._raw(Columns.INFOS)), takes_keys=takes_keys)
                if after != before:
                    grown[pid] = after
        return grown

    def holds(self, other: Schema) -> bool:
        """Whether rows of ``other`` are rows of this schema too, once they get absent keys of infos.

        So it is of a schema and its `extended` ones, unless a policy is new, or names of columns changed.
        """
        if self.policies.keys() != other.policies.keys() or self.multi_agent != other.multi_agent:
            return False
        return all(policy.holds(other.policies[pid]) for pid, policy in self.policies.items())

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
        return kinds <= {"scalar", "list", "bytes", "time", "none", "mask"} and not self.stacked

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


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys, no spaces and no NaN: equal values have equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


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


def _with_infos(found: tuple[Leaf, ...], form: InfoForm) -> tuple[Leaf, ...]:
    """Return the leaves of a policy with other ones of its infos, in their place."""
    at = next(number for number, leaf in enumerate(found) if leaf.column == Columns.INFOS)
    before, after = found[:at], [leaf for leaf in found[at:] if leaf.column != Columns.INFOS]
    return (*before, *info_leaves(form), *after)


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
