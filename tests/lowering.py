"""Lower kernels to sm_90 machine code on any machine and print what the assembler says of each, as JSON.

Run as a program, in a process of its own: it replaces Triton's driver by a stub that launches nothing, and launches by
compilation. Tensors are on the meta device: shapes and strides are all that a plan depends on.
"""

import io
import itertools
import json
import math
import re
from contextlib import redirect_stdout

import torch
import triton
from triton.backends.compiler import GPUTarget

from rl_triton_td import _launch, _scan, adjoint, ops, specs
from rl_triton_td._replay import Place

CAPABILITY = 90


class StubDriver:
    binary_ext = "cubin"

    def get_current_target(self):
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")

    @staticmethod
    def is_active():
        return True


compiled = []
assembled = {}  # what the assembler says of a kernel, by its hash


def compile_only(plan, sources, outputs, before, initial):
    with redirect_stdout(io.StringIO()) as report:
        kernel = _scan.scan_kernel.warmup(
            sources,
            plan.strides,
            outputs,
            before,
            initial,
            plan.meetings and plan.meetings.place(),
            *plan.tail,
            num_warps=plan.tile.num_warps,
            grid=(1,),
        )
    passed = None
    if plan.alone and not plan.summarise:
        places = itertools.count()
        here, there, behind = (
            tuple(Place(next(places)) if isinstance(x, torch.Tensor) else x for x in entries)
            for entries in (sources, outputs, (initial,))
        )
        plan.compiled = kernel
        *_, values, slots, meeting = plan.direct(here, there, *behind)
        arguments = here, plan.strides, there, None, *behind, meeting and Place(-1), *plan.tail
        kinds = [kind for kind, _ in _launch.parameters(kernel.src.signature.values(), arguments)]
        passed = [{"*": "u64", "i64": "u64", "fp32": "f32", "i32": "u32"}.get(k if k[0] != "*" else "*") for k in kinds]
        passed += [None if len(values) != 8 * (len(kinds) + 2) else "u64"] * 2
    compiled.append((plan, kernel, assembled.setdefault(kernel.hash, report.getvalue()), passed))


def install():
    triton.knobs.nvidia.dump_ptxas_log = triton.knobs.compilation.always_compile = True
    triton.runtime.driver.set_active(StubDriver())
    _launch._Launch.__call__ = compile_only
    _launch._multiprocessors = lambda device: 132
    _launch.driver = lambda: (1, 1)
    ops.runs_kernels = lambda device: True


def lower(spec, rows, steps, time_contiguous=True, *, shifted=False, masked=False, actions=0, number=torch.float32):
    """The assembler's reports on the launches of one call: registers, spills, how many loads and stores are wide.

    ``shifted`` takes next values from the next row. A masked call does so too and has a tile for every hyper: all that
    a tile can hold.
    """

    def entry(dtype=number, width=1):
        shape = (rows, steps, width) if time_contiguous else (steps, rows, width)
        x = torch.empty(shape, dtype=dtype, device="meta")
        return x if time_contiguous else x.transpose(0, 1)

    def flag():
        return entry(torch.bool)

    kinds = (0, 2, 2, 3, 0, 3, 0) if actions else (0,) * len(spec.names)
    made = {}  # entries of one name are one tensor, as in every call
    inputs = tuple(
        made.setdefault(name.removeprefix("trace_"), flag() if is_flag else entry(width=actions if kind else 1))
        for name, is_flag, kind in zip(spec.names, spec.flags, kinds, strict=True)
    )
    given = {}
    if spec.transition:
        given = {"done": flag(), "terminated": flag()}
        given |= {"successor": made.get("value", entry()), "bootstrap": entry()} if shifted or masked else {}
        given |= {} if shifted or masked else {"next_value": entry(width=actions or 1)}
    if masked:
        given["mask"] = flag()
    if actions:
        given["choice"] = ops.Choice(entry(torch.int64), entry(width=actions), kinds)
    compiled.clear()
    ops.evaluate(
        spec,
        inputs,
        tuple(entry() if masked else 0.9 for _ in spec.hypers),
        (True,) * len(spec.outputs),
        1,
        like=entry(),
        **given,
    )
    for plan, kernel, report, passed in compiled:
        tile = plan.tile
        yield {
            "variant": f"{spec.name} {rows}x{steps}" + " time-major" * (not time_contiguous) + " shifted" * shifted
            + " masked" * masked + " summary" * plan.summarise + f" {actions} actions" * bool(actions)
            + f" {number}".replace("torch.", "") * (number is not torch.float32),
            "spec": plan.spec.name,
            "tile": f"{tile.block_n}x{tile.block_t}, {tile.num_warps} warps, {tile.segments} segments",
            "registers": int(re.search(r"Used (\d+) registers", report)[1]),
            "shared": kernel.metadata.shared,
            "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", report))),
            "vector_loads": len(re.findall(r"ld\.global\S*\.v[24]", kernel.asm["ptx"])),
            "scalar_loads": len(re.findall(r"ld\.global(?!\S*\.v[24])", kernel.asm["ptx"])),
            "passed": passed,
            "parameters": re.findall(r"\.param \.(\w+)", re.search(r"\.entry[^(]*\(([^)]*)\)", kernel.asm["ptx"])[1]),
            "shuffles": kernel.asm["ptx"].count("shfl.sync"),
            "conversions": kernel.asm["ttgir"].count("ttg.convert_layout"),
            "told_apart": _told_apart(kernel.asm["ttgir"], kernel.asm["ptx"]),
        }  # fmt: skip


