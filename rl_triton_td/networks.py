"""Values of a rollout's states and of their successors, with each distinct state evaluated once.

Inside an episode the successor of step ``t`` is the state of step ``t + 1``, whose value is known once all states have
been evaluated. What is left are the *cut* steps: ends of episodes, the last step of the window, and any step whose next
observation is not the next row's. A terminated step has no successor worth a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor, nn

from .functional import ShapeError

PROBES = 8  # states evaluated a second time, among others
IS_INIT = "is_init"
Network = Callable[[TensorDictBase], TensorDictBase]


def depends_on_batch(*networks: nn.Module) -> bool:
    """Whether a module draws random numbers or takes statistics of its batch."""

    def unsteady(module):
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return module.training or module.running_mean is None
        rate = getattr(module, "dropout", 0)  # of attention and recurrent layers
        random = isinstance(module, (nn.modules.dropout._DropoutNd, nn.RReLU)) or isinstance(rate, float) and rate > 0
        return random and module.training

    return any(unsteady(module) for network in networks for module in network.modules())


def recurrent_states(network: nn.Module) -> list[NestedKey] | None:
    """Names of the recurrent states of a network that reads whole sequences, in TorchRL's ``recurrent_mode``; else
    ``None``. It writes the state after a step under ``"next"``, at the last step of every sequence."""
    layers = [module for module in network.modules() if getattr(module, "recurrent_mode", False)]
    if not layers:
        return None
    written = {unravel_key(key) for layer in layers for key in layer.out_keys}
    return [key for layer in layers for key in map(unravel_key, layer.in_keys) if next_key(key) in written]


def same_memory(params: TensorDictBase, others: TensorDictBase) -> bool:
    """Whether two sets of parameters are the same tensors, as those of a loss without target parameters are."""

    def place(x):
        return x.data_ptr(), x.shape, x.stride(), x.dtype, x.device

    if params is others:
        return True
    mine, theirs = dict(params.items(True, True)), dict(others.items(True, True))
    return mine.keys() == theirs.keys() and all(place(x) == place(theirs[key]) for key, x in mine.items())


def next_key(key: NestedKey) -> NestedKey:
    return ("next", *key) if isinstance(key, tuple) else ("next", key)


@dataclass
class Found:
    """What :meth:`Lookup.values` found.

    Attributes:
        here: what the network of states wrote; ``None`` if there was none.
        next_value: values of the successors, 0 at terminated steps; ``None`` if no step needed one.
        lost: the steps for which there was no slot, ``[*B, T]``; ``next_value`` is ``NaN`` there.
        repeatable: whether states that were evaluated twice came out the same; ``None`` if that does not show.
    """

    here: TensorDictBase | None
    next_value: Tensor | None
    lost: Tensor | None = None
    repeatable: bool | None = None


class Lookup:
    """A rollout as value networks read it.

    Args:
        tensordict: the rollout, ``[*B, T]`` with time anywhere.
        keys: what the networks read.
        done, terminated, mask: flags, ``[*B, T, ...]``; of a step with several, one is enough to end or to count, and
            all have to be terminated.
        time: the dimension of time.
        states: :func:`recurrent_states`.
        compare: look for rows that are not what the step before says comes next; else the flags are taken at their
            word.
        missing: makes the error for an entry that is not there.
    """

    def __init__(
        self,
        tensordict: TensorDictBase,
        keys: Iterable[NestedKey],
        *,
        done: Tensor,
        terminated: Tensor | None,
        mask: Tensor | None,
        time: int,
        states: list[NestedKey] | None,
        compare: bool,
        missing: Callable[[NestedKey], Exception],
    ):
        self.dims, self.time, self.compare, self.missing = tensordict.batch_dims, time, compare, missing
        self.sequences, self.states = states is not None, states or []
        flags = {"done": done, "terminated": done if terminated is None else terminated, "mask": mask}
        for name, x in flags.items():
            if x is not None and x.shape[: self.dims] != tensordict.batch_size:
                raise ShapeError(
                    f"{name} has shape {tuple(x.shape)}, which does not start with the tensordict's batch size, "
                    f"{tuple(tensordict.batch_size)}."
                )
        self.here, self.there = (
            tensordict.select(*keys, strict=False),
            tensordict.get("next").select(*keys, strict=False),
        )
        if self.sequences:  # they have time last
            self.time = self.dims - 1
            self.here, self.there = self.here.transpose(time, self.time), self.there.transpose(time, self.time)
            flags = {name: None if x is None else x.transpose(time, self.time) for name, x in flags.items()}
        self.turn = lambda x: x.transpose(time, self.time) if self.sequences else x
        self.here, self.there = _plain(self.here), _plain(self.there)
        self.shape, self.device = self.here.batch_size, done.device
        done, terminated, mask = (None if x is None else _per_step(x, self.dims) for x in flags.values())
        self.done, self.ended = done.any(-1) | terminated.any(-1), terminated.all(-1)
        self.mask = None if mask is None else mask.any(-1)
        leaves = list(dict.fromkeys(leaf for key in keys for leaf in _leaves(self.here, unravel_key(key))))
        self.observed = [key for key in leaves if not self.sequences or key not in (*self.states, IS_INIT)]

    @property
    def readable(self) -> bool:
        """Whether all that is to be read is there for the states, and in tensors."""
        entries = (x for data in (self.here, self.there) for x in data.values(True, True))
        there = self.shape.numel() and self.observed and (not self.sequences or IS_INIT in self.here.keys())
        return bool(there) and all(isinstance(x, Tensor) for x in entries)

    def needed(self) -> Tensor:
        """The steps whose successor has a value that counts and that is not the next row's, ``[*B, T]``."""
        steps = self.shape[self.time] - 1
        needed = self.done.clone()
        needed.narrow(self.time, steps, 1).fill_(True)
        inside = needed.narrow(self.time, 0, steps)
        if self.sequences:
            inside |= self._begins()
        for key in self.observed if self.compare else ():
            after = self.there.get(key, None)
            if after is not None:
                inside |= _differ(after, self.here.get(key), self.time, self.dims)
        if self.mask is not None:  # the last one that counts is the window's edge
            after = self.mask.flip(self.time).cumsum(self.time).flip(self.time) > 1
            needed = (needed | ~after) & self.mask
        return needed & ~self.ended

    def values(
        self, here: Network | None, there: Network, key: NestedKey, *, share: bool, slots: int | None, probe: bool
    ) -> Found:
        """Values of the states, then of the successors that these have not shown.

        Args:
            here, there: networks of states and of successors, which write ``key``. Without ``here``, the successors
                that are not needed have the value 0.
            key: the value.
            share: states' values are successors' values; otherwise every successor is evaluated.
            slots: evaluate that many successors, whatever is needed, so that all shapes stay the same and nothing waits
                for the device.
            probe: evaluate a few states again among the successors.
        """
        share &= slots is not None or not torch.compiler.is_compiling()
        count, index, lost = self.shape.numel(), None, None
        if share:
            needed = self.needed()
            lost = needed & ~self._remembered() if self.sequences else torch.zeros_like(needed)
            if slots is None:
                # before the states are evaluated: so the device is waited for when it has little to do yet
                index = needed.flatten().nonzero().squeeze(-1)
                share = 2 * len(index) <= count and not (self.sequences and bool(lost.any()))
        first = None if here is None else here(self.here.copy())
        value = None if first is None else first.get(key)
        if not share:
            return self._found(first, self._all(there, key))
        if slots is not None:
            return self._found(first, *self._by_slots(first, value, needed, lost, there, key, slots))
        probes = index[:0]
        if probe and value is not None and not self.sequences:
            probes = torch.linspace(0, count - 1, min(PROBES, count), device=self.device).long()
        if not len(index) + len(probes):
            return self._found(first, None if value is None else self._shifted(value))
        bootstraps, again = self._at(there, key, first, index, probes).split([len(index), len(probes)])
        next_value = bootstraps.new_zeros(*self.shape, *bootstraps.shape[1:]) if value is None else self._shifted(value)
        repeatable = _agree(again, value.flatten(0, self.dims - 1)[probes]) if len(probes) else None
        if repeatable is not False:
            next_value.flatten(0, self.dims - 1)[index] = bootstraps.to(next_value.dtype)
        return self._found(first, next_value, None, repeatable)

    # ---------------------------------------------------------------------------------------------------------- pieces

    def _begins(self) -> Tensor:
        """Whether the next row begins a sequence, ``[*B, T - 1]``."""
        begins = _per_step(self.here.get(IS_INIT), self.dims).any(-1)
        return begins.narrow(self.time, 1, self.shape[self.time] - 1)

    def _remembered(self) -> Tensor:
        """The steps after which a network of sequences leaves its state: the last one of every sequence."""
        last = torch.ones_like(self.done)
        last.narrow(self.time, 0, self.shape[self.time] - 1).copy_(self._begins())
        return last

    def _shifted(self, value: Tensor) -> Tensor:
        steps = self.shape[self.time]
        return torch.cat([value.narrow(self.time, 1, steps - 1), value.narrow(self.time, steps - 1, 1)], self.time)

    def _all(self, there: Network, key: NestedKey) -> Tensor:
        """Every successor, in a call as large as that of the states."""
        after = self.there.copy()
        for name in self.observed:
            after.set(name, self._after(name))
        if self.sequences:
            begins = self.here.get(IS_INIT)
            after.set(IS_INIT, begins | after.get(IS_INIT, begins))
        return there(after).get(key)

    def _at(self, there: Network, key: NestedKey, first, index: Tensor, probes: Tensor) -> Tensor:
        """Successors at the flat steps ``index``, then states at ``probes``, ``[K, *F]``."""
        count, at = len(index) + len(probes), _unravel(index, self.shape)
        again = _unravel(probes, self.shape)
        shape = (count, *(1,) * max(self.dims - 1, int(self.sequences)))  # as many dimensions as the network is used to
        rows = {name: torch.cat([self._after(name, at), self.here.get(name)[again]]) for name in self.observed}
        if self.sequences:
            rows |= {name: first.get(next_key(name))[at] for name in self.states}
            rows[IS_INIT] = torch.zeros_like(self.here.get(IS_INIT)[at])
        rows = {name: x.reshape(*shape, *x.shape[1:]) for name, x in rows.items()}
        data = TensorDict({}, shape, device=self.here.device)
        for name, x in rows.items():
            data.set(name, x)
        values = there(data).get(key)
        return values.reshape(count, *values.shape[len(shape) :])

    def _after(self, name: NestedKey, at=...) -> Tensor:
        """Next observations. In place of one that a collector dropped (NaN) stands the state's own, as in TorchRL."""
        own, after = self.here.get(name)[at], self.there.get(name, None)
        if after is None:
            if own.numel():
                raise self.missing(next_key(name))
            return own
        after = after[at]
        return torch.where(after.isnan(), own, after) if own.shape == after.shape and own.is_floating_point() else after

    def _by_slots(self, first, value, needed, lost, there, key, slots):
        """The needed steps take the slots in their order; slots that are left repeat the last step."""
        count, flat = needed.numel(), (needed & ~lost).flatten()
        rank = flat.cumsum(0)
        served = flat & (rank <= slots)
        index = torch.full((slots + 1,), count, device=self.device)
        index = index.scatter(0, torch.where(served, rank - 1, slots), torch.arange(count, device=self.device))[:slots]
        bootstraps = self._at(there, key, first, index.clamp(max=count - 1), index[:0])
        features = bootstraps.shape[1:]
        rows = (
            bootstraps.new_zeros(count, *features) if value is None else self._shifted(value).flatten(0, self.dims - 1)
        )
        # what is in no step's slot goes behind the last step
        rows = torch.cat([rows, rows[:1]]).index_put((index,), bootstraps.to(rows.dtype))[:count]
        lost = lost | (flat & ~served).view(self.shape)
        next_value = rows.view(*self.shape, *features)
        return next_value.masked_fill(_beside(lost, next_value), torch.nan), lost

    def _found(self, first, next_value, lost=None, repeatable=None) -> Found:
        if next_value is not None:
            next_value = self.turn(next_value.masked_fill(_beside(self.ended, next_value), 0))
        first, lost = (None if x is None else self.turn(x) for x in (first, lost))
        return Found(first, next_value, lost, repeatable)


