"""PPO on CartPole-v1 with the Triton GAE as the collector's ``postproc``.

The advantage estimator is the only line that differs from a plain TorchRL script: ``--estimator torchrl``
swaps in TorchRL's own GAE, so that both learning curves can be compared. The run stops as soon as the mean
return of the last 20 training episodes reaches 475 (of 500) or the frames are used up, writes the learning
curve to ``out/`` and exits with status 1 if that mean is below 450.

    python examples/ppo_cartpole.py
    python examples/ppo_cartpole.py --estimator torchrl --seed 1
"""

import argparse
import sys
import time
from collections import deque
from pathlib import Path

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from matplotlib.figure import Figure
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.envs import GymWrapper, RewardSum
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from tqdm import tqdm

NUM_ENVS, BATCH, EPOCHS, MINIBATCH, LR = 8, 2048, 10, 256, 1e-3
WINDOW, STOP_AT, PASS_AT = 20, 475.0, 450.0


def parse_args():
    parser = argparse.ArgumentParser(description="PPO on CartPole-v1")
    parser.add_argument("--estimator", choices=["rl_triton_td", "torchrl"], default="rl_triton_td")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="where the networks and the estimator run")
    parser.add_argument("--frames", type=int, default=200_000, help="upper limit on environment steps")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the learning curve")
    return parser.parse_args()


def make_env(seed, device):
    # SAME_STEP keeps the true last observation of an episode, which a time limit needs to bootstrap from.
    vector = gymnasium.make_vec(
        "CartPole-v1", NUM_ENVS, vectorization_mode="sync", vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP}
    )
    env = GymWrapper(vector, categorical_action_encoding=True, device=device).append_transform(RewardSum())
    env.set_seed(seed)
    return env


def mlp(out_features, gain):
    layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, out_features)]
    for layer, scale in zip(layers[::2], [2**0.5, 2**0.5, gain], strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def make_estimator(name, critic):
    if name == "rl_triton_td":
        from rl_triton_td import GAE
    else:
        from torchrl.objectives.value import GAE
    return GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=False)


def clock(device):
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main():
    args = parse_args()
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    env = make_env(args.seed, device)
    policy = TensorDictModule(mlp(env.action_spec.space.n, 0.01), ["observation"], ["logits"])
    actor = ProbabilisticActor(policy, ["logits"], distribution_class=Categorical, return_log_prob=True).to(device)
    critic = ValueOperator(mlp(1, 1.0), in_keys=["observation"]).to(device)
    estimator = make_estimator(args.estimator, critic)
    loss_module = ClipPPOLoss(
        actor, critic, entropy_bonus=False, critic_coeff=0.5, loss_critic_type="l2", normalize_advantage=True
    )
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=LR)
    estimator_time = 0.0

    def timed_estimator(data):
        nonlocal estimator_time
        begin = clock(device)
        data = estimator(data)
        estimator_time += clock(device) - begin
        return data

    total_frames = max(1, args.frames // BATCH) * BATCH
    sizes = {"frames_per_batch": BATCH, "total_frames": total_frames}
    collector = Collector(
        env, actor, **sizes, device=device, postproc=timed_estimator, auto_register_policy_transforms=False
    )
    recent, curve, frames = deque(maxlen=WINDOW), [], 0
    start = clock(device)
    progress = tqdm(total=total_frames, unit="frame", desc=f"{args.estimator}, seed {args.seed}")
    for data in collector:
        frames += data.numel()
        by_time = data["next"].transpose(0, 1)
        recent.extend(by_time["episode_reward"][by_time["done"]].tolist())
        mean_return = sum(recent) / max(1, len(recent))
        curve.append((frames, mean_return))
        progress.update(data.numel())
        progress.set_postfix(mean_return=f"{mean_return:.1f}")
        if len(recent) == WINDOW and mean_return >= STOP_AT:
            break
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 - frames / total_frames)
        data = data.reshape(-1)
        for _ in range(EPOCHS):
            for index in torch.randperm(BATCH, device=device).split(MINIBATCH):
                loss = loss_module(data[index])
                optimizer.zero_grad()
                (loss["loss_objective"] + loss["loss_critic"]).backward()
                nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
                optimizer.step()
    progress.close()
    seconds = clock(device) - start
    collector.shutdown()

    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"ppo_cartpole_{args.estimator}_{args.seed}.png"
    axes = Figure().subplots()
    axes.plot(*zip(*curve, strict=True))
    axes.set(xlabel="environment steps", ylabel=f"mean return of the last {WINDOW} episodes")
    axes.set_title(f"PPO on CartPole-v1, {args.estimator} GAE, seed {args.seed}")
    axes.figure.savefig(path, dpi=120)

    print(f"mean return of the last {len(recent)} training episodes: {mean_return:.1f} after {frames} frames")
    print(f"wall time: {seconds:.1f} s, of which {100 * estimator_time / seconds:.1f} % in the {args.estimator} GAE")
    print(f"learning curve: {path}")
    if len(recent) < WINDOW or mean_return < PASS_AT:
        sys.exit(f"FAILED: the mean return of the last {WINDOW} training episodes is below {PASS_AT:.0f}")


if __name__ == "__main__":
    main()
