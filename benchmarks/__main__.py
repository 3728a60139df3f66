"""``python -m benchmarks run | tune | networks | table | plot``; see ``--help`` of each."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from . import measure, registry, report
from . import networks as value_networks
from .suites import SUITES

HERE = Path(__file__).parent

try:
    from tqdm import tqdm
except ImportError:  # progress is a courtesy

    def tqdm(iterable, **kwargs):
        return iterable


def selection(args):
    """``(suite, shape, row, contenders)`` of what was asked for, shape by shape."""
    for name in args.suite:
        suite = SUITES[name]
        for shape in suite.shapes:
            for estimator in args.estimators or suite.estimators:
                yield name, shape, registry.ROWS[estimator], args.contenders or suite.contenders


def warm(args) -> None:
    """Let several processes compile what the run needs, each its share, into the caches on disk."""
    command = [sys.executable, "-m", "benchmarks", *sys.argv[1:], "--share"]
    env = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    shares = [
        subprocess.Popen([*command, f"{k}/{args.warm}"], env=env, stderr=subprocess.DEVNULL) for k in range(args.warm)
    ]
    deadline = time.monotonic() + min(180.0, args.budget / 2)
    for process in shares:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def warm_share(args) -> None:
    k, n = map(int, args.share.split("/"))
    for _, shape, row, contenders in itertools.islice(selection(args), k, None, n):
        for name in contenders:
            if name.startswith("torchrl"):
                continue
            try:
                measure.Case(row, shape, args.device, check=False).warm(name)
            except Exception:  # noqa: S112 the run will say
                continue


def run(args) -> None:
    started = time.monotonic()
    if args.plugin:
        registry.load_plugin(args.plugin)
    if args.share:
        return warm_share(args)
    device = torch.device(args.device)
    cuda = device.type == "cuda"
    if args.warm and cuda:
        warm(args)
    out = {"environment": measure.environment(), "quick": args.quick, "complete": False, "rows": []}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    tasks = list(selection(args))
    for suite, shape, row, contenders in tqdm(tasks, desc="benchmarks", unit="case", disable=None):
        left = args.budget - (time.monotonic() - started)
        if left <= 0:
            break
        about = {"suite": suite, "estimator": row.name, "N": shape.N, "T": shape.T, "layout": shape.layout,
                 "dtype": str(shape.dtype).removeprefix("torch."), "device": device.type}  # fmt: skip
        try:
            case = measure.Case(row, shape, device)
            ceiling = {"bytes": case.bytes, "copy_us": measure.copy_us(case.bytes, device) if cuda else None}
        except torch.OutOfMemoryError as e:
            out["rows"].append({**about, "contender": None, "note": type(e).__name__})
            continue
        left = args.budget - (time.monotonic() - started)
        for name, figures in case.in_turn(contenders, args.quick, args.limit, left):
            out["rows"].append({**about, **ceiling, "contender": name, **figures})
            args.out.write_text(report.dumps(out))
        del case
        if cuda:  # the next case has memory of its own, not pieces of a larger one's
            torch.cuda.empty_cache()
    else:
        out["complete"] = True
    args.out.write_text(report.dumps(out))
    print(report.detail(out["rows"]) if args.verbose else report.summary(out["rows"]))


def tiles(T: int, time_contiguous: bool):
    """Those worth trying: 512 to 4096 elements, 4 to 32 a thread."""
    from rl_triton_td._launch import Tile

    longest = max(8, 1 << (T - 1).bit_length())
    for log_elements, log_t, warps in itertools.product(range(9, 13), range(3, 13), (1, 2, 4, 8)):
        block_t, block_n = 1 << log_t, 1 << max(0, log_elements - log_t)
        fits = block_t <= min(longest, 1 << log_elements) and 4 <= (block_t * block_n) // (32 * warps) <= 32
        shaped = block_t >= min(128, longest) if time_contiguous else block_n >= 16 and block_t <= 64
        if fits and shaped:
            for segments in (1,) if T <= 8 * block_t else (1, 8, 64):
                yield Tile(block_n, block_t, warps, segments)


def tune(args) -> None:
    """Time every tile at every shape; print the plan's own and the best ones."""
    from rl_triton_td._launch import force_tile

    started, found = time.monotonic(), []
    for _, shape, row, _ in tqdm(list(selection(args)), desc="tune", unit="shape", disable=None):
        case = measure.Case(row, shape, "cuda")
        bound = [registry.CONTENDERS["ours_out"](row, d) for d in case.sets]
        floor, timed = measure.copy_us(case.bytes, case.device), []
        planned = measure.device_us(bound)
        for tile in tiles(shape.T, shape.layout != "time"):
            if time.monotonic() - started > args.budget:
                break
            try:
                with force_tile(tile):
                    timed.append((round(measure.device_us(bound, 3, 8), 2), tile))
            except Exception as e:
                print(f"{row.name} {shape} {tile}: {type(e).__name__}", file=sys.stderr)
        timed.sort(key=lambda entry: entry[0])
        best = [(us, [t.block_n, t.block_t, t.num_warps, t.segments]) for us, t in timed[:5]]
        found.append({"estimator": row.name, "N": shape.N, "T": shape.T, "layout": shape.layout,
                      "floor_us": floor, "plan_us": planned, "best": best})  # fmt: skip
        print(f"{row.name} {shape.N}x{shape.T} {shape.layout}: floor {floor:.2f}, plan {planned:.2f}, best {best[:3]}")
        if args.out:
            args.out.write_text(report.dumps({"environment": measure.environment(), "rows": found}))
        if time.monotonic() - started > args.budget:
            break


