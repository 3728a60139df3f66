"""Off-policy Q-learning on CartPole-v1: Retrace targets for sequences from a replay buffer.

The behaviour is epsilon-greedy with a decaying epsilon, and the log-probability of each action is stored with it. The
buffer holds pieces of 16 steps. Retrace estimates their returns under the current Q-network's policy with the final
epsilon (for a greedy one it would be tree backup), with the values of a copy that lags behind; ``--trace`` picks one of
its relatives. TorchRL 0.14 has no such class.
The run stops as soon as the mean return of the last 20 training episodes reaches 475 (of 500) or the frames are used
up, writes the learning curve to ``out/`` and exits with status 1 if that mean is below 400.

    python examples/retrace_cartpole.py
    python examples/retrace_cartpole.py --trace tree_backup --seed 1
"""

from copy import deepcopy

import torch
from common import Progress, Timed, make_env, mlp, parse_args, step
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import RewardScaling
from torchrl.modules import ProbabilisticActor

from rl_triton_td import RetraceEstimator

TRACES = ("retrace", "tree_backup", "q_lambda", "importance_sampling")
NUM_ENVS, T, CAPACITY, WARM_UP = 8, 16, 4000, 1024
SEQUENCES, UPDATES, LR, TAU = 16, 16, 2e-3, 0.05
FIRST_EPSILON, LAST_EPSILON, DECAY, STOP_AT, PASS_AT = 0.5, 0.02, 20_000, 475.0, 400.0


class EpsilonGreedy(nn.Module):
    """Probabilities of the actions: ``epsilon`` is spread over all, the greedy one has the rest."""

    epsilon = LAST_EPSILON

    def forward(self, action_value):
        greedy = nn.functional.one_hot(action_value.argmax(-1), action_value.shape[-1])
        return greedy * (1 - self.epsilon) + self.epsilon / action_value.shape[-1]


def make_actor(q_network, exploration):
    probabilities = TensorDictModule(exploration, ["action_value"], ["probs"])
    module = TensorDictSequential(q_network, probabilities)
    return ProbabilisticActor(module, ["probs"], distribution_class=Categorical, return_log_prob=True)


def main():
    args = parse_args("Q-learning with Retrace on CartPole-v1", frames=80_000, option="--trace", choices=TRACES)
    device = args.device
    # values of order 1 for the learner; the returns that are shown were summed up before
    env = make_env("CartPole-v1", NUM_ENVS, device, args.seed).append_transform(RewardScaling(loc=0.0, scale=0.05))
    q_network = TensorDictModule(mlp(4, 2, 1.0), ["observation"], ["action_value"]).to(device)
    target_network = deepcopy(q_network)
    exploration = EpsilonGreedy()
    behaviour, target = make_actor(q_network, exploration), make_actor(q_network, EpsilonGreedy())
    estimator = Timed(
        RetraceEstimator(gamma=0.99, lmbda=0.8, trace=args.trace, value_network=target_network, actor_network=target),
        device,
    )
    optimizer = torch.optim.Adam(q_network.parameters(), lr=LR)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY, device=device), batch_size=SEQUENCES)

    batch = NUM_ENVS * T
    total_frames = max(1, args.frames // batch) * batch
    sizes = {"frames_per_batch": batch, "total_frames": total_frames}
    collector = Collector(env, behaviour, **sizes, device=device, auto_register_policy_transforms=False)
    progress = Progress("Q-learning on CartPole-v1", args.trace, args, total_frames)
    for data in collector:
        buffer.extend(data.exclude("action_value", "probs"))  # NUM_ENVS items [T]; old values are of no use
        left = max(0.0, 1 - progress.frames / DECAY)
        exploration.epsilon = LAST_EPSILON + (FIRST_EPSILON - LAST_EPSILON) * left
        if progress.update(data, epsilon=f"{exploration.epsilon:.2f}") >= STOP_AT:
            break
        if progress.frames < WARM_UP:
            continue
        optimizer.param_groups[0]["lr"] = LR * (1 - progress.frames / total_frames)
        for _ in range(UPDATES):
            sequences = estimator(buffer.sample())  # [SEQUENCES, T]
            values = q_network(sequences.select("observation"))["action_value"]
            value = values.gather(-1, sequences["action"].unsqueeze(-1))
            step(optimizer, nn.functional.mse_loss(value, sequences["value_target"]), max_norm=10.0)
            with torch.no_grad():
                for old, new in zip(target_network.parameters(), q_network.parameters(), strict=True):
                    old.lerp_(new, TAU)
    collector.shutdown()
    progress.finish(estimator, PASS_AT)


if __name__ == "__main__":
    main()
