"""Evaluating a :class:`~.specs.Spec` on tensors: by the fused kernel, one compiled loop, or PyTorch around a scan.

:func:`evaluate` is the one door. On a GPU a spec is one fused kernel; on a CPU it is one loop that numba compiles, and
without numba its coefficient functions are read as PyTorch expressions around a bare scan. Under gradients and under
tracing that is one operator, ``rl_triton_td::evaluate``, for all specs; its gradient is the operator again, on the
spec's :mod:`adjoint <.adjoint>`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from . import _cpu
from ._launch import HEAD, apart, launch
from ._replay import not_remembered, traced
from ._triton import runs_kernels
from .adjoint import INPUTS, adjoint, differentiable, named
from .specs import NEIGHBOUR, RECURRENCE, Spec

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # of outputs, by number
DERIVED = 2**14  # steps from where a loop is compiled for what is derived of a spec, one for each set of gradients
COMPUTE = {torch.float64: torch.float64}  # everything else is computed in float32


@dataclass(frozen=True)
class Choice:
    """A choice among discrete actions, ``[*B, T, A]`` where the other entries are ``[*B, T, 1]``.

    Args:
        action: index of the taken action, ``[*B, T, 1]``.
        next_policy: probabilities at the next state; ``next_value`` holds the values of all actions there.
        kinds: of each input: 0 a number, 2 the number of the taken action, 3 its logarithm.
    """

    action: Tensor
    next_policy: Tensor
    kinds: tuple[int, ...]

    def uniform(self, inputs, next_value) -> bool:
        """Whether all lie alike along actions, as the kernel wants it."""
        chosen = [x for x, kind in zip(inputs, self.kinds, strict=True) if kind and x is not None]
        return all(x.stride(-1) == self.next_policy.stride(-1) for x in (*chosen, next_value))

    def made(self, inputs, next_value):
        """``(inputs, next_value)`` of the taken action and in expectation."""
        index = self.action.long()

        def pick(x, kind):
            if x is None or not kind:
                return x
            taken = x.gather(-1, index)
            return taken.log() if kind == 3 else taken

        picked = tuple(pick(x, kind) for x, kind in zip(inputs, self.kinds, strict=True))
        return picked, (self.next_policy * next_value).sum(-1, keepdim=True)


def evaluate(
    spec: Spec,
    inputs: tuple[Tensor | None, ...],
    hypers: tuple[float | Tensor, ...],
    out: tuple[Tensor | None, ...],
    time_dim: int,
    *,
    done: Tensor | None = None,
    terminated: Tensor | None = None,
    next_value: Tensor | None = None,
    successor: Tensor | None = None,
    bootstrap: Tensor | None = None,
    behind: bool = False,
    mask: Tensor | None = None,
    initial: Tensor | None = None,
    choice: Choice | None = None,
    like: Tensor,
) -> tuple[Tensor | None, ...]:
    """Outputs of ``spec``.

    Args:
        inputs: one entry for each of ``spec.inputs``, ``None`` for 0; of ``shape``, any strides.
        hypers: one for each of ``spec.hypers``: a number, or a tensor of ``shape`` or of no dimension.
        out: for each of ``spec.outputs`` a tensor to write into, ``True`` for a new one, ``None`` if not wanted.
        time_dim: not negative.
        done, terminated: flags of a ``transition`` spec.
        next_value: value of the true next state, or ``None``: then ``successor`` at the next step, with ``bootstrap``
            at truncated steps and behind the window (``behind``: there alone).
        mask: steps that are transitions; the others are stepped over.
        initial: ``x`` beyond the window, of ``shape`` without time.
        choice: inputs and ``next_value`` that hold a number for every action, and which was taken.
        like: has the shape, dtype, device and, for new outputs, the strides of the outputs.
    """
    if not like.numel():
        return _made(out, like)
    compute = COMPUTE.get(like.dtype, torch.float32)
    tensors = (*inputs, *hypers, next_value, successor, bootstrap, initial, choice and choice.next_policy)
    seen = _seen(tensors) or isinstance(like, FakeTensor)
    if forward_ad._current_level >= 0 and any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    ):
        raise NotImplementedError(f"{spec.name} has no derivatives in forward mode; those in reverse mode are there.")
    if not seen:
        inputs, hypers = tuple(map(_stored, inputs)), tuple(map(_stored, hypers))
        next_value, successor, bootstrap, initial = map(_stored, (next_value, successor, bootstrap, initial))
    fused = not seen and runs_kernels(like.device)
    if choice is not None and not (fused and mask is None and choice.uniform(inputs, next_value)):
        inputs, next_value, choice = *choice.made(inputs, next_value), None
    compiled = not seen and not fused and _cpu.compiles(spec, like.device)
    last, looked = None, mask is not None and not ((fused or compiled) and spec.causal)
    if looked:
        inputs, hypers, successor, last = _look_past_mask(spec, inputs, hypers, successor, next_value, mask, time_dim)
    if fused:
        return _fused(
            spec,
            (done, terminated, next_value, None if next_value is not None else successor, bootstrap, mask, last)
            + ((None, None) if choice is None else (choice.action, choice.next_policy))
            + inputs
            + _kernel_hypers(hypers, compute, like.device),
            out,
            time_dim,
            initial,
            masked=looked,
            behind=behind,
            compute=compute,
            like=like,
            kinds=None if choice is None else choice.kinds,
        )
    head = (done, terminated, next_value, None if next_value is not None else successor, bootstrap, mask, last)
    if compiled:
        outputs = _made(out, like)
        if _cpu.evaluate(spec, head, inputs, hypers, initial, outputs, time_dim, looked, behind, compute):
            _overwritten(out)
            return outputs
        if mask is not None and not looked:
            inputs, hypers, successor, last = _look_past_mask(
                spec, inputs, hypers, successor, next_value, mask, time_dim
            )
            head = (*head[:3], successor, bootstrap, mask, last)
    results = None
    if seen:
        wanted = tuple(-1 if o is None else DTYPES.index(like.dtype) for o in out)
        entries = (*head, *inputs, *(_as_tensor(h, compute, like.device) for h in hypers), initial)
        results = _operate(spec, entries, wanted, _order(like), time_dim, behind, compute)
    if results is None:
        results = _composite(
            spec, head, inputs, hypers, initial, out, time_dim, behind, compute, like.device, recurrence
        )
        results = tuple(
            None if o is None else r.to(like.dtype).expand(like.shape).contiguous()
            for r, o in zip(results, out, strict=True)
        )
    return tuple(r if o is None or o is True else o.copy_(r) for r, o in zip(results, out, strict=True))


def _order(x: Tensor) -> list[int]:
    """Dimensions from the outermost in memory to the innermost, sorted by comparisons, which can be traced."""
    order: list[int] = []
    for dim in range(x.ndim):
        at = dim
        while at and x.stride(order[at - 1]) < x.stride(dim):
            at -= 1
        order.insert(at, dim)
    return order


def _as_tensor(hyper, dtype, device):
    if isinstance(hyper, Tensor):
        return hyper
    # traced, a product: it alone follows a number that changes without compiling anew
    if torch.compiler.is_compiling():
        return torch.ones((), dtype=dtype, device=device) * hyper
    return torch.full((), hyper, dtype=dtype, device=device)


def _kernel_hypers(hypers, compute, device):
    """A kernel takes numbers in single precision; for double they travel as tensors."""
    if compute != torch.float64:
        return hypers
    return tuple(h if isinstance(h, Tensor) else torch.full((), h, dtype=torch.float64, device=device) for h in hypers)


def _look_past_mask(spec, inputs, hypers, successor, next_value, mask, time_dim):
    """What the spec reads at a neighbouring step, taken from the neighbouring valid step; and who has none after it."""

    def neighbour(x, shift):
        if not shift or not isinstance(x, Tensor) or not x.ndim:
            return x
        x = x if x.is_floating_point() else x.to(torch.float32)
        (found,) = evaluate(NEIGHBOUR[shift], (x, mask), (), (True,), time_dim, like=x)
        return found

    read = tuple(neighbour(x, shift) for x, shift in zip((*inputs, *hypers), spec.shifts, strict=True))
    inputs, hypers = read[: len(inputs)], read[len(inputs) :]
    if not spec.transition:
        return inputs, hypers, None, None
    successor = neighbour(successor, 1) if next_value is None else None
    followed = neighbour(mask, 1)
    return inputs, hypers, successor, (followed == 0) & mask.bool()


def _fused(spec, sources, out, time_dim, initial, *, masked, behind, compute, like, kinds):
    outputs = _made(out, like)
    neighbours = any(spec.shifts) or sources[HEAD.index("successor")] is not None
    written = apart(outputs, sources) if neighbours else outputs
    launch(
        spec,
        like.shape,
        time_dim,
        sources,
        written,
        initial=initial,
        masked=masked,
        behind=behind,
        dtype=compute,
        kinds=kinds,
    )
    for output, fresh in zip(outputs, written, strict=True):
        if output is not fresh:
            output.copy_(fresh)
    _overwritten(out)
    return outputs


def _made(out, like):
    return tuple(torch.empty_like(like) if o is True else o for o in out)


def _stored(x):
    """``x`` as memory holds it: PyTorch may have put off a sign."""
    return x.resolve_neg() if isinstance(x, Tensor) else x


def _overwritten(out):
    """Autograd, past which tensors were written, is told."""
    torch._C._increment_version([o for o in out if isinstance(o, Tensor) and not o.is_inference()])


def _composite(spec, head, inputs, hypers, initial, out, time_dim, behind, compute, device, scan):
    """The spec in PyTorch, time first, around ``scan``."""
    done, terminated, next_value, successor, bootstrap, mask, last = head

    def read(x, flag=False):
        if x is None:
            return torch.zeros((), dtype=torch.bool if flag else compute, device=device)
        return (x if x.dtype == torch.bool else x != 0) if flag else x.to(compute)

    def first(x):
        return x.movedim(time_dim, 0) if isinstance(x, Tensor) and x.ndim else x

    inputs = [first(x) for x in inputs]
    valid = None
    if mask is not None:
        # selected before any arithmetic, so that no gradient of a masked entry is 0 * inf
        valid = read(first(mask), True)
        inputs = [x if x is None else torch.where(valid, x, 0) for x in inputs]
    hypers = [first(h) if isinstance(h, Tensor) else torch.full((), h, dtype=compute, device=device) for h in hypers]
    hypers = tuple(h.to(compute) for h in hypers)
    step = ()
    if spec.transition:
        terminated = read(first(terminated), True)
        done = read(first(done), True) | terminated
        if last is None:
            last = torch.zeros_like(done, memory_format=torch.preserve_format)
            last[-1:] = True
            successor = None if successor is None else _shift(first(successor), 1)
        else:
            last, successor = first(last), first(successor)
        done = done | last
        if next_value is not None:
            next_value = read(first(next_value))
        else:
            next_value = read(first(bootstrap))
            if behind:
                next_value = torch.where(last, next_value, math.nan)
            if successor is not None:
                next_value = torch.where(done, next_value, read(successor))
        step = (done, torch.where(terminated, 0, next_value))
    if mask is None:
        inputs, hypers = (
            [
                _shift(x, shift) if shift and x is not None and x.ndim else x
                for x, shift in zip(entries, shifts, strict=True)
            ]
            for entries, shifts in ((inputs, spec.shifts[: len(inputs)]), (hypers, spec.shifts[len(inputs) :]))
        )
    tile = tuple(read(x, flag) for x, flag in zip(inputs, spec.flags, strict=True))
    maps = spec.torch_coefficients(step, tile, tuple(hypers))
    if initial is not None:
        initial = initial.to(compute)
    x, x_next = [] if spec.recurrences else [maps[0]], []
    for u, w in zip(maps[::2], maps[1::2]):  # noqa: B905 a spec without recurrence has no decay
        u, w = torch.broadcast_tensors(u, w.to(compute))
        if valid is not None:
            u, w = torch.where(valid, u, 0), torch.where(valid, w, 1)
        x.append(scan(u, w, initial, spec.reverse))
        if any(o is not None and name in spec.looks_ahead for name, o in zip(spec.outputs, out, strict=True)):
            x_next.append(_entering(x[-1], initial, spec.reverse))
    results = spec.torch_epilogue(tuple(x), tuple(x_next or x), step, tile, tuple(hypers))
    wanted = (r if o is not None else None for r, o in zip(results, out, strict=True))
    if valid is not None:
        wanted = (r if r is None else torch.where(valid, r, 0) for r in wanted)
    return tuple(r if r is None else r.movedim(0, time_dim) for r in wanted)


def _shift(x: Tensor, shift: int) -> Tensor:
    """``x[t + shift]`` along the first dimension, 0 outside."""
    edge = x.new_zeros((min(abs(shift), len(x)), *x.shape[1:]))
    return torch.cat((x[shift:], edge)) if shift > 0 else torch.cat((edge, x[:shift]))


def _entering(x: Tensor, initial: Tensor | None, reverse: bool) -> Tensor:
    """What enters each step: the solution at the step before it in scan order."""
    edge = (torch.zeros_like(x[0]) if initial is None else initial.expand_as(x[0]))[None]
    return torch.cat((x[1:], edge)) if reverse else torch.cat((edge, x[:-1]))


def recurrence(u: Tensor, w: Tensor, initial: Tensor | None, reverse: bool) -> Tensor:
    """``x[t] = u[t] + w[t] * x[previous]`` along the first dimension, where ``w = 0`` selects ``x`` away."""
    if not u.numel():
        return u.clone()
    if not _seen((u, w, initial)):
        return _solve(u, w, initial, reverse)
    entries = (*(None,) * INPUTS, u, w, initial)
    return _operate(RECURRENCE[reverse], entries, (DTYPES.index(u.dtype),), _order(u), 0, False, u.dtype)[0]


# ----------------------------------------------------------------------------------------------------------- operator
# The sources of a spec are what its kernel loads: `HEAD` but for the choice, inputs, hypers, `initial`. `places` says
# which of `tensors` each is (-1: none); the first of those has the shape of the outputs. `outputs` has the dtype of
# each that is wanted (-1: not), `order` their dimensions, outermost in memory first, `double` the arithmetic's.

torch.library.define(
    "rl_triton_td::evaluate",
    "(str spec, Tensor[] tensors, int[] places, int[] outputs, int[] order, int time_dim, bool behind, bool double)"
    " -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)


def _seen(tensors) -> bool:
    """Whether gradients, tracing or a transform follow what is done with ``tensors``."""
    return traced() or (torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors))


def _operate(spec: Spec, entries, outputs, order, time_dim: int, behind: bool, compute: torch.dtype) -> tuple | None:
    """``outputs`` of ``spec`` on the sources ``entries``; ``None`` where their gradient cannot be derived."""
    if not torch.compiler.is_compiling() and named(spec.name) is not spec:
        raise ValueError(f"Two specs are named {spec.name!r}; gradients and traces find a spec by its name.")
    tensors, places = [], []
    for entry in entries:
        place = -1
        if entry is not None:
            place = next((i for i, x in enumerate(tensors) if x is entry), len(tensors))
            if place == len(tensors):
                tensors.append(entry)
        places.append(place)
    tracked = ()
    # what a transform wraps may be tracked and does not say so
    transformed = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
    if torch.is_grad_enabled():
        tracked = tuple(
            k
            for k, x in enumerate(entries)
            if x is not None and x.is_floating_point() and (transformed or x.requires_grad)
        )
    saved = _saved(spec.name, tracked, tuple(o >= 0 for o in outputs))
    if saved is None:
        return None
    name = f"{spec.name}+" if saved else spec.name
    asked = [*outputs, *(DTYPES.index(compute) if kept else -1 for kept in saved)]
    layout = (places, asked, order, time_dim, behind, compute == torch.float64)
    if transformed:
        made = _Transformed.apply(name, *layout, *tensors)
    else:
        made = torch.ops.rl_triton_td.evaluate(name, tensors, *layout)
    return tuple(_spread(made, [o >= 0 for o in asked])[: len(outputs)])


@torch.compiler.assume_constant_result
def _saved(name: str, tracked: tuple[int, ...], wanted: tuple[bool, ...]) -> tuple[bool, ...] | None:
    """Which of what enters each step, and of the solution, the gradients of the sources ``tracked`` need.

    ``()`` if they need none, ``None`` if they cannot be derived.
    """
    if not tracked:
        return ()
    spec = named(name)
    if not differentiable(spec):
        return None
    read = adjoint(spec).read(tracked, wanted)
    saved = tuple(k in read for k in adjoint(spec).saved)
    return saved if any(saved) else ()


def _allocate(tensors, outputs, order):
    """A new tensor for each output, ``None`` where it is not wanted."""
    like, strides, stride = tensors[0], [0] * len(order), 1
    for dim in reversed(order):
        strides[dim] = stride
        stride = stride * like.shape[dim]
    new = functools.partial(torch.empty_strided, like.shape, strides, device=like.device)
    return [None if o < 0 else new(dtype=DTYPES[o]) for o in outputs]


@torch.library.register_fake("rl_triton_td::evaluate")
def _(name, tensors, places, outputs, order, time_dim, behind, double):
    return [x for x in _allocate(tensors, outputs, order) if x is not None]


@torch.library.impl("rl_triton_td::evaluate", ("cpu", "cuda"))
def _(name, tensors, places, outputs, order, time_dim, behind, double):
    spec, like = named(name), tensors[0]
    compute = torch.float64 if double else torch.float32
    entries = [None if place < 0 else tensors[place] for place in places]
    first_hyper = INPUTS + len(spec.inputs)
    head, inputs, initial = entries[:INPUTS], entries[INPUTS:first_hyper], entries[-1]
    hypers = [0.0 if h is None else h for h in entries[first_hyper:-1]]  # an adjoint need not read all
    made = _allocate(tensors, outputs, order)
    not_remembered()
    if like.numel() and runs_kernels(like.device):
        launch(
            spec,
            like.shape,
            time_dim,
            (*head, *(None,) * (len(HEAD) - INPUTS), *inputs, *hypers),
            tuple(made),
            initial=initial,
            masked=head[HEAD.index("mask")] is not None,
            behind=behind,
            dtype=compute,
            meets=False,  # compilers warm up in memory that they take back
        )
        return [x for x in made if x is not None]
    compiled = like.numel() >= (DERIVED if name[-1] in "'+" else 1) and _cpu.compiles(spec, like.device)
    if compiled:
        looked = head[HEAD.index("mask")] is not None
        compiled = _cpu.evaluate(spec, head, inputs, hypers, initial, made, time_dim, looked, behind, compute)
    if like.numel() and not compiled:
        results = _composite(spec, head, inputs, hypers, initial, made, time_dim, behind, compute, like.device, _solve)
        for x, result in zip(made, results, strict=True):
            if x is not None:
                x.copy_(result)
    return [x for x in made if x is not None]


@torch.library.register_vmap("rl_triton_td::evaluate")
def _(info, in_dims, name, tensors, *layout):
    tensors, layout = _batched(info.batch_size, in_dims[1], tensors, layout)
    made = torch.ops.rl_triton_td.evaluate(name, tensors, *layout)
    return made, [0] * len(made)


def _batched(size, in_dims, tensors, layout):
    """The operator's tensors with a batch of ``size`` as the outermost dimension of all but shared numbers."""
    places, outputs, order, time_dim, behind, double = layout
    shape, batched = tensors[0].shape, []
    if in_dims[0] is not None:
        shape = tensors[0].movedim(in_dims[0], 0).shape[1:]
    for place, (x, dim) in enumerate(zip(tensors, in_dims, strict=True)):
        is_number = x.ndim == (dim is not None) and place != places[-1]
        if dim is not None:
            x = x.movedim(dim, 0)
            x = x.view(size, *(1,) * len(shape)).expand(size, *shape) if is_number else x
        elif not is_number:
            x = x.expand(size, *x.shape)
        batched.append(x)
    return batched, (places, outputs, [0, *(d + 1 for d in order)], time_dim + 1, behind, double)


