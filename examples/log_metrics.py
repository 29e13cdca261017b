"""Log metrics with TensorBoard: pip install rlio[tensorboard] && python examples/log_metrics.py."""

from torch.utils.tensorboard import SummaryWriter

import rlio

with (
    rlio.RolloutWorker("CartPole-v1", rlio.RandomPolicy(), seed=0) as worker,
    SummaryWriter("runs") as events,
):
    for step in range(3):
        worker.sample()
        summary = worker.get_metrics().summarise()
        numbers = {name: value for name, value in summary.items() if isinstance(value, int | float)}
        for name, value in numbers.items():
            events.add_scalar(name, value, step)
print(f"the return of episodes was {numbers['episode_return_mean']:.1f}: tensorboard --logdir runs")
