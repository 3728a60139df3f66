"""Value estimators for TorchRL: read keys, call one function, write keys.

The classes extend those of :mod:`torchrl.objectives.value`, so they go wherever TorchRL's go: a collector's
``postproc``, a replay buffer's transform, ``loss.make_value_estimator``, a trainer's hook. Reading, value networks,
masks, standardisation and writing in place are shared; a subclass says which function it calls.
"""

from __future__ import annotations

import functools
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, make_dataclass, replace

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from tensordict.nn import (
    CompositeDistribution,
    dispatch,
    set_composite_lp_aggregate,
    set_skip_existing,
    skip_existing,
)
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor
from torchrl.objectives import value as torchrl_value
from torchrl.objectives.utils import _maybe_get_or_select, hold_out_net
from torchrl.objectives.value.advantages import ValueEstimatorBase, _call_actor_net

from . import functional as F
from . import networks, specs
from ._replay import Memory, remembers
from .networks import next_key as _next

__all__ = [
    "GAE",
    "DiscountedReturn",
    "EligibilityTrace",
    "EpisodicPrefixSum",
    "MissingEntryError",
    "MultiAgentGAE",
    "RetraceEstimator",
    "SpecEstimator",
    "TD0Estimator",
    "TD1Estimator",
    "TDLambdaEstimator",
    "VTrace",
]


class MissingEntryError(KeyError, ValueError):
    """The TensorDict lacks an entry that an estimator reads."""

    def __str__(self):
        return self.args[0]


def _keys(cls):
    """A dataclass of key names; TorchRL's ``set_keys`` looks for each in the class's own ``__dict__``."""
    cls = dataclass(cls)
    for entry in fields(cls):
        setattr(cls, entry.name, entry.default)
    return cls


@_keys
class _Keys(ValueEstimatorBase._AcceptedKeys):
    """Names of the entries: TorchRL's, and three more.

    Attributes:
        truncated: read from ``"next"`` where ``done`` is absent, or where this key was named by the caller (it then
            adds to ``done``).
        mask: steps that are transitions; the default is where TorchRL's ``split_trajectories`` puts it.
        bootstrap: continuation values, read where there is no ``("next", value)``.
    """

    truncated: NestedKey = "truncated"
    mask: NestedKey = ("collector", "mask")
    bootstrap: NestedKey = "bootstrap"


@dataclass
class _Ends:
    """Where a rollout's episodes end, and which of its steps are transitions."""

    done: Tensor
    terminated: Tensor | None
    mask: Tensor | None
    time_dim: int


@dataclass
class _Step:
    """What an estimator reads, each with the shape of the values."""

    value: Tensor | None
    next_value: Tensor | None
    bootstrap: Tensor | None
    reward: Tensor
    done: Tensor
    terminated: Tensor | None
    mask: Tensor | None
    gamma: Tensor
    time_dim: int
    beside: tuple[Tensor | None, ...]  # what :meth:`Estimator._beside` found
    fresh: dict[NestedKey, Tensor]  # made on the way, to be written with the results


def _called(forward):
    """TorchRL's ways into an estimator: its skip-existing and gradient modes, and tensors in place of a tensordict."""

    @functools.wraps(forward)
    def from_tensors(self, tensordict, *args, **kwargs):
        # entries that share all dimensions end in that of features, as everywhere in TorchRL
        if tensordict.batch_dims > 1 and all(x.shape == tensordict.shape for x in tensordict.values(True, True)):
            tensordict.auto_batch_size_(batch_dims=tensordict.batch_dims - 1)
        return forward(self, tensordict, *args, **kwargs)

    dispatched = dispatch(from_tensors)

    @functools.wraps(forward)
    def call(self, *args, **kwargs):
        first = args[0] if args else None
        inner = forward if type(first) is TensorDict or isinstance(first, TensorDictBase) else dispatched
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(self.differentiable)  # a context manager takes longer
        try:
            if self.skip_existing is None:
                return inner(self, *args, **kwargs)
            with set_skip_existing(self.skip_existing):
                return inner(self, *args, **kwargs)
        finally:
            torch._C._set_grad_enabled(before)

    return call


class _Recalled:
    """Keys of what results depend on: in the rollout, the written ones first, in what comes next, and below both."""

    def __init__(self, written, here, there):
        self.here = [key for key in (*written, *here) if type(key) is str]
        self.there = [key for key in there if type(key) is str]
        self.below = [(_own, key) for key in written if type(key) is not str]
        self.below += [(_entry, key) for key in here if type(key) is not str]
        self.below += [(_entry, _next(key)) for key in there if type(key) is not str]


