"""Videos whose frames are rows: how they are read, and how a root keeps them. docs/design/videos.md.

A row names a video by the digest of its bytes, and a frame by its presentation time. A root has each video
once, as it was: ``_videos/<digest>.mp4``.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.batch.arrays import object_column
from rlio.batch.encoded_picture import EncodedPicture, VideoFrame, is_encoded
from rlio.batch.nested import leaves, map_structure
from rlio.catalog.names import VIDEO_DIR, video_path
from rlio.errors import CorruptData, DataNotFound, RlioError, SchemaError, excerpt, raise_at
from rlio.storage.filesystem import Storage
from rlio.support.extras import needs

__all__ = ["VideoStream", "Videos", "keep_videos", "video_library"]

DIGEST_BYTES: Final = 16
# Videos that stay open, of the whole process. Each has some frames in memory.
_OPEN: Final = 8
# Bytes of a video that are read at once: by a decoder, from a disk and from a remote store; and by a check.
_BUFFER: Final = 1 << 20
_REMOTE_BUFFER: Final = 4 << 20
_PIECE: Final = 8 << 20
# Up to so many frames ahead, a decoder goes on; it seeks what is further away.
_AHEAD: Final = 32


def video_library(what: str = "frames of videos") -> Any:
    """PyAV.

    Raises:
        MissingExtra: It is not installed.
    """
    with needs(f"PyAV, for {what},", "video"):
        return import_module("av")  # It has types, but is installed with the extra alone.


class VideoStream:
    """The first video stream of an MP4 file; a `rlio.batch.encoded_picture.FrameStream`. Can be pickled.

    Frames in order are decoded once: the decoder stays open, and goes on. For any number of threads.

    Args:
        storage: The folder of the file.
        path: Its path there.
        size: Bytes of the file; None: they are counted.
        digest: That of its bytes, which are checked before the first frame is decoded; None: any bytes are
            accepted.
    """

    def __init__(
        self, storage: Storage, path: str, *, size: int | None = None, digest: bytes | None = None
    ) -> None:
        self._storage, self._path, self._size = storage, path, size
        self._expected = self._digest = digest
        self._is_checked = digest is None
        self._lock = threading.RLock()
        self._looked: tuple[Any, Any] | None = None
        self._decoder: _Decoder | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _stream, (self._storage, self._path, self._size, self._expected)

    def __repr__(self) -> str:
        return f"VideoStream({self.uri!r})"

    @property
    def uri(self) -> str:
        """Where it is, for messages."""
        return self._storage.uri_of(self._path)

    @property
    def digest(self) -> bytes:
        """16 bytes: the BLAKE2b of the file."""
        with self._lock:
            if self._digest is None:
                self._size, self._digest = self._measured()
            return self._digest

    def content(self) -> bytes:
        """The bytes of the file.

        Raises:
            CorruptData: It has other bytes than those of the digest.
        """
        data = self._found(lambda: self._storage.read(self._path))
        if hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest() != self.digest:
            raise self._changed()
        return data

    def times(self, begin: float, count: int, fps: float) -> tuple[list[int], tuple[int, ...]]:
        """The times of consecutive frames, and the shape of each.

        Args:
            begin: The time of the first one, in seconds after the first frame of the video.
            count: How many.
            fps: Frames a second.

        Raises:
            CorruptData: There are fewer frames, or one is not where it should be.
        """
        with self._looked_at() as (container, video):
            unit, start = float(video.time_base), video.start_time or 0
            low, high = (start + (begin + frames / fps) / unit for frames in (-0.5, count + 0.5))
            found = []
            for packet in _packets(container, video, round(low)):
                # No frame is shown before it is decoded.
                if packet.dts is not None and packet.dts > high:
                    break
                if packet.pts is not None and packet.pts >= low and not packet.is_discard:
                    found.append(packet.pts)
            times, shape = sorted(found)[:count], (video.height, video.width, 3)
        for number, time in enumerate(times):
            seconds, expected = (time - start) * unit, begin + number / fps
            if abs(seconds - expected) > 0.5 / fps:
                raise CorruptData(
                    f"frame {number} from {begin} seconds on is at {seconds:.4f} seconds, expected "
                    f"{expected:.4f}: frames are missing, or the video has not {fps:g} frames a second",
                    uri=self.uri,
                )
        if len(times) < count:
            raise CorruptData(
                f"the video has {len(times)} frames from {begin} seconds on, expected {count}", uri=self.uri
            )
        return times, shape

    def seconds(self, times: Sequence[int]) -> list[float]:
        """When frames are shown, in seconds after the first frame of the video."""
        with self._looked_at() as (_, video):
            unit, start = video.time_base, video.start_time or 0
            return [float((time - start) * unit) for time in times]

    def about(self) -> dict[str, Any]:
        """Facts of the stream: ``codec``, ``pix_fmt``."""
        with self._looked_at() as (_, video):
            codec = video.codec_context.codec
            name = getattr(codec, "canonical_name", codec.name)
            return {"codec": name, "pix_fmt": video.codec_context.pix_fmt}

    @contextmanager
    def _looked_at(self) -> Iterator[tuple[Any, Any]]:
        """The open file, of which no frame is decoded: its header has the places of all frames."""
        _use(self)
        with self._lock, _explained(self.uri):
            try:
                if self._looked is None:
                    self._looked = self._opened()
                yield self._looked
            except BaseException:
                self._close_looked()
                raise

    def frames(self, times: Sequence[int], shape: tuple[int, ...]) -> Iterator[NDArray[np.uint8]]:
        """The frames at ascending times, each of ``shape``; the caller does not change them.

        Raises:
            CorruptData: The file is damaged or another one, or has no such frame.
        """
        for time in times:
            _use(self)
            with self._lock, _explained(self.uri):
                self._check()
                try:
                    if self._decoder is None:
                        self._decoder = _Decoder(*self._opened())
                    frame = self._decoder.at(time, shape)
                except BaseException:
                    self._close_decoder()
                    raise
            yield frame

    def close(self) -> None:
        """Close the file, which is opened again when it is needed. For who has the lock."""
        self._close_looked()
        self._close_decoder()

    # A file and its stream refer to each other. If it were not closed, the decoder would stay until the next
    # collection of garbage. In a fork, that waits for the decoder's threads, which are not there, or crashes.
    def _close_looked(self) -> None:
        looked, self._looked = self._looked, None
        if looked is not None:
            looked[0].close()

    def _close_decoder(self) -> None:
        decoder, self._decoder = self._decoder, None
        if decoder is not None:
            decoder.close()

    def _check(self) -> None:
        if self._is_checked:
            return
        self._size, found = self._measured()
        if found != self._expected:
            raise self._changed()
        self._is_checked = True

    def _changed(self) -> CorruptData:
        return CorruptData(
            "the video has other bytes than those that rows name: it is damaged, or was replaced; restore it",
            uri=self.uri,
        )

    def _measured(self) -> tuple[int, bytes]:
        """Size and digest of the file."""
        digest, size = hashlib.blake2b(digest_size=DIGEST_BYTES), 0
        while piece := self._found(lambda: self._storage.read_range(self._path, size, size + _PIECE)):  # noqa: B023
            digest.update(piece)
            size += len(piece)
        return size, digest.digest()

    def _found(self, read: Callable[[], bytes]) -> bytes:
        try:
            return read()
        except DataNotFound as error:
            if self._expected is None:
                raise
            raise CorruptData("the video that rows name is not there: restore it", uri=self.uri) from error

    def _opened(self) -> tuple[Any, Any]:
        if self._size is None:
            self._size, _ = self._measured()
        if self._storage.is_zipped:  # Each range would be unpacked from the beginning.
            file: Any = io.BytesIO(self._found(lambda: self._storage.read(self._path)))
        else:
            raw = _Ranges(self._storage, self._path, self._size)
            file = io.BufferedReader(raw, _BUFFER if self._storage.is_local else _REMOTE_BUFFER)
        container = video_library().open(file, format="mp4")
        return container, container.streams.video[0]


def _stream(storage: Storage, path: str, size: int | None, digest: bytes | None) -> VideoStream:
    return VideoStream(storage, path, size=size, digest=digest)


@contextmanager
def _explained(uri: str) -> Iterator[None]:
    """Turn the errors of PyAV into `CorruptData`."""
    try:
        yield
    except CorruptData as error:
        raise_at(error, uri=uri)
    except RlioError:
        raise
    except (video_library().FFmpegError, IndexError, ValueError, TypeError, ZeroDivisionError) as error:
        raise CorruptData(f"not readable as a video: {excerpt(str(error))}", uri=uri) from error


def _packets(container: Any, video: Any, time: int) -> Iterator[Any]:
    """Packets from a keyframe on that is shown at ``time``, or before."""
    target, before = time, None
    while True:
        container.seek(target, stream=video, backward=True)
        packets = container.demux(video)
        first = next(packets)
        # It sought by when frames are decoded: a frame that is shown earlier may be decoded before this one.
        if None in (first.pts, first.dts) or first.pts <= time or first.dts == before:
            return chain([first], packets)
        target, before = first.dts - 1, first.dts


class _Decoder:
    """A video that is decoded from its beginning on, or from where it was sought."""

    def __init__(self, container: Any, video: Any) -> None:
        self._container, self._video = container, video
        self._frames: Iterator[Any] | None = None
        self._at = self._reach = 0
        # The new_obs of the last row of a group is the obs of the first row of the next one.
        self._last: NDArray[np.uint8] | None = None

    def at(self, time: int, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """The frame that is shown at ``time``."""
        if self._last is not None and time == self._at:
            return self._last
        if self._frames is None:
            self._check_size(self._video, shape)
            self._reach = round(_AHEAD / (self._video.average_rate or 1) / self._video.time_base)
        if self._frames is None or not self._at < time <= self._at + self._reach:
            packets = _packets(self._container, self._video, time)
            self._frames = (frame for packet in packets for frame in packet.decode())
        self._last = None
        for frame in self._frames:
            if frame.pts is None or frame.pts < time:
                self._at = self._at if frame.pts is None else frame.pts
                continue
            self._at = frame.pts
            if frame.pts > time:
                break
            self._check_size(frame, shape)
            if frame.is_corrupt:
                raise CorruptData(f"the frame at {time} is damaged")
            self._last = frame.to_ndarray(format="rgb24")
            return self._last
        raise CorruptData(f"the video has no frame at {time}")

    def close(self) -> None:
        """Close the file; the decoder is freed with this object."""
        self._frames = None
        if hasattr(decoder := self._video.codec_context, "close"):  # In PyAV 12, the file's does not do it.
            decoder.close(strict=False)
        self._container.close()

    def _check_size(self, found: Any, shape: tuple[int, ...]) -> None:
        if (found.height, found.width, 3) != shape:
            raise CorruptData(
                f"found a video of {found.height} x {found.width} pixels, expected {shape[0]} x {shape[1]}"
            )


class _Ranges(io.RawIOBase):
    """An object of a storage as a file, which holds nothing open."""

    def __init__(self, storage: Storage, path: str, size: int) -> None:
        self._storage, self._path, self._size, self._at = storage, path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._storage.read_range(
            self._path, self._at, max(self._at, min(self._at + len(buffer), self._size))
        )
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


# ---- open decoders of the process ----

_recent: OrderedDict[VideoStream, None] = OrderedDict()
_recent_lock = threading.Lock()
#: Decoders of the parent of a fork, whose threads are not here: they are never freed.
_of_parent: list[Any] = []


def _use(stream: VideoStream) -> None:
    """Note that a video is in use; close the one that was used longest ago."""
    with _recent_lock:
        _recent[stream] = None
        _recent.move_to_end(stream)
        oldest = _recent.popitem(last=False)[0] if len(_recent) > _OPEN else None
    if oldest is not None and oldest._lock.acquire(blocking=False):
        try:
            oldest.close()
        finally:
            oldest._lock.release()


def _let_go_in_child() -> None:
    global _recent_lock
    _recent_lock = threading.Lock()
    for stream in _recent:
        _of_parent.append((stream._looked, stream._decoder))
        stream._looked = stream._decoder = None
        stream._lock = threading.RLock()
    _recent.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)


# ---- videos of a root ----


class Videos:
    """The videos of a root; each is checked once, before its first frame is decoded.

    Args:
        storage: The root.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._streams: dict[bytes, VideoStream] = {}

    def known(self, batch: SampleBatch | MultiAgentBatch) -> SampleBatch | MultiAgentBatch:
        """Return rows of a shard whose frames of videos can be decoded.

        Raises:
            CorruptData: A row names no frame.
        """
        if isinstance(batch, MultiAgentBatch):
            parts = {pid: self._known(rows) for pid, rows in batch.items()}
            return MultiAgentBatch(parts, batch.env_steps())
        return self._known(batch)

    def _known(self, rows: SampleBatch) -> SampleBatch:
        return rows._like({name: map_structure(self._column, column) for name, column in rows.items()})

    def _column(self, leaf: Any) -> Any:
        if not is_encoded(leaf) or leaf[0].codec != "video":
            return leaf
        return object_column(map(self._frame, leaf.tolist()))

    def _frame(self, picture: EncodedPicture) -> EncodedPicture:
        data = picture.data
        if picture.is_none or isinstance(picture, VideoFrame):
            return picture
        if len(data) != DIGEST_BYTES + 8:
            raise CorruptData(f"found {len(data)} bytes, expected the {DIGEST_BYTES + 8} that name a frame")
        digest = data[:DIGEST_BYTES]
        stream = self._streams.get(digest)
        if stream is None:
            stream = VideoStream(self._storage, video_path(digest.hex()), digest=digest)
            self._streams[digest] = stream
        return VideoFrame(stream, int.from_bytes(data[DIGEST_BYTES:], "little", signed=True), picture.shape)


