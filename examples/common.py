"""What the examples share: arguments, environments, networks, a stopwatch, and the progress bar with its plot."""

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
from torch import nn
from torchrl.envs import GymWrapper, RewardSum
from tqdm import tqdm

WINDOW = 20  # episodes in a mean return


def parse_args(description, frames, option="--estimator", choices=("rl_triton_td", "torchrl")):
    """The options of an example; seeds the generators too."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(option, choices=choices, default=choices[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", type=torch.device, help="where networks and estimator run")
    parser.add_argument("--frames", type=int, default=frames, help="upper limit on environment steps")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the learning curve")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    return args


def make_env(name, num_envs, device="cpu", seed=None):
    # SAME_STEP keeps the true last observation of an episode, which a time limit needs to bootstrap from.
    vector = gymnasium.make_vec(
        name, num_envs, vectorization_mode="sync", vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP}
    )
    env = GymWrapper(vector, categorical_action_encoding=True, device=device).append_transform(RewardSum())
    if seed is not None:
        env.set_seed(seed)
    return env


def mlp(in_features, out_features, gain):
    """Two hidden layers, orthogonal weights; ``gain`` scales the last layer's."""
    layers = [nn.Linear(in_features, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, out_features)]
    for layer, scale in zip(layers[::2], [2**0.5, 2**0.5, gain], strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def step(optimizer, loss, max_norm=0.5):
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], max_norm)
    optimizer.step()


def clock(device):
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Timed:
    """Calls an estimator and adds up the time that it takes."""

    def __init__(self, estimator, device):
        self.estimator, self.device, self.seconds = estimator, device, 0.0

    def __call__(self, data):
        begin = clock(self.device)
        data = self.estimator(data)
        self.seconds += clock(self.device) - begin
        return data


class Progress:
    """Progress bar and learning curve: the mean return of the last episodes against environment steps."""

    def __init__(self, task, label, args, total_frames):
        self.task, self.label, self.args = task, label, args
        self.recent, self.curve, self.frames = deque(maxlen=WINDOW), [], 0
        self.start = clock(args.device)
        self.bar = tqdm(total=total_frames, unit="frame", desc=f"{label}, seed {args.seed}")

    def update(self, data, **shown):
        """Count a rollout ``[N, T]``; returns the mean return, or ``-inf`` before the window is full."""
        by_time = data["next"].transpose(0, 1)
        self.recent.extend(by_time["episode_reward"][by_time["done"]].tolist())
        self.frames += data.numel()
        self.bar.update(data.numel())
        if self.recent:
            self.curve.append((self.frames, self.mean_return))
            shown = {"mean_return": f"{self.mean_return:.1f}"} | shown
        self.bar.set_postfix(shown)
        return self.mean_return if len(self.recent) == WINDOW else -float("inf")

    @property
    def mean_return(self):
        return sum(self.recent) / max(1, len(self.recent))

    def finish(self, timed, pass_at):
        """Write the plot, print the results, and exit with status 1 if the mean return is below ``pass_at``."""
        self.bar.close()
        seconds = clock(self.args.device) - self.start
        self.args.out.mkdir(parents=True, exist_ok=True)
        path = self.args.out / f"{Path(sys.argv[0]).stem}_{self.label}_{self.args.seed}.png"
        axes = Figure().subplots()
        if self.curve:
            axes.plot(*zip(*self.curve, strict=True))
        axes.set(xlabel="environment steps", ylabel=f"mean return of the last {WINDOW} episodes")
        axes.set_title(f"{self.task}, {self.label}, seed {self.args.seed}")
        axes.figure.savefig(path, dpi=120)
        episodes, share = len(self.recent), 100 * timed.seconds / seconds
        print(
            f"mean return of the last {episodes} training episodes: {self.mean_return:.1f} after {self.frames} frames"
        )
        print(f"wall time: {seconds:.1f} s, of which {share:.1f} % in the estimator and the networks that it calls")
        print(f"learning curve: {path}")
        if episodes < WINDOW or self.mean_return < pass_at:
            sys.exit(f"FAILED: the mean return of the last {WINDOW} training episodes is below {pass_at:.0f}")
