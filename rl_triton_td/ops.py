"""Evaluating a :class:`~.specs.Spec` on tensors: by the fused kernel, or by PyTorch around one scan.

:func:`evaluate` is the one door. Without gradients, tensors on a GPU go through one fused kernel. Everywhere else (CPU,
gradients, tracing) the coefficient functions are read as PyTorch expressions around :func:`recurrence`, the bare scan,
which is its own adjoint run the other way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ._launch import HEAD, launch
from ._triton import runs_kernels
from .specs import NEIGHBOUR, RECURRENCE, Spec

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
        return tuple(torch.empty_like(like, requires_grad=False) if o is True else o for o in out)
    compute = COMPUTE.get(like.dtype, torch.float32)
    tensors = (*inputs, *hypers, next_value, successor, bootstrap, initial, choice and choice.next_policy)
    differentiable = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)
    fused = not differentiable and not torch.compiler.is_compiling() and runs_kernels(like.device)
    if choice is not None and not (fused and mask is None and choice.uniform(inputs, next_value)):
        inputs, next_value, choice = *choice.made(inputs, next_value), None
    last, looked = None, mask is not None and not (fused and spec.causal)
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
    results = _composite(
        spec, inputs, hypers, out, time_dim, done, terminated, next_value, successor, bootstrap, behind, mask, last,
        initial, compute, like.device,
    )  # fmt: skip
    return tuple(_deliver(result, wanted, like) for result, wanted in zip(results, out, strict=True))


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
    outputs = tuple(torch.empty_like(like, requires_grad=False) if o is True else o for o in out)
    neighbours = any(spec.shifts) or sources[HEAD.index("successor")] is not None
    written = _private(outputs, sources) if neighbours else outputs
    launch(
        spec,
        like.shape,
        time_dim,
        sources,
        written,
        initial=None if initial is None else initial.reshape(-1),
        masked=masked,
        behind=behind,
        dtype=compute,
        kinds=kinds,
    )
    for output, fresh in zip(outputs, written, strict=True):
        if output is not fresh:
            output.copy_(fresh)
    return outputs


def _private(outputs, sources):
    """Outputs, with a stand-in for each that lies on a source: a step must not overwrite what its neighbour reads."""
    read = {x.data_ptr() for x in sources if isinstance(x, Tensor)}
    return tuple(o if o is None or o.data_ptr() not in read else torch.empty_like(o) for o in outputs)


def _deliver(result, wanted, like):
    if wanted is None:
        return None
    result = result.to(like.dtype)
    if wanted is True:
        return result.expand(like.shape).contiguous()
    wanted.copy_(result)
    return wanted


def _composite(
    spec, inputs, hypers, out, time_dim, done, terminated, next_value, successor, bootstrap, behind, mask, last,
    initial, compute, device,
):  # fmt: skip
    """The spec in PyTorch, time first."""

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
        x.append(recurrence(u, w, initial, spec.reverse))
        if any(o is not None and name in spec.looks_ahead for name, o in zip(spec.outputs, out, strict=True)):
            x_next.append(_entering(x[-1], initial, spec.reverse))
    results = spec.torch_epilogue(tuple(x), tuple(x_next or x), step, tile, tuple(hypers))
    if valid is not None:
        results = tuple(torch.where(valid, r, 0) for r in results)
    return tuple(r.movedim(0, time_dim) for r in results)


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
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return _recurrence_op(u, w, initial, reverse)
    return _solve(u, w, initial, reverse)


@torch.library.custom_op("rl_triton_td::recurrence", mutates_args=())
def _recurrence_op(u: Tensor, w: Tensor, initial: Tensor | None, reverse: bool) -> Tensor:
    return _solve(u, w, initial, reverse)


@_recurrence_op.register_fake
def _(u, w, initial, reverse):
    return torch.empty_like(u, memory_format=torch.contiguous_format)


def _save_for_adjoint(ctx, inputs, output):
    _, w, initial, ctx.reverse = inputs
    ctx.save_for_backward(w, initial, output)


def _adjoint(ctx, grad):
    """The adjoint of a recurrence is the recurrence run the other way, so it differentiates as often as asked."""
    w, initial, x = ctx.saved_tensors
    adjoint = recurrence(grad, _entering(w, None, not ctx.reverse), None, not ctx.reverse)
    grad_initial = None
    if initial is not None:
        edge = -1 if ctx.reverse else 0
        grad_initial = w[edge] * adjoint[edge]
    return adjoint, adjoint * _entering(x, initial, ctx.reverse), grad_initial, None


_recurrence_op.register_autograd(_adjoint, setup_context=_save_for_adjoint)


@_recurrence_op.register_vmap
def _(info, in_dims, u, w, initial, reverse):
    def batch_second(x, dim, at):
        if x is None:
            return None
        return (
            x.movedim(dim, at)
            if dim is not None
            else x.unsqueeze(at).expand(*x.shape[:at], info.batch_size, *x.shape[at:])
        )

    u, w = batch_second(u, in_dims[0], 1), batch_second(w, in_dims[1], 1)
    return _recurrence_op(u, w, batch_second(initial, in_dims[2], 0), reverse), 1


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
        initial=None if initial is None else initial.reshape(-1),
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
