"""The rows of the golden data sets, made by arithmetic alone, and the script that wrote them.

`python tests/golden_data.py FOLDER` writes the files of the present format into FOLDER/data, and logs of
writers that were killed into FOLDER/logs. The files under tests/golden/ stay readable for ever once a format
is released. Those of version 0 may still be replaced, except that the format before the present one stays:
in `format-0-new_obs`, the physical column of ``new_obs`` has that name, in `format-0` it is ``_new_obs``, and
in `format-0-infos` keys of infos are columns of Parquet.
"""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path
from unittest import mock

import gymnasium as gym
import numpy as np
from gymnasium.spaces import GraphInstance

import rlio
from rlio.batch.arrays import object_column
from rlio.batch.picture_codecs import encode_column
from rlio.log import spool


def cartpole_like() -> rlio.SampleBatch:
    """Two interleaved environments, episodes of 7 rows, infos, text, a missing final observation."""
    rows = np.arange(60)
    env, step = rows % 2, rows // 2
    t = step % 7
    obs = (np.stack([step, env, t, step * 0.5], axis=1) / 8).astype(np.float32)
    new_obs = (np.stack([step + 1, env, t + 1, (step + 1) * 0.5], axis=1) / 8).astype(np.float32)
    valid = rows != 59
    new_obs[~valid] = 0
    infos = np.array([{"lives": int(k), "p": np.float32([k / 4])} if k % 3 else {} for k in t], object)
    return rlio.SampleBatch(
        obs=obs,
        actions=(rows % 2).astype(np.int64),
        rewards=np.where(t == 6, np.nan, t * 0.25).astype(np.float32),
        terminateds=t == 6,
        truncateds=rows == 59,
        new_obs=new_obs,
        new_obs_valid=valid,
        infos=infos,
        eps_id=(1000 + step // 7 * 2 + env).astype(np.int64),
        env_id=env.astype(np.int32),
        t=t.astype(np.int64),
        language=np.array([f"goal {k}" for k in t], object),
    )


def frames() -> rlio.SampleBatch:
    """Stacks of four frames over two episodes, and a nested action."""
    step = np.arange(24) % 12
    frame = (np.arange(40)[:, None, None] * np.arange(1, 37).reshape(6, 6)).astype(np.uint8)
    episode = np.arange(24) // 12 * 16
    index = episode[:, None] + step[:, None] + np.arange(4)
    return rlio.SampleBatch(
        obs=np.moveaxis(frame[index], 1, -1).copy(),
        new_obs=np.moveaxis(frame[index + 1], 1, -1).copy(),
        actions={"move": step.astype(np.int8), "aim": (step.astype(np.float64)[:, None] / 3, step % 5 == 0)},
        rewards=step.astype(np.float64),
        terminateds=step == 11,
        eps_id=(np.arange(24) // 12).astype(np.int64),
    )


def sequences() -> rlio.SampleBatch:
    """Three sequences with recurrent state."""
    return rlio.SampleBatch(
        {
            "obs": np.arange(12, dtype=np.float16).reshape(6, 2),
            "rewards": np.arange(6, dtype=">f4"),
            "seq_lens": np.array([2, 3, 1], np.int32),
            "state_in_0": np.arange(12, dtype=np.float32).reshape(3, 4),
        },
        max_seq_len=3,
    )


def two_policies() -> rlio.MultiAgentBatch:
    """Two policies with spaces of their own over three joint steps; one agent dies early."""
    return rlio.MultiAgentBatch(
        {
            "walker": rlio.SampleBatch(
                obs=np.arange(6, dtype=np.float32).reshape(3, 2),
                actions=np.array([0, 1, 0]),
                eps_id=np.array([5, 5, 5]),
                t=np.arange(3),
            ),
            "flyer": rlio.SampleBatch(
                obs=np.arange(6, dtype=np.float64).reshape(2, 3),
                actions=np.array([[0.5], [-0.5]]),
                eps_id=np.array([5, 5]),
                t=np.arange(2),
            ),
        },
        env_steps=3,
    )


def agents() -> rlio.MultiAgentBatch:
    """Four policies whose observations differ, and one whose two agents take turns."""
    t = np.arange(5)
    steps = {"eps_id": np.full(5, 3), "t": t, "terminateds": t == 4}
    turns = np.arange(12).reshape(6, 2)
    valid = np.arange(10) < 9
    camera = (turns[..., None, None] + np.arange(4).reshape(2, 2)).astype(np.uint8)
    speed = turns[..., None] / np.float32(4)
    seen, known = (values[:5].reshape(10, *values.shape[2:]) for values in (camera, speed))
    later, then = (values[1:].reshape(10, *values.shape[2:]).copy() for values in (camera, speed))
    later[~valid], then[~valid] = 0, 0
    words = np.array([f"word {k}" for k in range(6)], object)
    return rlio.MultiAgentBatch(
        {
            "walker": rlio.SampleBatch(
                obs={"camera": seen, "speed": known},
                new_obs={"camera": later, "speed": then},
                new_obs_valid=valid,
                agent_index=np.tile([0, 1], 5),
                eps_id=np.full(10, 3),
                t=np.repeat(t, 2),
                terminateds=np.repeat(t == 4, 2) & valid,
            ),
            "flyer": rlio.SampleBatch(
                obs=np.arange(15, dtype=np.float64).reshape(5, 3),
                new_obs=np.arange(3, 18, dtype=np.float64).reshape(5, 3),
                **steps,
            ),
            "diver": rlio.SampleBatch(
                obs=np.arange(10, dtype=np.float32).reshape(5, 2),
                new_obs=np.arange(2, 12, dtype=np.float32).reshape(5, 2),
                **steps,
            ),
            "caller": rlio.SampleBatch(obs=words[:5], new_obs=words[1:], **steps),
        },
        env_steps=5,
    )


def parts() -> rlio.SampleBatch:
    """Lists of numbers and of texts, tuples of arrays, graphs as observations, and pictures."""
    rows = range(11)

    def graph(n: int) -> GraphInstance:
        count = n % 3
        links = np.array([[0, 1]] * count, np.int32) if count else None
        edges = np.full((count, 1), n, np.float64) if count else None
        return GraphInstance(np.full((2, 3), n, np.float32), edges, links)

    return rlio.SampleBatch(
        obs=object_column(graph(n) for n in rows),
        new_obs=object_column(graph(n + 1) for n in rows),
        actions=object_column((np.int64(n),) * (n % 3) for n in rows),
        eps_id=np.full(11, 4),
        t=np.arange(11),
        tokens=object_column(np.full(n % 4, n, np.int32) for n in rows),
        words=object_column([f"word {n}"] * (n % 3) for n in rows),
        names=object_column(np.array([f"name {n}", "x"]) for n in rows),
        camera=encode_column(np.arange(11 * 12, dtype=np.uint8).reshape(11, 2, 2, 3)),
    )


def times() -> rlio.SampleBatch:
    """Dates and durations of NumPy, in units with and without an Arrow type, some of them unknown."""
    units = ("D", "h", "s", "ms", "us", "ns", "M", "25s")
    counts = np.array([0, -1, 19_700, 5, -40_000])
    columns = {f"at_{unit}": counts.astype(f"M8[{unit}]") for unit in units}
    columns |= {"swapped": counts.astype(">M8[us]"), "lasts": counts.astype("m8[ms]")}
    for values in columns.values():
        values[3] = "NaT"
    pairs = np.stack([columns["at_us"], columns["at_us"]], axis=1)
    moments = np.arange(6).astype("M8[us]")
    return rlio.SampleBatch(
        eps_id=np.full(5, 4), t=np.arange(5), obs=moments[:5], new_obs=moments[1:], pairs=pairs, **columns
    )


def dates() -> rlio.SampleBatch:
    """Dates of Python, alone, in lists and in infos."""
    moments = [datetime.datetime(2026, 1, 31, hour, microsecond=hour) for hour in range(4)]
    return rlio.SampleBatch(
        eps_id=np.full(4, 4),
        t=np.arange(4),
        moments=object_column(moments),
        utc=object_column(moment.replace(tzinfo=datetime.UTC) for moment in moments),
        days=object_column(moment.date() for moment in moments),
        lists=object_column([moment] * number for number, moment in enumerate(moments)),
        infos=object_column({"day": moment.date(), "hour": moment.hour} for moment in moments),
    )


DATA_SETS = {
    "agents": agents,
    "cartpole_like": cartpole_like,
    "dates": dates,
    "frames": frames,
    "parts": parts,
    "sequences": sequences,
    "times": times,
    "two_policies": two_policies,
}


def write(folder: Path) -> None:
    """Write every data set twice, as Parquet and as JSON, with fixed ids."""
    spaces = {"default_policy": (gym.spaces.Box(-8, 8, (4,), np.float32), gym.spaces.Discrete(2))}
    for name, make in DATA_SETS.items():
        fixed = {"writer_id": "w00000-00000000", "spaces": spaces if name == "cartpole_like" else None}
        with rlio.ParquetWriter(folder / f"{name}.parquet", **fixed) as writer:
            writer.write(make())
        with rlio.JsonWriter(folder / f"{name}.jsonl", **fixed) as writer:
            writer.write(make())


def write_logs(folder: Path) -> None:
    """Write logs of Parquet writers that were killed before they stored a row."""
    for name in ("agents", "cartpole_like", "frames"):
        child = os.fork()
        if not child:
            # The files say nothing of where they were made.
            with mock.patch.multiple(spool, host_id=lambda: "elsewhere", boot_id=lambda: ""):
                writer = rlio.ParquetWriter(folder / name, writer_id="w00000-00000000")
                writer.write(DATA_SETS[name]())
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    write(Path(sys.argv[1]) / "data")
    write_logs(Path(sys.argv[1]) / "logs")
