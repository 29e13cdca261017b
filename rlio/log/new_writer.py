"""Opens a new writer: the root, a unique id, the claim that followers see, and the log."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from rlio.catalog.commit import put_header
from rlio.catalog.markers import claim, disclaim
from rlio.catalog.names import check_writer_id, make_writer_id, writer_dir
from rlio.errors import OptionError, PublishError, RlioError, StoreError
from rlio.log.log import Log
from rlio.log.publisher import Publisher
from rlio.log.spool import LogFolder, Spool, spool_of
from rlio.storage.clients import within
from rlio.storage.failures import is_permanent
from rlio.storage.filesystem import Storage

__all__ = ["open_publisher"]

logger: logging.Logger = logging.getLogger("rlio")

# Seconds that opening a writer waits for its claim, and for the root.
_CLAIM_SECONDS = 2.0
_OPEN_SECONDS = 10.0


def open_publisher(
    root: str | os.PathLike[str] | Storage,
    *,
    writer_id: str | None = None,
    worker_index: int = 0,
    storage_options: dict[str, object] | None = None,
    spool: Spool | None = None,
) -> Publisher:
    """Open the publisher of a new writer, and its log.

    If the store is down or hangs, a writer still opens if its rows can wait: in a log outside the store,
    under a drawn id. (Only the store knows whether a given id is free.) The root is then made in the
    background, before the first shard. A permanent failure (no rights, a missing bucket, another format
    version) refuses every writer.

    Args:
        root: Folder of the data set, on any filesystem.
        writer_id: None draws a new id; a given id must have no rows there yet.
        worker_index: Goes into a drawn id.
        storage_options: Options for fsspec.
        spool: The options of the log; None: no log.

    Raises:
        OptionError: The given id is illegal or has rows; or the root has another format version.
        CorruptData: The root's header is damaged.
        PublishError: The root or the log cannot be written.
        UnsafeData: The spool belongs to another user.
    """
    storage = root if isinstance(root, Storage) else Storage.open(root, storage_options=storage_options)
    is_given = writer_id is not None
    writer = make_writer_id(worker_index) if writer_id is None else check_writer_id(writer_id)
    where = None if spool is None else spool_of(storage, spool)
    # If the log and the root share a disk, a root that does not answer means a log that does not.
    beside = where is not None and storage.is_local and Path(where).is_relative_to(storage.root)
    if is_given:
        _check_free(storage, writer)
    try:
        # Before any row is accepted, finds a root that cannot be written or has another format.
        has_root = _make_root(storage, can_wait=where is not None and not beside and not is_given)
        _claim(storage, writer, given=is_given)
        log = None
        if spool is not None and where is not None:
            folder = LogFolder.create(os.path.join(where, writer), root=storage.uri, writer=writer)
            log = Log(folder, spool=spool)
    except BaseException as error:
        if is_given:
            # Free the id for another attempt; if that fails too, it stays taken.
            with contextlib.suppress(OSError, RlioError):
                disclaim(storage, writer)
        if not isinstance(error, OSError) or (
            isinstance(error, RlioError) and not isinstance(error, StoreError)
        ):
            raise
        raise PublishError(
            f"nothing can be stored there: {type(error).__name__}: {error}; repair access, then open the "
            "writer again",
            uri=storage.uri,
        ) from error
    return Publisher(storage, writer, log=log, has_root=has_root, asks_first=log is None or beside)


def _check_free(storage: Storage, writer: str) -> None:
    try:
        used = storage.list(writer_dir(writer))
    except OSError as error:
        raise PublishError(
            f"the store does not say whether writer_id={writer!r} is free there: {error}; repair access, or "
            "leave writer_id out to let the rows wait in a log",
            uri=storage.uri,
        ) from error
    if used:
        raise OptionError(
            f"writer {writer!r} was used there already: pass another writer_id, or None for a new one",
            uri=storage.uri,
        )


def _make_root(storage: Storage, *, can_wait: bool) -> bool:
    """Make the root unless it exists. Returns whether it exists now.

    Args:
        storage: The root.
        can_wait: Whether the rows can wait in a log if the store does not answer.
    """
    if not can_wait:
        put_header(storage)
        return True
    try:
        within(_OPEN_SECONDS, lambda: put_header(storage))
    except OSError as error:
        # A PublishError says what was not stored; its cause says why, and whether a retry can help.
        if is_permanent(error.__cause__ or error if isinstance(error, PublishError) else error):
            raise
        logger.warning("%s does not answer: rows wait in the log until it does (%s)", storage.uri, error)
        return False
    return True


def _claim(storage: Storage, writer: str, *, given: bool) -> None:
    """Put the writer's claim.

    A drawn id is safe without a claim, so a store that hangs or fails does not stop its writer.
    """
    if given:
        claim(storage, writer)
        return
    try:
        within(_CLAIM_SECONDS, lambda: claim(storage, writer))
    except (RlioError, OSError) as error:
        logger.warning("followers may not see this writer before its first shard: %s", error)
