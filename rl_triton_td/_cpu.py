"""A :class:`~.specs.Spec` on CPU tensors as one compiled loop, where numba is installed.

The coefficient functions are traced into symbols, as :mod:`.adjoint` does to derive gradients, and written out in
scalars as the body of a loop over rows and, serially, over time: every entry is read where it lies. One function is
compiled for each spec and set of entries; shapes, strides and addresses are its arguments. Where no step leans on
another, it goes along the memory, and LLVM makes vectors of it.
"""

from __future__ import annotations

import array
import functools
import hashlib
import itertools
import math
import operator
import os
import re
import tempfile
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import torch
from torch import Tensor

from . import _triton
from ._launch import HEAD, _merge_rows, _pointers, apart
from ._replay import Place, record
from .adjoint import DECAYED, EXP, INPUTS, SELECT, NotDifferentiable, _named, _ordered, _trace
from .specs import FLAGS, Spec

BLOCK = 64  # rows at most that take a step together
CHUNK = 256  # steps whose results wait in memory of their own, in a loop without recurrences
STAGE = 64  # and of a row in one with recurrences, between its passes
TEAM = 8  # rows whose sums are added up together there: as many as hide how long an addition takes
SHORT = 32  # steps that lie side by side and are fewer are not worth vectors
TOGETHER = 4  # rows that do where a row's steps lie side by side: as many as keep the arithmetic busy
SHARED = 2**17  # steps in all, from where threads share them
HEAD_FLAGS = frozenset(HEAD.index(name) for name in FLAGS)
FORMS = {
    SELECT: "({1} if {0} else {2})",
    EXP: "exp({})",
    DECAYED: "(F(0.0) if {0} == F(0.0) else {0} * {1})",
    "~{}": "not {}",
}


def compiles(spec: Spec, device: torch.device) -> bool:
    """Whether :func:`evaluate` is there for ``spec`` on ``device``."""
    return _triton.NUMBA and device.type == "cpu" and spec not in _refused and _traceable(spec)


def _symbols(spec: Spec):
    return _named("x[{}]", spec.recurrences), _named("x_next[{}]", spec.recurrences)


@functools.cache
def _traceable(spec: Spec) -> bool:
    try:
        _trace(spec, *_symbols(spec))
    except NotDifferentiable:
        return False
    return True


def evaluate(
    spec: Spec, head, inputs, hypers, initial, outputs, time_dim: int, looked: bool, behind: bool, compute
) -> bool:
    """Write the ``outputs`` of ``spec``, tensors of one shape or ``None``; false, and nothing, if it does not compile.

    Args:
        head, inputs, hypers, initial: the sources, as the operator has them; hypers may be numbers.
        looked: entries that the spec reads at another step are already those of the valid neighbour.
        behind: the bootstrap holds only behind the last step.
        compute: dtype of the arithmetic.
    """
    if not all(x.data_ptr() for x in (*head, *inputs, *hypers, initial, *outputs) if isinstance(x, Tensor)):
        return False  # no memory of their own: wrappers, zeros that are not stored
    sources = [_flag(x) if k in HEAD_FLAGS else _number(x, compute) for k, x in enumerate(head)]
    sources += (_flag(x) if flag else _number(x, compute) for x, flag in zip(inputs, spec.flags, strict=True))
    numbers = array.array("d" if compute == torch.float64 else "f", [h for h in hypers if not isinstance(h, Tensor)])
    places = itertools.count(numbers.buffer_info()[0], numbers.itemsize)
    sources += (_number(h, compute) if isinstance(h, Tensor) else next(places) for h in hypers)
    initial, written = _number(initial, compute), outputs
    if not looked and not spec.causal:
        written = apart(outputs, (*sources, initial))
    written = [o if o is None or o.dtype == compute else torch.empty_like(o, dtype=compute) for o in written]
    shape = next(o for o in written if o is not None).shape
    entries = (*sources, initial, *written)
    strides = tuple([x.stride() if isinstance(x, Tensor) else None if x is None else () for x in entries])
    key = (spec, shape, time_dim, strides, looked, behind, compute)
    plan = _plans.get(key)
    if plan is None:
        plan = _Loop(*key)
        if plan.function is None:
            return False
        if len(_plans) >= 4096:
            _plans.clear()
        _plans[key] = plan
    record(plan, sources, written, initial, numbers)
    plan.run(_pointers(sources), _pointers(written), None, None if initial is None else initial.data_ptr())
    for output, fresh in zip(outputs, written, strict=True):
        if output is not fresh:
            output.copy_(fresh)
    return True


