"""What the writers of this package share: their log's options, and how a schema grows."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from rlio.batch import MultiAgentBatch
from rlio.errors import OptionError, SchemaConflict, excerpt
from rlio.interfaces import Batch
from rlio.schemas.schema import Schema
from rlio.storage.shard_log import ShardLog
from rlio.storage.spool import Spool
from rlio.storage.wal import Sync
from rlio.writers.roll import Roll

__all__ = ["SpoolLike", "make_room", "parse_spool", "schema_after"]

SpoolLike: TypeAlias = "Literal['auto'] | str | os.PathLike[str] | Spool | None"


def parse_spool(spool: SpoolLike, sync: Sync | None) -> Spool | None:
    """The writers' arguments ``spool`` and ``sync`` as a `Spool`; None: no log.

    Raises:
        OptionError: They contradict each other, or one is illegal.
    """
    if spool is None:
        if sync is not None:
            raise OptionError(f"sync={excerpt(sync)} with spool=None: without a log there is nothing to sync")
        return None
    if isinstance(spool, Spool):
        found = spool
    elif spool == "auto":
        found = Spool()
    elif isinstance(spool, (str, os.PathLike)):
        found = Spool(folder=spool)
    else:
        raise OptionError(f"spool={excerpt(spool)}: 'auto', a folder, a Spool, or None for no log")
    return found if sync is None else replace(found, sync=sync)


def schema_after(
    schema: Schema | None,
    batch: Batch,
    *,
    spaces: Mapping[str, Mapping[str, Any]] | None,
    stored: Mapping[str, str],
) -> Schema:
    """The schema after ``batch``: from the first batch, and with new policies from later ones.

    Raises:
        SchemaError: The batch cannot be stored.
        SchemaConflict: It is of the other kind than those before.
    """
    if schema is None:
        return Schema.of(batch, spaces=spaces, stored=stored)
    if schema.multi_agent != isinstance(batch, MultiAgentBatch):
        raise SchemaConflict(
            f"a {type(batch).__name__} after batches of the other kind: wrap SampleBatches with "
            "as_multi_agent(), or open another writer"
        )
    return schema.extended(batch, spaces=spaces)


def make_room(
    log: ShardLog,
    roll: Roll,
    *,
    store: Callable[[], object],
    flush: Callable[[], object],
    finish: Callable[[], object],
) -> None:
    """Publish first what can be neither logged nor held in memory any longer.

    Args:
        log: The writer's.
        roll: Its ``max_bytes`` is what may wait in memory where there is no log.
        store: Stores the shards that wait.
        flush: Publishes everything.
        finish: Ends the open shard, which is then stored in the background.

    Raises:
        PublishError: It cannot be published; nothing new is to be taken.
    """
    journal = log.journal
    if journal is None:
        if log.waiting_bytes >= roll.max_bytes:
            store()
    elif journal.failure is not None:  # A sync has failed: the log no longer protects what is in it.
        flush()
    elif not journal.has_room():
        finish()
        log.wait_for_room()
