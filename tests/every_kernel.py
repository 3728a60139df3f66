"""Run every kernel variant once on small inputs, for `compute-sanitizer --tool memcheck|racecheck python …`.

Arguments: how many of the tilings are run (the first is the shipped plan), and which share of the calls, as ``3/8``.
"""

import itertools
import sys
from contextlib import nullcontext
from functools import partial

import torch

import rl_triton_td.functional as F
from rl_triton_td._launch import Tile, force_tile

TILES = (None, Tile(1, 64, 2), Tile(4, 32, 4), Tile(2, 64, 4, 3), Tile(2, 32, 2, 1, 3))
N, A = 5, 6


def backward(function, *args, **kwargs) -> None:
    outputs = function(*args, **kwargs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    leaves = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad]
    torch.autograd.grad([x.sum() for x in outputs], leaves)


def calls(time_dim: int, dtype: torch.dtype, device: str):
    T = 201 if dtype == torch.float32 else 200  # odd: what lies beside a row is read with it
    shape = (N, T) if time_dim else (T, N)
    g = torch.Generator().manual_seed(0)

    def series(*more):
        return torch.randn(*shape, *more, generator=g).to(device=device, dtype=dtype)

    done, mask = (torch.rand(shape, generator=g).to(device) < p for p in (0.1, 0.8))
    terminated = done & (torch.rand(shape, generator=g).to(device) < 0.5)
    value, next_value, reward, log_pi, log_mu, bootstrap = (series() for _ in range(6))
    rest = dict(time_dim=time_dim)
    dense = (value, next_value, reward, done, terminated)
    shifted, cut = (value, None, reward, done, terminated), (value, None, reward, done, done)
    for extra in ({}, {"mask": mask}):
        for gamma in (0.99, torch.tensor(0.99, device=device), series().abs()):
            yield partial(F.generalized_advantage_estimate, gamma, 0.95, *dense, **rest, **extra)
        yield partial(F.generalized_advantage_estimate, 0.99, 0.95, *dense, lmbda_critic=0.8, **rest, **extra)
        yield partial(F.generalized_advantage_estimate, 0.99, 0.95, *shifted, bootstrap=bootstrap, **rest, **extra)
        yield partial(
            F.generalized_advantage_estimate, 0.99, 0.95, *cut, bootstrap=bootstrap.select(time_dim, 0), **rest, **extra
        )
        yield partial(F.td0_return_estimate, 0.99, next_value, reward, terminated, **rest, **extra)
        yield partial(F.td1_advantage_estimate, 0.99, *dense, **rest, **extra)
        yield partial(F.td_lambda_return_estimate, 0.99, 0.9, *dense[1:], **rest, **extra)
        yield partial(F.reward2go, reward, done, 0.99, **rest, **extra)
        yield partial(F.vtrace_advantage_estimate, 0.99, log_pi, log_mu, *dense, **rest, **extra)
        yield partial(F.vtrace_advantage_estimate, 0.99, log_pi, log_mu, *shifted, bootstrap=bootstrap, **rest, **extra)
        for trace in F.TRACES:
            yield partial(
                F.retrace_lambda_advantage_estimate, 0.99, 0.9, log_pi, log_mu, *dense, trace=trace, **rest, **extra
            )
        yield partial(F.retrace_lambda_return_estimate, 0.99, 0.9, log_pi, log_mu, *dense, **rest, **extra)
        yield partial(F.eligibility_trace, 0.99, 0.9, reward, done, initial=reward.select(time_dim, 0), **rest, **extra)
        yield partial(F.eligibility_trace, 0.99, 0.9, reward, done, ratio=log_pi.exp(), **rest, **extra)
        for boundary in ("ends_at", "starts_at"):
            yield partial(F.episodic_prefix_sum, reward, done, boundary=boundary, **rest, **extra)
        for reverse in (False, True):
            yield partial(F.linear_recurrence, reward, 0.1 * value, reverse=reverse, **rest, **extra)
        leaves = [x.detach().requires_grad_() for x in (value, next_value, reward, log_pi, series().abs())]
        ends = (done, terminated)
        for function, args, more in (
            (F.vtrace_advantage_estimate, (leaves[4], leaves[3], log_mu, *leaves[:3], *ends), {}),
            (F.generalized_advantage_estimate, (0.99, leaves[4], *leaves[:3], *ends), {"lmbda_critic": 0.8}),
            (F.eligibility_trace, (0.99, leaves[4], leaves[2], done), {}),
        ):
            yield partial(backward, function, *args, **more, **rest, **extra)
    q, next_q = series(A), series(A)
    pi, next_pi = series(A).softmax(-1), series(A).softmax(-1)
    action = torch.randint(0, A, (*shape, 1), generator=g).to(device)
    column = [x.unsqueeze(-1) for x in (log_mu, reward, done, terminated)]
    taken = q.gather(-1, action)
    yield partial(F.retrace_from_action_values, 0.99, 0.9, pi, next_pi, q, next_q, action, *column, **rest)
    yield partial(F.retrace_from_action_values, 0.99, 0.9, pi, pi, taken, next_q, action, *column, **rest)

    if time_dim:  # rows strung together, of which the last are fewer
        shape = (5, 63)
        values, done, initial = [series() for _ in range(3)], torch.rand(shape, generator=g).to(device) < 0.1, series()
        yield partial(F.generalized_advantage_estimate, 0.99, 0.95, *values, done, done, **rest)
        yield partial(F.vtrace_advantage_estimate, 0.99, *values[:2], *values, done, done, **rest)
        yield partial(
            F.generalized_advantage_estimate, 0.99, 0.95, values[0], None, values[2], done, done,
            bootstrap=initial[:, 0], **rest,
        )  # fmt: skip
        yield partial(F.eligibility_trace, 0.99, 0.9, values[0], done, initial=initial[:, 0], **rest)
        for reverse in (False, True):
            yield partial(F.linear_recurrence, *values[:2], initial=initial[:, 0], reverse=reverse, **rest)

    shape = (2, 5001) if time_dim else (5001, 2)  # rows cut into segments, which meet where arithmetic is float32
    values, done = [series() for _ in range(3)], torch.rand(shape, generator=g).to(device) < 0.01
    yield partial(F.generalized_advantage_estimate, 0.99, 0.95, *values, done, done, **rest)
    yield partial(F.vtrace_advantage_estimate, 0.99, *values[:2], *values, done, done, **rest)


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tiles = TILES[: int(sys.argv[1])] if sys.argv[1:] else TILES
    share, shares = map(int, sys.argv[2].split("/")) if sys.argv[2:] else (0, 1)
    for tile, time_dim, dtype in itertools.product(tiles, (0, 1), (torch.float32, torch.bfloat16, torch.float64)):
        if dtype == torch.float32 or tile is TILES[0]:
            with force_tile(tile) if tile else nullcontext():  # None: the shipped plan
                for call in itertools.islice(calls(time_dim, dtype, device), share, None, shares):
                    call()
    if device == "cuda":
        torch.cuda.synchronize()
    print("every kernel ran")
