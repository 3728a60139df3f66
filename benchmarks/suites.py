"""The shapes: ``Shape(N rows, T steps, layout, dtype)``, and what each suite measures by default."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import torch

from .registry import CONTENDERS, ROWS

OURS = ("ours", "ours_out", "module", "module_out")
EAGER = (*OURS, "torchrl_serial", "torchrl_vec", "rl_triton", "pufferlib")
PEERS = tuple(name for name, row in ROWS.items() if row.peer)


@dataclass(frozen=True)
class Shape:
    """``[N, T]`` stored by rows, time-major ("time") or as a window of longer rows ("sliced")."""

    N: int
    T: int
    layout: str = "rows"
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Suite:
    shapes: tuple[Shape, ...]
    estimators: Iterable[str] = tuple(ROWS)
    contenders: Iterable[str] = EAGER


PAPER = ((64, 512), (128, 1024), (256, 1024), (512, 128), (512, 512), (512, 2048), (512, 4096), (4096, 128),
         (4096, 512), (4096, 2048), (16384, 128), (16384, 512))  # fmt: skip
BF16 = torch.bfloat16


def _shapes(pairs, *more):
    return tuple(Shape(*pair) for pair in pairs) + more


SUITES = {
    # the paper's table 4, and its two regimes against PufferLib (figures 2 and 3)
    "paper": Suite(_shapes(PAPER), contenders=tuple(CONTENDERS)),
    "parallel": Suite(
        _shapes((N, T) for T, N in product((8, 16, 32, 64, 128), (4096, 8192, 16384, 32768))), ("gae_bootstrap",)
    ),
    "classic": Suite(
        _shapes((N, T) for T, N in product((128, 512, 1024, 2048, 4096), (128, 512, 2048, 8192))), ("gae_bootstrap",)
    ),
    # the paper's headline shape, its compiled baseline included
    "baseline": Suite(_shapes([(4096, 128)]), PEERS, ("ours", "module", "paper", "rl_triton")),
    "peers": Suite(
        _shapes((*PAPER, (64, 16384), (16384, 16), (32768, 8), (65536, 64))),
        PEERS,
        ("ours", "module", "module_out", "rl_triton"),
    ),
    "quick": Suite(
        _shapes([(64, 512), (4096, 8), (4096, 128), (512, 2048), (16384, 128)],
                Shape(1024, 1000), Shape(2048, 128, "time"), Shape(2048, 128, "rows", BF16)),
    ),
    "large": Suite(
        _shapes([(2**21, 8), (2**20, 16), (2**20, 15), (131072, 128), (65536, 256), (65536, 255), (16384, 1000),
                 (16384, 1001), (16384, 1100), (8192, 2560), (4096, 4096)],
                Shape(65536, 256, "time"), Shape(16384, 1024, "time"), Shape(4096, 4096, "time")),
        contenders=("ours",),
    ),
    "long": Suite(
        _shapes([(64, 16384), (1, 1000000)]),
        ("gae", "gae_bootstrap", "td_lambda", "reward2go", "vtrace", "eligibility_trace", "prefix_sum"),
        ("ours", "ours_out", "rl_triton"),
    ),
    "odd": Suite(_shapes([(16384, 1000), (1000, 999), (4097, 127)]), contenders=("ours", "rl_triton")),
    "layouts": Suite(
        (Shape(65536, 256, "time"), Shape(4096, 128, "time"), Shape(65536, 256, "sliced"), Shape(4096, 128, "sliced")),
        contenders=("ours", "module_out", "rl_triton"),
    ),
    "bf16": Suite(tuple(Shape(N, T, dtype=BF16) for N, T in ((65536, 256), (4096, 128), (512, 4096))),
                  contenders=("ours", "module_out")),
    # the faster of TorchRL's paths, on the GPU and on the CPU
    "torchrl": Suite(
        _shapes([(64, 512), (512, 128), (512, 2048), (4096, 128), (4096, 512)]),
        ("gae", "td0", "td1", "td_lambda", "reward2go", "vtrace"),
        ("module", "torchrl_serial", "torchrl_vec"),
    ),
    "cpu": Suite(
        _shapes((N, T) for T, N in product((8, 128, 2048), (1, 64, 4096))),
        ("gae", "td0", "td1", "td_lambda", "reward2go", "vtrace"),
        ("ours", "module", "torchrl_serial", "torchrl_vec"),
    ),
}  # fmt: skip
