"""IMPALA on CartPole-v1: workers collect with stale policies, the learner corrects with V-trace.

Two worker processes run ahead with the last weights that they were sent, and the learner sends new ones only after
every second batch. Each batch carries the log-probability that the worker's policy gave its actions; V-trace scores
the same actions under the learner's policy and weighs by the ratio. ``--estimator torchrl`` swaps in TorchRL's VTrace.
The run stops as soon as the mean return of the last 20 training episodes reaches 475 (of 500) or the frames are used
up, writes the learning curve to ``out/`` and exits with status 1 if that mean is below 400. Seeded, but batches arrive
in the order in which the workers finish.

    python examples/impala_cartpole.py
    python examples/impala_cartpole.py --estimator torchrl --seed 1
"""

from copy import deepcopy
from functools import partial

import torch
from common import Progress, Timed, make_env, mlp, parse_args, step
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch.distributions import Categorical
from torchrl.collectors import MultiAsyncCollector
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import A2CLoss

WORKERS, NUM_ENVS, BATCH, STEPS, SEND_EVERY, LR = 2, 8, 1024, 8, 2, 1e-3
STOP_AT, PASS_AT = 475.0, 400.0


def make_estimator(name, actor, critic):
    if name == "rl_triton_td":
        from rl_triton_td import VTrace
    else:
        from torchrl.objectives.value import VTrace
    return VTrace(gamma=0.99, actor_network=actor, value_network=critic)


def main():
    args = parse_args("IMPALA on CartPole-v1", frames=400_000)
    device = args.device
    policy = TensorDictModule(mlp(4, 2, 0.01), ["observation"], ["logits"])
    actor = ProbabilisticActor(policy, ["logits"], distribution_class=Categorical, return_log_prob=True).to(device)
    critic = ValueOperator(mlp(4, 1, 1.0), in_keys=["observation"]).to(device)
    estimator = Timed(make_estimator(args.estimator, actor, critic), device)
    loss_module = A2CLoss(actor, critic, entropy_coeff=0.01, critic_coeff=0.5, loss_critic_type="l2")
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=LR)

    total_frames = max(1, args.frames // BATCH) * BATCH
    sizes = {"frames_per_batch": BATCH, "total_frames": total_frames}
    # a copy: TorchRL may move the policy's weights to memory that the workers share
    behaviour = deepcopy(actor)
    collector = MultiAsyncCollector(
        [partial(make_env, "CartPole-v1", NUM_ENVS)] * WORKERS, behaviour, **sizes, device="cpu"
    )
    collector.set_seed(args.seed)
    progress = Progress("IMPALA on CartPole-v1", args.estimator, args, total_frames)
    lags = []
    for batch, data in enumerate(collector):
        data = data.to(device)
        with torch.no_grad():
            ratio = (actor.get_dist(data).log_prob(data["action"]) - data["action_log_prob"]).exp()
        lags.append((ratio - 1).abs().mean().item())
        if progress.update(data, off_policy=f"{lags[-1]:.3f}") >= STOP_AT:
            break
        for _ in range(STEPS):
            data = estimator(data)
            loss = loss_module(data)
            step(optimizer, loss["loss_objective"] + loss["loss_critic"] + loss["loss_entropy"])
        if batch % SEND_EVERY == SEND_EVERY - 1:
            collector.update_policy_weights_(TensorDict.from_module(actor).data)
    collector.shutdown()
    print(f"off-policy lag: mean |pi/mu - 1| is {sum(lags) / len(lags):.3f}")
    progress.finish(estimator, PASS_AT)


if __name__ == "__main__":
    main()
