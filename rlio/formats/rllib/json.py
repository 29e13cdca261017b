"""RLlib's JSON lines: one batch, or one step, a line. `rlio.JsonReader` reads what `RllibJsonSink` writes.

A row has the observation that its action was chosen for (``obs``), and the reward and the observation
(``new_obs``) that followed. ``terminateds`` and ``truncateds`` are true in the last row of an episode only.
One episode is written a line, with nothing packed.

``infos`` are those of ``obs``, as RLlib has them since 2.3; the first is ``{}``. ``new_infos`` are those of
``new_obs``, which rlio reads again.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from rlio.batch.arrays import to_numpy
from rlio.batch.columns import Columns
from rlio.batch.episode import Episode
from rlio.errors import SchemaError, excerpt
from rlio.formats.format import Format, Marks
from rlio.formats.rllib.columns import NEXT_INFOS
from rlio.formats.rllib.sinks import RllibSink
from rlio.formats.sink import Origin
from rlio.storage.filesystem import Storage

FORMAT = Format(
    name="rllib-json",
    title="RLlib's JSON",
    marks=Marks(
        endings=(".json", ".jsonl", ".zip"),
        json=lambda found: found.get("type") in ("SampleBatch", "MultiAgentBatch") and "schema" not in found,
    ),
    reader="rlio.readers.json_reader:JsonReader",
    rows="rlio.formats.rllib.json_records:open_json",
    writer="rlio.formats.rllib.json:RllibJsonSink",
    loses=frozenset(("dtypes",)),
    advice="read it with rlio.JsonReader",
    about="Batches as RLlib's JsonWriter wrote them, packed columns and `dones` included.",
)


class RllibJsonSink(RllibSink):
    """Writes JSON lines of episodes; an `EpisodeSink` that continues after the files that are there.

    Agents' ids are not written.

    Args:
        storage: The folder.
        origin: What is known of the data.
        final_obs: What to do if a final observation is missing: "raise", or "repeat" the last observation.
    """

    ending = ".json"

    def __init__(self, storage: Storage, origin: Origin, *, final_obs: str = "raise") -> None:
        super().__init__(storage, final_obs)

    def _packed(self, episode: Episode) -> bytes:
        columns = {
            name: _plain(column, name)
            for name, column in episode.to_batch().items()
            if name not in (Columns.AGENT_INDEX, "agent_id")
        }
        if NEXT_INFOS in columns:
            raise SchemaError(
                "files for RLlib have infos under this name: rename the column", column=NEXT_INFOS
            )
        if infos := columns.get(Columns.INFOS):
            columns[Columns.INFOS], columns[NEXT_INFOS] = [{}, *infos[:-1]], infos
        record = {"type": "SampleBatch", **columns}
        return json.dumps(record).encode() + b"\n"

    def _encoded(self, episodes: list[bytes]) -> bytes:
        return b"".join(episodes)


def _plain(value: Any, name: str) -> Any:
    """``value`` as lists, dicts, texts and numbers."""
    if isinstance(value, tuple):
        raise SchemaError(
            "RLlib's JSON makes lists of tuples: make the column a dict or an array", column=name
        )
    if isinstance(value, dict):
        return {key: _plain(part, name) for key, part in value.items()}
    array = to_numpy(value)
    return [_item(item, name) for item in array] if array.dtype == object else array.tolist()


def _item(value: Any, name: str) -> Any:
    """One object, such as an info."""
    if isinstance(value, dict):
        return {str(key): _item(part, name) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_item(part, name) for part in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return _item(value.tolist(), name)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise SchemaError(f"JSON has no {type(value).__name__} ({excerpt(value, 80)})", column=name)
