"""Every example runs as its docstring says."""

import operator
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from pages import blocks, commands_of

#: They need libraries that are not installed here; tests/integrations runs them.
ELSEWHERE = ("d3rlpy_cql.py", "rllib_bc.py", "sb3_warm_start.py", "torchrl_sac.py")
EXAMPLES = sorted(
    path for path in (Path(__file__).parents[1] / "examples").glob("*.py") if path.name not in ELSEWHERE
)
ARGUMENTS = {"clone_from_log.py": ["out"], "convert_rllib.py": ["old/*.json", "out"]}
RETURN = re.compile(r"(-?\d+) (?:in|after|of|if)")
REWARDS = re.compile(r"mean reward: ([\d.]+) at first, ([\d.]+) at last")
NAME = operator.attrgetter("name")
LINUX = sys.platform == "linux"
PRINTS = {
    "atari.py": "uint8 (32, 4, 84, 84)",
    "custom_reader.py": "12 of 16 rows are from the file",
    "custom_writer.py": "300 steps are stored",
    "data_parallel.py": "each of 1600 rows was served once: to 2, and then to 1 processes",
    "external_client.py": "has learned",
    "llm_rollouts.py": "no group was lost",
    "log_metrics.py": "the return of episodes was 31.9",
    "multi_agent.py": "200 steps, {'lean': 186, 'random': 245}",
    "online_dqn.py": "200 updates after",
    "record_your_loop.py": "20 episodes in",
    "clone_from_log.py": "student",
    "csv_to_policy.py": "from log.csv",
    "convert_rllib.py": "3 rows",
    "resume.py": "the run that was stopped ended where the other did",
    "worker_group.py": "steps by 2 writers",
}
#: Those that train print the mean return of the data, and last that of the policy, which is this much higher.
GAINS = {"decision_transformer.py": 100, "filtered_bc.py": 300, "iql.py": 400, "td3_bc.py": 400}
PRINTS |= dict.fromkeys(GAINS, "mean return: ")
ON_RAY = ("worker_group.py",)
#: Those that learn, or start processes that import torch.
LONG = (
    "atari.py",
    "clone_from_log.py",
    "data_parallel.py",
    "external_client.py",
    "llm_rollouts.py",
    "online_dqn.py",
    *GAINS,
)


def gain(printed: str) -> int:
    """How much higher the last return is than the first, that of the data."""
    recorded, *_, trained = RETURN.findall(printed.partition("mean return: ")[2])
    return int(trained) - int(recorded)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the example runs, with the recording that `convert_rllib.py` is given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "a.json").write_text(
        '{"type": "SampleBatch", "obs": [[0.5], [1.0], [1.5]], "rewards": [1.0, 1.0, 1.0], '
        '"dones": [false, false, true], "eps_id": [1, 1, 1]}\n'
    )
    return tmp_path


def run_here(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(example), *ARGUMENTS.get(example.name, [])])
    runpy.run_path(str(example), run_name="__main__")


@pytest.mark.further  # The code of docs/distributed.md, which does the same, runs in `make test`.
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("example", [each for each in EXAMPLES if each.name in ON_RAY], ids=NAME)
def test_an_example_runs_on_a_cluster(
    example: Path, ray_cluster: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which the cluster's one driver is: one of its own would listen to the network."""
    import ray

    monkeypatch.setattr(ray, "init", lambda: None)
    run_here(example, monkeypatch)
    assert PRINTS[example.name] in capsys.readouterr().out


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "example", [each for each in EXAMPLES if each.name not in (*ON_RAY, *LONG)], ids=NAME
)
def test_an_example_runs(
    example: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(example, monkeypatch)
    assert PRINTS[example.name] in capsys.readouterr().out


@pytest.mark.further
@pytest.mark.parametrize("example", [each for each in EXAMPLES if each.name not in ON_RAY], ids=NAME)
def test_an_example_runs_in_an_interpreter_of_its_own(example: Path, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(example), *ARGUMENTS.get(example.name, [])],
        cwd=folder,
        # Processes that learn together meet on this machine alone.
        env={**os.environ, "OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": "lo"} if LINUX else {}),
        capture_output=True,
        text=True,
        timeout=280,  # Seconds on an idle machine; the margin is for a busy one.
    )
    assert done.returncode == 0, done.stderr
    assert PRINTS[example.name] in done.stdout
    if example.name in GAINS:
        assert gain(done.stdout) >= GAINS[example.name], done.stdout
    if example.name == "llm_rollouts.py":
        (reached,) = REWARDS.findall(done.stdout)
        assert float(reached[1]) >= float(reached[0]) + 0.5, done.stdout


def test_the_cookbook_shows_each_recipe_with_what_it_prints(checkout: Path) -> None:
    shown = {}
    for code in blocks(checkout / "docs" / "cookbook.md", "console"):
        ((_, path),) = commands_of(code)
        assert (checkout / path).is_file()
        if "mean return: " in code:
            shown[Path(path).name] = gain(code)
    assert set(shown) == {*GAINS, *ELSEWHERE}
    assert all(shown[name] >= GAINS.get(name, 100) for name in shown), shown