def networks(args) -> None:
    """Time GAE with value networks, and PPO updates, beside TorchRL's."""
    out = {"environment": measure.environment(), "complete": False, "rows": []}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    found = value_networks.rows(args.part, torch.device(args.device), args.tiny, args.networks)
    for row in tqdm(found, desc="networks", unit="row", disable=None):
        out["rows"].append(row)
        args.json.write_text(report.dumps(out))
    out["complete"] = True
    args.json.write_text(report.dumps(out))
    print(value_networks.table(out["rows"]))


def load(paths) -> list[dict]:
    return [row for path in paths for row in json.loads(Path(path).read_text())["rows"]]


def table(args) -> None:
    rows = load(args.json)
    peers = json.loads(args.peers.read_text()) if args.peers else None
    text = report.detail(rows) if args.detail else report.summary(rows, peers)
    print(text)
    if args.update:
        report.update(args.update, text)


def plot(args) -> None:
    from .plot import plots

    for path in plots(load(args.json), args.out):
        print(path)


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True)

    def command(function, **kwargs):
        sub = commands.add_parser(function.__name__, help=function.__doc__, **kwargs)
        sub.set_defaults(command=function)
        return sub

    for function in (run, tune):
        sub = command(function)
        sub.add_argument("--suite", nargs="+", choices=SUITES, default=["quick"])
        sub.add_argument("--estimators", nargs="+", choices=registry.ROWS, metavar="NAME")
        sub.add_argument("--budget", type=float, default=float("inf"), help="seconds after which to stop")
        sub.add_argument("--out", type=Path, default=HERE / "results" / "latest.json" if function is run else None)
        if function is run:
            sub.add_argument("--contenders", nargs="+", metavar="NAME", help=f"of {', '.join(registry.CONTENDERS)}")
            sub.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
            sub.add_argument("--quick", action="store_true", help="a fifth of the repetitions")
            sub.add_argument("--limit", type=float, default=60, help="seconds for one contender at one shape")
            sub.add_argument("--warm", type=int, default=0, metavar="N", help="processes that compile beforehand")
            sub.add_argument("--plugin", help="a local file with more CONTENDERS")
            sub.add_argument("--verbose", action="store_true", help="print every figure")
            sub.add_argument("--share", help=argparse.SUPPRESS)
        else:
            sub.set_defaults(contenders=["ours"])
    sub = command(networks)
    sub.add_argument("--json", type=Path, default=HERE / "results" / "networks.json")
    sub.add_argument("--part", nargs="+", choices=("gae", "update"), default=["gae", "update"])
    names = [s.name for s in (*value_networks.GAE_SHAPES, *value_networks.UPDATE_SHAPES, *value_networks.TINY)]
    sub.add_argument("--networks", nargs="+", choices=dict.fromkeys(names), help="those of these names alone")
    sub.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    sub.add_argument("--tiny", action="store_true", help="shapes for a CPU, to see that all runs")
    sub = command(table)
    sub.add_argument("json", nargs="+")
    sub.add_argument("--detail", action="store_true", help="every figure instead of a line per estimator")
    sub.add_argument("--peers", type=Path, help="recorded figures of rl-triton, where the run has none")
    sub.add_argument("--update", type=Path, nargs="?", const=HERE.parent / "README.md", help="write into this file")
    sub = command(plot)
    sub.add_argument("json", nargs="+")
    sub.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args(argv)
    args.command(args)


if __name__ == "__main__":
    main()