def _save(ctx, inputs, output):
    name, tensors, ctx.places, outputs, ctx.order, ctx.time_dim, ctx.behind, double = inputs
    ctx.set_materialize_grads(False)
    ctx.rule = rule = adjoint(named(name))
    ctx.compute = torch.float64 if double else torch.float32
    ctx.wanted = tuple(o >= 0 for o in outputs)
    ctx.kinds = [(x.dtype, x.ndim) for x in tensors]
    transformed = torch._C._are_functorch_transforms_active()
    tracked = [k for k, p in enumerate(ctx.places) if p >= 0 and (transformed or tensors[p].requires_grad)]
    read = rule.read(tracked, ctx.wanted)
    solution = [None] * len(rule.saved)
    if name.endswith("+"):
        solution = _spread(output, ctx.wanted)[-len(solution) :]
    if any(k in read and x is None for k, x in zip(rule.saved, solution, strict=True)):
        raise RuntimeError(f"{name}: the gradients asked for need outputs of {name}+. Call rl_triton_td.functional.")
    original = [None if place < 0 else tensors[place] for place in ctx.places]
    saved, ctx.kept = [], []
    flags = _cpu.HEAD_FLAGS | {INPUTS + k for k, is_flag in enumerate(rule.spec.flags) if is_flag}
    for k, x in enumerate(rule.entries(original, solution, (None,) * len(outputs))):
        place = -1
        if x is not None and (k in read or k in flags):
            place = next((i for i, y in enumerate(saved) if y is x), len(saved))
            if place == len(saved):
                saved.append(x)
        ctx.kept.append(place)
    # where the next values are not kept they are 0, not missing: factors of gradients that there are none of
    following = [HEAD.index(name) for name in ("next_value", "successor", "bootstrap")]
    ctx.behind &= all(ctx.places[k] < 0 for k in following) or any(ctx.kept[k] >= 0 for k in following)
    ctx.save_for_backward(*saved)