class Estimator(ValueEstimatorBase):
    """What all estimators share.

    Entries are ``[*B, T, *F]`` in a TensorDict whose batch size starts with ``[*B, T]``. Time is the dimension given as
    ``time_dim``, else the one named ``"time"``, else the last. Team-level entries (``[*B, T, 1]`` beside values of
    ``[*B, T, agents, 1]``) hold for every agent. An ``advantage`` or ``value_target`` that is there already, with
    fitting shape, dtype and device, is overwritten in its own memory: a preallocated, shared or memory-mapped buffer
    stays the buffer.

    Keyword Args:
        keys (dict, optional): names of entries, as for :meth:`set_keys`.
        value_network (TensorDictModule, optional): evaluates the states and their successors. ``None`` reads both from
            the TensorDict; without a ``("next", value)`` entry, the successor's value is that of the next row, and the
            ``bootstrap`` entry's where the episode or the window is cut.
        reuse_values (bool, optional): whether the network evaluates each distinct state once: the states in one plain
            call, their successors only where the next row does not hold them (ends that are not terminal, the last
            step). The successor's value is that of the next row elsewhere, and 0 where terminated.

            - ``None`` (default): where that is the same as two calls. Next observations that differ in any bit from
              the next row's are evaluated too (multi-step returns, reordered or padded rows), and all of them if they
              are more than half. A network that is random or depends on its batch (dropout or batch statistics in
              training; a few states that come out different in other company, looked at in the first batch of a
              shape) is called as by ``False``.
            - ``True``: nothing is looked at. The flags say where the successor is not the next row; beside a mask or
              ``steps_to_next_obs``, which can say otherwise, all successors are evaluated.
            - ``False``: TorchRL's calls. So are those with ``shifted=True`` or ``skip_existing``.

            With ``target_params`` other than ``params``, and under ``torch.compile``, all successors are evaluated, in
            a second plain call. The device is waited for once, to count the successors; once more in the first batch
            of a shape, and for a network of sequences.
        bootstrap_slots (int, optional): evaluate exactly that many successors in the second call, so that no shape
            depends on the data and the device is not waited for, in a CUDA graph for example. Observations are
            compared unless ``reuse_values=True``; the network is taken to treat each state by itself. Steps that find
            no slot are counted in the buffer ``bootstrap_overflow``, and their episodes come out ``NaN``.
        **kwargs: those of the TorchRL class of the same name.

    A network of sequences (TorchRL's ``LSTMModule`` and ``GRUModule`` in ``recurrent_mode``) reads whole rows with
    ``is_init``; a bootstrap goes on from the state that the network had after its own step. Where a next observation
    was dropped by a collector (``NaN``), the state's own stands in, as in TorchRL; where the entry is missing, a step
    that needs it is an error.

    Raises:
        MissingEntryError: an entry that is read is not there.
        rl_triton_td.functional.ShapeError, ValueError, TypeError: an entry does not fit; the TensorDict is as it was.
    """

    _AcceptedKeys = _Keys
    default_keys = _Keys
    writes: tuple[str, ...] = ("advantage", "value_target")  # names of tensor_keys
    agent_dim = -2
    reward_eps = 1e-5  # floor of the standard deviation under average_rewards

    def __init__(
        self,
        *,
        keys: dict[str, NestedKey] | None = None,
        value_network=None,
        reuse_values: bool | None = None,
        bootstrap_slots: int | None = None,
        **kwargs,
    ):
        if not (reuse_values is None or isinstance(reuse_values, bool)):
            raise TypeError(f"reuse_values must be True, False or None, got {reuse_values!r}.")
        self._check_positive_int(bootstrap_slots, "bootstrap_slots")
        if bootstrap_slots is not None and (reuse_values is False or kwargs.get("shifted")):
            raise ValueError(
                "bootstrap_slots is for values that are reused: not with reuse_values=False or shifted=True."
            )
        self.__dict__["_named"] = frozenset()
        # TorchRL keeps numbers in single-precision buffers; double-precision rollouts get the number itself
        self.__dict__["_exact"] = {name: x for name, x in kwargs.items() if isinstance(x, float)}
        super().__init__(value_network=value_network, **kwargs)
        self.reuse_values, self.bootstrap_slots = reuse_values, bootstrap_slots
        if bootstrap_slots is not None:
            overflow = torch.zeros((), dtype=torch.long, device=self._device)
            self.register_buffer("bootstrap_overflow", overflow, persistent=False)
        if keys:
            self.set_keys(**keys)
        _ = self.out_keys  # made at first use: within a compiled call, that would be a reason to compile the next anew

    def _register(self, **hypers: float | Tensor) -> None:
        """Keep discounts and thresholds in buffers, as TorchRL's classes do."""
        for name, value in hypers.items():
            if isinstance(value, (int, float)):
                self._exact[name] = float(value)
                value = torch.tensor(float(value), device=self._device)
            self.register_buffer(name, value)

    def _compute(self, step: _Step, tensordict: TensorDictBase, out) -> tuple[Tensor, ...]:
        """The results named in ``writes``, written into ``out`` where that is given."""
        raise NotImplementedError

    # ----------------------------------------------------------------------------------------------------------- keys

    def set_keys(self, **kwargs) -> None:
        """Set names of entries, e.g. ``set_keys(reward=("agents", "reward"), mask="mask")``.

        ``mask``, ``bootstrap`` and ``truncated`` are used where they are found; once named here, they must be there.
        """
        super().set_keys(**kwargs)
        self.__dict__["_written"] = self.__dict__["_recalled"] = None
        self.__dict__["_named"] = self._named | ({"mask", "bootstrap", "truncated", "ratio"} & set(kwargs))

    @property
    def in_keys(self) -> list[NestedKey]:
        keys, named = self.tensor_keys, self._named
        flags = [keys.reward, keys.done, keys.terminated, *([keys.truncated] if "truncated" in named else [])]
        if self.value_network is None:
            after = keys.bootstrap if "bootstrap" in named else _next(keys.value)
            found = [keys.value, *map(_next, flags), after]
        else:
            values = list(getattr(self.value_network, "in_keys", ()))
            found = [*values, *map(_next, flags), *map(_next, values)] if values else []
        found += self._more_in_keys()
        if "mask" in named:
            found.append(keys.mask)
        if self.group_key is not None:
            found.append(self.group_key)
        return list(dict.fromkeys(map(unravel_key, found)))

    def _more_in_keys(self) -> list[NestedKey]:
        return []

    @property
    def out_keys(self) -> list[NestedKey]:
        return list(self.__dict__.get("_out_keys_apparent") or self._all_out_keys())

    def _all_out_keys(self) -> list[NestedKey]:
        """Keys of ``writes``."""
        if self.__dict__.get("_written") is None:
            self.__dict__["_written"] = [unravel_key(getattr(self.tensor_keys, name)) for name in self.writes]
        return self.__dict__["_written"]

    @out_keys.setter
    def out_keys(self, selected: list[NestedKey]) -> None:  # by select_out_keys and reset_out_keys
        self.__dict__["_out_keys_apparent"] = None
        if list(selected) != self.out_keys:
            self.__dict__["_out_keys_apparent"] = list(selected)

    # -------------------------------------------------------------------------------------------------------- calling

    @_called
    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        params: TensorDictBase | None = None,
        target_params: TensorDictBase | None = None,
        time_dim: int | None = None,
    ) -> TensorDictBase:
        """Write ``advantage`` and ``value_target`` into the tensordict and return it.

        Args:
            tensordict: the rollout.
            params, target_params: parameters of a functional value network, for the states and for their successors.
            time_dim: overrides the module's.
        """
        if not tensordict.batch_size:
            raise RuntimeError(
                "Expected input tensordict to have at least one dimension, got "
                f"tensordict.batch_size = {tensordict.batch_size}"
            )
        beside = self._beside(tensordict)
        arguments = tensordict, params, target_params, time_dim, beside
        situation = self._situation(tensordict, time_dim, beside) if params is None and target_params is None else None
        self._deliver(tensordict, self._recall(situation, self._results, arguments))
        return tensordict

    def _deliver(self, tensordict, results):
        """Write those of ``results`` that are selected."""
        selected = self.__dict__.get("_out_keys_apparent")
        there = tensordict._tensordict if type(tensordict) is TensorDict else {}
        for key, result in zip(self._all_out_keys(), results, strict=True):
            if there.get(key) is not result and (not selected or key in selected):
                _write(tensordict, key, result)

    def _results(self, tensordict, params, target_params, time_dim, beside):
        """The results named in ``writes``, in the memory of the tensordict's entries if all of them fit."""
        step = self._read(tensordict, params, target_params, time_dim, beside=beside)
        self._warn_of_seams(tensordict, step.done, step.mask, step.time_dim)
        like = step.reward if step.value is None else step.value
        standardize = self._standardizes()
        existing = None
        if len(self.out_keys) == len(self.writes) and not standardize and not _tracked(step):
            found = tuple(_fitting(tensordict, key, like) for key in self.out_keys)
            existing = found if all(entry is not None for entry in found) else None
        results = self._compute(step, tensordict, existing)
        _keep(tensordict, step.fresh)
        if standardize:
            groups = self._group_ids(tensordict)
            results = tuple(
                F.standardize(result, mask=step.mask, groups=groups, dim=self._pooled_dims(result))
                if name == "advantage"
                else result
                for name, result in zip(self.writes, results, strict=True)
            )
        return results

    def _standardizes(self) -> bool:
        return getattr(self, "average_gae", False) or getattr(self, "average_adv", False)

    def _beside(self, tensordict: TensorDictBase) -> tuple[Tensor | None, ...]:
        """What the estimator reads or evaluates apart from rewards, flags and values."""
        return ()

    # --------------------------------------------------------------------------------------------- launches remembered

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        self.__dict__["_recalled"] = None  # what was remembered of calls may not hold any more

    def _situation(self, tensordict, time_dim, beside):
        """What the results depend on, where they depend on nothing else; else ``None``."""
        if torch.compiler.is_compiling():
            return None
        recalled = self.__dict__.get("_recalled")
        if recalled is None:
            self.__dict__["_memory"], keys = Memory(), self._recalled_keys()
            recalled = self.__dict__["_recalled"] = _Recalled(self.out_keys, *keys) if keys else ()
        after = _entry(tensordict, "next")
        if not recalled or type(tensordict) is not TensorDict or type(after) is not TensorDict:
            return None
        # most are absent, which a method takes long to find out
        entries = [*map(tensordict._tensordict.get, recalled.here), *map(after._tensordict.get, recalled.there)]
        entries += [read(tensordict, key) for read, key in recalled.below]
        names = tuple(tensordict.names) if tensordict._has_names() else None
        return time_dim, len(tensordict.batch_size), names, (*entries, *beside, *self._buffers.values())

    def _recall(self, situation, function, arguments):
        """``function(*arguments)``, or what is remembered of it in this situation."""
        if situation is None:
            return function(*arguments)
        found = self._memory.recall(situation, None)
        if found is not None:
            return found
        *constants, entries = situation
        tensors = [x for x in entries if x is not None]
        if not remembers() or not all(isinstance(x, Tensor) for x in tensors):
            return function(*arguments)
        constants = [torch.is_grad_enabled(), *constants, *(x is None for x in entries)]
        return self._memory((situation, None), constants, tensors, function, arguments)

    def _recalled_keys(self):
        """Entries that are read from the rollout and from what comes next; nothing where results depend on more."""
        averages = self._standardizes() or getattr(self, "average_rewards", False)
        if self.value_network is not None or averages:
            return ()
        keys = self.tensor_keys
        here = (keys.value, keys.bootstrap, keys.mask, keys.steps_to_next_obs, "shifted_valid")
        return here, (keys.reward, keys.done, keys.terminated, keys.truncated, keys.value)

    def value_estimate(
        self,
        tensordict: TensorDictBase,
        target_params: TensorDictBase | None = None,
        next_value: Tensor | None = None,
        time_dim: int | None = None,
        *,
        params: TensorDictBase | None = None,
        **kwargs,
    ) -> Tensor:
        """The value target alone; nothing is written but values of the network.

        Args:
            tensordict: the rollout.
            target_params: parameters of a functional value network for the successors.
            next_value: their values, where they are known.
            time_dim: overrides the module's.
            params: parameters for the states.
        """
        step = self._read(tensordict, params, target_params, time_dim, next_value, required=False)
        return self._deliver_target(step, tensordict)

    def _deliver_target(self, step: _Step, tensordict: TensorDictBase) -> Tensor:
        target = self._compute(step, tensordict, None)[-1]
        _keep(tensordict, step.fresh)
        return target

    # -------------------------------------------------------------------------------------------------------- reading

    def _warn_of_seams(self, tensordict, done, mask, time_dim) -> None:
        """In the first batch: workers that a collector put end to end along time run into each other."""
        if not self.__dict__.get("_looked_for_seams") and not torch.compiler.is_compiling():
            self.__dict__["_looked_for_seams"] = True
            if _seams(tensordict, done, mask, time_dim):
                warnings.warn(
                    f"{type(self).__name__} read a row in which a trajectory runs into another without an end between "
                    'them: ("collector", "traj_ids") changes where ("next", "done") is not set. The results leak '
                    'across. Where a collector with cat_results=0 returns such rows, use cat_results="stack", '
                    'set_truncated=True, or ValueEstimatorTransform(estimator, at="sample", num_slices=workers).',
                    stacklevel=2,
                )

    def _missing(self, key: NestedKey, tensordict: TensorDictBase) -> MissingEntryError:
        entries = ", ".join(sorted(str(k) for k in tensordict.keys(True, True))) or "nothing"
        return MissingEntryError(
            f"{type(self).__name__} reads {key!r}, which the tensordict lacks. It holds {entries}."
        )

    def _read(self, tensordict, params, target_params, time_dim, next_value=None, required=True, beside=None) -> _Step:
        keys, named = self.tensor_keys, self._named
        after = _entry(tensordict, "next")
        reward = None if after is None else _entry(after, keys.reward)
        if reward is None:
            raise self._missing(_next(keys.reward), tensordict)
        done, terminated = _entry(after, keys.done), _entry(after, keys.terminated)
        if done is None or "truncated" in named:
            truncated = _entry(after, keys.truncated)
            if truncated is None and "truncated" in named:
                raise self._missing(_next(keys.truncated), tensordict)
            if done is None and terminated is None:
                raise self._missing(_next(keys.done), tensordict)
            terminated = done if terminated is None else terminated
            done = terminated if done is None else done
            done = done if truncated is None else done.bool() | truncated.bool()
        mask = _entry(tensordict, keys.mask)
        if mask is None and "mask" in named:
            raise self._missing(keys.mask, tensordict)
        gamma = self._hyper("gamma", reward)
        steps = _entry(tensordict, keys.steps_to_next_obs)
        if steps is not None:
            gamma = gamma ** steps.view_as(reward)
        dims = tensordict.batch_dims
        time_dim = self._get_time_dim(time_dim, tensordict) if dims else reward.ndim - 2
        fresh, ends = {}, _Ends(done, terminated, mask, time_dim)
        value, next_value, bootstrap, valid = self._values(
            tensordict, ends, params, target_params, next_value, required, fresh
        )
        if getattr(self, "average_rewards", False):
            # a mask of each agent says nothing of a team's reward
            counted = [_lead(m, reward).bool() for m in (mask, valid) if m is not None and m.ndim <= reward.ndim]
            counted = functools.reduce(torch.logical_and, counted) if counted else None
            groups = self._group_ids(tensordict)
            reward = F.standardize(reward, mask=counted, groups=groups, eps=self.reward_eps)
            fresh[_next(keys.reward)] = reward
        like = next_value if next_value is not None else value if value is not None else reward
        if valid is not None:
            mask = _lead(valid, like) if mask is None else _lead(mask, like).bool() & _lead(valid, like)
        return _Step(
            value,
            next_value,
            bootstrap,
            self._for_each_agent(reward, like, dims),
            self._for_each_agent(done, like, dims),
            self._for_each_agent(terminated, like, dims),
            None if mask is None else _lead(mask, like),
            self._for_each_agent(gamma, like, dims) if gamma.ndim else gamma,
            time_dim,
            self._beside(tensordict) if beside is None else beside,
            fresh,
        )

    def _hyper(self, name: str, like: Tensor) -> Tensor:
        """A discount or threshold on the device of ``like``; none of this waits for the device."""
        value = self._buffers[name]
        if value.device != like.device:
            value = value.to(like.device)
            setattr(self, name, value)
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        if name in self._exact and not value.dtype == wide == torch.float32:
            exact = torch.full((), self._exact[name], dtype=torch.float64, device=value.device)
            unchanged = value == exact.float().to(value.dtype)
            return torch.where(unchanged, exact.to(wide), value.to(wide))
        return value

    def _values(self, tensordict, ends, params, target_params, next_value, required, fresh):
        """``(value, next_value, bootstrap, valid)`` by the network, else from the tensordict."""
        keys, named = self.tensor_keys, self._named
        if self.value_network is None or next_value is not None:
            value, bootstrap = _entry(tensordict, keys.value), None
            if next_value is None:
                if "bootstrap" not in named:
                    next_value = _entry(tensordict, _next(keys.value))
                if next_value is None:
                    bootstrap = _entry(tensordict, keys.bootstrap)
                if next_value is None and bootstrap is None:
                    key = keys.bootstrap if "bootstrap" in named else _next(keys.value)
                    raise self._missing(key, tensordict)
            if value is None and (required or bootstrap is not None):
                raise self._missing(keys.value, tensordict)
            return value, next_value, bootstrap, _entry(tensordict, "shifted_valid")
        params, target_params = self._network_parameters(params, target_params)
        found, valid = self._look(tensordict, ends, params, target_params, keys.value), None
        if found is not None:
            value, next_value = found.here.get(keys.value), found.next_value
        else:
            value, next_value, valid = self._look_twice(tensordict, params, target_params, keys.value)
        fresh |= {keys.value: value, _next(keys.value): next_value}
        if valid is not None:
            fresh["shifted_valid"] = valid
        return value, next_value.detach(), None, valid

    def _network_parameters(self, params, target_params):
        """Parameters for the states and for their successors; ``None`` where the network keeps its own for both."""
        if params is None and target_params is None:
            return None, None
        params = TensorDict.from_module(self.value_network).data if params is None else params.detach()
        return params, params.clone(False) if target_params is None else target_params

    def _look(self, tensordict, ends, params, target_params, key, policy=None, states=True) -> networks.Found | None:
        """Values with each distinct state evaluated once; ``None`` where TorchRL's two calls are called for.

        ``policy``, with a module and a function of the network's outputs, adds to what is evaluated. ``states=False``
        leaves the states out, and the successors that :meth:`networks.Lookup.needed` does not name.
        """
        network, vouched, slots = self.value_network, bool(self.reuse_values), self.bootstrap_slots
        module, add = (None, None) if policy is None else policy
        called = [network] if module is None else [network, module]
        if self.reuse_values is False or self.shifted or skip_existing() or not tensordict.batch_dims:
            return None
        if not vouched and slots is None and networks.depends_on_batch(*called):
            return None
        single = _entry(tensordict, self.tensor_keys.steps_to_next_obs) is None
        recurrent = networks.recurrent_states(network)
        lookup = networks.Lookup(
            tensordict,
            [key for part in called for key in part.in_keys],
            done=ends.done,
            terminated=ends.terminated,
            mask=ends.mask,
            time=ends.time_dim,
            states=recurrent,
            compare=states and not vouched,
            missing=lambda key: self._missing(key, tensordict),
        )
        stamp = (id(network), network.training, lookup.shape)
        probed = self.__dict__.get("_probed")
        if not lookup.readable or probed == (stamp, False) and not vouched and slots is None:
            return None
        whole = self._split_value_net_input(lookup.here)

        def evaluate(data, params):
            chunks, dim = (data,), 0
            if data.batch_size == lookup.shape:
                chunks, dim = self._split_value_net_input(data), self._resolve_value_chunk_dim(data.ndim)
            elif len(whole) > 1:
                chunks = data.split(whole[0].numel(), 0)
            # gradients may pass through the values, but not into the network's own parameters
            held = hold_out_net(network) if params is None else params.to_module(network, preserve_module_state=False)
            with held:
                parts = [network(chunk).select(key, *map(_next, recurrent or ()), strict=False) for chunk in chunks]
            values = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
            return values if add is None else add(data, values)

        same = params is None or not torch.compiler.is_compiling() and networks.same_memory(params, target_params)
        probe = not vouched and slots is None and probed != (stamp, True)
        found = lookup.values(
            None if not states and not probe and recurrent is None else functools.partial(evaluate, params=params),
            functools.partial(evaluate, params=target_params),
            key if add is None else self.tensor_keys.state_value,
            share=same and single and not (vouched and states and ends.mask is not None),
            slots=slots,
            probe=probe,
        )
        if found.repeatable is not None:
            self.__dict__["_probed"] = (stamp, found.repeatable)
        if found.lost is not None:
            if self.bootstrap_overflow.device != found.lost.device:
                self.bootstrap_overflow = self.bootstrap_overflow.to(found.lost.device)
            self.bootstrap_overflow.add_(found.lost.sum())
        return None if found.repeatable is False else found

    def _look_twice(self, tensordict, params, target_params, key):
        """TorchRL's calls: ``(value, next_value, valid)``."""
        with hold_out_net(self.value_network) if params is None else nullcontext():
            return self._call_value_nets(
                data=self._network_input(tensordict, key),
                params=params,
                next_params=target_params,
                single_call=self.shifted,
                value_key=key,
                detach_next=False,
                vmap_randomness=self.vmap_randomness,
            )

    def _network_input(self, tensordict: TensorDictBase, key: NestedKey) -> TensorDictBase:
        """A shallow copy; values that states have and their successors lack (a policy wrote them) are left out."""
        data = tensordict.copy()
        if (_entry(data, key) is None) != (_entry(data, _next(key)) is None):
            data = data.exclude(key, _next(key))
        return data

    # --------------------------------------------------------------------------------------------------------- shapes

    def _for_each_agent(self, x: Tensor | None, value: Tensor, batch_dims: int) -> Tensor | None:
        """A team-level entry, one dimension short of the values', repeated for every agent without a copy."""
        if x is None or x.ndim != value.ndim - 1 or value.ndim != batch_dims + 2:
            return x
        dim = self.agent_dim % value.ndim
        return x.unsqueeze(dim).expand(*x.shape[:dim], value.shape[dim], *x.shape[dim:])

    def _pooled_dims(self, advantage: Tensor) -> tuple[int, ...] | None:
        """The dimensions that share a mean and a deviation; ``None``: all."""
        return None


