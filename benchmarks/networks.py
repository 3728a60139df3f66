"""GAE with a value network, and a whole PPO update: ours beside TorchRL's and beside one bare forward pass."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torchrl.modules import OneHotCategorical
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE as TorchRLGAE

import rl_triton_td as rtd

from . import measure

GAMMA, LMBDA, ACTIONS, EPOCHS, MINIBATCHES = 0.99, 0.95, 8, 4, 4
TOLERANCE = 1e-2  # of 1 + |advantage|: TorchRL's default path drops what has decayed


@dataclass(frozen=True)
class Shape:
    """``N`` rows of ``T`` steps with observations of shape ``observed``, for MLPs of ``widths`` or a CNN without."""

    name: str
    N: int
    T: int
    observed: tuple[int, ...]
    widths: tuple[int, ...] = ()


GAE_SHAPES = (
    Shape("mlp_256", 4096, 128, (64,), (256, 256)),
    Shape("mlp_1024", 4096, 128, (64,), (1024, 1024)),
    Shape("cnn", 256, 128, (4, 84, 84)),
)
UPDATE_SHAPES = tuple(
    Shape(f"mlp_{width}", N, 128, (64,), (width, width)) for width in (128, 1024) for N in (4096, 16384)
)
TINY = (Shape("mlp_8", 8, 12, (4,), (8, 8)), Shape("cnn", 2, 12, (4, 36, 36)))


# ------------------------------------------------------------------------------------------------- data and networks


def rollout(shape: Shape, device, done=0.01, seed=0) -> TensorDict:
    """A rollout whose next observations are the next rows', but where an episode ends: half of the ends truncate."""
    g = torch.Generator(device).manual_seed(seed)
    N, T = shape.N, shape.T

    def states(steps):
        if len(shape.observed) == 3:
            return torch.randint(256, (N, steps, *shape.observed), generator=g, device=device, dtype=torch.uint8)
        return torch.randn(N, steps, *shape.observed, generator=g, device=device)

    def flag(rate):
        return torch.rand(N, T, 1, generator=g, device=device) < rate

    ends, terminal = flag(done), flag(0.5)
    obs = states(T)
    after = torch.cat([obs[:, 1:], states(1)], 1)
    cut = ends.squeeze(-1).nonzero(as_tuple=True)
    after[cut] = after[cut].flip(-1)
    action = torch.randint(ACTIONS, (N, T), generator=g, device=device)
    return TensorDict(
        {
            "observation": obs,
            "action": nn.functional.one_hot(action, ACTIONS),
            "action_log_prob": torch.full((N, T), 1 / ACTIONS, device=device).log(),
            "next": {
                "observation": after,
                "reward": torch.randn(N, T, 1, generator=g, device=device),
                "done": ends,
                "terminated": ends & terminal,
            },
        },
        [N, T],
        names=[None, "time"],
    )


class Frames(nn.Module):
    """A small CNN over ``[*B, C, H, W]`` bytes."""

    def __init__(self, observed: tuple[int, ...]):
        super().__init__()
        convolutions = [nn.Conv2d(observed[0], 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.Flatten()]
        self.body = nn.Sequential(*convolutions)
        features = self.body(torch.zeros(1, *observed)).shape[-1]
        self.head = nn.Sequential(nn.Linear(features, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, x):
        return self.head(self.body(x.flatten(0, -4).float() / 255)).unflatten(0, x.shape[:-3])


def network(shape: Shape, out: int, device, seed=0) -> nn.Module:
    torch.manual_seed(seed)
    if not shape.widths:
        return Frames(shape.observed).to(device)
    sizes, layers = (*shape.observed, *shape.widths), []
    for a, b in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], out)).to(device)


def critic(shape: Shape, device) -> TensorDictModule:
    return TensorDictModule(network(shape, 1, device), in_keys=["observation"], out_keys=["state_value"])


def _hypers(value_network, device):
    return {"gamma": GAMMA, "lmbda": LMBDA, "value_network": value_network, "device": device}


CONTENDERS = {
    "ours": lambda net, device: rtd.GAE(**_hypers(net, device)),
    "ours_unchecked": lambda net, device: rtd.GAE(**_hypers(net, device), reuse_values=True),
    "torchrl": lambda net, device: TorchRLGAE(**_hypers(net, device)),
    "torchrl_no_vmap": lambda net, device: TorchRLGAE(**_hypers(net, device), deactivate_vmap=True),
    "torchrl_shifted": lambda net, device: TorchRLGAE(**_hypers(net, device), shifted=True),
}
UPDATERS = {
    "ours": CONTENDERS["ours"],
    "torchrl": CONTENDERS["torchrl"],
    "torchrl_compiled": lambda net, device: torch.compile(CONTENDERS["torchrl"](net, device)),
}


# -------------------------------------------------------------------------------------------------- checks and timing


class Reference:
    """Advantages of some rows by the float64 loop, from values that every state and successor was evaluated for."""

    def __init__(self, td: TensorDict, net: TensorDictModule):
        picked = torch.linspace(0, len(td) - 1, min(16, len(td)), device=td.device).long()
        rows = td[picked]
        with torch.no_grad():
            entries = [net.module(rows["observation"]), net.module(rows["next", "observation"])]
        entries += [rows["next", name] for name in ("reward", "done", "terminated")]
        entries = [x.squeeze(-1).cpu() if x.dtype == torch.bool else x.squeeze(-1).cpu().double() for x in entries]
        self.picked = picked
        self.advantage = measure.reference_module().gae(GAMMA, LMBDA, *entries)[0]

    def check(self, out: TensorDict) -> dict:
        """The largest error relative to ``1 + |x|``, and the share of steps that were dropped."""
        found, valid = out["advantage"][self.picked].squeeze(-1).cpu().double(), out.get("shifted_valid", None)
        error = (found - self.advantage).abs() / (1 + self.advantage.abs())
        if valid is not None:
            # what is cut short is another episode from the last end on
            done = out["next", "done"][self.picked].squeeze(-1).cpu()
            kept = valid[self.picked].cpu()
            whole = kept.all(-1, keepdim=True) | ((done & kept).flip(-1).cumsum(-1).flip(-1) > 0)
            error = error[whole & kept]
        worst = error.max().item() if error.numel() else 0.0
        if not worst <= TOLERANCE:
            raise measure.Wrong(f"error {worst:.1e}")
        return {"error": worst, "dropped": 0.0 if valid is None else 1 - valid.double().mean().item()}


