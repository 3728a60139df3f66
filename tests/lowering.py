"""Lower kernels to sm_90 machine code on any machine and print what the assembler says of each, as JSON.

Run as a program, in a process of its own: it replaces Triton's driver by a stub that launches nothing.
"""

import json
import math
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget

from rl_triton_td import _scan, adjoint, specs
from rl_triton_td._launch import HEAD, tile_plan

CAPABILITY = 90
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"


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


def lower(spec, rows, steps, time_contiguous=True, *, masked=False, summarise=False, actions=0):
    """The assembler's report of one variant: registers, spills, and how many loads are wide.

    A masked variant also has no dense next values and a tile for every hyper: all that a tile can hold.
    """
    exclusive = bool(spec.looks_ahead) and not summarise
    number, flag = torch.empty(1), torch.empty(1, dtype=torch.bool)
    head = dict.fromkeys(HEAD)
    if spec.transition:
        head |= {"done": flag, "terminated": flag}
        head |= {"successor": number, "bootstrap": number} if masked else {"next_value": number}
    if masked:
        head |= {"mask": flag, "last": flag if spec.transition else None}
    if actions:
        head |= {"action": torch.empty(1, dtype=torch.int64), "next_policy": number}
    sources = [*head.values(), *(flag if is_flag else number for is_flag in spec.flags)]
    sources += [number if masked else 0.9 for _ in spec.hypers]
    outputs = (number,) * (2 * spec.recurrences if summarise else len(spec.outputs))
    tensors = sum(isinstance(x, torch.Tensor) for x in (*sources, *(() if summarise else outputs)))
    tile = tile_plan(rows, steps, time_contiguous, exclusive=exclusive, tensors=tensors, actions=actions)
    aligned = 16 if time_contiguous and steps % 16 == 0 else 1
    strides = (steps // aligned, None, None, 1) if time_contiguous else (1, None, None, rows // 16)
    layouts = [(0, 1 if time_contiguous else 16)] * (len(sources) + len(spec.outputs))
    if actions:  # the entries that hold a number for every action have a layout of their own
        width = math.gcd(16, actions)
        strides = (steps * actions // 16, None, None, actions // width, *strides)
        wide = (HEAD.index("next_value"), HEAD.index("next_policy"), *(len(HEAD) + i for i in (1, 2, 3, 5)))
        layouts = [(0, width) if i in wide else (1, 1) for i in range(len(layouts))]
    folds = tile.segments > 1 and spec.recurrences and not summarise
    compiled = _scan.scan_kernel.warmup(
        tuple(sources),
        strides,
        outputs,
        (number,) * (2 * spec.recurrences) if folds else None,
        None,
        rows,
        steps // aligned,
        triton.cdiv(triton.cdiv(steps, tile.block_t), tile.segments),
        None,
        None,
        actions or None,
        1 if actions else None,
        LAYOUTS=tuple(layouts),
        SHIFTS=(0,) * len(spec.shifts) if masked else spec.shifts,
        KINDS=(0, 2, 2, 3, 0, 3, 0) if actions else spec.flags,
        WANTED=() if summarise else (True,) * len(spec.outputs),
        SCALAR=(2 if masked else 0,) * len(spec.hypers),
        COEFFICIENTS=spec.coefficients,
        EPILOGUE=spec.epilogue,
        RECURRENCES=spec.recurrences,
        REVERSE=spec.reverse,
        FLIP=spec.reverse and not time_contiguous,
        TRANSITION=spec.transition,
        EXCLUSIVE=exclusive,
        BOOTSTRAP_BEHIND=False,
        SUMMARISE=summarise,
        FOLD=max(16, 1 << (tile.segments - 1).bit_length()) if folds else 0,
        ACTIONS=1 << (actions - 1).bit_length() if actions else 0,
        DTYPE=triton.language.float32,
        WIDE=False,
        ALIGN=aligned,
        STAGES=tile.num_stages,
        BLOCK_N=tile.block_n,
        BLOCK_T=tile.block_t,
        num_warps=tile.num_warps,
        grid=(1,),
    )
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(compiled.asm["ptx"])
        source.flush()
        arch = re.search(r"\.target (\w+)", compiled.asm["ptx"])[1]
        command = [PTXAS, "-v", f"--gpu-name={arch}", source.name, "-o", "/dev/null"]
        run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{spec.name}: {run.stderr}")
    report = run.stderr
    return {
        "variant": f"{spec.name} {rows}x{steps}" + " time-major" * (not time_contiguous) + " masked" * masked
        + " summary" * summarise + f" {actions} actions" * bool(actions),
        "tile": f"{tile.block_n}x{tile.block_t}, {tile.num_warps} warps, {tile.segments} segments",
        "registers": int(re.search(r"Used (\d+) registers", report)[1]),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", report))),
        "vector_loads": len(re.findall(r"ld\.global\S*\.v[24]", compiled.asm["ptx"])),
    }  # fmt: skip


SHAPES = [(32768, 8), (4096, 128), (65536, 256), (4096, 2048), (512, 4096), (8192, 16384), (64, 16384), (1, 10**6)]


def variants():
    """Every spec at every kind of tile that the plan has; fewer of the derived ones, which ask for every gradient."""
    given = tuple(specs.SPECS.values())
    for spec in given:
        derived = adjoint.adjoint(spec).spec
        yield lower(derived, 4096, 128)
        yield lower(derived, 512, 4096)
        yield lower(derived, 65536, 256, False)
        yield lower(derived, 4096, 4096, masked=True)
        if spec in (specs.GAE, specs.DECOUPLED_GAE, specs.VTRACE):
            yield lower(derived, 1, 10**6)
            yield lower(derived, 1, 10**6, summarise=True)
            yield lower(adjoint.saving(spec), 4096, 4096, masked=True)
    for spec in given:
        for rows, steps in SHAPES:
            yield lower(spec, rows, steps)
            if tile_plan(rows, steps, True).segments > 1 and spec.recurrences:
                yield lower(spec, rows, steps, summarise=True)
        for rows, steps in ((65536, 256), (8192, 128), (8, 16384)):
            yield lower(spec, rows, steps, False)
        yield lower(spec, 4096, 4096, masked=True)
    for steps in (4096, 8192):
        for actions in (4, 18, 64):
            yield lower(specs.RETRACE, 512, steps, actions=actions)


if __name__ == "__main__":
    triton.runtime.driver.set_active(StubDriver())
    for report in variants():
        print(json.dumps(report), flush=True)