def _spread(made, wanted) -> list:
    """Of each output that was ``made``, or ``None`` where it was not wanted."""
    made = iter(made)
    return [next(made) if w else None for w in wanted]


def _adjoint(ctx, grads, needed):
    """Of each of the operator's tensors, the gradient or ``None``."""
    rule, saved = ctx.rule, ctx.saved_tensors
    spec, first = rule.original, rule.saved.stop
    grads = _spread(grads, ctx.wanted)
    entries = [None if place < 0 else saved[place] for place in ctx.kept]
    entries[first : first + len(grads)] = grads
    tracked = [k for k, place in enumerate(ctx.places) if place >= 0 and needed[place]]
    asked = rule.asked(tracked, [g is not None for g in grads])
    numbers = {k for k, place in enumerate(ctx.places) if place >= 0 and not ctx.kinds[place][1]}
    outputs = [-1] * len(rule.sources)
    for j in asked:
        k = rule.sources[j]
        outputs[j] = DTYPES.index(ctx.compute if k in numbers else ctx.kinds[ctx.places[k]][0])
    total = [None] * len(ctx.kinds)
    if asked:
        results = _operate(rule.spec, entries, outputs, ctx.order, ctx.time_dim, ctx.behind, ctx.compute)
    mask = entries[HEAD.index("mask")]
    shifts = {HEAD.index("successor"): 1, **dict(enumerate(spec.shifts, INPUTS))} if mask is None else {}
    for j in sorted(asked, key=lambda j: shifts.get(rule.sources[j], 0) != 0):
        k = rule.sources[j]
        place, part, shift = ctx.places[k], results[j], shifts.get(k, 0)
        if k == len(ctx.places) - 1:
            part = _at_end(part, mask, ctx.time_dim, last=spec.reverse)
        elif k in numbers:
            part, shift = part.sum().to(ctx.kinds[place][0]), 0
        total[place] = _moved(total[place], part, shift, ctx.time_dim)
    return total


