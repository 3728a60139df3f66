"""Plots of what was measured."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from .report import TORCHRL, cases, figure, ratio  # noqa: E402


def plots(rows: list[dict], out: Path) -> list[Path]:
    """``speedup``, ``ceiling``, ``calls`` and ``networks`` as PNGs in ``out``; one that has no figures is left out."""
    out.mkdir(parents=True, exist_ok=True)
    found = cases([row for row in rows if "network" not in row])
    paths = (speedup(found, out), ceiling(found, out), calls(found, out))
    return [path for path in (*paths, networks([row for row in rows if row.get("ms")], out)) if path]


def _save(figure_, axes, path, **labels):
    axes.set(**labels)
    axes.grid(alpha=0.3, which="both")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="x-small", frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure_.savefig(path, dpi=150)
    plt.close(figure_)
    return path


def speedup(found, out):
    """How many times TorchRL's faster path takes our module's (else our function's) time: bars an estimator."""
    bars = defaultdict(dict)
    for (device, estimator, N, T, layout, dtype), case in found.items():
        times = ratio(case, TORCHRL, "module", "call_us") or ratio(case, TORCHRL, "ours", "call_us")
        if times and layout == "rows" and dtype == "float32":
            bars[estimator][f"{N}×{T}" + ("" if device == "cuda" else f" ({device})")] = times
    if not bars:
        return None
    shapes = list(dict.fromkeys(shape for by_shape in bars.values() for shape in by_shape))
    figure_, axes = plt.subplots(figsize=(max(6, 0.25 * len(bars) * len(shapes)), 4), layout="constrained")
    width = 0.8 / len(shapes)
    for k, shape in enumerate(shapes):
        at = [i + (k - (len(shapes) - 1) / 2) * width for i in range(len(bars))]
        axes.bar(at, [by_shape.get(shape, 0) for by_shape in bars.values()], width, label=shape)
    axes.set_xticks(range(len(bars)), bars, rotation=20, ha="right")
    axes.set_yscale("log")
    return _save(figure_, axes, out / "speedup.png", ylabel="TorchRL's faster path ÷ ours, full call")


def _lines(found, value):
    lines = defaultdict(list)
    for key, case in found.items():
        point = value(key, case)
        if point:
            lines[point[0]].append(point[1:])
    return {name: sorted(points) for name, points in lines.items()}


def ceiling(found, out):
    """Copy kernel ÷ ours, device time, against the bytes that are moved."""

    def value(key, case):
        row = case.get("ours")
        if row and row.get("device_us") and row.get("copy_us"):
            return key[1], row["bytes"], row["copy_us"] / row["device_us"]
        return None

    lines = _lines(found, value)
    if not lines:
        return None
    figure_, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    axes.set_prop_cycle(color=plt.get_cmap("tab20").colors)
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), ".", label=name)
    axes.axhline(1, color="k", lw=0.8)
    axes.set_xscale("log")
    return _save(figure_, axes, out / "ceiling.png", xlabel="bytes moved", ylabel="fraction of the copy's speed")


def calls(found, out):
    """Full call against the number of steps, GAE's rows and every contender."""

    def value(key, case, name):
        us = figure(case, name, "call_us")
        return (name, key[2] * key[3], us) if us and key[1] in ("gae", "gae_bootstrap") else None

    names = dict.fromkeys(name for case in found.values() for name in case)
    figure_, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    axes.set_prop_cycle(color=plt.get_cmap("tab20").colors)
    for name in names:
        for label, points in _lines(found, lambda key, case: value(key, case, name)).items():  # noqa: B023
            axes.plot(*zip(*points, strict=True), ".-", label=label)
    if not axes.lines:
        plt.close(figure_)
        return None
    axes.set_xscale("log")
    axes.set_yscale("log")
    return _save(figure_, axes, out / "calls.png", xlabel="steps (N × T)", ylabel="GAE, full call, µs")


def networks(rows, out):
    """A call with a value network beside one bare forward pass, in time and in memory; the estimator's share of PPO."""
    gae, updates = ([row for row in rows if row["part"] == part] for part in ("gae", "update"))
    bare = {row["network"]: row for row in gae if row["contender"] == "forward"}
    panels = [
        (f"{label}, in bare forward passes", {
            (row["network"], row["contender"]): row[name] / bare[row["network"]][name]
            for row in gae if row["contender"] != "forward" and row[name] and bare.get(row["network"], {}).get(name)
        })
        for name, label in (("ms", "time"), ("peak_bytes", "peak memory"))
    ]  # fmt: skip
    shares = {(f"{r['network']}, {r['N']}×{r['T']}", r["contender"]): 100 * r["share"] for r in updates}
    panels = [panel for panel in (*panels, ("estimator's share of a PPO update, %", shares)) if panel[1]]
    if not panels:
        return None
    figure_, all_axes = plt.subplots(
        1, len(panels), figsize=(5.5 * len(panels), 4), layout="constrained", squeeze=False
    )
    for axes, (label, bars) in zip(all_axes[0], panels, strict=True):
        groups, contenders = (list(dict.fromkeys(key[i] for key in bars)) for i in range(2))
        width = 0.8 / len(contenders)
        for k, name in enumerate(contenders):
            at = [i + (k - (len(contenders) - 1) / 2) * width for i in range(len(groups))]
            axes.bar(at, [bars.get((group, name), 0) for group in groups], width, label=name)
        axes.set_xticks(range(len(groups)), groups, fontsize="x-small")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3, axis="y")
        axes.legend(fontsize="x-small", frameon=False)
    path = out / "networks.png"
    figure_.savefig(path, dpi=150)
    plt.close(figure_)
    return path