def _seams(tensordict: TensorDictBase, done: Tensor, mask: Tensor | None, time_dim: int) -> bool:
    """Whether a row goes on in another trajectory without an end between; looked at where that is cheap, on the CPU."""
    ids = tensordict.get(("collector", "traj_ids"), None)
    if ids is None or ids.device.type != "cpu" or ids.shape != tensordict.batch_size or not ids.numel():
        return False

    def steps(x, first):
        x = x.flatten(ids.ndim).any(-1) if x.ndim > ids.ndim else x.bool()
        return x.narrow(time_dim, first, ids.shape[time_dim] - 1)

    seam = (ids.diff(dim=time_dim) != 0) & ~steps(done, 0)
    if mask is not None:
        seam &= steps(mask, 0) & steps(mask, 1)
    return bool(seam.any())


def _lead(x: Tensor, value: Tensor) -> Tensor:
    """A mask of ``[*B, T]``, with the dimensions after time that ``value`` has."""
    while x.ndim < value.ndim:
        x = x.unsqueeze(-1)
    return x.expand(value.shape)


def _entry(tensordict: TensorDictBase, key: NestedKey) -> Tensor | TensorDictBase | None:
    """``tensordict.get(key, None)``, past the work that it does for keys of other kinds."""
    if isinstance(key, str):
        # most are absent, which a method takes long to find out
        return (tensordict._tensordict.get if type(tensordict) is TensorDict else tensordict._get_str)(key, None)
    for part in key:
        if tensordict is None:
            return None
        tensordict = _entry(tensordict, part)
    return tensordict


