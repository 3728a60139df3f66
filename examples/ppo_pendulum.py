"""PPO on the continuous task Pendulum-v1 with the Triton GAE as the collector's ``postproc``.

An untrained policy gets about -1200 an episode. Episodes never terminate, a time limit cuts them after 200 steps, so
every end bootstraps from the value of the true last observation. ``--estimator torchrl`` swaps in TorchRL's own GAE.
The run stops as soon as the mean return of the last 20 training episodes reaches -200 or the frames are used up,
writes the learning curve to ``out/`` and exits with status 1 if that mean is below -400.

    python examples/ppo_pendulum.py
    python examples/ppo_pendulum.py --estimator torchrl --seed 1
"""

import torch
from common import Progress, Timed, make_env, mlp, parse_args, step
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import RewardScaling
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss

NUM_ENVS, BATCH, EPOCHS, MINIBATCH, LR = 8, 2048, 10, 128, 1e-3
STOP_AT, PASS_AT = -200.0, -400.0


def make_estimator(name, critic):
    if name == "rl_triton_td":
        from rl_triton_td import GAE
    else:
        from torchrl.objectives.value import GAE
    return GAE(gamma=0.9, lmbda=0.95, value_network=critic, average_gae=False)


def main():
    args = parse_args("PPO on Pendulum-v1", frames=250_000)
    device = args.device
    # the learner's rewards are near [-1, 1]; the returns that are shown were summed up before
    env = make_env("Pendulum-v1", NUM_ENVS, device, args.seed).append_transform(RewardScaling(loc=1.0, scale=1 / 8))
    normal = nn.Sequential(mlp(3, 2, 0.01), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(normal, ["observation"], ["loc", "scale"]),
        ["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
        return_log_prob=True,
    ).to(device)
    critic = ValueOperator(mlp(3, 1, 1.0), in_keys=["observation"]).to(device)
    estimator = Timed(make_estimator(args.estimator, critic), device)
    loss_module = ClipPPOLoss(
        actor, critic, entropy_bonus=False, critic_coeff=0.5, loss_critic_type="l2", normalize_advantage=True
    )
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=LR)

    total_frames = max(1, args.frames // BATCH) * BATCH
    sizes = {"frames_per_batch": BATCH, "total_frames": total_frames}
    collector = Collector(env, actor, **sizes, device=device, postproc=estimator, auto_register_policy_transforms=False)
    progress = Progress("PPO on Pendulum-v1", args.estimator, args, total_frames)
    for data in collector:
        if progress.update(data) >= STOP_AT:
            break
        optimizer.param_groups[0]["lr"] = LR * (1 - progress.frames / total_frames)
        data = data.reshape(-1)
        for _ in range(EPOCHS):
            for index in torch.randperm(BATCH, device=device).split(MINIBATCH):
                loss = loss_module(data[index])
                step(optimizer, loss["loss_objective"] + loss["loss_critic"])
    collector.shutdown()
    progress.finish(estimator, PASS_AT)


if __name__ == "__main__":
    main()
