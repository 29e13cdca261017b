"""`Generations`: several objects that are replaced together, by any number of processes at once.

::

    checkpoint.json                           names the current generation; it is replaced last
    5b1c…32 hexadecimal digits…/             the current generation
    e07f…/                                    one that is being made, was replaced, or whose saver died

A saver makes a new generation, under a name that no other has, and then replaces the small object: that is
the commit, in one step. The last commit counts, whole. No generation is changed after its commit.

A generation that the small object does not name may be removed if it was committed earlier, or if its saver
is dead. A saver holds a lock (flock) on the folder that it makes, so on a local disk the next save finds and
removes what a killed one left. Stores and network filesystems have no such lock: there, the next save after a
day removes it.

A reader whose generation was removed reads the small object again.

Example:
    >>> storage = Storage.open("memory://generations-example")
    >>> generations = Generations(storage, "newest.json")
    >>> def make(name):
    ...     storage.put(f"{name}/part", b"rows")
    ...     return name.encode()
    >>> generations.replace(make)
    b''
    >>> generations.read(lambda content: storage.read(f"{content.decode()}/part"))
    b'rows'
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import uuid
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from rlio.errors import CorruptData, DataNotFound, RlioError, StoreError
from rlio.storage.failures import explained
from rlio.storage.filesystem import Storage
from rlio.storage.local import make_folders, on_network, remove_unfinished, try_lock
from rlio.storage.near import with_hint
from rlio.support.forks import cached_property

__all__ = ["Generations"]

logger: logging.Logger = logging.getLogger("rlio")

T = TypeVar("T")

# Longer than the last two calls of a save take, with their retries; S3 dates an upload by its beginning.
_GRACE: Final = 24 * 3600.0
_ATTEMPTS: Final = 100
#: Where there are no locks: folder and prefix -> the generations that this process has committed there.
_committed: Final[dict[tuple[str, str], set[str]]] = {}


class Generations:
    """The generations of one kind of content in a folder.

    Args:
        storage: The folder.
        newest: Name of the small object that names the current generation.
        prefix: What the names of its generations begin with. Kinds of content that share a folder have
            different ones; other names are never touched.
    """

    def __init__(self, storage: Storage, newest: str, *, prefix: str = "") -> None:
        self._storage = storage
        self._newest = newest
        self._prefix = prefix
        self._name = re.compile(re.escape(prefix) + "[0-9a-f]{32}")

    def is_name(self, name: object) -> bool:
        """Whether a generation may have this name, which may come from an untrusted object."""
        return isinstance(name, str) and self._name.fullmatch(name) is not None

    # ---- saving ----

    def replace(self, make: Callable[[str], bytes]) -> bytes:
        """Make a new generation the current one: completely, or not at all.

        Args:
            make: Gets the name of the new generation, stores its objects in the folder of that name, and
                returns the content of the small object, which contains the name.

        Returns:
            The content of the small object that was there before; b"" if there was none.

        Raises:
            PublishError: The small object could not be stored.
            StoreError: The store failed.
        """
        with self._begun() as name:
            committing = False
            try:
                content = make(name)
                before = self._content()
                committing = True
                self._storage.put(self._newest, content)
            except BaseException:
                # A call to a remote store that failed may still take effect.
                if self._storage.is_local or not committing:
                    with contextlib.suppress(RlioError):  # The error that is raised is the one that matters.
                        self._remove_unless_current(name)
                raise
        try:
            self._collect(before, name)
        except RlioError as error:
            logger.warning("an earlier save remains in %s until the next save: %s", self._storage.uri, error)
        if self._storage.is_local:
            remove_unfinished(self._storage.root)
        return before

    def _content(self) -> bytes:
        try:
            return self._storage.read(self._newest)
        except DataNotFound:
            return b""

    @contextlib.contextmanager
    def _begun(self) -> Iterator[str]:
        """The name of a new generation; on a local disk its folder exists, and is locked."""
        for _ in range(_ATTEMPTS):
            name = f"{self._prefix}{uuid.uuid4().hex}"
            if self._storage.is_local:
                with explained(self._storage.uri_of(name)):
                    make_folders(self._path(name))
            with self._locked(name) as mine:
                # Before it was locked, another saver may have taken it for that of a dead one.
                if mine is None or (mine and os.path.isdir(self._path(name))):
                    yield name
                    return
        raise StoreError("no folder could be made and locked there: save again", uri=self._storage.uri)

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[bool | None]:
        """Hold the lock of a generation's folder; see `try_lock`. False also if the folder is gone."""
        if not self._has_locks:
            yield None
            return
        try:
            fd = os.open(self._path(name), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            yield False
            return
        try:
            yield try_lock(fd)
        finally:
            os.close(fd)

    @cached_property
    def _has_locks(self) -> bool:
        return self._storage.is_local and os.name == "posix" and not on_network(self._storage.root)

    def _path(self, name: str) -> str:
        return os.path.join(self._storage.root, name)

    # ---- removing ----

    def _collect(self, before: bytes, made: str) -> None:
        """Remove every generation that can never be current again.

        Args:
            before: The small object's content from before a commit: what it names was committed earlier.
            made: The generation of the commit.
        """
        names = [name for name in self._storage.folders("", self._prefix) if self.is_name(name)]
        mine: set[str] = set()
        if not self._has_locks:
            # Of two savers that commit at once, neither knows the other's: each removes its own later.
            mine = _committed.setdefault((self._storage.uri, self._prefix), set())
            mine.add(made)
            mine.intersection_update(names)
        for name in names:
            if name in mine or name.encode() in before:
                self._remove_unless_current(name)
                continue
            with self._locked(name) as abandoned:
                if self._is_old(name) if abandoned is None else abandoned:
                    self._remove_unless_current(name)

    def _remove_unless_current(self, name: str) -> None:
        """Remove a generation whose saver does not commit any more, unless it has committed it last."""
        if name.encode() not in self._content():
            self._storage.remove_folder(name)

    def _is_old(self, name: str) -> bool:
        """Whether nothing was stored in a generation within the last day, by the store's own clock."""
        now = self._storage.modified(self._newest)
        times = [time for time in self._storage.list_with_times(name)[1].values() if time is not None]
        return now is not None and bool(times) and max(times) < now - _GRACE

    # ---- reading ----

    def read(self, load: Callable[[bytes], T]) -> T:
        """What ``load`` gives for the current content of the small object.

        Calls it again if it fails while another generation becomes the current one.

        Raises:
            DataNotFound: There is no small object.
            CorruptData: Something that it names is absent.
        """
        try:
            content = self._storage.read(self._newest)
        except DataNotFound as error:
            raise with_hint(error, self._storage.did_you_mean()) from error
        for _ in range(_ATTEMPTS):
            try:
                return load(content)
            except (CorruptData, DataNotFound) as error:
                read, content = content, self._storage.read(self._newest)
                if content == read:
                    if isinstance(error, CorruptData):
                        raise
                    raise CorruptData(
                        f"{self._newest} names something that is not there: copy the whole folder, or save "
                        f"again ({error})",
                        uri=self._storage.uri,
                    ) from error
        raise StoreError(
            f"{_ATTEMPTS} times, what was read was replaced meanwhile: load again when fewer save there",
            uri=self._storage.uri,
        )