def _moved(total, part, shift, dim):
    """``total`` and ``part``, the latter ``shift`` steps on: the gradient of what was read there."""
    if not shift:
        return part if total is None else total + part
    total = torch.zeros_like(part) if total is None else total
    length = part.shape[dim] - abs(shift)
    if length > 0:
        total.narrow(dim, max(shift, 0), length).add_(part.narrow(dim, max(-shift, 0), length))
    return total


def _at_end(x, mask, dim, last):
    """``x`` at the last (else first) step of each row, at the last that is valid under a mask."""
    if mask is None:
        return x.select(dim, -1 if last else 0)
    steps = torch.arange(x.shape[dim], device=x.device).view(-1, *(1,) * (x.ndim - dim - 1))
    valid = mask != 0
    index = torch.where(valid, steps, 0).amax(dim) if last else torch.where(valid, steps, x.shape[dim] - 1).amin(dim)
    return x.gather(dim, index.unsqueeze(dim)).squeeze(dim)


def _backward(ctx, grads):
    return None, _adjoint(ctx, grads, ctx.needs_input_grad[1]), None, None, None, None, None, None


torch.library.register_autograd("rl_triton_td::evaluate", _backward, setup_context=_save)


class _Transformed(torch.autograd.Function):
    """The operator where a transform of :mod:`torch.func` follows it; gradients registered for an operator refuse."""

    @staticmethod
    def forward(name, places, outputs, order, time_dim, behind, double, *tensors):
        layout = (places, outputs, order, time_dim, behind, double)
        return tuple(torch.ops.rl_triton_td.evaluate(name, list(tensors), *layout))

    @staticmethod
    def setup_context(ctx, inputs, output):
        name, *layout = inputs[:7]
        _save(ctx, (name, inputs[7:], *layout), output)

    @staticmethod
    def backward(ctx, *grads):
        return (None,) * 7 + tuple(_adjoint(ctx, grads, ctx.needs_input_grad[7:]))

    @staticmethod
    def vmap(info, in_dims, name, *arguments):
        tensors, layout = _batched(info.batch_size, in_dims[7:], arguments[6:], arguments[:6])
        made = _Transformed.apply(name, *layout, *tensors)
        return made, (0,) * len(made)


