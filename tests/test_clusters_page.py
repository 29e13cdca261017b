"""docs/clusters.md is true: its programs run, and logs are where it says and recovered as it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash_child import fork, wait_for
from pages import blocks_of, commands_of, run_command, run_page
from typer.testing import CliRunner

import rlio
from rlio.cli import main as cli
from rlio.log.spool import host_id

ROWS = 10


def page(checkout: Path) -> Path:
    return checkout / "docs" / "clusters.md"


def test_its_blocks_print_what_it_says(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_page(page(checkout), tmp_path)
    printed = capsys.readouterr().out.splitlines()
    assert printed[1:] == ["True 10 0", "10 10"]
    writer, log = printed[0].split()
    assert log == str(tmp_path / "runs" / "cluster" / "_wal" / writer)


def train_py(checkout: Path, folder: Path) -> Path:
    """The training program of the page, which meets in a file: torch opens TCP ports on all interfaces."""
    run_page(page(checkout), folder)
    script = folder / "train.py"
    text = script.read_text()
    for said, done, times in (
        ('"env://"', f'f"file://{folder}/meeting-{{world}}"', 2),
        ("step % 5 == 0", "step == 5", 1),
        ("policy.learn_on_batch(batch)", 'policy.learn_on_batch(batch); print("a batch")', 1),
    ):
        assert text.count(said) == times
        text = text.replace(said, done)
    script.write_text(text)
    return script


def test_the_training_program_goes_on_from_its_checkpoint(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one process alone; with torchrun it is `further`."""
    script = train_py(checkout, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    capsys.readouterr()
    for batches in (10, 5):  # 600 rows, 60 a batch; then the half that came after the checkpoint.
        (tmp_path / "meeting-1").unlink(missing_ok=True)
        run_command(["python", script.name], "clusters.md")
        assert capsys.readouterr().out.splitlines() == [*["a batch"] * batches, "rank 0 of 1: 10 updates"]


@pytest.mark.further
@pytest.mark.skipif(sys.platform != "linux", reason="the name of the loopback interface is Linux's")
def test_torchrun_trains_with_two_processes_and_one_goes_on(checkout: Path, tmp_path: Path) -> None:
    (command,) = (
        commands_of(block.code)[0] for block in blocks_of(page(checkout)) if Path(__file__).name in block.why
    )
    assert command == ["torchrun", "--standalone", "--nproc-per-node", "2", "train.py"]
    train_py(checkout, tmp_path)
    ended = [f"rank {rank} of 2: 10 updates" for rank in range(2)]
    assert torchrun(tmp_path, processes=2) == [*["a batch"] * 20, *ended]
    # Half of the epoch is behind the checkpoint.
    assert torchrun(tmp_path, processes=1) == [*["a batch"] * 5, "rank 0 of 1: 10 updates"]


def torchrun(folder: Path, *, processes: int) -> list[str]:
    """Run train.py there; the lines that its processes printed, sorted."""
    # A file for each process: lines of two processes would run into each other in one pipe.
    logs = folder / f"logs-{processes}"
    arguments = {"nnodes": "1", "nproc-per-node": str(processes), "rdzv-backend": "c10d"}
    arguments |= {"redirects": "3", "log-dir": str(logs)}
    arguments |= {"rdzv-conf": "store_type=file", "rdzv-endpoint": f"{folder}/rendezvous-{processes}"}
    options = [f"--{name}={value}" for name, value in arguments.items()]
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, "train.py"],
        cwd=folder,
        env={**os.environ, **loopback},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    printed = {name: list(logs.rglob(f"{name}.log")) for name in ("stdout", "stderr")}
    errors = [done.stderr, *(file.read_text() for file in printed["stderr"])]
    assert done.returncode == 0, "\n".join(errors)
    assert len(printed["stdout"]) == processes
    return sorted(line for file in printed["stdout"] for line in file.read_text().splitlines())


def test_processes_record_unlike_episodes_under_their_own_writers(checkout: Path, tmp_path: Path) -> None:
    for _ in range(2):
        run_page(page(checkout), tmp_path)
    table = rlio.open_dataset(tmp_path / "runs" / "cluster").to_arrow(columns=["eps_id"], writers=True)
    episodes: dict[str, set[int]] = {}
    for writer, episode in zip(table["_writer"].to_pylist(), table["eps_id"].to_pylist(), strict=True):
        episodes.setdefault(writer, set()).add(episode)
    one, other = episodes.values()
    assert not one & other


def killed_writer(root: Path, **options: Any) -> Path:
    """The log of a writer that was killed before anything was published."""

    def act() -> None:
        writer = rlio.ParquetWriter(root, **options)
        writer.write(rlio.SampleBatch(t=np.arange(ROWS)))
        (root.parent / "log").write_text(writer.logs[0].folder)
        os._exit(0)

    assert wait_for(fork(act)) == 0
    return Path((root.parent / "log").read_text())


def recover(*arguments: object) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(cli.app, ["recover", *map(str, arguments), "--json"])
    return done.exit_code, json.loads(done.stdout)


def test_the_log_of_a_process_that_died_is_recovered_on_its_node(tmp_path: Path) -> None:
    root = tmp_path / "root"
    log = killed_writer(root)
    assert log.parent == root / "_wal"
    code, report = recover(root)
    assert (code, report["rows"]) == (0, ROWS)
    assert len(rlio.open_dataset(root)) == ROWS


def test_the_log_of_another_host_stays_until_all_hosts_are_asked_for(tmp_path: Path) -> None:
    root = tmp_path / "root"
    owner = killed_writer(root) / "owner"
    owner.write_text(owner.read_text().replace(host_id(), "0" * len(host_id())))
    code, report = recover(root)
    assert (code, report["rows"], report["logs"][0]["outcome"]) == (1, 0, "other-host")
    assert recover(root, "--all-hosts")[1]["rows"] == ROWS


def test_a_log_on_a_disk_that_was_moved_is_recovered_from_its_new_folder(tmp_path: Path) -> None:
    root = tmp_path / "root"
    log = killed_writer(root, spool=tmp_path / "local")
    assert log.parent.parent == tmp_path / "local"
    (tmp_path / "local").rename(tmp_path / "moved")
    assert recover(root, "--spool", tmp_path / "moved", "--all-hosts")[1]["rows"] == ROWS


def test_logs_of_a_root_on_a_network_filesystem_or_a_store_lie_in_the_users_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlio.log.spool.on_network", lambda path: True)
    monkeypatch.setenv("RLIO_SPOOL", str(tmp_path / "local"))
    log = killed_writer(tmp_path / "shared")
    assert log.parent.parent == tmp_path / "local"
    assert recover(tmp_path / "shared")[1]["rows"] == ROWS
