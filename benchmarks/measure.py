"""Verifying a contender and timing it: on the device, per call, back to back; and the copy that bounds it."""

from __future__ import annotations

import functools
import gc
import importlib.util
import math
import signal
import statistics
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch

from rl_triton_td._triton import jit, tl

from . import registry

TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-4}  # others: 3e-2
SLOW_US = 2000  # from here on, fewer calls
LARGE = 5e7  # bytes of inputs and outputs, from where one contender at a time holds memory


class Wrong(Exception):
    """The contender's output is not the reference's."""


@contextmanager
def time_limit(seconds: float, of: float):
    """``TimeoutError`` after that long, what is left ``of`` a limit, where signals allow."""

    def stop(*_):
        raise TimeoutError(f"more than {of:.0f} s")

    previous, began = signal.signal(signal.SIGALRM, stop), time.monotonic()
    outer, _ = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        if outer:
            signal.setitimer(signal.ITIMER_REAL, max(outer - (time.monotonic() - began), 1e-3))


# -------------------------------------------------------------------------------------------------------- verification


@functools.cache
def reference_module():
    path = Path(__file__).parents[1] / "tests" / "reference.py"
    spec = importlib.util.spec_from_file_location("benchmarks_reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Check:
    """The float64 reference of some rows, the first and the last among them; computed once for all contenders.

    Of rows longer than ``steps``, the end is compared where time runs backward, else the beginning: what depends on no
    step outside.
    """

    def __init__(self, row: registry.Row, d: dict, steps: int = 16384):
        self.row, (N, T) = row, registry.like(d).shape[:2]
        count = max(1, min(N, 64, steps // T))
        picked = torch.randperm(N, generator=torch.Generator().manual_seed(0))[:count]
        picked[-1] = N - 1
        if count > 1:
            picked[0] = 0
        self.picked = picked.to(next(iter(d.values())).device)
        self.window = slice(steps) if row.forward else slice(max(0, T - steps), None)
        self.d = {name: self._part(x).cpu() for name, x in d.items()}
        self.expected = functools.cache(lambda who: registry.reference(row, self.d, reference_module(), who))

    def _part(self, x):
        return x[self.picked][:, self.window] if x.shape[1] > 1 else x[self.picked]

    def __call__(self, returned, contender: str) -> float:
        """The largest error, relative to ``1 + |x|``; raises :class:`Wrong` above the tolerance."""
        worst = 0.0
        own = contender.startswith("pufferlib") or contender == "rl_triton" and self.row.differs
        expected = self.expected(contender if own else "")
        for x, y in zip(registry.results(self.row, returned), expected, strict=True):
            if x is not None and y is not None:
                error = (self._part(x).cpu().double() - y).abs() / (1 + y.abs())
                worst = max(worst, math.inf if error.isnan().any() else error.max().item())
        if worst > TOLERANCE.get(registry.like(self.d).dtype, 3e-2):
            raise Wrong(f"error {worst:.1e}")
        return worst


# -------------------------------------------------------------------------------------------------------------- timing


def _synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def estimate_us(call, fresh, device) -> float:
    """Roughly, after two calls to warm up."""
    for _ in range(2):
        call(fresh())
    best = math.inf
    for _ in range(3):
        x = fresh()
        _synchronize(device)
        start = time.perf_counter()
        call(x)
        _synchronize(device)
        best = min(best, (time.perf_counter() - start) * 1e6)
        if best > 50 * SLOW_US:
            break
    return best


def full_call_us(call, fresh, device, calls=50) -> float:
    """Median; each call synchronised, by CUDA events on a GPU and by the clock elsewhere."""
    cuda, batch = device.type == "cuda", []
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if cuda else (None, None)
    for _ in range(calls):
        x = fresh()
        if cuda:
            torch.cuda.synchronize(device)
            start.record()
            call(x)
            end.record()
            torch.cuda.synchronize(device)
            batch.append(start.elapsed_time(end) * 1e3)
        else:
            at = time.perf_counter()
            call(x)
            batch.append((time.perf_counter() - at) * 1e6)
    return statistics.median(batch)


def back_to_back_us(call, fresh, device, calls=200) -> float:
    """Wall clock of a loop over ``calls``, synchronised at its end."""
    for _ in range(2):  # the first fills the allocator
        xs = [fresh() for _ in range(calls)]
        _synchronize(device)
        at = time.perf_counter()
        for x in xs:
            call(x)
        _synchronize(device)
        us = (time.perf_counter() - at) / calls * 1e6
        del xs
    return us


def device_us(bound, repeats=5, calls=20) -> float:
    """A CUDA graph of several calls, in turn on each of ``bound``, so that large inputs come from memory."""
    rounds = max(1, calls // len(bound))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # the inputs may still be on their way
    with torch.cuda.stream(stream):
        fresh = [[(call, make()) for call, make in bound] for _ in range(rounds)]
        for call, x in ((call, make()) for call, make in bound):
            call(x)
        torch.cuda.synchronize()
        graph, kept = torch.cuda.CUDAGraph(), [None] * len(bound)
        with torch.cuda.graph(graph, stream=stream):
            for batch in fresh:
                for k, (call, x) in enumerate(batch):
                    kept[k] = call(x)
        graph.replay()
        best, start, end = math.inf, *(torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(repeats):
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            best = min(best, start.elapsed_time(end))
    return best / rounds / len(bound) * 1e3


def capturable(call, fresh) -> bool:
    """Whether a call leaves the device running; to find out within a capture would break later ones."""
    x = fresh()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(x)
    except RuntimeError:
        return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


def peak_extra_bytes(call, fresh, device, outputs: int) -> int:
    """Memory at the highest point of a call, beyond what was there and its outputs."""
    x = fresh()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    call(x)
    return max(0, torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - before - outputs)


# ------------------------------------------------------------------------------------------------------------- ceiling


@jit
def copy_kernel(source, target, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < n), mask=at < n)


def rotations(moved: int, device) -> int:
    """How many sets of inputs to take turns, so that none is found in the cache; 1 for what fits it."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return 1 if moved <= cache else max(2, math.ceil(4 * cache / moved))


@functools.cache
def copy_us(moved: int, device) -> float:
    """Device time of a kernel that reads half of ``moved`` bytes and writes as many: the ceiling."""
    n, best = -(-moved // 128) * 16, math.inf  # whole vectors
    pairs = [(torch.zeros(n, device=device), torch.empty(n, device=device)) for _ in range(rotations(moved, device))]
    for block, warps in ((1024, 4), (2048, 8), (4096, 8)):

        def bind(x, y, block=block, warps=warps):
            return (lambda _: copy_kernel[(-(-n // block),)](x, y, n, block, num_warps=warps)), (lambda: None)

        best = min(best, device_us([bind(x, y) for x, y in pairs]))
    return best


# ----------------------------------------------------------------------------------------------------------- contender


class Case:
    """A row at a shape: its inputs, their reference and the contenders' figures."""

    def __init__(self, row: registry.Row, shape, device, check: bool = True):
        self.row, self.shape, self.device = row, shape, torch.device(device)
        make = functools.partial(registry.entries, row, shape.N, shape.T, shape.layout, shape.dtype, self.device)
        self.d = make()
        self.bytes = registry.bytes_moved(row, self.d)
        sets = rotations(self.bytes, self.device) if self.device.type == "cuda" and check else 1
        self.sets = [self.d, *(make(seed=k) for k in range(1, sets))]
        self.check = Check(row, self.d) if check else None

    def warm(self, name: str) -> None:
        """One call, so that what it compiles is in the caches on disk."""
        call, fresh = registry.CONTENDERS[name](self.row, self.d)
        call(fresh())

    def measure(self, name: str, quick: bool, limit: float) -> dict:
        """The figures of a contender alone."""
        return dict(self.in_turn((name,), quick, limit))[name]

    def in_turn(self, names, quick: bool, limit: float, budget: float = math.inf):
        """``(name, figures)`` of contenders; figures that one has not are ``None``, and ``note`` says why.

        Of small inputs, calls are timed in turn, so that a slow moment of the host is one of all contenders. Each has
        ``limit`` seconds, all have ``budget``: what has not begun by then is left out.
        """
        ends, limit = time.monotonic() + budget, min(limit, budget)
        kinds = "device_us", "call_us", "back_to_back_us", "peak_extra_bytes", "error", "note"
        for group in [names] if self.bytes < LARGE else [[name] for name in names]:
            found, left = {name: dict.fromkeys(kinds) for name in group}, dict.fromkeys(group, limit)
            running = {name: self._measure(name, quick, found[name]) for name in group}
            while running:
                for name, steps in tuple(running.items()):
                    began = time.monotonic()
                    if began >= ends and left[name] == limit:
                        del found[name], running[name]
                    elif not self._goes_on(steps, found[name], min(left[name], ends - began), limit):
                        del running[name]
                    left[name] -= time.monotonic() - began
            yield from found.items()

    def _goes_on(self, steps, result, seconds, limit) -> bool:
        """Takes the next of ``steps``, if there is one."""
        try:
            with time_limit(seconds, limit):
                return next(steps, steps) is not steps
        except registry.Unavailable as e:
            result["note"] = f"unavailable: {e}"
        except Wrong as e:
            result["note"] = f"not timed: {e}"
        except Exception as e:
            result["note"] = f"{type(e).__name__}: {str(e).strip().splitlines()[0][:160] if str(e).strip() else ''}"
        finally:
            gc.enable()
        return False

    def _measure(self, name, quick, result):
        """Makes a contender ready, then takes five rounds of times, then the rest: a step each."""
        device, contender = self.device, registry.CONTENDERS[name]
        call, fresh = contender(self.row, self.d)
        result["error"] = self.check(call(fresh()), name)
        rough = estimate_us(call, fresh, device)
        scale = min(1.0, SLOW_US / rough) * (0.2 if quick else 1)
        calls, medians = max(1 if rough > 1e5 else 3, int(50 * scale)), 5 if scale > 0.1 else 1
        # every module call keeps its outputs until the loop's end
        many = 200 if self.bytes < LARGE else 20
        many, repeats = max(1 if rough > 1e5 else 3, int(many * scale)), 3 if scale > 0.1 else 1
        full, loops = [], []
        for k in range(5):
            yield
            gc.disable()  # until the step's end: what is made ready may leave much behind
            if k < medians:
                full.append(full_call_us(call, fresh, device, calls))
            if k < repeats:
                loops.append(back_to_back_us(call, fresh, device, many))
        result["call_us"], result["back_to_back_us"] = min(full), min(loops)
        yield
        gc.disable()
        if device.type != "cuda":
            return
        x = registry.like(self.d)
        outputs = 0 if name.endswith("_out") else len(self.row.outputs)
        if name == "module" and self.row.name.startswith("td"):
            outputs = 2  # the advantage is written too
        result["peak_extra_bytes"] = peak_extra_bytes(call, fresh, device, outputs * x.numel() * x.element_size())
        if rough > 20 * SLOW_US:
            result["note"] = "no device time: too many kernels for a graph"
            return
        if name == "pufferlib" or not capturable(call, fresh):
            result["note"] = "no device time: it synchronises, or launches on the legacy stream"
            return
        try:
            bound = [(call, fresh)] + [contender(self.row, d) for d in self.sets[1:]]
            result["device_us"] = device_us(bound, calls=4 if rough > SLOW_US else 20)
        except Exception as e:
            torch.cuda.synchronize()
            result["note"] = f"no device time: {type(e).__name__} in the capture"


# --------------------------------------------------------------------------------------------------------- environment


def environment() -> dict:
    """What a figure depends on."""
    import datetime
    import subprocess
    from importlib.metadata import PackageNotFoundError, version

    def output(*command):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=Path(__file__).parent)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None

    def installed(name):
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "threads": torch.get_num_threads(),
        **{name: installed(name) for name in ("torch", "triton", "tensordict", "torchrl", "rl-triton", "pufferlib")},
        "commit": output("git", "rev-parse", "HEAD"),
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