def _flag(x):
    return x if x is None or x.dtype == torch.bool else x != 0


def _number(x, dtype):
    return x if x is None or x.dtype == dtype else x.to(dtype)


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads - 1, thread_name_prefix=__name__)


def _after_fork():
    """Threads stay behind in the parent, and what they were holding."""
    global _compiling
    _pool.cache_clear()
    _compiling = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _await(others):
    """Wait for all of them, whatever interrupts: the memory that they write to must not go away."""
    try:
        wait(others)
    except BaseException:
        _await(others)
        raise


class _Loop:
    """Everything about a call but its pointers: the compiled function and the layout, built once.

    A layout holds counts, the sizes of the outer row dimensions and, of each entry, the strides in bytes.
    """

    repeatable = True

    def __init__(self, spec, shape, time_dim, strides, looked, behind, compute):
        first_hyper = INPUTS + len(spec.inputs)
        initial = first_hyper + len(spec.hypers)
        flags = {*HEAD_FLAGS, *(INPUTS + k for k, flag in enumerate(spec.flags) if flag)}
        present = tuple(s is not None for s in strides)
        scalar = tuple(s == () for s in strides[first_hyper:initial])
        steps, size, held, contiguous = shape[time_dim], compute.itemsize, [], 0
        for k, s in enumerate(strides):
            if s is None:
                continue
            if k == initial:
                s = (*s[:time_dim], 0, *s[time_dim:])
            contiguous += len(s) > 0 and s[time_dim] == 1
            held.append(tuple(stride * (1 if k in flags else size) for stride in s or (0,) * len(shape)))
        sizes, merged = _merge_rows(shape, time_dim, held)
        units, there = None, dict(zip(HEAD, present, strict=False))
        sides = [1 if k in flags else size for k, there in enumerate(present) if there]
        made = sum(present[initial + 1 :])
        if _elementwise(spec, present, scalar, looked):  # time is one more row dimension, and all of one step
            order = sorted(range(len(shape)), key=lambda dim: -held[-1][dim])
            spread = [(*(s[dim] for dim in order), 0) for s in held]
            flat = _merge_rows((*(shape[dim] for dim in order), 1), len(shape), spread)
            inner = [m[-1] if m else 0 for m in flat[1]]
            units = _units(inner, sides, made, flat[0][-1] if flat[0] else 1)
            if units:
                held, time_dim, steps, (sizes, merged) = spread, -1, 1, flat
        elif spec.recurrences and (looked or spec.causal) and not there["mask"]:
            units = _units([s[time_dim] for s in held], sides, made, steps)
        together = TEAM if units else TOGETHER if contiguous * 2 >= sum(bool(s) for s in strides) else BLOCK
        layout = [max(0, len(sizes) - 1), steps, together, *sizes[:-1]]
        for s, m in zip(held, merged, strict=True):
            layout += (s[time_dim], m[-1] if m else 0, *m[:-1])
        self.spec, self.present = spec, operator.itemgetter(*(k for k, there in enumerate(present) if there))
        self.function = _function(spec, present, scalar, looked, behind, units, compute == torch.float64)
        self.layout = array.array("q", layout)
        self.address, _ = self.layout.buffer_info()
        self.outer, self.rows = math.prod(sizes[:-1]), sizes[-1] if sizes else 1
        self.work = shape.numel() // (2 if time_dim < 0 else 1)  # without a recurrence, steps are done sooner

    def run(self, sources, outputs, before, initial):
        """Call the function with pointers as numbers on all rows, in several threads where there is enough to do."""
        pointers, outer, rows = self.present((*sources, initial, *outputs)), self.outer, self.rows
        threads = min(torch.get_num_threads(), max(outer, rows)) if self.work >= SHARED else 1
        if threads == 1:
            return self._call(0, outer, 0, rows, *pointers)
        edges = [max(outer, rows) * k // threads for k in range(threads + 1)]
        shares = [(a, b, 0, rows) if outer > rows else (0, outer, a, b) for a, b in zip(edges, edges[1:])]  # noqa: B905
        others = [_pool(threads).submit(self._call, *share, *pointers) for share in shares[1:]]
        try:
            self._call(*shares[0], *pointers)
        finally:
            _await(others)

    def _call(self, *given):
        given = array.array("q", (self.address, *given))
        self.function.call(given.buffer_info()[0])

    def direct(self, sources, outputs, initial):
        """What ``_replay.c`` wants of a call in one thread, as :meth:`_launch._Launch.direct` has it for a launch."""
        if self.work >= SHARED:
            return None
        given = self.address, 0, self.outer, 0, self.rows, *self.present((*sources, initial, *outputs))
        slots = tuple((k, int(x)) for k, x in enumerate(given) if isinstance(x, Place))
        return self.function.address, (0, 0, 0), 0, 0, array.array("q", given).tobytes(), slots, None


def _units(strides, sides, made, steps):
    """The strides in elements of ``sides`` bytes, if those of the last ``made`` are 1 and the others 0 or 1."""
    found = [divmod(stride, side) for stride, side in zip(strides, sides, strict=True)]
    fits = steps >= SHORT and {*found} <= {(0, 0), (1, 0)} and {*found[-made:]} == {(1, 0)}
    return tuple(unit for unit, _ in found) if fits else None


_plans: dict[tuple, _Loop] = {}


# ------------------------------------------------------------------------------------------------------------- source


@functools.cache
def _elementwise(spec: Spec, present, scalar, looked: bool) -> bool:
    """Whether a step's outputs depend on what lies at the step alone, wherever in its row that is."""
    first_hyper = INPUTS + len(spec.inputs)
    there = dict(zip(HEAD, present, strict=False))
    tensors = (*present[INPUTS:first_hyper], *(not s for s in scalar))
    moved = any(shift and tensor for shift, tensor in zip(spec.shifts, tensors, strict=True)) and not looked
    if spec.recurrences or moved:
        return False
    roots = [root for part in _trace(spec, *_symbols(spec)) for root in part]
    cut = any(node.form == "step[0]" for node in _ordered(roots))
    return not spec.transition or (there["next_value"] and not cut)


def _source(spec: Spec, present, scalar, looked: bool, behind: bool, units=None) -> str:
    """The loop, in names that :func:`_language` gives a meaning.

    With ``units``, the entries' strides in elements along the innermost dimension, it goes along that dimension in
    loops that LLVM makes vectors of: they write to memory of their own, which none of the entries can lie on.
    Recurrences take passes over a few steps of a few rows: the coefficients, the serial sums, the epilogue.
    """
    tiles = [f"tile{k}" for k in range(len(spec.inputs))]
    hypers = [f"hyper{k}" for k in range(len(spec.hypers))]
    outs = [f"out{k}" for k in range(len(spec.outputs))]
    carries = [f"carry{k}" for k in range(spec.recurrences)]
    sources = [*HEAD[:INPUTS], *tiles, *hypers]
    entries = [name for name, there in zip((*sources, "initial", *outs), present, strict=True) if there]
    wanted = [(k, name) for k, name in enumerate(outs) if name in entries]
    flags = {*FLAGS, *(name for name, flag in zip(tiles, spec.flags, strict=True) if flag)}
    scalars = [name for name, is_scalar in zip(hypers, scalar, strict=True) if is_scalar and name in entries]
    tensors = [name for name in entries if name not in scalars]
    shifts = {"successor": 1, **dict(zip((*tiles, *hypers), spec.shifts, strict=True))}
    shifts = {k: shift for k, shift in shifts.items() if shift and k in tensors and not looked}
    held = [name for name in shifts if spec.causal]  # the scan has just come by what they read
    past_mask = "mask" in entries and not looked and not units
    staged = units is not None and spec.recurrences > 0
    maps, results = _trace(spec, *_symbols(spec))
    # what takes longest is kept for the epilogue
    exponentials = [node for node in _ordered(maps) if node.form == EXP] if staged else []
    rooms = [*carries, *(f"held_{name}" for name in held), *(["follows"] if past_mask and spec.transition else [])]

    def place(name, t="t"):
        return f"at_{name} + {t} * time_{name} + n * row_{name}"

    unit = dict(zip(entries, units or (), strict=False))

    def read(name, t=None):
        if not units or name == "initial":
            return f"{'flag' if name in flags else 'number'}({place(name, t or 't')})"
        row = f"{'from' if staged else 'at'}_{name}"
        index = (t or ("j" if staged else "n")) if unit[name] else "0"
        return f"flag_of({row}, {index})" if name in flags else f"get(pointer({row}), {index})"

    def numeric(name, t=None):
        return f"(F(1.0) if {read(name, t)} else F(0.0))" if name in flags else read(name, t)

    def nothing(name):
        return "False" if name in flags else "F(0.0)"

    lines = [f"def {re.sub(r'[^a-zA-Z0-9_]', '_', spec.name)}(given):"]

    def emit(depth, *texts):
        lines.extend("    " * depth + text for text in texts)

    given = ("layout", "outer_low", "outer_high", "low", "high", *(f"start_{name}" for name in entries))
    emit(1, *(f"{name} = integer(given + {8 * k})" for k, name in enumerate(given)))
    emit(1, *(f"{name} = integer(layout + {8 * k})" for k, name in enumerate(("dims", "steps", "together"))))
    emit(1, "first = layout + 24 + 8 * dims")
    for k, name in enumerate(entries):
        emit(1, f"strides_{name} = first + {8 * k} * (2 + dims)")
        emit(1, f"time_{name}, row_{name} = integer(strides_{name}), integer(strides_{name} + 8)")
    emit(1, *(f"{name} = number(start_{name})" for name in scalars), *(f"{name} = room()" for name in rooms))
    emit(1, *(f"made_{name} = chunk()" for _, name in wanted if units))
    if staged:
        emit(1, *(f"{part}{k} = wide()" for part in "uwx" for k in range(spec.recurrences)))
        emit(1, *(f"e{k} = chunk()" for k in range(len(exponentials))))
        emit(1, *(f"beside_{name} = chunk()" for name in held))
    emit(1, "for o in range(outer_low, outer_high):")
    emit(2, *(f"at_{name} = start_{name}" for name in tensors), "rest = o", "for k in range(dims):")
    emit(3, "d = dims - 1 - k", "size = integer(layout + 24 + 8 * d)", "index, rest = rest % size, rest // size")
    emit(3, *(f"at_{name} += index * integer(strides_{name} + 16 + 8 * d)" for name in tensors))
    if units and not staged:
        emit(2, f"for begin in range(low, high, {CHUNK}):", f"    for n in range(begin, min(begin + {CHUNK}, high)):")
    else:
        emit(2, "for begin in range(low, high, together):", "    end = min(begin + together, high)")
    if rooms:
        entering = read("initial", "0") if "initial" in entries else "F(0.0)"
        emit(3, "for n in range(begin, end):")
        emit(4, "slot = (n - begin) * 8")
        emit(4, *(f"keep({k} + slot, {entering})" if k in carries else f"write({k} + slot, F(0.0))" for k in rooms))
    body = functools.partial(emit, 6 if staged else 4 if units else 5)
    values = {name: nothing(name) if name not in entries else name for name in sources}
    values |= {name: f"here_{name}" for name in tensors}

    def step():
        """What lies at the step and what its transition reaches."""
        for name in sources:
            if name in held and staged:
                past = f"get(beside_{name}, side + j)" + (" != F(0.0)" if name in flags else "")
                body(f"here_{name} = {past}")
            elif name in held:
                past = f"number(held_{name} + slot)" + (" != F(0.0)" if name in flags else "")
                body(f"here_{name}, own = {past}, {numeric(name)}", f"write(held_{name} + slot, own)")
            elif name in shifts:
                t = f"(t + {shifts[name]})"
                body(f"here_{name} = {read(name, t)} if 0 <= {t} < steps else {nothing(name)}")
            elif name in tensors and (units or name != "mask"):
                body(f"here_{name} = {read(name)}")
        if not spec.transition:
            return
        last = "here_last" if "last" in entries else "False" if units and not staged else "t == steps - 1"
        if past_mask:
            last = "number(follows + slot) == F(0.0)"
        body(f"last = {last}", f"terminated = {values['terminated']}", f"done = {values['done']} | terminated | last")
        if past_mask:
            body("write(follows + slot, F(1.0))")
        following = values["next_value"]
        if "next_value" not in entries:
            following = values["bootstrap"]
            if behind:
                following = f"({following} if last else F(NAN))"
            if "successor" in entries:
                following = f"({following} if done else {values['successor']})"
        body(f"next_value = F(0.0) if terminated else {following}")

    leaves = {"step[0]": "done", "step[1]": "next_value"}
    leaves |= {f"tile[{k}]": values[name] for k, name in enumerate(tiles)}
    leaves |= {f"hypers[{k}]": values[name] for k, name in enumerate(hypers)}
    leaves |= {f"x[{k}]": f"x{k}" for k in range(spec.recurrences)}
    leaves |= {f"x_next[{k}]": f"F(carried{k})" for k in range(spec.recurrences)}
    if staged:
        here, after = (0, 1) if spec.reverse else (1, 0)
        leaves |= {f"x[{k}]": f"F(take(x{k}, side + j + {here}))" for k in range(spec.recurrences)}
        leaves |= {f"x_next[{k}]": f"F(take(x{k}, side + j + {after}))" for k in range(spec.recurrences)}
    texts, numbers = {}, itertools.count()

    def express(root):
        for node in _ordered([root]):
            if node in texts:
                continue
            if node.args:
                text = FORMS.get(node.form, node.form).format(*(texts[arg] for arg in node.args))
                texts[node] = f"v{next(numbers)}"
                body(f"{texts[node]} = {text}")
            elif node.value is None:
                texts[node] = leaves[node.form]
            else:
                texts[node] = f"F({repr(node.value).replace('nan', 'NAN').replace('inf', 'INF')})"
        return f"F({texts[root]})"

    if staged:
        emit(3, f"for piece in range(0, steps, {STAGE}):", f"    count = min({STAGE}, steps - piece)")
        emit(4, f"low_step = {'steps - piece - count' if spec.reverse else 'piece'}")
        each = ["for n in range(begin, end):", f"    side = (n - begin) * {STAGE + 1}"]
        each += (f"    from_{name} = {place(name, 'low_step')}" for name in tensors if name != "initial")
        each_step = functools.partial(emit, 5, "for j in range(count):")
        emit(4, *each)
        for name in held:  # before the step that the next piece needs is written over
            to, of, edge, own = (0, 1, "count - 1", "0") if spec.reverse else (1, 0, "0", "count - 1")
            moved = numeric(name, f"j + {of}")
            emit(5, "for j in range(count - 1):", f"    put(beside_{name}, side + j + {to}, {moved})")
            emit(5, f"put(beside_{name}, side + {edge}, number(held_{name} + (n - begin) * 8))")
            emit(5, f"write(held_{name} + (n - begin) * 8, {numeric(name, own)})")
        each_step("    t = low_step + j")
        step()
        for k in range(spec.recurrences):
            for part, root in zip("uw", maps[2 * k : 2 * k + 2], strict=True):
                body(f"give({part}{k}, side + j, D({express(root)}))")
        body(*(f"put(e{k}, side + j, {texts[node]})" for k, node in enumerate(exponentials)))

        def add_up(depth, k, rows, selected):
            sides = [f"(n + {r} - begin) * {STAGE + 1}" for r in rows]
            emit(depth, *(f"carried{r} = kept(carry{k} + (n + {r} - begin) * 8)" for r in rows))
            first = "count" if spec.reverse else "0"
            emit(depth, *(f"give(x{k}, {sides[r]} + {first}, carried{r})" for r in rows))
            emit(depth, "for i in range(count):", f"    j = {'count - 1 - i' if spec.reverse else 'i'}")
            for r in rows:
                w = f"take(w{k}, {sides[r]} + j)"
                carried = f"(carried{r} if {w} != 0.0 else 0.0)" if selected else f"carried{r}"
                emit(depth + 1, f"carried{r} = take(u{k}, {sides[r]} + j) + {w} * {carried}")
                emit(depth + 1, f"give(x{k}, {sides[r]} + j + {here}, carried{r})")

        emit(4, "n = begin")
        for team in (TEAM, TOGETHER, 1):
            emit(4, f"while end - n >= {team}:")
            for k in range(spec.recurrences):
                add_up(5, k, range(team), False)
            emit(5, f"n += {team}")
        emit(4, "for n in range(begin, end):")
        for k in range(spec.recurrences):
            final = f"take(x{k}, (n - begin) * {STAGE + 1} + {'0' if spec.reverse else 'count'})"
            # a sum that is not finite makes all that follow so: then again, with what is cut off selected away
            emit(5, f"if not ({final} * 0.0 == 0.0):")
            add_up(6, k, range(1), True)
            emit(5, f"keep(carry{k} + (n - begin) * 8, {final})")
        texts.clear(), texts.update((node, f"get(e{k}, side + j)") for k, node in enumerate(exponentials))
        emit(4, *each)
        each_step("    t = low_step + j")
        step()
        for k, name in wanted:
            result = express(results[k])
            body(f"put(made_{name}, j, {result})")
        for _, name in wanted:
            each_step(f"    put(pointer(from_{name}), j, get(made_{name}, j))")
        return "\n".join(lines) + "\n"

    if not units:
        emit(3, "for i in range(steps):")
        emit(4, f"t = {'steps - 1 - i' if spec.reverse else 'i'}", "for n in range(begin, end):")
        body("slot = (n - begin) * 8")
    if "mask" in entries and not units:
        body(f"if not {read('mask')}:", *(f"    write({place(name)}, F(0.0))" for _, name in wanted), "    continue")
    step()
    body(*(f"carried{k} = kept({name} + slot)" for k, name in enumerate(carries)))
    for k, name in enumerate(carries):
        u, w = express(maps[2 * k]), express(maps[2 * k + 1])
        body(f"w{k} = {w}", f"sum{k} = D({u}) + D(w{k}) * (carried{k} if w{k} != F(0.0) else 0.0)")
        body(f"keep({name} + slot, sum{k})", f"x{k} = F(sum{k})")
    for k, name in wanted:
        result = express(results[k])
        if units:
            result = f"{result} if here_mask else F(0.0)" if "mask" in entries else result
            body(f"put(made_{name}, n - begin, {result})")
        else:
            body(f"write({place(name)}, {result})")
    for _, name in wanted if units else ():
        emit(3, f"for n in range(begin, min(begin + {CHUNK}, high)):")
        emit(4, f"put(pointer(at_{name}), n, get(made_{name}, n - begin))")
    return "\n".join(lines) + "\n"


# -------------------------------------------------------------------------------------------------------- compilation

_compiling = threading.RLock()
_functions: dict[tuple, object] = {}
_refused: set[Spec] = set()  # that numba does not compile


def _function(spec, *variant):
    """The compiled loop; ``None`` and, once for a spec, a warning where it says what numba does not take."""
    with _compiling:
        key = spec, *variant
        if key not in _functions and spec not in _refused:
            *entries, double = variant
            try:
                _functions[key] = _compiled(_source(spec, *entries), double)
            except Exception as error:
                _refused.add(spec)
                warnings.warn(
                    f"{spec.name} is evaluated in PyTorch on CPU tensors, since numba does not compile it: "
                    f"{type(error).__name__}: {' '.join(str(error).split())[:400]}",
                    stacklevel=2,
                )
        return _functions.get(key)


@functools.cache
def _language(double: bool) -> dict:
    """What the names in a loop's source mean."""
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    kind = types.float64 if double else types.float32

    row = types.CPointer(kind)

    @intrinsic
    def pointer(context, place):
        def build(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_data_type(kind).as_pointer())

        return row(types.int64), build

    def items(kind):
        row = types.CPointer(kind)

        @intrinsic
        def get(context, base, index):
            def build(context, builder, signature, args):
                return builder.load(builder.gep(args[0], [args[1]]))

            return kind(row, types.int64), build

        @intrinsic
        def put(context, base, index, value):
            def build(context, builder, signature, args):
                builder.store(args[2], builder.gep(args[0], [args[1]]))
                return context.get_dummy_value()

            return types.void(row, types.int64, kind), build

        @intrinsic
        def chunk(context):
            def build(context, builder, signature, args):
                size = max(CHUNK, TEAM * (STAGE + 1))
                return cgutils.alloca_once(builder, context.get_data_type(kind), size=size)

            return row(), build

        return get, put, chunk

    get, put, chunk = items(kind)
    take, give, wide = items(types.float64)

    @intrinsic
    def flag_of(context, place, index):
        def build(context, builder, signature, args):
            lies = context.get_data_type(types.uint8)
            base = builder.inttoptr(args[0], lies.as_pointer())
            return builder.icmp_unsigned("!=", builder.load(builder.gep(base, [args[1]])), lies(0))

        return types.boolean(types.int64, types.int64), build

    def reader(kind, stored):
        @intrinsic
        def read(context, place):
            def build(context, builder, signature, args):
                lies = context.get_data_type(stored)
                value = builder.load(builder.inttoptr(args[0], lies.as_pointer()))
                return builder.icmp_unsigned("!=", value, lies(0)) if kind is types.boolean else value

            return kind(types.int64), build

        return read

    def writer(kind):
        @intrinsic
        def write(context, place, value):
            def build(context, builder, signature, args):
                builder.store(args[1], builder.inttoptr(args[0], context.get_data_type(kind).as_pointer()))
                return context.get_dummy_value()

            return types.void(types.int64, kind), build

        return write

    @intrinsic
    def room(context):
        def build(context, builder, signature, args):
            word = context.get_data_type(types.int64)
            return builder.ptrtoint(cgutils.alloca_once(builder, word, size=BLOCK), word)

        return types.int64(), build

    @intrinsic
    def exp(context, x):
        """In single precision, for LLVM leaves the library's to scalars: 2**n times a polynomial (Cephes)."""

        def build(context, builder, signature, args):
            lies, whole = context.get_data_type(kind), context.get_data_type(types.int32)
            (x,), magic = args, lies(12582912.0)  # 1.5 * 2**23: a sum with it is rounded to a whole number

            def multiply_add(x, y, z):
                return builder.fadd(builder.fmul(x, y, flags=("contract",)), z, flags=("contract",))

            for relation, limit in (("<", lies(89.0)), (">", lies(-105.0))):
                x = builder.select(builder.fcmp_ordered(relation, x, limit), x, limit)
            rounded = multiply_add(x, lies(1.44269504), magic)
            n = builder.fsub(rounded, magic)
            for part in (-0.693359375, 2.12194440e-4):  # of the logarithm of 2
                x = multiply_add(n, lies(part), x)
            y = lies(1.9875691500e-4)
            for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0):
                y = multiply_add(y, x, lies(c))
            n = builder.sub(builder.bitcast(rounded, whole), builder.bitcast(magic, whole))
            half = builder.ashr(n, whole(1))
            for part in (half, builder.sub(n, half)):  # a power of two each, which alone may be none of the numbers
                power = builder.shl(builder.add(part, whole(127)), whole(23))
                y = builder.fmul(y, builder.bitcast(power, lies))
            return builder.select(builder.fcmp_unordered("uno", args[0], args[0]), args[0], y)

        return kind(kind), build

    return {
        "F": kind,
        "D": types.float64,  # of what is carried: a sum over a million steps keeps its digits
        "NAN": math.nan,
        "INF": math.inf,
        "exp": math.exp if double else exp,
        "number": reader(kind, kind),
        "integer": reader(types.int64, types.int64),
        "flag": reader(types.boolean, types.uint8),
        "write": writer(kind),
        "kept": reader(types.float64, types.float64),
        "keep": writer(types.float64),
        "room": room,
        "pointer": pointer,
        "get": get,
        "put": put,
        "flag_of": flag_of,
        "chunk": chunk,
        "take": take,
        "give": give,
        "wide": wide,
        "__name__": __name__,  # numba imports it when it loads what it has kept
    }


def _compiled(source: str, double: bool):
    """The loop of ``source``; from disk where a process has compiled it before and the user's cache can be written."""
    import numba

    def compiled(file, cache):
        namespace = dict(_language(double))
        exec(compile(source, file, "exec"), namespace)
        loop = namespace[source[4 : source.index("(")]]
        function = numba.cfunc("void(int64)", error_model="numpy", cache=cache)(loop)
        function.call = function.ctypes  # which is made anew each time that it is asked for
        return function

    try:
        return compiled(str(_kept(source, double)), True)
    except Exception:  # no home, no room, no right to write there; a file that is damaged
        return compiled(f"<{__name__}>", False)


def _kept(source: str, double: bool) -> Path:
    """The file that holds ``source``, beside which numba keeps the machine code."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl_triton_td"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    meaning = f"{source}{double}".encode() + Path(__file__).read_bytes()
    file = folder / f"{hashlib.sha256(meaning).hexdigest()[:32]}.py"
    if not file.exists():
        handle, fresh = tempfile.mkstemp(dir=folder)
        with open(handle, "w") as stream:
            stream.write(source)
        os.replace(fresh, file)
    return file
