"""Kinds of files that rlio does not read, each with the way to read it: they are refused by name."""

from __future__ import annotations

from typing import Final

from rlio.formats.format import Format, Marks, with_all_of

__all__ = ["FORMATS"]

_ARRAYS: Final = "pass its arrays to rlio.from_arrays(arrays, mapping=rlio.Mapping(columns=...))"
_EPISODES: Final = "pass its episodes to rlio.from_episodes(episodes)"


def _refused(name: str, title: str, endings: tuple[str, ...], advice: str) -> Format:
    return Format(name=name, title=title, marks=Marks(endings=endings, by_ending=True), advice=advice)


FORMATS: Final = (
    _refused(
        "pickle",
        "a pickle",
        (".pkl", ".pickle", ".p", ".joblib", ".dill", ".cloudpickle"),
        "rlio unpickles nothing, because a pickle runs code. If you trust the file, load it yourself "
        f"(pickle.load), and {_ARRAYS}, or {_EPISODES}",
    ),
    _refused(
        "npy",
        "a file of NumPy's .npy",
        (".npy",),
        f"it is one array without a name. Load the files with numpy.load(path), and {_ARRAYS}",
    ),
    _refused(
        "torch",
        "a file of torch.save",
        (".pt", ".pth"),
        "it is a pickle, of which rlio reads none. Load it with torch.load(path, weights_only=True), and "
        f"{_ARRAYS}, or {_EPISODES}",
    ),
    _refused(
        "compressed",
        "a compressed file",
        (".gz", ".bz2", ".xz", ".zst", ".lz4", ".tar", ".tgz", ".7z", ".rar"),
        "unpack it (gunzip, tar -xf, unzstd), and pass the file or folder that comes out",
    ),
    _refused(
        "mcap",
        "a recording of ROS",
        (".mcap", ".bag", ".db3"),
        "it has messages by topic, not steps. Read them with the package mcap (or rosbags), take one value a "
        f"step, and {_ARRAYS}",
    ),
    _refused(
        "demo",
        "a demonstration of Unity ML-Agents",
        (".demo",),
        f"load it with mlagents.trainers.demo_loader.load_demonstration, and {_EPISODES}",
    ),
    _refused(
        "matlab",
        "a file of MATLAB",
        (".mat",),
        f"load it with scipy.io.loadmat (or h5py, from version 7.3 on), and {_ARRAYS}",
    ),
    _refused(
        "lance",
        "a data set of Lance",
        (".lance",),
        "load it with lance.dataset(path).to_table(), and pass the table to "
        "rlio.read(table, mapping=rlio.Mapping(columns=...))",
    ),
    _refused(
        "excel",
        "a spreadsheet",
        (".xlsx", ".xls", ".ods"),
        "load it with pandas.read_excel(path), and pass the frame to "
        "rlio.read(frame, mapping=rlio.Mapping(columns=...))",
    ),
    Format(
        name="vault",
        title="Flashbax Vault",  # Arrays of zarr in one OCDBT store.
        marks=Marks(json=with_all_of({"structure_shape", "structure_dtype"})),
        advice=(
            "rlio does not read it yet; load it with its own library and write each episode as a SampleBatch "
            "(obs, new_obs, actions, rewards, terminateds, truncateds, eps_id, t) with rlio.ParquetWriter"
        ),
    ),
)
