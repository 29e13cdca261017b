"""The origin of data: fixed when a writer starts, and stored in every shard's footer.

Example:
    >>> Provenance(env="CartPole-v1", seed=0, policy="random").stored
    {'actions': 'raw', 'observations': 'raw'}
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any, Literal

from rlio.errors import OptionError
from rlio.limits import DEFAULT_LIMITS
from rlio.schemas.schema import canonical_json
from rlio.schemas.spaces import space_to_json
from rlio.support.forks import cached_property
from rlio.support.options import check_choice, check_count, set_options

__all__ = ["Provenance"]

_PACKAGES = ("rlio", "numpy", "pyarrow", "gymnasium")
# Each footer holds it, and a footer has at most 16 MiB.
_MAX_BYTES = DEFAULT_LIMITS.footer_bytes // 4


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The origin of the data; every field is optional.

    Attributes:
        env: Id or JSON of the environment's spec.
        policy: Name of the policy that acted.
        seed: Seed of the run.
        started: Start of the run, ISO 8601. Empty by default, so equal runs give equal bytes.
        commit: Commit of the user's code.
        actions: Whether recorded actions are the policy's own ("raw") or as sent to the environment, after
            clipping and scaling ("sent").
        observations: Whether observations are the environment's ("raw") or "preprocessed".
        extra: Anything else, as JSON.
    """

    env: str | None = None
    policy: str | None = None
    seed: int | None = None
    started: str | None = None
    commit: str | None = None
    actions: Literal["raw", "sent"] = "raw"
    observations: Literal["raw", "preprocessed"] = "raw"
    extra: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        check_choice("actions", self.actions, ("raw", "sent"))
        check_choice("observations", self.observations, ("raw", "preprocessed"))
        set_options(self, seed=check_count("seed", self.seed, least=None, none="an unknown seed"))

    @property
    def stored(self) -> dict[str, str]:
        """The fields that a reader needs to use the columns correctly; kept in the schema."""
        return {"actions": self.actions, "observations": self.observations}

    @cached_property
    def text(self) -> str:
        """Canonical JSON of the set fields, with the versions of the libraries."""
        given = {f.name: getattr(self, f.name) for f in fields(self)} | {"extra": dict(self.extra)}
        known = {name: value for name, value in given.items() if value is not None and value != {}}
        try:
            text = canonical_json({**known, "versions": _versions()})
            if len(text.encode()) > _MAX_BYTES:
                raise ValueError(f"{len(text)} characters, more than {_MAX_BYTES}")
            DEFAULT_LIMITS.check_json(text, "a provenance")
            json.loads(text)  # Readers must be able to parse it, too.
        except (TypeError, ValueError, RecursionError) as error:
            raise OptionError(f"provenance must be small JSON: {error}; shorten its fields") from error
        return text

    def spaces_to_json(
        self, spaces: Mapping[str, tuple[Any, Any]] | None
    ) -> dict[str, dict[str, Any]] | None:
        """Return the written form of ``{policy: (observation space, action space)}``."""
        if spaces is None:
            return None
        return {
            pid: {"observation": space_to_json(observation), "action": space_to_json(action)}
            for pid, (observation, action) in spaces.items()
        }


@cache  # Each version is a file read, and the libraries of a process do not change.
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # A source tree on sys.path, without its metadata.
            found[package] = "unknown"
    return found
