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

from rlio.batch.columns import Columns
from rlio.formats.episode_files import EpisodeFilesSink
from rlio.formats.files.value_arrays import FLOATS
from rlio.formats.format import Format, Holds, Marks
from rlio.formats.rllib.columns import NEXT_INFOS
from rlio.formats.sink import Origin, PreparedEpisode
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
    holds=Holds(
        obs="dicts",
        actions="dicts",
        extra="dicts",
        texts=frozenset(("obs", "actions", "extra")),
        text_axes=32,
        reserved=f"{NEXT_INFOS}|type",
        floats=FLOATS,
        final_obs="needed",
        infos=True,
        dtypes=False,
    ),
    advice="read it with rlio.JsonReader",
    about="Batches as RLlib's JsonWriter wrote them, packed columns and `dones` included.",
)


class RllibJsonSink(EpisodeFilesSink):
    """Writes JSON lines of episodes; an `EpisodeSink` that continues after the files that are there.

    Args:
        storage: The folder.
        origin: What is known of the data.
    """

    ending = ".json"

    def __init__(self, storage: Storage, origin: Origin) -> None:
        super().__init__(storage)

    def _part(self, episode: PreparedEpisode) -> bytes:
        rows = episode.rows()
        del rows[Columns.NEXT_OBS_VALID]  # RLlib's batches have all observations.
        columns = {name: _plain(column) for name, column in rows.items()}
        if infos := columns.get(Columns.INFOS):
            columns[Columns.INFOS], columns[NEXT_INFOS] = [{}, *infos[:-1]], infos
        return json.dumps({"type": "SampleBatch", **columns}).encode() + b"\n"

    def _encoded(self, episodes: list[bytes]) -> bytes:
        return b"".join(episodes)


def _plain(value: Any) -> Any:
    """``value`` as lists, dicts, texts and numbers."""
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (np.ndarray, np.generic)):
        plain = value.tolist()
        return _plain(plain) if value.dtype == object else plain
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value