def _own(tensordict: TensorDictBase, key: NestedKey) -> Tensor | None:
    """The entry's own memory; ``None`` where reading it stacks or loads a copy."""
    entry = _entry(tensordict, key)
    if entry is None or (type(tensordict) is TensorDict and isinstance(key, str)):
        return entry
    return entry if _entry(tensordict, key) is entry else None


def _fitting(tensordict: TensorDictBase, key: NestedKey, like: Tensor) -> Tensor | None:
    """The entry's own memory if ``like`` can be written into it."""
    entry = _own(tensordict, key)
    if (
        isinstance(entry, Tensor)
        and entry.shape == like.shape
        and entry.dtype == like.dtype
        and entry.device == like.device
        and not entry.requires_grad
        and (0 not in entry.stride() or entry.is_contiguous())  # an expanded entry is no memory of its own
    ):
        return entry
    return None


def _tracked(step: _Step) -> bool:
    """Whether autograd follows the results, which then need memory of their own."""
    tensors = (step.value, step.next_value, step.bootstrap, step.reward, step.gamma)
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _write(tensordict: TensorDictBase, key: NestedKey, value: Tensor) -> None:
    """Into the entry's own memory where it fits, as a new entry otherwise."""
    entry = _entry(tensordict, key)
    if entry is value:
        return
    if entry is not None:
        entry = None if value.requires_grad else _fitting(tensordict, key, value)
    if entry is None and type(tensordict) is TensorDict and isinstance(key, str):
        tensordict._set_str(key, value, inplace=False, validated=True)  # it has the shape of other entries
    elif entry is None:
        tensordict.set(key, value)
    else:
        entry.copy_(value)