def _solve(u, w, initial, reverse):
    if not runs_kernels(u.device):
        return _solve_in_blocks(u, w, initial, reverse)
    x = torch.empty_like(u, memory_format=torch.contiguous_format)
    launch(
        RECURRENCE[reverse],
        u.shape,
        0,
        (None,) * len(HEAD) + (u, w),
        (x,),
        initial=initial,
        masked=False,
        behind=False,
        dtype=u.dtype,
    )
    return x


def _solve_in_blocks(u, w, initial, reverse):
    """The recurrence in about ``2 * sqrt(T)`` vector steps: all blocks of a row at once, then from block to block."""
    shape, steps = u.shape, len(u)
    u, w = u.reshape(steps, -1).contiguous(), w.reshape(steps, -1).contiguous()
    rows = u.shape[1]
    before = u.new_zeros(rows) if initial is None else initial.reshape(rows)
    blocks = max(1, math.isqrt(steps)) if steps * (1 + rows / 1024) > 64 + 6 * math.isqrt(steps) else 1
    x = _scan_blocks(u, w, before, reverse, blocks, _multiply_add)
    if not math.isfinite(x.sum().item()) and not x.isfinite().all():
        # 0 * NaN is NaN: once more, selecting
        x = _scan_blocks(u, w, before, reverse, blocks, _select_multiply_add)
    return x.view(shape)


