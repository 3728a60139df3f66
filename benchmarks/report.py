"""Tables of what was measured."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict

from .registry import ROWS

BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
KEY = ("device", "estimator", "N", "T", "layout", "dtype")
FIGURES = ("device_us", "call_us", "back_to_back_us")


def dumps(result: dict) -> str:
    """JSON with a line a row."""
    rows = ",\n".join(json.dumps(_rounded(row)) for row in result["rows"])
    head = json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=1)
    return f'{head[:-2]},\n "rows": [\n{rows}\n]\n}}\n'


def _rounded(row):
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}


def cases(rows: list[dict]) -> dict[tuple, dict[str, dict]]:
    """Rows by ``(device, estimator, N, T, layout, dtype)`` and contender; a later row replaces an earlier one."""
    found = defaultdict(dict)
    for row in rows:
        if row["contender"]:
            found[tuple(row[name] for name in KEY)][row["contender"]] = row
    return found


def figure(case: dict, contenders, name: str):
    """The smallest that any of ``contenders`` has, or ``None``."""
    contenders = (contenders,) if isinstance(contenders, str) else contenders
    found = [case[c][name] for c in contenders if c in case and case[c].get(name) is not None]
    return min(found) if found else None


def ratio(case, over, under, name):
    a, b = figure(case, over, name), figure(case, under, name)
    return a / b if a and b else None


def markdown(header, lines) -> str:
    def cell(x):
        return "" if x is None else f"{x:.3g}" if isinstance(x, float) else str(x)

    body = [header, ["---", *["--:"] * (len(header) - 1)], *lines]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in body)


def detail(rows: list[dict]) -> str:
    """A line a contender and shape."""
    lines = []
    for (device, estimator, N, T, layout, dtype), case in cases(rows).items():
        for name, row in case.items():
            copy, own = row.get("copy_us"), row.get("device_us")
            lines.append([
                estimator, device, f"{N}×{T}", layout, dtype, name, *(row.get(f) for f in FIGURES),
                own / copy if own and copy else None, row.get("peak_extra_bytes"), row.get("error"), row.get("note"),
            ])  # fmt: skip
    return markdown(["estimator", "on", "shape", "layout", "dtype", "contender", "device µs", "call µs",
                     "back to back µs", "÷ copy", "extra bytes", "error", "note"], lines)  # fmt: skip


TORCHRL = ("torchrl_serial", "torchrl_vec")
NO_COPY = ("ours", "ours_out")


def summary(rows: list[dict], peers: dict | None = None) -> str:
    """A line an estimator: the worst over its shapes, or the median where said."""
    by_row = defaultdict(list)
    for key, case in cases(rows).items():
        by_row[key[0], key[1]].append((key[2:], case))
    recorded = {(p["algo"], p["B"], p["T"]): p for p in (peers or {}).get("rl_triton_0_1_3", ())}

    def of(entries, function, reduce, where=lambda shape, case: True):
        found = [function(shape, case) for shape, case in entries if where(shape, case)]
        found = [x for x in found if x is not None]
        return reduce(found) if found else None

    def against_recorded(estimator):
        def function(shape, case):
            other = recorded.get((ROWS[estimator].peer, *shape[:2]))
            own = figure(case, NO_COPY, "device_us")
            plain = shape[2:] == ("rows", "float32")
            return other["device_us"] / own if other and own and plain else None

        return function

    def small(shape, case):
        return shape[0] * shape[1] < 1e6

    def large(shape, case):
        return next(iter(case.values())).get("bytes", 0) >= 1e8

    def to_copy(shape, case):
        own, copy = figure(case, "ours", "device_us"), next(iter(case.values())).get("copy_us")
        return own / copy if own and copy else None

    def extra(shape, case):
        peak = figure(case, "ours", "peak_extra_bytes")
        return None if peak is None else 100 * peak / case["ours"]["bytes"]

    def back(name):
        return lambda shape, case: figure(case, name, "back_to_back_us")

    def times(over, under, name):
        return lambda shape, case: ratio(case, over, under, name)

    def long(shape, case):
        return shape[1] >= 128

    lines = []
    for (device, estimator), entries in by_row.items():
        rlt = of(entries, times("rl_triton", NO_COPY, "device_us"), min)
        if rlt is None and recorded:
            rlt = of(entries, against_recorded(estimator), min)
        lines.append([
            estimator if device == "cuda" else f"{estimator} ({device})",
            of(entries, to_copy, max, large),
            *(of(entries, back(c), statistics.median, small) for c in ("ours", "module", "module_out", "rl_triton")),
            rlt,
            of(entries, times("rl_triton", "ours", "back_to_back_us"), min, small),
            of(entries, times("rl_triton", "module", "back_to_back_us"), min, small),
            of(entries, times("rl_triton", "module_out", "back_to_back_us"), min, small),
            of(entries, times("paper", "ours", "call_us"), min),
            of(entries, times(TORCHRL, "module", "call_us"), min, long),
            of(entries, extra, max),
        ])  # fmt: skip
    header = ["estimator", "device ÷ copy, ≥ 100 MB", "function, µs", "module, µs", "module, outputs given, µs",
              "rl-triton, µs", "rl-triton ÷ function, device", "… ÷ function, call", "… ÷ module",
              "… ÷ module, outputs given", "compiled doubling scan ÷ function", "TorchRL ÷ module, T ≥ 128",
              "extra memory, %"]  # fmt: skip
    keep = [i for i in range(len(header)) if i == 0 or any(line[i] is not None for line in lines)]
    return markdown([header[i] for i in keep], [[line[i] for i in keep] for line in lines])


def update(path, text: str) -> None:
    """Replace what stands between the markers of a file, or append both."""
    old = path.read_text() if path.exists() else ""
    block = f"{BEGIN}\n{text}\n{END}"
    if BEGIN in old and END in old:
        head, rest = old.split(BEGIN, 1)
        new = head + block + rest.split(END, 1)[1]
    else:
        new = old + ("\n" if old else "") + block + "\n"
    path.write_text(new)