def _keep(tensordict: TensorDictBase, fresh: dict[NestedKey, Tensor]) -> None:
    """Values and rewards made on the way, as new entries: the caller's tensors stay as they are. A locked tensordict
    takes none, there the entry's own memory has to do."""
    for key, made in fresh.items():
        if tensordict.is_locked:
            _write(tensordict, key, made)
        else:
            tensordict.set(key, made)


# ---------------------------------------------------------------------------------------------------------------- GAE


class GAE(Estimator, torchrl_value.GAE):
    r"""Generalized advantage estimation: :func:`.functional.generalized_advantage_estimate` on a TensorDict.

    Schulman et al. 2016, arXiv:1506.02438. Reading, writing and keys as in :class:`Estimator`.

    Keyword Args:
        gamma (float or Tensor): discount.
        lmbda (float or Tensor): decay of the trace.
        value_network (TensorDictModule, optional): see :class:`Estimator`.
        average_gae (bool): standardise the advantage (within ``group_key`` where given). Defaults to ``False``.
        keys (dict, optional): names of entries.
        reuse_values, bootstrap_slots: how the network evaluates states and successors, see :class:`Estimator`.
        **kwargs: ``differentiable``, ``skip_existing``, ``shifted``, ``shifted_budget``, ``time_dim``,
            ``auto_reset_env``, ``deactivate_vmap``, ``value_chunk_size``, ``num_chunks``, ``value_chunk_dim``,
            ``group_key`` and ``device`` as in :class:`torchrl.objectives.value.GAE`; ``vectorized`` is accepted, there
            is one path.

    Examples:
        >>> gae = GAE(gamma=0.99, lmbda=0.95)
        >>> gae.in_keys
        ['state_value', ('next', 'reward'), ('next', 'done'), ('next', 'terminated'), ('next', 'state_value')]
        >>> gae.out_keys
        ['advantage', 'value_target']
    """

    def _compute(self, step, tensordict, out):
        if self.auto_reset_env:
            step = self._continue_from_own_value(step, tensordict.batch_dims)
        return F.generalized_advantage_estimate(
            step.gamma,
            self._hyper("lmbda", step.reward),
            step.value,
            step.next_value,
            step.reward,
            step.done,
            step.terminated,
            bootstrap=step.bootstrap,
            mask=step.mask,
            time_dim=step.time_dim,
            out=out,
        )

    def _beside(self, tensordict):
        if not self.auto_reset_env:
            return ()
        key = _next(self.tensor_keys.truncated)
        truncated = _entry(tensordict, key)
        if truncated is None:
            raise self._missing(key, tensordict)
        return (truncated,)

    def _continue_from_own_value(self, step, batch_dims):
        """Where the next state of a truncated step is the reset one, its own value stands in for the continuation."""
        truncated = self._for_each_agent(step.beside[0], step.value, batch_dims).bool()
        if step.terminated is not None:
            truncated = truncated & ~step.terminated.bool()
        reward = torch.where(truncated, step.reward + step.gamma * step.value, step.reward)
        return replace(step, reward=reward, terminated=step.done)

    def value_estimate(
        self,
        tensordict: TensorDictBase,
        params: TensorDictBase | None = None,
        target_params: TensorDictBase | None = None,
        time_dim: int | None = None,
        **kwargs,
    ) -> Tensor:
        """The value target alone, as :meth:`Estimator.value_estimate`, in TorchRL's order of arguments."""
        return super().value_estimate(tensordict, target_params, time_dim=time_dim, params=params)


class MultiAgentGAE(GAE, torchrl_value.MultiAgentGAE):
    """:class:`GAE` for values ``[*B, T, agents, 1]``, with team rewards and flags ``[*B, T, 1]`` or each agent's own.

    Keyword Args:
        agent_dim (int): the dimension of agents in the values. Defaults to ``-2``.
        **kwargs: those of :class:`GAE`. ``average_gae`` standardises each agent's advantage by itself.
    """

    def _for_each_agent(self, x, value, batch_dims):
        return None if x is None else self._broadcast_to_agents(x, value, self.agent_dim)

    def _pooled_dims(self, advantage):
        agents = self.agent_dim % advantage.ndim
        return tuple(dim for dim in range(advantage.ndim) if dim != agents)


# --------------------------------------------------------------------------------------------------------- TD returns


class _TDEstimator(Estimator):
    """Returns, with the advantage as what they exceed the value by."""

    spec: specs.Spec

    def __init__(self, **kwargs):
        tensors = {name: x for name, x in kwargs.items() if name in self.spec.hypers and isinstance(x, Tensor)}
        super().__init__(**(kwargs | dict.fromkeys(tensors, 0.0)))  # TorchRL's class would copy them, with a warning
        for name, x in tensors.items():
            self._exact.pop(name, None)
            self.register_buffer(name, x.to(self._device))

    def _compute(self, step, tensordict, out):
        names = ("advantage", "value_target")
        hypers = (step.gamma, *(self._hyper(name, step.reward) for name in self.spec.hypers[1:]))
        if step.value is None:  # the return alone
            names, out = ("value_target",), None
        results = F._returns(
            self.spec, names, hypers, step.value, step.next_value, step.reward, step.done, step.terminated,
            step.bootstrap, step.mask, step.time_dim, out,
        )  # fmt: skip
        return results if len(results) == 2 else (None, *results)

    def value_estimate(self, tensordict, target_params=None, next_value=None, time_dim=None, **kwargs) -> Tensor:
        """The return alone, as :meth:`Estimator.value_estimate`; states are not evaluated for it."""
        if next_value is None and self.value_network is not None:
            next_value = self._next_value(tensordict, target_params, kwargs)
        step = self._read(tensordict, None, None, time_dim, next_value, required=False)
        if step.next_value is not None:
            step = replace(step, value=None)
        if not self.spec.recurrences and "mask" not in self._named:
            step = replace(step, mask=None)  # no step leans on its neighbours; padding is the loss's to leave out
        return self._deliver_target(step, tensordict)


class TD0Estimator(_TDEstimator, torchrl_value.TD0Estimator):
    """One-step return and TD error: :func:`.functional.td0_return_estimate` on a TensorDict.

    Keyword Args:
        gamma (float or Tensor): discount.
        average_rewards (bool): standardise the rewards first, and write them back.
        **kwargs: see :class:`Estimator` and :class:`torchrl.objectives.value.TD0Estimator`.
    """

    spec = specs.TD0

    def _compute(self, step, tensordict, out):
        if step.next_value is not None and step.terminated is not None:
            step = replace(step, done=None)  # where an episode is cut plays no part in one step
        return super()._compute(step, tensordict, out)


