"""`D4RLReader`: HDF5 files in D4RL's flat layout, one dataset a column and one row a step.

h5py (extra ``hdf5``) reads HDF5. Links to other places, virtual and external data, and compression plug-ins
are refused, so an untrusted file cannot reach outside itself.

Not here: the layout (`rlio.formats.d4rl.source`).

Example:
    >>> import io, h5py, numpy as np
    >>> from rlio.storage import Storage
    >>> stream = io.BytesIO()
    >>> with h5py.File(stream, "w") as file:
    ...     for name, values in {"observations": [[0.0], [1.0], [2.0]], "actions": [[1.0]] * 3}.items():
    ...         file[name] = np.array(values, np.float32)
    ...     file["rewards"], file["terminals"] = np.ones(3, np.float32), np.array([False, True, False])
    >>> Storage.open("memory://d4rl-example").put("a.hdf5", stream.getvalue())
    >>> with D4RLReader("memory://d4rl-example/a.hdf5", epochs=1) as reader:
    ...     batch = reader.sample()
    >>> batch["eps_id"].tolist(), batch["new_obs"].tolist(), batch["new_obs_valid"].tolist()
    ([0, 0, 1], [[1.0], [0.0], [0.0]], [True, False, False])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from rlio.formats.d4rl.sink import FORMAT
from rlio.formats.d4rl.source import D4rlSource
from rlio.formats.files.inputs import FileOptions, find_files
from rlio.formats.place import episode_files
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.readers.episode_reader import EpisodeReader
from rlio.readers.source_reader import Asked, SourceKeywords
from rlio.storage.filesystem import StrPath
from rlio.support.options import check_count, checked_keywords
from rlio.support.spaces import Spaces

__all__ = ["D4RLReader"]


class D4RLReader(EpisodeReader):
    """Reads HDF5 files in D4RL's layout.

    Columns are ``obs, actions, rewards, terminateds, new_obs, eps_id, t``; ``truncateds`` if the file has
    timeouts; ``new_obs_valid`` if it has no next observations; ``action_logp`` if it has them. Other datasets
    with a row a step keep their HDF5 path as name (``infos/qpos``). Episodes end at terminals and timeouts,
    and are numbered across all files; a tail without either keeps both flags false. All options are those of
    `rlio.DatasetReader`, except ``at``. With ``on_error="skip"``, `skipped` counts
    damaged episodes, and files that cannot be opened.

    Several threads may call it: see `rlio.InputReader`.

    Args:
        inputs: A file, folder, glob or URI, or a list of those. In folders, every ``*.hdf5`` and ``*.h5`` is
            read.
        max_episode_steps: Time limit of the environment, for old files without timeouts: an episode that
            reaches it is truncated there.
        spaces: (observation space, action space), if the files do not state them; None: not known.
        limits: Limits on the files' demands.
        storage_options: Keywords of the fsspec filesystem.
        keywords: What is read, in which order, what a unit is, and where rows are kept: see
            `rlio.DatasetReader`. A text as
            ``columns`` (``"intersect"``, ``"fill"``) is for files with different columns.

    Raises:
        MissingExtra: h5py is not installed.
        DataNotFound: ``inputs`` name no file, or the files hold no row.
        CorruptData: A file is not HDF5, or is damaged. (UnsafeData: it leads out of itself, or needs a
            plug-in.)
        SchemaError: A file is not in D4RL's layout, or differs from the first.
    """

    @checked_keywords
    def __init__(
        self,
        inputs: StrPath | Sequence[StrPath],
        *,
        max_episode_steps: int | None = None,
        spaces: Spaces | None = None,
        limits: Limits = DEFAULT_LIMITS,
        storage_options: Mapping[str, Any] | None = None,
        **keywords: Unpack[SourceKeywords],
    ) -> None:
        asked = Asked.of(keywords)  # Raises before anything is opened.
        steps = check_count("max_episode_steps", max_episode_steps, least=1, of="steps", none="no limit")
        how = asked.opening(FileOptions(spaces=spaces, storage_options=storage_options, limits=limits))
        files = find_files(inputs, how, suffixes=FORMAT.marks.endings)
        source = D4rlSource(files, asked.options, max_episode_steps=steps, limits=limits)
        own = {} if steps is None else {"max_episode_steps": steps}
        self._begin(episode_files(source, FORMAT, own, how), asked)