def _multiply_add(u, w, x, out=None):
    return torch.addcmul(u, w, x, out=out)


def _select_multiply_add(u, w, x, out=None):
    return torch.where(w == 0, u, torch.addcmul(u, w, x), out=out)


def _scan_blocks(u, w, before, reverse, blocks, step):
    steps, rows = u.shape
    length = -(-steps // blocks)
    blocks = -(-steps // length)
    padding = blocks * length - steps
    if padding:  # with the identity map, behind the end that is read last
        u = torch.cat((u.new_zeros(padding, rows), u) if reverse else (u, u.new_zeros(padding, rows)))
        w = torch.cat((w.new_ones(padding, rows), w) if reverse else (w, w.new_ones(padding, rows)))
    x = torch.empty_like(u)
    u, w, out = (z.view(blocks, length, rows).unbind(1) for z in (u, w, x))
    order = range(length - 1, -1, -1) if reverse else range(length)
    if blocks == 1:
        previous = before[None]
        for t in order:
            previous = step(u[t], w[t], previous, out=out[t])
    else:
        decay = torch.empty_like(x)
        decays = decay.view(blocks, length, rows).unbind(1)
        previous, product = None, None
        for t in order:
            if previous is None:
                previous, product = out[t].copy_(u[t]), decays[t].copy_(w[t])
            else:
                previous = step(u[t], w[t], previous, out=out[t])
                product = step(torch.zeros((), dtype=u[t].dtype, device=u[t].device), w[t], product, out=decays[t])
        enters = torch.empty_like(previous)
        for b in range(blocks - 1, -1, -1) if reverse else range(blocks):
            enters[b] = before
            before = step(previous[b], product[b], before)
        x, decay = x.view(blocks, length, rows), decay.view(blocks, length, rows)
        x = step(x, decay, enters[:, None]).view(-1, rows)
    return x[padding:] if reverse else x[:steps]
