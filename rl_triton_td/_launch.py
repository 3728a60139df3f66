"""Launching :func:`._scan.scan_kernel`: row layout, tile plan, one launch or three, and the cache of launches."""

from __future__ import annotations

import functools
import math
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from . import _scan
from ._triton import tl
from .specs import RECURRENCE, Spec

INT32 = 2**31
ROW_DIMS = 3  # that the kernel indexes; a layout with more is launched slice by slice


@dataclass(frozen=True)
class Tile:
    """What one program holds at a time, and how many segments a row is cut into."""

    block_n: int
    block_t: int
    num_warps: int
    segments: int = 1
    num_stages: int = 1


def tile_plan(rows: int, steps: int, time_contiguous: bool, multiprocessors: int = 132) -> Tile:
    """The tile for ``rows`` sequences of ``steps`` steps, contiguous along time or along rows."""
    elements = 1024
    if time_contiguous:
        block_t = min(_power_of_2(steps), elements)
        block_n = min(_power_of_2(rows), elements // block_t)
    else:
        block_n = min(_power_of_2(rows), 32)
        block_t = min(_power_of_2(steps), elements // block_n)
    programs, chunks = -(-rows // block_n), -(-steps // block_t)
    segments = 1
    if chunks > 1 and programs < 2 * multiprocessors:
        segments = min(chunks, -(-4 * multiprocessors // programs))
        segments = -(-chunks // -(-chunks // segments))
    return Tile(block_n, block_t, max(1, min(8, block_n * block_t // 128)), segments)


def _power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


_forced_tile: Tile | None = None


class force_tile:
    """Context manager for tests and tuning: every launch inside takes ``tile``."""

    def __init__(self, tile: Tile):
        self.tile = tile

    def __enter__(self):
        global _forced_tile
        self.outer, _forced_tile = _forced_tile, self.tile

    def __exit__(self, *_):
        global _forced_tile
        _forced_tile = self.outer


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _merge_rows(shape, time_dim: int, strides: list[tuple[int, ...]]):
    """Row dimensions of ``shape``, merged where every tensor's strides allow it: ``(sizes, strides)``, outer first."""
    sizes, merged = [], [[] for _ in strides]
    for dim, size in enumerate(shape):
        if dim == time_dim or size == 1:
            continue
        if sizes and all(m[-1] == s[dim] * size for m, s in zip(merged, strides, strict=True)):
            sizes[-1] *= size
            for m, s in zip(merged, strides, strict=True):
                m[-1] = s[dim]
        else:
            sizes.append(size)
            for m, s in zip(merged, strides, strict=True):
                m.append(s[dim])
    return sizes, merged


class _TooManyRowDimensions(Exception):
    pass


class _Launch:
    """Everything about a launch but its pointers: built once for a layout, then called."""

    def __init__(self, spec: Spec, shape, time_dim, sources, outputs, masked, behind, dtype, device, summarise):
        self.spec, self.device, self.summarise = spec, device, summarise
        # a summary's outputs have a layout of their own, [rows, segments], that the kernel knows
        tensors = [x for x in (*sources, *(() if summarise else outputs)) if isinstance(x, Tensor) and x.ndim]
        sizes, merged = _merge_rows(shape, time_dim, [x.stride() for x in tensors])
        if len(sizes) > ROW_DIMS:
            raise _TooManyRowDimensions
        steps, self.rows = shape[time_dim], math.prod(sizes)
        inner_contiguous = [m[-1] == 1 for m in merged if m] if sizes else []
        time_strides = [x.stride(time_dim) for x in tensors]
        # expanded tensors (stride 0) have no say
        time_contiguous = sum(s == 1 for s in time_strides) >= sum(inner_contiguous)
        self.tile = _forced_tile or tile_plan(self.rows, steps, time_contiguous, _multiprocessors(device))
        chunks = -(-steps // self.tile.block_t)
        self.segments = min(self.tile.segments, chunks)
        chunks = -(-chunks // self.segments)
        self.grid = (-(-self.rows // self.tile.block_n), self.segments, 1)
        aligned = math.gcd(16, steps, *(s for m in merged for s in m))
        layouts = {
            id(x): (*(r // aligned for r in m or [0]), *(None,) * (ROW_DIMS - max(1, len(m))), s)
            for x, m, s in zip(tensors, merged, time_strides, strict=True)
        }
        none = (0, None, None, 0)
        strides = [layouts.get(id(x), none) for x in (*sources, *(outputs if not summarise else ()))]
        hypers = sources[-len(spec.hypers) :] if spec.hypers else ()
        scalar = tuple(
            0 if not isinstance(h, Tensor) else 1 if not any(h.stride()) or h.numel() == 1 else 2 for h in hypers
        )
        wanted = () if summarise else tuple(o for o, x in zip(spec.outputs, outputs, strict=True) if x is not None)
        wide = steps * max([1, *time_strides]) >= INT32
        self.tail = (
            self.rows,
            steps // aligned,
            chunks,
            *(sizes[1:] + [None] * (2 - len(sizes[1:]))),
            (0,) * len(spec.shifts) if masked else spec.shifts,
            spec.flags,
            () if summarise else tuple(x is not None for x in outputs),
            scalar,
            spec.coefficients,
            spec.epilogue,
            spec.recurrences,
            spec.reverse,
            spec.reverse and not time_contiguous,
            spec.transition,
            any(o in spec.looks_ahead for o in wanted),
            behind,
            summarise,
            tl.float64 if dtype == torch.float64 else tl.float32,
            wide,
            aligned,
            self.tile.num_stages,
            self.tile.block_n,
            self.tile.block_t,
        )
        self.strides = tuple(s for layout in strides for s in layout)
        self.compiled = None  # by the first launch

    def __call__(self, sources, outputs, enter):
        if self.compiled is None or self.device.type != "cuda":
            self.compiled = _scan.scan_kernel[self.grid](
                sources, self.strides, outputs, enter, *self.tail, num_warps=self.tile.num_warps
            )
            return
        # what Triton specialises on is in the cache's key, so its own look-up is not needed again
        self.run(_pointers(sources), _pointers(outputs), None if enter is None else _pointers(enter))

    def run(self, sources, outputs, enter):
        """Launch what is compiled on pointers as numbers, on the current stream."""
        kernel = self.compiled
        kernel.run(
            *self.grid,
            torch._C._cuda_getCurrentRawStream(self.device.index),
            kernel.function,
            kernel.packed_metadata,
            None,
            None,
            None,
            sources,
            self.strides,
            outputs,
            enter,
            *self.tail,
        )


def _pointers(entries):
    return tuple(x.data_ptr() if isinstance(x, Tensor) else x for x in entries)


_launches: dict[tuple, _Launch] = {}


def launch(spec: Spec, shape, time_dim: int, sources, outputs, *, initial, masked, behind, dtype, summarise=False):
    """Run ``spec``.

    Args:
        sources: ``(done, terminated, next_value, successor, bootstrap, mask, last, *inputs, *hypers)``; tensors of
            ``shape`` (any strides), numbers for hypers, ``None`` where absent.
        outputs: tensors of ``shape`` to be written, ``None`` where not wanted.
        initial: ``x`` beyond the window, one number a row, or ``None`` for 0.
        masked: entries that the spec reads at another step are already those of the valid neighbour.
        behind: the bootstrap holds only behind the last step.
        dtype: of the arithmetic.
        summarise: write what each segment does to what enters it, ``(u, w)`` of ``[rows, segments]``.
    """
    layout = tuple(
        (x.dtype, x.stride(), x.data_ptr() & 15 == 0) if isinstance(x, Tensor) else x is None
        for x in (*sources, *outputs, initial)
    )
    device = next(x for x in outputs if x is not None).device
    key = (spec, time_dim, shape, layout, masked, behind, dtype, summarise, device, _forced_tile)
    plan = _launches.get(key)
    if plan is None:
        try:
            plan = _Launch(spec, shape, time_dim, sources, outputs, masked, behind, dtype, device, summarise)
        except _TooManyRowDimensions:
            return _launch_slices(
                spec, shape, time_dim, sources, outputs, initial=initial, masked=masked, behind=behind, dtype=dtype
            )
        if len(_launches) >= 4096:
            _launches.clear()
        _launches[key] = plan
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _run(plan, shape, time_dim, sources, outputs, initial, masked, behind, dtype)
    return _run(plan, shape, time_dim, sources, outputs, initial, masked, behind, dtype)


def _run(plan: _Launch, shape, time_dim, sources, outputs, initial, masked, behind, dtype):
    if (launches := getattr(_recording, "launches", None)) is not None:
        launches.append((plan, sources, outputs, initial))
    spec = plan.spec
    if plan.segments == 1 or plan.summarise or not spec.recurrences:
        return plan(sources, outputs, None if initial is None else (initial,))
    # three launches: what each segment does to what enters it, what enters each, and the answer
    summary = tuple(
        torch.empty((plan.rows, plan.segments), dtype=dtype, device=plan.device) for _ in range(2 * spec.recurrences)
    )
    with force_tile(plan.tile):
        launch(
            spec, shape, time_dim, sources, summary, initial=None, masked=masked, behind=behind, dtype=dtype,
            summarise=True,
        )  # fmt: skip
    enter = tuple(torch.empty_like(summary[0]) for _ in range(spec.recurrences))
    with force_tile(Tile(1, _power_of_2(plan.segments), 4)):
        for k in range(spec.recurrences):
            launch(
                RECURRENCE[spec.reverse], summary[0].shape, 1, (None,) * 7 + summary[2 * k : 2 * k + 2],
                (None, enter[k]), initial=initial, masked=False, behind=False, dtype=dtype,
            )  # fmt: skip
    plan(sources, outputs, enter)


def _launch_slices(spec, shape, time_dim, sources, outputs, *, initial, masked, behind, dtype):
    """:func:`launch` for rows of more strided dimensions than the kernel indexes, one slice of the first at a time."""
    dim = next(d for d in range(len(shape)) if d != time_dim and shape[d] > 1)
    rows = math.prod(shape) // shape[time_dim] // shape[dim]
    if initial is not None:
        initial = initial.reshape(math.prod(shape[:dim]), shape[dim], -1)
    for i in range(shape[dim]):
        at = [x.narrow(dim, i, 1) if isinstance(x, Tensor) else x for x in (*sources, *outputs)]
        launch(
            spec,
            (*shape[:dim], 1, *shape[dim + 1 :]),
            time_dim,
            tuple(at[: len(sources)]),
            tuple(at[len(sources) :]),
            initial=None if initial is None else initial[:, i].reshape(rows),
            masked=masked,
            behind=behind,
            dtype=dtype,
        )


# ------------------------------------------------------------------------------------------------ launches remembered

_recording = threading.local()  # .launches: a list while a call is watched
_PLAIN = (Tensor, torch.nn.Parameter)


def remembered(function):
    """Remember the launch that a call came to, and do only that where arguments are laid out the same again.

    The key holds all that a call depends on but the data: numbers by value; shape, strides, dtype, device and alignment
    of tensors. A call that did more than one launch on its own arguments and new outputs is never remembered.
    """
    calls: dict[tuple, _Replay | None] = {}

    @functools.wraps(function)
    def call(*args, **kwargs):
        if torch.compiler.is_compiling() or not torch.cuda.is_initialized():
            return function(*args, **kwargs)
        key, flat, pointers = [tuple(kwargs), torch.is_grad_enabled()], [], []
        for given in (*args, *kwargs.values()):
            for x in given if type(given) is tuple else (given,):
                if type(x) in _PLAIN:
                    if not x.is_cuda:
                        return function(*args, **kwargs)
                    pointer = x.data_ptr()
                    key += (x.dtype, x.shape, x.stride(), x.device, pointer & 15 == 0, x.requires_grad)
                    pointers.append(pointer)
                else:
                    key.append(x)
                    pointers.append(None)
                flat.append(x)
        key = tuple(key)
        try:
            replay = calls.get(key, _UNKNOWN)
        except TypeError:  # unhashable: no argument that a launch could come of
            return function(*args, **kwargs)
        if replay is None:
            return function(*args, **kwargs)
        if replay is not _UNKNOWN:
            return replay(flat, pointers)
        outer, found = getattr(_recording, "launches", None), []
        _recording.launches = found
        try:
            result = function(*args, **kwargs)
        finally:
            _recording.launches = outer
        if len(calls) >= 1024:
            calls.clear()
        calls[key] = _Replay.of(found, flat, pointers, result)
        return result

    return call


_UNKNOWN = object()


class _Replay:
    """One launch, with the arguments that its sources come from."""

    @classmethod
    def of(cls, record, flat, pointers, result):
        given = [p for p in pointers if p]
        if len(record) != 1 or len(set(given)) != len(given):
            return None
        plan, sources, outputs, initial = record[0]
        if plan.compiled is None or plan.segments > 1 or _forced_tile is not None:
            return None
        self = cls()
        self.plan = plan
        try:
            # a view of an argument starts where the argument does
            self.sources = [pointers.index(x.data_ptr()) if isinstance(x, Tensor) else None for x in sources]
            self.initial = None if initial is None else pointers.index(initial.data_ptr())
        except ValueError:
            return None
        self.constants = [None if isinstance(x, Tensor) else x for x in sources]
        results = result if isinstance(result, tuple) else (result,)
        self.single = not isinstance(result, tuple)
        self.outputs = []
        for output in outputs:
            if output is None:
                self.outputs.append(None)
                continue
            place = next((i for i, x in enumerate(flat) if x is output), None)
            like = (output.shape, output.stride(), output.dtype, output.device)
            self.outputs.append((place, like))
        self.returned = [next((i for i, o in enumerate(outputs) if o is x), None) for x in results]
        return None if None in self.returned else self

    def __call__(self, flat, pointers):
        plan, outputs = self.plan, []
        for output in self.outputs:
            if output is None:
                outputs.append(None)
            elif output[0] is None:
                shape, strides, dtype, device = output[1]
                outputs.append(torch.empty_strided(shape, strides, dtype=dtype, device=device))
            else:
                outputs.append(flat[output[0]])
        sources = tuple(
            constant if i is None else pointers[i] for i, constant in zip(self.sources, self.constants, strict=True)
        )
        written = tuple(None if x is None else x.data_ptr() for x in outputs)
        enter = None if self.initial is None else (pointers[self.initial],)
        if plan.device.index == torch._C._cuda_getDevice():
            plan.run(sources, written, enter)
        else:
            with torch.cuda.device(plan.device):
                plan.run(sources, written, enter)
        if self.single:
            return outputs[self.returned[0]]
        return tuple(outputs[i] for i in self.returned)