class TD1Estimator(_TDEstimator, torchrl_value.TD1Estimator):
    """Discounted return that continues with the next value where it is cut: :func:`.functional.td1_return_estimate`.

    Keyword Args:
        gamma (float or Tensor): discount.
        average_rewards (bool): standardise the rewards first, and write them back.
        **kwargs: see :class:`Estimator` and :class:`torchrl.objectives.value.TD1Estimator`.
    """

    spec = specs.RETURN


class TDLambdaEstimator(_TDEstimator, torchrl_value.TDLambdaEstimator):
    r"""The :math:`\lambda`-return: :func:`.functional.td_lambda_return_estimate` on a TensorDict.

    Keyword Args:
        gamma, lmbda (float or Tensor): discount and decay.
        average_rewards (bool): standardise the rewards first, and write them back.
        **kwargs: see :class:`Estimator` and :class:`torchrl.objectives.value.TDLambdaEstimator`.
    """

    spec = specs.TD_LAMBDA
    reward_eps = 1e-4


# ------------------------------------------------------------------------------------------------------------ V-trace


class VTrace(Estimator, torchrl_value.VTrace):
    r"""V-trace: :func:`.functional.vtrace_advantage_estimate` on a TensorDict (Espeholt et al. 2018, arXiv:1802.01561).

    The importance ratio is that of the action in the TensorDict, scored under ``actor_network``: on fresh on-policy
    data it is 1. Only where the TensorDict holds no action does the actor choose one, as TorchRL's class always does.

    Keyword Args:
        gamma (float or Tensor): discount.
        actor_network (ProbabilisticTensorDictSequential): the current policy.
        value_network (TensorDictModule, optional): see :class:`Estimator`.
        rho_thresh, c_thresh (float or Tensor): clipping thresholds of the importance weights. Default to 1.
        average_adv (bool): standardise the advantage.
        **kwargs: see :class:`Estimator` and :class:`torchrl.objectives.value.VTrace`.
    """

    def _more_in_keys(self):
        log_prob = self.tensor_keys.sample_log_prob
        actor = self.actor_network
        return [
            *(log_prob if isinstance(log_prob, list) else [log_prob]),
            *getattr(actor, "in_keys", ()),
            *getattr(actor, "dist_sample_keys", ()),
        ]

    def _beside(self, tensordict):
        key = self.tensor_keys.sample_log_prob
        log_mu = _maybe_get_or_select(tensordict, key) if isinstance(key, list) else _entry(tensordict, key)
        if log_mu is None:
            raise self._missing(key, tensordict)
        if is_tensor_collection(log_mu):
            log_mu = log_mu.sum(dim="feature", reduce=True)
        return self._log_pi(tensordict), log_mu

    def _compute(self, step, tensordict, out):
        log_pi, log_mu = step.beside
        return F.vtrace_advantage_estimate(
            step.gamma,
            _as_value(log_pi, step.value),
            _as_value(log_mu, step.value),
            step.value,
            step.next_value,
            step.reward,
            step.done,
            step.terminated,
            self._hyper("rho_thresh", step.reward),
            self._hyper("c_thresh", step.reward),
            step.time_dim,
            bootstrap=step.bootstrap,
            mask=step.mask,
            out=out,
        )

    def _log_pi(self, tensordict: TensorDictBase) -> Tensor:
        """Log-probability of the stored action under the current policy."""
        actor = self.actor_network
        actions = list(getattr(actor, "dist_sample_keys", ()))
        stored = [_entry(tensordict, key) for key in actions]
        with hold_out_net(actor) if torch.is_grad_enabled() else nullcontext():  # it goes through all parameters
            if not stored or any(action is None for action in stored):
                with set_composite_lp_aggregate(True):
                    return _call_actor_net(
                        actor_net=actor, data=tensordict, params=None, log_prob_key=self.tensor_keys.sample_log_prob
                    )
            distribution = actor.get_dist(tensordict.select(*actor.in_keys, strict=False))
            if isinstance(distribution, CompositeDistribution):
                with set_composite_lp_aggregate(True):
                    return distribution.log_prob(tensordict.select(*actions))
            (action,) = stored
            return distribution.log_prob(action)


def _as_value(log_prob: Tensor, value: Tensor) -> Tensor:
    return log_prob.view_as(value) if log_prob.numel() == value.numel() else log_prob


# ----------------------------------------------------------------------------------------------- Retrace and relatives


@_keys
class _RetraceKeys(_Keys):
    """Names of the entries of :class:`RetraceEstimator`.

    Attributes:
        value: ``Q(s_t, a_t)``; what Retrace corrects.
        state_value: under ``"next"``, ``E_pi Q(s'_t, .)``.
        log_pi: log-probability of the taken action under the target policy.
        action_value: values of all actions, ``[*B, T, A]``, at the state and under ``"next"``.
        action: the taken action, one-hot ``[*B, T, A]`` or an index ``[*B, T]`` or ``[*B, T, 1]``.
    """

    value: NestedKey = "state_action_value"
    state_value: NestedKey = "state_value"
    log_pi: NestedKey = "log_pi"
    action_value: NestedKey = "action_value"
    action: NestedKey = "action"


