"""RLlib's algorithms reach the same return with data that RLlib recorded, and with what rlio made of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import rlio

ray = pytest.importorskip("ray", reason="ray is not installed")
pytest.importorskip("ray.rllib", reason="ray[rllib] is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

import msgpack  # noqa: E402
import msgpack_numpy  # noqa: E402
from ray.rllib.algorithms.bc import BCConfig  # noqa: E402
from ray.rllib.algorithms.marwil import MARWILConfig  # noqa: E402
from ray.rllib.algorithms.ppo import PPOConfig  # noqa: E402
from ray.rllib.core.rl_module import RLModuleSpec  # noqa: E402
from ray.rllib.core.rl_module.torch import TorchRLModule  # noqa: E402
from ray.rllib.env.single_agent_episode import SingleAgentEpisode  # noqa: E402
from ray.rllib.offline.json_reader import JsonReader  # noqa: E402
from ray.rllib.offline.offline_env_runner import OfflineSingleAgentEnvRunner  # noqa: E402

from rlio.integrations.rllib import RlioOfflineData  # noqa: E402

logger = logging.getLogger(__name__)
# RLlib leaves files open, and uses what others have deprecated.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1800)]

#: CartPole of RLlib's own tests, 20 batches in JSON; of episodes of up to 200 steps.
CARTPOLE = Path(__file__).parents[3] / "shared/data/rllib/cartpole/large.json"
EPISODES, ITERATIONS, UPDATES, BATCH = 30, 4, 20, 512


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


class Balance(TorchRLModule):
    """Pushes the cart below the pole; three actions of ten are drawn."""

    random = np.random.default_rng(0)

    def _forward(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        x, speed, angle, turn = np.asarray(batch["obs"]).T
        good = 3 * angle + turn + 0.1 * x + 0.2 * speed > 0
        drawn = self.random.random(len(good)) < 0.3
        return {
            "actions": torch.as_tensor(np.where(drawn, self.random.integers(0, 2, len(good)), good)).long()
        }


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, cluster: None) -> Path:
    """Episodes that RLlib sampled and wrote."""
    root = tmp_path_factory.mktemp("recorded")
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=0, batch_mode="complete_episodes")
        .rl_module(rl_module_spec=RLModuleSpec(module_class=Balance))
        .offline_data(output=str(root), output_write_episodes=True)
        .debugging(seed=0)
    )
    runner = OfflineSingleAgentEnvRunner(config=config)
    assert len(runner.sample(num_episodes=EPISODES)) == EPISODES
    runner.stop()
    return root


def rllib_steps(recording: Path) -> int:
    """How many steps RLlib itself finds."""
    if recording.suffix == ".json":
        return sum(batch.count for batch in JsonReader(str(recording)).read_all_files())
    rows = ray.data.read_parquet(list(map(str, recording.glob("*/*")))).take_all()
    states = (msgpack.unpackb(row["item"], object_hook=msgpack_numpy.decode) for row in rows)
    return sum(len(SingleAgentEpisode.from_state(state)) for state in states)


def rllib_input(recording: Path) -> dict[str, Any]:
    if recording.suffix == ".json":
        found = {
            "input_": [str(recording)],
            "input_read_method": "read_json",
            "input_read_sample_batches": True,
        }
    else:
        found = {"input_": list(map(str, recording.glob("*/*"))), "input_read_episodes": True}
    return {**found, "input_read_batch_size": 4}


def trained(config: Any, data: dict[str, Any]) -> tuple[float, float, Any]:
    """The last loss, the mean return of 20 episodes of the most probable action, and the algorithm's data."""
    env = gym.make("CartPole-v1")
    algorithm = (
        config.environment(observation_space=env.observation_space, action_space=env.action_space)
        .training(train_batch_size_per_learner=BATCH, lr=2e-3, gamma=0.9)
        .rl_module(model_config={"vf_share_layers": False})
        .offline_data(dataset_num_iters_per_learner=UPDATES, **data)
        .debugging(seed=0)
        .build_algo()
    )
    try:
        for _ in range(ITERATIONS):
            result = algorithm.train()["learners"]["default_policy"]
        module = algorithm.learner_group._learner.module["default_policy"]
        # Batches of whole episodes are not exact.
        steps = float(result["num_module_steps_trained_lifetime"])
        assert steps == pytest.approx(ITERATIONS * UPDATES * BATCH, rel=0.15)
        reached = float(np.mean([episode_return(module, env, seed) for seed in range(1000, 1020)]))
        return float(result["policy_loss"]), reached, algorithm.offline_data
    finally:
        algorithm.stop()


def episode_return(module: Any, env: Any, seed: int) -> float:
    observation, _ = env.reset(seed=seed)
    total, ended = 0.0, False
    while not ended:
        with torch.no_grad():
            found = module.forward_inference({"obs": torch.as_tensor(observation)[None]})
        action = int(found["action_dist_inputs"].argmax())
        observation, reward, terminated, truncated, _ = env.step(action)
        total, ended = total + float(reward), terminated or truncated
    return total


@pytest.mark.parametrize("config", [BCConfig, MARWILConfig])
@pytest.mark.parametrize("recording", ["recorded", "RLlib's tests"])
def test_an_algorithm_reaches_the_same_return_with_converted_data(
    recording: str, config: Any, recorded: Path, tmp_path: Path
) -> None:
    own = recorded if recording == "recorded" else CARTPOLE
    if not own.exists():
        pytest.skip("the recordings of RLlib's own tests are not there")
    report = rlio.convert(own, tmp_path / "converted", to="rlio")
    rows = rllib_steps(own)
    assert report.rows == rows == len(rlio.open_dataset(tmp_path / "converted"))
    converted = {"input_": [str(tmp_path / "converted")], "offline_data_class": RlioOfflineData}
    own_loss, own_return, _ = trained(config(), rllib_input(own))
    loss, reached, data = trained(config(), converted)
    found = {"rows": rows, "RLlib's": (own_return, own_loss), "converted": (reached, loss)}
    logger.info("%s, %s: %s", config.__name__, recording, found)
    assert (data.rows, data.episodes) == (rows, EPISODES if own is recorded else 21)
    assert min(own_return, reached) > 150  # A few tens if untrained.
    assert reached == pytest.approx(own_return, rel=0.1)