def keep_videos(batch: SampleBatch | MultiAgentBatch, storage: Storage, kept: set[bytes]) -> None:
    """Store the videos whose frames are rows in a root, before the rows: no row names one that is not there.

    Args:
        batch: The rows.
        storage: The root.
        kept: Digests of those that it has; gets the others.

    Raises:
        CorruptData: One has changed since it was looked at.
        PublishError: One cannot be stored.
        SchemaError: Rows name a video that is not there.
    """
    for rows in batch.policies().values():
        for column in rows.values():
            for _, leaf in leaves(column):
                if is_encoded(leaf) and leaf[0].codec == "video":
                    _keep(leaf.tolist(), storage, kept)


def _keep(column: Iterable[EncodedPicture], storage: Storage, kept: set[bytes]) -> None:
    # One of each video.
    found = {
        picture.stream if isinstance(picture, VideoFrame) else picture.data[:DIGEST_BYTES]: picture
        for picture in column
        if not picture.is_none
    }
    for picture in found.values():
        digest = picture.data[:DIGEST_BYTES]
        if digest in kept:
            continue
        path = video_path(digest.hex())
        if not storage.exists(path):
            if not isinstance(picture, VideoFrame):
                raise SchemaError(f"rows name the video {digest.hex()}, which is not in {VIDEO_DIR}/")
            storage.put(path, picture.stream.content())
        kept.add(digest)