class RetraceEstimator(Estimator):
    r"""Retrace(:math:`\lambda`) and its relatives: off-policy targets for action values (Munos et al. 2016).

    :func:`.functional.retrace_lambda_advantage_estimate` on a TensorDict. With a ``value_network`` that writes the
    values of all discrete actions (``action_value``, ``[*B, T, A]``, as TorchRL's Q-networks do), the taken action's
    value is picked and the next state's expectation taken under the target policy: that of ``actor_network``, or,
    without one, the :math:`\epsilon`-greedy policy of the values themselves (with :math:`\epsilon = 0`, Retrace is
    Tree-backup: the behaviour policy plays no part). Without a network, the tensordict holds
    ``state_action_value``, ``("next", "state_value")`` and, where the trace needs it, ``log_pi``.

    Keyword Args:
        gamma, lmbda (float or Tensor): discount and decay.
        value_network (TensorDictModule, optional): writes ``action_value``.
        actor_network (ProbabilisticTensorDictSequential, optional): the target policy, over discrete actions.
        epsilon (float): exploration of the greedy target policy. Defaults to 0.
        trace (str): ``"retrace"``, ``"importance_sampling"``, ``"tree_backup"`` or ``"q_lambda"``.
        c_thresh, rho_thresh (float or Tensor): clipping thresholds of the trace and of the advantage's weight.
        average_adv (bool): standardise the advantage.
        **kwargs: ``keys``, ``time_dim``, ``differentiable``, ``skip_existing``, ``group_key``, ``device``,
            ``reuse_values``, ``bootstrap_slots``, ``deactivate_vmap``, ``value_chunk_size``, ``num_chunks`` as in
            :class:`Estimator`.
    """

    _AcceptedKeys = _RetraceKeys
    default_keys = _RetraceKeys

    def __init__(
        self,
        *,
        gamma: float | Tensor,
        lmbda: float | Tensor,
        value_network=None,
        actor_network=None,
        epsilon: float = 0.0,
        trace: str = "retrace",
        c_thresh: float | Tensor = 1.0,
        rho_thresh: float | Tensor = 1.0,
        average_adv: bool = False,
        time_dim: int | None = None,
        keys: dict[str, NestedKey] | None = None,
        **kwargs,
    ):
        if trace not in F.TRACES:
            raise ValueError(f"trace must be one of {F.TRACES}, got {trace!r}.")
        super().__init__(value_network=value_network, keys=keys, **kwargs)
        self._register(gamma=gamma, lmbda=lmbda, c_thresh=c_thresh, rho_thresh=rho_thresh)
        self.actor_network = actor_network
        self.epsilon, self.trace, self.average_adv, self.time_dim = epsilon, trace, average_adv, time_dim

    @property
    def in_keys(self):
        keys = self.tensor_keys
        after = [_next(key) for key in (keys.reward, keys.done, keys.terminated)]
        log_mu = [keys.sample_log_prob] if self.trace in ("retrace", "importance_sampling") else []
        if self.value_network is not None:
            values = list(getattr(self.value_network, "in_keys", ()))
            policy = list(getattr(self.actor_network, "in_keys", ()))
            found = [*values, *after, *map(_next, values), keys.action, *log_mu, *policy, *map(_next, policy)]
        else:
            log_pi = [] if self.trace == "q_lambda" else [keys.log_pi]
            found = [keys.value, *after, _next(keys.state_value), *log_pi, *log_mu]
        found += [keys.mask] if "mask" in self._named else []
        return list(dict.fromkeys(map(unravel_key, found)))

    def _values(self, tensordict, ends, params, target_params, next_value, required, fresh):
        keys = self.tensor_keys
        valid = tensordict.get("shifted_valid", None)
        if self.value_network is None:
            value = tensordict.get(keys.value, None)
            if value is None:
                raise self._missing(keys.value, tensordict)
            next_value = tensordict.get(_next(keys.state_value), None) if next_value is None else next_value
            if next_value is None:
                raise self._missing(_next(keys.state_value), tensordict)
            return value, next_value, None, valid
        params, target_params = self._network_parameters(params, target_params)

        def expect(data, values):
            action_values = values.get(keys.action_value)
            pi = self._policy(data, action_values)
            return values.set(keys.log_pi, pi).set(keys.state_value, (pi * action_values).sum(-1, keepdim=True))

        found = self._look(
            tensordict, ends, params, target_params, keys.action_value, policy=(self.actor_network, expect)
        )
        if found is not None:
            here, next_value = found.here, found.next_value
        else:
            action_values, next_action_values, valid = self._look_twice(
                tensordict, params, target_params, keys.action_value
            )
            here = expect(tensordict, TensorDict({keys.action_value: action_values}, tensordict.batch_size))
            after = TensorDict({keys.action_value: next_action_values}, tensordict.batch_size)
            next_value = expect(tensordict.get("next"), after).get(keys.state_value)
        action_values, pi = here.get(keys.action_value), here.get(keys.log_pi)
        index = self._action_index(tensordict, action_values)
        self.__dict__["_log_pi"] = pi.gather(-1, index).log()
        return action_values.gather(-1, index), next_value.detach(), None, valid

    def _action_index(self, tensordict, action_values):
        key = self.tensor_keys.action
        action = tensordict.get(key, None)
        if action is None:
            raise self._missing(key, tensordict)
        if action.shape == action_values.shape:
            return action.long().argmax(-1, keepdim=True)
        return action.long() if action.ndim == action_values.ndim else action.long().unsqueeze(-1)

    def _policy(self, tensordict, action_values):
        """Probabilities of all actions under the target policy."""
        if self.actor_network is not None:
            with hold_out_net(self.actor_network):
                return self.actor_network.get_dist(
                    tensordict.select(*self.actor_network.in_keys, strict=False)
                ).probs.to(action_values.dtype)
        actions = action_values.shape[-1]
        greedy = torch.nn.functional.one_hot(action_values.argmax(-1), actions).to(action_values.dtype)
        return greedy * (1 - self.epsilon) + self.epsilon / actions

    def _beside(self, tensordict):
        keys, log_pi = self.tensor_keys, None
        if self.value_network is None and self.trace != "q_lambda":
            log_pi = _entry(tensordict, keys.log_pi)
            if log_pi is None:
                raise self._missing(keys.log_pi, tensordict)
        log_mu = _entry(tensordict, keys.sample_log_prob)
        if log_mu is None and self.trace in ("retrace", "importance_sampling"):
            raise self._missing(keys.sample_log_prob, tensordict)
        return log_pi, log_mu

    def _recalled_keys(self):
        found = super()._recalled_keys()
        return found and (found[0], (*found[1], self.tensor_keys.state_value))

    def _compute(self, step, tensordict, out):
        log_pi, log_mu = step.beside
        if self.value_network is not None:
            log_pi, self.__dict__["_log_pi"] = self.__dict__["_log_pi"], None
        return F.retrace_lambda_advantage_estimate(
            step.gamma,
            self._hyper("lmbda", step.reward),
            None if log_pi is None else _as_value(log_pi, step.value),
            None if log_mu is None else _as_value(log_mu, step.value),
            step.value,
            step.next_value,
            step.reward,
            step.done,
            step.terminated,
            step.time_dim,
            c_thresh=self._hyper("c_thresh", step.reward),
            rho_thresh=self._hyper("rho_thresh", step.reward),
            trace=self.trace,
            mask=step.mask,
            out=out,
        )


# ------------------------------------------------------------------------------------------- recurrences without values


class DiscountedReturn(Estimator):
    r"""Discounted return (reward-to-go): :func:`.functional.reward2go` on a TensorDict.

    Reads ``("next", reward)`` and the flags, writes ``value_target``. Where a truncated episode or the window goes on,
    the return continues with the value of the next state if there is a ``value_network``, which evaluates those states
    alone, with the ``bootstrap`` entry if there is one, and with 0 otherwise.

    Keyword Args:
        gamma (float or Tensor): discount.
        average_rewards (bool): standardise the rewards first, and write them back.
        **kwargs: see :class:`Estimator`.
    """

    writes = ("value_target",)

    def __init__(self, *, gamma: float | Tensor, average_rewards: bool = False, time_dim: int | None = None, **kwargs):
        super().__init__(**kwargs)
        self._register(gamma=gamma)
        self.average_rewards, self.time_dim = average_rewards, time_dim

    @property
    def in_keys(self):
        keys = self.tensor_keys
        found = [_next(key) for key in (keys.reward, keys.done, keys.terminated)]
        found += [_next(key) for key in getattr(self.value_network, "in_keys", ())]
        return [*found, *(getattr(keys, name) for name in ("mask", "bootstrap") if name in self._named)]

    def _values(self, tensordict, ends, params, target_params, next_value, required, fresh):
        valid = tensordict.get("shifted_valid", None)
        if next_value is None and self.value_network is not None:
            key = self.tensor_keys.value
            found = self._look(tensordict, ends, target_params, target_params, key, states=False)
            next_value = self._next_value(tensordict, target_params, {}) if found is None else found.next_value
            return None, None, next_value, valid
        if next_value is None:
            next_value = tensordict.get(self.tensor_keys.bootstrap, None)
            if next_value is None and "bootstrap" in self._named:
                raise self._missing(self.tensor_keys.bootstrap, tensordict)
        return None, None, next_value, valid

    def _compute(self, step, tensordict, out):
        result = F.reward2go(
            step.reward,
            step.done,
            step.gamma,
            terminated=step.terminated,
            bootstrap=step.bootstrap,
            mask=step.mask,
            time_dim=step.time_dim,
            out=out,
        )
        return (result,)