def timed(call, device) -> float:
    """Milliseconds of one call, by events on a GPU."""
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end)


def peak_bytes(call, device) -> int | None:
    """Memory at the highest point of a call, beyond what was there before."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def guarded(function, row: dict) -> dict:
    """``row`` with what ``function`` found, or with a note of why there is nothing: out of memory, wrong, refused."""
    try:
        return {**row, **function(), "note": None}
    except Exception as e:
        said = str(e).strip().splitlines()
        return {**row, "note": f"{type(e).__name__}: {said[0][:160] if said else ''}"}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------------- measurements


def gae_rows(shape: Shape, device, calls: int):
    """A row a contender: median time and peak memory of a GAE call."""
    td, net = rollout(shape, device), critic(shape, device)
    reference = Reference(td, net)

    def figures(call):
        for _ in range(3):
            call()
        peak = peak_bytes(call, device)
        return {"ms": statistics.median(timed(call, device) for _ in range(calls)), "peak_bytes": peak}

    def forward():
        with torch.no_grad():
            net.module(td["observation"])

    def contender(make):
        estimator = make(net, device)

        def call():
            return estimator(td.copy())

        return {**reference.check(call()), **figures(call)}

    about = {"part": "gae", "network": shape.name, "N": shape.N, "T": shape.T, "device": device.type}
    yield guarded(lambda: figures(forward), {**about, "contender": "forward"})
    for name, make in CONTENDERS.items():
        yield guarded(functools.partial(contender, make), {**about, "contender": name})


def update_rows(shape: Shape, device, calls: int):
    """A row a contender: median time of a PPO update, and the estimator's part of it."""
    td, minibatch = rollout(shape, device), shape.N * shape.T // MINIBATCHES

    def contender(make):
        net = critic(shape, device)
        scores = TensorDictModule(network(shape, ACTIONS, device, 1), in_keys=["observation"], out_keys=["logits"])
        choice = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=OneHotCategorical)
        loss = ClipPPOLoss(ProbabilisticTensorDictSequential(scores, choice), net, entropy_coeff=0.01)
        optimizer = torch.optim.Adam(loss.parameters(), lr=1e-4)
        estimator = make(net, device)

        def estimate():
            return estimator(td.copy())

        def update():
            took = []
            began = time.perf_counter()
            if device.type == "cuda":
                marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                marks[0].record()
            out = estimate()
            if device.type == "cuda":
                marks[1].record()
            else:
                took.append((time.perf_counter() - began) * 1e3)
            flat = out.select(*loss.in_keys, "advantage", "value_target", "state_value", strict=False).reshape(-1)
            for _ in range(EPOCHS):
                for index in torch.randperm(len(flat), device=device).split(minibatch):
                    losses = loss(flat[index])
                    sum(losses[k] for k in ("loss_objective", "loss_critic", "loss_entropy")).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                took.append(marks[0].elapsed_time(marks[1]))
            return took[0]

        found = Reference(td, net).check(estimate())
        update()
        parts = []
        totals = [timed(lambda: parts.append(update()), device) for _ in range(calls)]
        ms, estimator_ms = statistics.median(totals), statistics.median(parts)
        return {**found, "ms": ms, "estimator_ms": estimator_ms, "share": estimator_ms / ms}

    about = {"part": "update", "network": shape.name, "N": shape.N, "T": shape.T, "device": device.type}
    for name, make in UPDATERS.items():
        yield guarded(functools.partial(contender, make), {**about, "contender": name})


def rows(parts, device, tiny: bool, only=None):
    """Every row of ``parts`` ("gae", "update"), each as soon as it is measured."""
    for part in parts:
        shapes = TINY if tiny else {"gae": GAE_SHAPES, "update": UPDATE_SHAPES}[part]
        for shape in shapes:
            if only and shape.name not in only or part == "update" and not shape.widths:
                continue
            calls = 2 if tiny else 20 if part == "gae" else 3
            yield from {"gae": gae_rows, "update": update_rows}[part](shape, device, calls)


def table(found: list[dict]) -> str:
    """Markdown of the rows: times and memory beside one bare forward pass, and the estimator's share of updates."""
    from .report import markdown

    bare = {(r["network"], r["N"]): r for r in found if r["contender"] == "forward"}
    lines = []
    for r in found:
        base = bare.get((r["network"], r["N"]), {}) if r["part"] == "gae" else {}
        beside = [r[k] / base[k] if r.get(k) and base.get(k) else None for k in ("ms", "peak_bytes")]
        gib = r["peak_bytes"] / 2**30 if r.get("peak_bytes") is not None else None
        about = (r["part"], r["network"], f"{r['N']}×{r['T']}", r["contender"], r.get("ms"), beside[0], gib, beside[1])
        lines.append([*about, r.get("share"), r.get("dropped"), r.get("error"), r["note"]])
    header = ["part", "network", "shape", "contender", "ms", "÷ forward", "peak GiB", "÷ forward's"]
    return markdown([*header, "estimator's share", "dropped", "error", "note"], lines)