def _told_apart(ttgir, ptx) -> bool | None:
    """Whether of the words that a program waits for every one is read by one thread, or by one in each warp that then
    waits alone; ``None`` where it waits for none."""
    if "isVolatile = true" not in ttgir:
        return None
    waits_together = any("ld.volatile" in loop and "bar.sync" in loop for loop in _loops(ptx))
    words = re.findall(r"isVolatile = true.*?tensor<(\d+)x(\d+)x!tt\.ptr<i64>, (#\w+)>", ttgir)
    for *tile, layout in words:
        spread = re.search(rf"^{layout} = #ttg\.blocked<(.*)>$", ttgir, re.M)[1]
        per_thread, lanes, warps = (
            [int(x) for x in re.search(rf"{name} = \[(\d+), (\d+)\]", spread).groups()]
            for name in ("sizePerThread", "threadsPerWarp", "warpsPerCTA")
        )
        for size, *held in zip(map(int, tile), per_thread, lanes, warps, strict=True):
            if math.prod(held[:2]) > size or math.prod(held) > size and waits_together:
                return False
    return len(words) > 0


def _loops(ptx):
    """What lies between a label and the jumps back to it."""
    lines = ptx.splitlines()
    labels = {line.split(":")[0]: i for i, line in enumerate(lines) if line.startswith("$")}
    for i, line in enumerate(lines):
        jump = re.search(r"\bbra\S*\s+(\$\w+);", line)
        if jump and labels.get(jump[1], i) < i:
            yield "\n".join(lines[labels[jump[1]] : i])


HEAVY = (specs.GAE, specs.DECOUPLED_GAE, specs.VTRACE, specs.RETRACE, specs.RATIO_TRACE)  # those that hold most
SHAPES = [(4096, 128), (65536, 256), (8192, 16384), (64, 16384)]
SHAPES_OF_HEAVY = [(32768, 8), (8192, 2560), (4096, 2048), (512, 4096), (1, 10**6)]
ODD = [(2**20, 15), (65536, 255), (16384, 1001), (8192, 2501), (4096, 4095), (4096, 127), (64, 16383)]
SIDE_BY_SIDE = [(131072, 128), (32768, 512), (16384, 1024), (8192, 2048), (4096, 4096), (2048, 8192), (64, 16384)]


def variants():
    """Every spec at every kind of tile: all tiles those that hold most. Of derived ones, which ask for every gradient,
    fewer."""
    given = tuple(specs.SPECS.values())
    for spec in given:
        derived, heavy = adjoint.adjoint(spec).spec, spec in HEAVY
        for rows, steps, time_contiguous in [(4096, 128, True), (65536, 256, False)] + [(512, 4096, True)] * heavy:
            yield from lower(derived, rows, steps, time_contiguous)
        yield from lower(derived, 4096, 4096, masked=True)
        if spec in (specs.GAE, specs.DECOUPLED_GAE, specs.VTRACE):
            yield from lower(derived, 1, 10**6)
            yield from lower(adjoint.saving(spec), 4096, 4096, masked=True)
        for rows, steps in SHAPES + SHAPES_OF_HEAVY * heavy:
            yield from lower(spec, rows, steps)
        yield from lower(spec, 65536, 256, False)
        for rows, steps in [(4096, 128), (4096, 4096)] + [(64, 16384)] * heavy:
            if spec.transition:
                yield from lower(spec, rows, steps, shifted=True)
            yield from lower(spec, rows, steps, masked=True)
    for rows, steps in SIDE_BY_SIDE:
        for spec in (specs.GAE, specs.VTRACE, specs.RETRACE):
            yield from lower(spec, rows, steps, False)
        yield from lower(specs.GAE, rows, steps, False, shifted=True)
        if rows in (32768, 4096, 64):
            yield from lower(specs.VTRACE, rows, steps, False, masked=True)
        if rows in (8192, 64):
            yield from lower(specs.VTRACE, rows, steps, False, shifted=True, number=torch.float64)
        if rows in (32768, 8192, 4096, 64):
            yield from lower(specs.RETRACE, rows, steps, False, actions=6)
    for spec in given:
        yield from lower(spec, 131072, 127)
    for rows, steps in ODD:
        for spec in (specs.GAE, specs.VTRACE):
            yield from lower(spec, rows, steps)
            yield from lower(spec, rows, steps, shifted=True)
        yield from lower(specs.GAE, rows, steps, masked=True)
    yield from lower(specs.GAE, 8192, 2048, False, masked=True, number=torch.float64)
    yield from lower(specs.GAE, 4096, 4096, False, masked=True)
    for steps in (4096, 8192):
        for actions in (4, 18, 64):
            yield from lower(specs.RETRACE, 512, steps, actions=actions)


if __name__ == "__main__":
    install()
    for report in variants():
        print(json.dumps(report), flush=True)