class _ForwardEstimator(Estimator):
    """A forward recurrence over one entry: reads it and the ends of episodes, writes one entry."""

    reads: str
    beside: tuple[str, ...] = ()  # read too, and must be there
    optional: tuple[str, ...] = ()

    def __init__(self, *, time_dim: int | None = None, **kwargs):
        super().__init__(**kwargs)
        self.time_dim = time_dim

    @property
    def in_keys(self):
        keys = self.tensor_keys
        more = (*self.beside, *sorted(self._named))
        return [getattr(keys, self.reads), _next(keys.done), *(getattr(keys, name) for name in more)]

    def _entry(self, name, tensordict, required=False):
        key = getattr(self.tensor_keys, name)
        entry = _entry(tensordict, key)
        if entry is None and (required or name in self._named):
            raise self._missing(key, tensordict)
        return entry

    @_called
    def forward(self, tensordict: TensorDictBase, *, time_dim: int | None = None) -> TensorDictBase:
        """Write the result into the tensordict and return it; ``time_dim`` overrides the module's."""
        situation = self._situation(tensordict, time_dim, ())
        self._deliver(tensordict, (self._recall(situation, self._result, (tensordict, time_dim)),))
        return tensordict

    def _result(self, tensordict, time_dim):
        x = self._entry(self.reads, tensordict, required=True)
        key = _next(self.tensor_keys.done)
        done = _entry(tensordict, key)
        if done is None:
            raise self._missing(key, tensordict)
        mask, time_dim = self._entry("mask", tensordict), self._get_time_dim(time_dim, tensordict)
        self._warn_of_seams(tensordict, done, mask, time_dim)
        (written,) = self.out_keys
        return self._run(
            x,
            done,
            mask=mask,
            time_dim=time_dim,
            out=None if x.requires_grad and torch.is_grad_enabled() else _fitting(tensordict, written, x),
            **{name: self._entry(name, tensordict, name in self.beside) for name in (*self.beside, *self.optional)},
        )

    def _recalled_keys(self):
        names = (self.reads, "mask", *self.beside, *self.optional)
        return tuple(getattr(self.tensor_keys, name) for name in names), (self.tensor_keys.done,)

    def value_estimate(self, *args, **kwargs):
        raise NotImplementedError(f"{type(self).__name__} estimates no value.")


@_keys
class _TraceKeys(_Keys):
    """Names of the entries of :class:`EligibilityTrace`.

    Attributes:
        gradient: gradient of the value, or features, ``[*B, T, D]``.
        ratio: importance ratio, used where it is found.
        trace: what is written.
    """

    gradient: NestedKey = "gradient"
    ratio: NestedKey = "ratio"
    trace: NestedKey = "trace"


class SpecEstimator(_ForwardEstimator):
    """The module of a :class:`~rl_triton_td.specs.Spec` of your own, one that needs no values.

    A subclass names its ``spec``, which has one output. Its inputs are entries of their names, ``done`` under
    ``"next"``; the output is written; its hypers are arguments of the constructor.

    Keyword Args:
        keys (dict, optional): names of entries.
        time_dim, differentiable: see :class:`Estimator`.
        **hypers (float or Tensor): those of the spec.
    """

    spec: specs.Spec

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        spec, known = cls.spec, {entry.name for entry in fields(_Keys)}
        if spec.transition:
            raise TypeError(f"{cls.__name__}: {spec.name} reads values of states, which this class does not.")
        if len(spec.outputs) != 1:
            raise TypeError(f"{cls.__name__}: {spec.name} must have one output, has {spec.outputs}.")
        names = dict.fromkeys((*spec.names, *spec.outputs))
        keys = make_dataclass(
            "_AcceptedKeys", [(n, NestedKey, field(default=n)) for n in names if n not in known], bases=(_Keys,)
        )
        keys.__module__, keys.__qualname__ = cls.__module__, f"{cls.__qualname__}._AcceptedKeys"
        cls._AcceptedKeys = cls.default_keys = _keys(keys)
        cls.reads, cls.writes = spec.names[0], spec.outputs
        cls.beside = tuple(name for name in dict.fromkeys(spec.names[1:]) if name != "done")

    def __init__(self, *, keys: dict[str, NestedKey] | None = None, time_dim: int | None = None, **kwargs):
        hypers = {name: kwargs.pop(name) for name in self._hypers()}
        super().__init__(keys=keys, time_dim=time_dim, **kwargs)
        self._register(**hypers)

    def _hypers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name.partition("@")[0] for name in self.spec.hypers))

    def _run(self, x, done, *, mask, time_dim, out, **beside):
        time = F._time(time_dim, x)
        entries = {self.reads: x, "done": done, **beside}
        entries = {name: F._expand(name, entries[name], x, time) for name in dict.fromkeys(self.spec.names)}
        F._check(self.reads, x, **entries)
        hypers = {name: F._number(name, self._hyper(name, x), x) for name in self._hypers()}
        return F._forward(
            self.spec,
            tuple(entries[name] for name in self.spec.names),
            tuple(hypers[name.partition("@")[0]] for name in self.spec.hypers),
            None,
            mask,
            out,
            x,
            time,
        )


class EligibilityTrace(_ForwardEstimator):
    """Accumulating eligibility trace: :func:`.functional.eligibility_trace` on a TensorDict.

    Reads ``gradient`` and ``("next", done)``, writes ``trace``.

    Keyword Args:
        gamma, lmbda (float or Tensor): discount and decay.
        keys (dict, optional): names of entries; with a ``ratio`` entry it is the off-policy trace.
        time_dim, differentiable: see :class:`Estimator`.
    """

    _AcceptedKeys = default_keys = _TraceKeys
    reads, writes, optional = "gradient", ("trace",), ("ratio",)

    def __init__(self, *, gamma: float | Tensor, lmbda: float | Tensor, **kwargs):
        super().__init__(**kwargs)
        self._register(gamma=gamma, lmbda=lmbda)

    def _run(self, x, done, **kwargs):
        return F.eligibility_trace(self._hyper("gamma", x), self._hyper("lmbda", x), x, done, **kwargs)


@_keys
class _PrefixSumKeys(_Keys):
    """Names of the entries of :class:`EpisodicPrefixSum`.

    Attributes:
        x: what is summed. Defaults to the reward.
        total: what is written.
    """

    x: NestedKey = ("next", "reward")
    total: NestedKey = "total"


class EpisodicPrefixSum(_ForwardEstimator):
    """Sum since the episode's first step: :func:`.functional.episodic_prefix_sum` on a TensorDict.

    Reads ``x`` (by default the reward) and ``("next", done)``, writes ``total``.

    Keyword Args:
        boundary (str): ``"ends_at"`` (``done[t]`` marks an episode's last step) or ``"starts_at"`` (its first).
        keys (dict, optional): names of entries.
        time_dim, differentiable: see :class:`Estimator`.
    """

    _AcceptedKeys = default_keys = _PrefixSumKeys
    reads, writes = "x", ("total",)

    def __init__(self, *, boundary: str = "ends_at", **kwargs):
        if boundary not in specs.PREFIX_SUM:
            raise ValueError(f"boundary must be one of {tuple(specs.PREFIX_SUM)}, got {boundary!r}.")
        super().__init__(**kwargs)
        self.boundary = boundary

    def _run(self, x, done, **kwargs):
        return F.episodic_prefix_sum(x, done, boundary=self.boundary, **kwargs)