def _plain(data: TensorDictBase) -> TensorDictBase:
    """Stacked once, where each reading would stack anew."""
    return data if type(data) is TensorDict else data.contiguous()


def _leaves(data: TensorDictBase, key: NestedKey) -> list[NestedKey]:
    entry = data.get(key, None)
    if entry is None:
        return []
    if not is_tensor_collection(entry):
        return [key]
    head = key if isinstance(key, tuple) else (key,)
    return [(*head, *(leaf if isinstance(leaf, tuple) else (leaf,))) for leaf in entry.keys(True, True)]


def _unravel(index: Tensor, shape: Iterable[int]) -> tuple[Tensor, ...]:
    """``torch.unravel_index`` without its copy to the device, which would be waited for."""
    at = []
    for size in reversed(shape):
        at.append(index % size)
        index = index // size
    return tuple(reversed(at))


def _per_step(flag: Tensor, dims: int) -> Tensor:
    """``[*B, T, n]``."""
    return flag.bool().unsqueeze(-1).flatten(dims)


def _beside(flag: Tensor, value: Tensor) -> Tensor:
    """A flag ``[*B, T]`` with dimensions that broadcast against those of ``value``."""
    return flag.reshape(*flag.shape, *(1,) * (value.ndim - flag.ndim))


def _differ(after: Tensor, rows: Tensor, time: int, dims: int) -> Tensor:
    """Whether what comes after a step is not the next row, to the bit, ``[*B, T - 1]``."""
    steps = rows.shape[time] - 1
    if after.shape != rows.shape or after.dtype != rows.dtype:
        return torch.ones((), dtype=torch.bool, device=rows.device)
    pair = [x.unsqueeze(-1).flatten(dims) for x in (after.narrow(time, 0, steps), rows.narrow(time, 1, steps))]
    word = next(
        (w for w in (torch.int64, torch.int32, torch.int16, torch.uint8) if all(_reads_as(w, x) for x in pair)), None
    )
    left, right = (x if word is None else x.view(word) for x in pair)
    return (left != right).any(-1)


def _reads_as(word: torch.dtype, x: Tensor) -> bool:
    """Whether ``x`` can be read in words of that size: compared so, NaN equals NaN and there is less to compare."""
    fold = word.itemsize // x.element_size()
    if fold < 2 or torch.compiler.is_compiling():  # which knows no storage offsets
        return fold == 1
    return x.stride(-1) == 1 and all(n % fold == 0 for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))


def _agree(again: Tensor, known: Tensor) -> bool | None:
    """Whether values agree to rounding; ``None`` where they are so much the same that nothing would show."""
    again, known = again.detach(), known.detach()
    if again.shape != known.shape:
        return False
    fraction = max(1e-2, 8 * torch.finfo(known.dtype).eps)
    again, known = again.double().flatten(), known.double().flatten()
    known = known.nan_to_num()
    off = (again.nan_to_num() - known).abs().amax()
    off, spread, size = torch.stack([off, known.amax() - known.amin(), known.abs().amax()]).tolist()
    if spread <= fraction * size:
        return None if off <= fraction * size else False
    return off <= fraction * spread
