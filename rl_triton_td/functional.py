r"""Estimators as functions of tensors, with the names and argument order of ``torchrl.objectives.value.functional``.

Shapes
    Every tensor is ``[*B, T, *F]`` with time at ``time_dim`` (default ``-2``); nothing is broadcast against it but what
    is said to be. Any strides are read where they lie.
Flags
    ``done[t]`` ends the episode AT ``t`` (terminated or truncated), ``terminated[t]`` says that nothing follows it.
    Flags have any dtype; non-zero is true, and terminated implies done. ``terminated=None`` means ``done``.
Discounts
    ``gamma`` and ``lmbda`` are numbers, tensors of one element, or tensors that expand to the values' shape (per step,
    per row, per agent). In single precision they are rounded to it like every other input.
Successor value
    ``next_state_value`` is the value of the state that the transition really reached. With ``next_state_value=None``
    it is ``state_value`` at the next step, and ``bootstrap`` where that is another episode's: at truncated steps and
    behind the window. A ``bootstrap`` with time, ``[*B, T, *F]``, is read at those steps; one without, ``[*B, *F]``,
    is the value behind the window alone. ``bootstrap=None`` means 0 behind the window. A truncated step before the
    last one then has no continuation: that is a ``ValueError`` on CPU tensors; on a GPU, where looking would stall the
    stream, that step's episode comes out NaN.
Mask
    ``mask`` (``[*B, T, *F]``, ``[*B, T, 1]`` or ``[*B, T]``) is false where a step is no transition at all: padding, a
    tool's output, a reset row. Such steps are stepped over without decay, may hold anything, and come out 0.
Numbers
    bfloat16, float16, float32 or float64 in; computed in float32 (float64 if the result is); the result has the dtype
    of the value entries. What a flag or mask puts out of play is selected away, never multiplied, so NaN and inf stay
    inside their own episode.
Outputs
    ``out=`` takes the tensor (or tuple) to write into, of any strides; it must not overlap an input other than exactly.
Errors
    :class:`ShapeError`, ``TypeError`` or ``ValueError``, naming the argument.
"""

from __future__ import annotations

import functools
import inspect
import math

import torch
from torch import Tensor

from . import specs
from ._replay import not_remembered, remembered
from .ops import Choice, evaluate

__all__ = [
    "ShapeError",
    "eligibility_trace",
    "episodic_prefix_sum",
    "generalized_advantage_estimate",
    "linear_recurrence",
    "retrace_from_action_values",
    "retrace_lambda_advantage_estimate",
    "retrace_lambda_return_estimate",
    "reward2go",
    "standardize",
    "td0_advantage_estimate",
    "td0_return_estimate",
    "td1_advantage_estimate",
    "td1_return_estimate",
    "td_lambda_advantage_estimate",
    "td_lambda_return_estimate",
    "vec_generalized_advantage_estimate",
    "vec_td1_advantage_estimate",
    "vec_td1_return_estimate",
    "vec_td_lambda_advantage_estimate",
    "vec_td_lambda_return_estimate",
    "vtrace_advantage_estimate",
]


class ShapeError(ValueError, RuntimeError):
    """Shapes that do not fit; a ``RuntimeError`` too, since that is what TorchRL raises."""


# ---------------------------------------------------------------------------------------------------------- arguments


def _time(time_dim: int, like: Tensor) -> int:
    ndim = like.ndim
    if not -ndim <= time_dim < ndim:
        raise ShapeError(
            f"The tensor shape and the time dimension are not compatible: got {tuple(like.shape)} and "
            f"time_dim={time_dim}."
        )
    return time_dim % ndim


def _check(like_name: str, like: Tensor, **tensors: Tensor | None) -> None:
    """``tensors`` have the shape and device of ``like``; those whose name is no flag's are floating-point."""
    for name, x in ((like_name, like), *tensors.items()):
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}.")
        if x.shape != like.shape:
            raise ShapeError(
                f"All input tensors (value, reward and done states) must share a unique shape: {name} has "
                f"{tuple(x.shape)}, {like_name} has {tuple(like.shape)}."
            )
        if x.device != like.device:
            raise ValueError(f"{name} is on {x.device}, {like_name} on {like.device}: they must share a device.")
        if name not in specs.FLAGS and not x.is_floating_point():
            raise TypeError(f"{name} must be floating-point, got {x.dtype}.")


def _expand(name: str, x: Tensor | None, like: Tensor, time: int) -> Tensor | None:
    """An entry that may lack the feature dimensions, or hold 1 there, with the shape of ``like``."""
    if x is None:
        return x
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}.")
    if x.shape == like.shape:
        return x
    lead, features = like.shape[: time + 1], like.shape[time + 1 :]
    given = x.shape[time + 1 :]
    fits = len(given) in (0, len(features)) and all(g in (1, f) for g, f in zip(given, features))  # noqa: B905
    if x.shape[: time + 1] != lead or not fits:
        raise ShapeError(
            f"{name} has shape {tuple(x.shape)}, expected {tuple(like.shape)}"
            + (f" or {tuple(lead)}, with 1 or nothing for the dimensions after time." if features else ".")
        )
    return x.reshape(*lead, *(given or (1,) * len(features))).expand(like.shape)


def _number(name: str, x: float | Tensor, like: Tensor) -> float | Tensor:
    """A discount or threshold: a number, a tensor without dimensions or one of the shape of ``like``."""
    if isinstance(x, (int, float)):
        return float(x)
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a number or a tensor, got {type(x).__name__}.")
    if not x.is_floating_point():
        x = x.to(like.dtype)
    if x.numel() == 1:
        x = x.reshape(())
        if x.device != like.device:
            if x.requires_grad or torch.compiler.is_compiling() or x.device.type != "cpu":
                return x.to(like.device)
            not_remembered()
            return x.item()
        return x
    if x.device != like.device:
        raise ValueError(f"{name} is on {x.device}, the values on {like.device}: they must share a device.")
    missing = like.ndim - x.ndim
    if missing < 0 or any(a not in (1, b) for a, b in zip(x.shape, like.shape[missing:], strict=True)):
        raise ShapeError(
            f"{name} has shape {tuple(x.shape)}, which does not expand to that of the values, {tuple(like.shape)}."
        )
    if missing and x.ndim > 1 and x.shape[:-1] == like.shape[: x.ndim - 1]:
        raise ShapeError(
            f"{name} has shape {tuple(x.shape)}, which fits the values' {tuple(like.shape)} from the first dimension "
            "and from the last. Give it as many dimensions as the values."
        )
    return x.expand(like.shape)


def _bootstrap(bootstrap: Tensor | None, like: Tensor, time: int) -> tuple[Tensor | None, bool]:
    """The bootstrap with the shape of ``like``, and whether it holds behind the window alone."""
    if bootstrap is None:
        return None, False
    if not isinstance(bootstrap, Tensor):
        raise TypeError(f"bootstrap must be a tensor, got {type(bootstrap).__name__}.")
    behind = bootstrap.shape != like.shape
    if behind:
        rows = (*like.shape[:time], *like.shape[time + 1 :])
        if bootstrap.shape != rows:
            raise ShapeError(
                f"bootstrap has shape {tuple(bootstrap.shape)}, expected {tuple(like.shape)} (read at truncated steps "
                f"and at the last one) or {rows} (the value behind the window)."
            )
        bootstrap = bootstrap.unsqueeze(time).expand(like.shape)
    _check("state_value", like, bootstrap=bootstrap)
    return bootstrap, behind


def _transition(
    state_value: Tensor | None,
    next_state_value: Tensor | None,
    done: Tensor | None,
    terminated: Tensor | None,
    bootstrap: Tensor | None,
    mask: Tensor | None,
    like: Tensor,
    time: int,
) -> dict:
    """What :func:`~.ops.evaluate` wants to know of a transition, checked but for shapes."""
    mask = _expand("mask", mask, like, time)
    if mask is not None:
        _check("state_value", like, mask=mask)
    if next_state_value is not None:
        if bootstrap is not None:
            raise ValueError("bootstrap is read only where next_state_value is None; got both.")
        return {"done": done, "terminated": done if terminated is None else terminated,
                "next_value": next_state_value, "mask": mask}  # fmt: skip
    if state_value is None:
        raise ValueError("next_state_value is None: state_value is needed to take the successor's value from.")
    bootstrap, behind = _bootstrap(bootstrap, like, time)
    if (bootstrap is None or behind) and terminated is not None:
        if not (like.is_cuda or like.is_meta or torch.compiler.is_compiling()):
            _refuse_lost_bootstrap(done, terminated, mask, time)
        behind = True
    return {"done": done, "terminated": done if terminated is None else terminated, "successor": state_value,
            "bootstrap": bootstrap, "behind": behind, "mask": mask}  # fmt: skip


def _refuse_lost_bootstrap(done, terminated, mask, time):
    not_remembered()
    truncated = done.bool() & ~terminated.bool()
    if mask is not None:
        truncated = truncated & mask.bool()
        # the last valid step is followed by the window's end
        after = mask.bool().flip(time).cumsum(time).flip(time) > 1
        truncated = truncated & after
    elif truncated.shape[time]:
        truncated = truncated.narrow(time, 0, truncated.shape[time] - 1)
    if truncated.any():
        where = tuple(truncated.nonzero()[0].tolist())
        raise ValueError(
            f"bootstrap: step {where} is truncated (done, not terminated) and goes on in a state whose value is in no "
            "entry. Pass bootstrap of the values' shape with that value at truncated steps, or next_state_value."
        )


def _outputs(out, names: tuple[str, ...], like: Tensor):
    """For each output ``True`` (a new tensor) or the tensor given for it."""
    if out is None:
        return (True,) * len(names)
    given = (out,) if isinstance(out, Tensor) else tuple(out)
    if len(given) != len(names):
        raise ValueError(f"out must hold {len(names)} tensors {names}, got {len(given)}.")
    for name, x in zip(names, given, strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"out for {name} must be a tensor, got {type(x).__name__}.")
        if x.shape != like.shape or x.dtype != like.dtype or x.device != like.device:
            raise ShapeError(
                f"out for {name} is {x.dtype} {tuple(x.shape)} on {x.device}, expected {like.dtype} "
                f"{tuple(like.shape)} on {like.device}."
            )
        if x.requires_grad and x.is_leaf and torch.is_grad_enabled():
            raise ValueError(f"out for {name} is a leaf that requires grad, which nothing may be written into.")
    return given


# ---------------------------------------------------------------------------------------------------------------- GAE


@remembered
def generalized_advantage_estimate(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    state_value: Tensor,
    next_state_value: Tensor | None,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    *,
    time_dim: int = -2,
    bootstrap: Tensor | None = None,
    mask: Tensor | None = None,
    lmbda_critic: float | Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Generalized advantage estimate, and the critic's target :math:`A_t + V_t`.

    .. math::
        \delta_t = r_t + \gamma (1 - \mathrm{term}_t) V'_t - V_t, \qquad
        A_t = \delta_t + \gamma \lambda (1 - \mathrm{done}_t) A_{t+1}

    Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation",
    arXiv:1506.02438, eqs. 10 and 16.

    Args:
        gamma, lmbda: discount and decay; see the module's notes for these and for what follows.
        state_value, next_state_value, reward: ``[*B, T, *F]``.
        done, terminated: flags of the same shape.
        time_dim: the dimension of time.
        bootstrap: continuation values, with ``next_state_value=None``.
        mask: the steps that are transitions.
        lmbda_critic: a second decay, for the target alone (decoupled GAE, Yuan et al. 2025, arXiv:2503.01491), in the
            same pass.
        out: ``(advantage, value_target)`` to write into.

    Returns:
        ``(advantage, value_target)``, each ``[*B, T, *F]`` in the dtype of ``state_value``.

    Raises:
        ShapeError: shapes that differ, a ``time_dim`` that is not there.
        TypeError: an entry that is no floating-point tensor.
        ValueError: mixed devices; a truncated step without a continuation value.

    Examples:
        >>> value = torch.zeros(1, 3, 1)
        >>> reward = torch.tensor([1.0, 1.0, 1.0]).view(1, 3, 1)
        >>> done = torch.tensor([False, True, False]).view(1, 3, 1)
        >>> advantage, _ = generalized_advantage_estimate(0.9, 0.5, value, value, reward, done)
        >>> advantage.flatten()
        tensor([1.4500, 1.0000, 1.0000])
    """
    _check("state_value", state_value, next_state_value=next_state_value, reward=reward, done=done,
           terminated=terminated)  # fmt: skip
    time = _time(time_dim, state_value)
    hypers = (_number("gamma", gamma, state_value), _number("lmbda", lmbda, state_value))
    spec = specs.GAE
    if lmbda_critic is not None:
        spec, hypers = specs.DECOUPLED_GAE, (*hypers, _number("lmbda_critic", lmbda_critic, state_value))
    return evaluate(
        spec,
        (reward, state_value),
        hypers,
        _outputs(out, spec.outputs, state_value),
        time,
        like=state_value,
        **_transition(state_value, next_state_value, done, terminated, bootstrap, mask, state_value, time),
    )


def _vectorized(function):
    """TorchRL's ``vec_`` name for ``function``; like TorchRL's, it refuses discounts that belong to the start step."""
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def vectorized(*args, **kwargs):
        given = dict(zip(parameters, args), **kwargs)  # noqa: B905 later parameters have defaults
        if given.get("rolling_gamma") is False:
            if any(isinstance(given.get(name), Tensor) and given[name].numel() > 1 for name in ("gamma", "lmbda")):
                raise NotImplementedError(
                    f"The vectorized version of TD is not available: When using rolling_gamma=False with discounts per "
                    f"step, call {function.__name__}."
                )
            return function(**{**given, "rolling_gamma": None})
        return function(*args, **kwargs)

    vectorized.__name__ = vectorized.__qualname__ = f"vec_{function.__name__}"
    return vectorized


vec_generalized_advantage_estimate = _vectorized(generalized_advantage_estimate)


# --------------------------------------------------------------------------------------------------- TD(0), TD(lambda)


@remembered
def _returns(
    spec: specs.Spec,
    names: tuple[str, ...],
    hypers: tuple,
    state_value: Tensor | None,
    next_state_value: Tensor | None,
    reward: Tensor,
    done: Tensor | None,
    terminated: Tensor | None,
    bootstrap: Tensor | None,
    mask: Tensor | None,
    time_dim: int,
    out: tuple[Tensor, ...] | None,
    rolling_gamma: bool | None = None,
) -> tuple[Tensor, ...]:
    """The outputs ``names`` of a return: ``"value_target"``, and ``"advantage"``, what it exceeds the value by."""
    like_name = "state_value" if next_state_value is None else "next_state_value"
    like = state_value if next_state_value is None else next_state_value
    if like is None:
        raise ValueError("next_state_value is None: state_value is needed to take the successor's value from.")
    _check(like_name, like, state_value=state_value, reward=reward, done=done, terminated=terminated)
    done = terminated if done is None else done
    time = _time(time_dim, like)
    hypers = tuple(_number(name, h, like) for name, h in zip(spec.hypers, hypers, strict=True))
    transition = _transition(state_value, next_state_value, done, terminated, bootstrap, mask, like, time)
    outputs = dict(zip(names, _outputs(out, names, like), strict=True))
    value = state_value if "advantage" in names else None
    if rolling_gamma is not None and not rolling_gamma:
        target = _per_start(spec, reward, hypers, transition, like, time)
        advantage = None if value is None else target - value
        if transition["mask"] is not None and advantage is not None:
            advantage = torch.where(transition["mask"].bool(), advantage, 0)
        results = {"value_target": target, "advantage": advantage}
        return tuple(results[name] if o is True else o.copy_(results[name]) for name, o in outputs.items())
    wanted = tuple(outputs.get(name) for name in spec.outputs)
    results = evaluate(spec, (reward, value), hypers, wanted, time, like=like, **transition)
    results = dict(zip(spec.outputs, results, strict=True))
    return tuple(results[name] for name in names)


def _per_start(spec, reward, hypers, transition, like, time):
    """Discounts that belong to the step a return starts from: a row of its own for each start, its diagonal kept."""
    if not any(isinstance(h, Tensor) and h.ndim for h in hypers):
        raise ShapeError("rolling_gamma=False is expected only with time-sensitive gamma or lambda values")
    steps = like.shape[time]
    at_once = max(1, 2**24 // max(1, like.numel()))
    parts = []
    for first in range(0, steps, at_once):
        count = min(at_once, steps - first)

        def rows(x, count=count):
            return x.expand(count, *x.shape) if isinstance(x, Tensor) and x.ndim else x

        def of_start(h, first=first, count=count):
            if not isinstance(h, Tensor) or not h.ndim:
                return h
            return h.narrow(time, first, count).movedim(time, 0).unsqueeze(time + 1).expand(count, *like.shape)

        target, _ = evaluate(
            spec,
            (rows(reward), None),
            tuple(of_start(h) for h in hypers),
            (True, None),
            time + 1,
            like=rows(like),
            **{name: rows(x) for name, x in transition.items()},
        )
        parts.append(target.narrow(time + 1, first, count).diagonal(dim1=0, dim2=time + 1).movedim(-1, time))
    return torch.cat(parts, time) if parts else like.clone()


def td0_return_estimate(
    gamma: float | Tensor,
    next_state_value: Tensor | None,
    reward: Tensor,
    terminated: Tensor | None = None,
    *,
    done: Tensor | None = None,
    time_dim: int = -2,
    state_value: Tensor | None = None,
    bootstrap: Tensor | None = None,
    mask: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    r"""One-step return :math:`G_t = r_t + \gamma (1 - \mathrm{term}_t) V'_t`.

    Sutton & Barto 2018, "Reinforcement Learning", 2nd ed., eq. 6.2.

    Args:
        gamma: discount.
        next_state_value, reward: ``[*B, T, *F]``.
        terminated: flags of the same shape; ``done`` stands in for it where absent.
        state_value, bootstrap, done: the successor's value where ``next_state_value=None``.
        mask, time_dim, out: see the module's notes.

    Returns:
        The return, ``[*B, T, *F]``.
    """
    if terminated is None and done is None:
        raise ValueError("terminated: one of terminated and done is needed, got neither.")
    if terminated is not None and next_state_value is not None:
        done = None  # the episode's end plays no part
    if reward.ndim == 1 and time_dim == -2:  # time plays no part in a one-step return of dense next values
        time_dim = -1
    return _returns(
        specs.TD0, ("value_target",), (gamma,), state_value, next_state_value, reward, done, terminated, bootstrap,
        mask, time_dim, out,
    )[0]  # fmt: skip


def td0_advantage_estimate(
    gamma: float | Tensor,
    state_value: Tensor,
    next_state_value: Tensor | None,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    *,
    time_dim: int = -2,
    bootstrap: Tensor | None = None,
    mask: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    r"""One-step advantage :math:`r_t + \gamma (1 - \mathrm{term}_t) V'_t - V_t`: the TD error (ibid., eq. 6.5).

    Arguments and shapes as in :func:`td0_return_estimate` and :func:`generalized_advantage_estimate`.
    """
    if reward.ndim == 1 and time_dim == -2:
        time_dim = -1
    return _returns(
        specs.TD0, ("advantage",), (gamma,), state_value, next_state_value, reward, done, terminated, bootstrap, mask,
        time_dim, out,
    )[0]  # fmt: skip


def td1_return_estimate(
    gamma: float | Tensor,
    next_state_value: Tensor | None,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    time_dim: int = -2,
    *,
    state_value: Tensor | None = None,
    bootstrap: Tensor | None = None,
    mask: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    r"""Discounted return that continues with :math:`V'` where an episode or the window is cut.

    .. math:: G_t = r_t + \gamma (1 - \mathrm{term}_t)
        \begin{cases} V'_t & \mathrm{done}_t \text{ or } t = T - 1 \\ G_{t+1} & \text{else} \end{cases}

    Sutton & Barto 2018, eqs. 3.9 and 12.3 at :math:`\lambda = 1`.

    Args:
        gamma: discount.
        next_state_value, reward: ``[*B, T, *F]``.
        done, terminated: flags of the same shape.
        rolling_gamma: ``False`` takes the whole return from ``t`` with the discount of step ``t``; ``None`` and
            ``True`` let every step bring its own.
        time_dim, state_value, bootstrap, mask, out: see the module's notes.

    Returns:
        The return, ``[*B, T, *F]``.
    """
    return _returns(
        specs.RETURN, ("value_target",), (gamma,), state_value, next_state_value, reward, done, terminated, bootstrap,
        mask, time_dim, out, rolling_gamma,
    )[0]  # fmt: skip


def td1_advantage_estimate(
    gamma: float | Tensor,
    state_value: Tensor,
    next_state_value: Tensor | None,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    time_dim: int = -2,
    *,
    bootstrap: Tensor | None = None,
    mask: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """:func:`td1_return_estimate` less ``state_value``."""
    return _returns(
        specs.RETURN, ("advantage",), (gamma,), state_value, next_state_value, reward, done, terminated, bootstrap,
        mask, time_dim, out, rolling_gamma,
    )[0]  # fmt: skip


def td_lambda_return_estimate(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    next_state_value: Tensor | None,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    *,
    time_dim: int = -2,
    state_value: Tensor | None = None,
    bootstrap: Tensor | None = None,
    mask: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    r"""The :math:`\lambda`-return.

    .. math:: G_t = r_t + \gamma (1 - \mathrm{term}_t)
        \begin{cases} V'_t & \mathrm{done}_t \text{ or } t = T - 1 \\
        (1 - \lambda) V'_t + \lambda G_{t+1} & \text{else} \end{cases}

    Sutton & Barto 2018, eqs. 12.2 and 12.3 in the recursive form of exercise 12.1.

    Args:
        gamma, lmbda: discount and decay.
        next_state_value, reward: ``[*B, T, *F]``.
        done, terminated: flags of the same shape.
        rolling_gamma: ``False`` takes the whole return from ``t`` with gamma and lambda of step ``t``.
        time_dim, state_value, bootstrap, mask, out: see the module's notes.

    Returns:
        The return, ``[*B, T, *F]``.
    """
    return _returns(
        specs.TD_LAMBDA, ("value_target",), (gamma, lmbda), state_value, next_state_value, reward, done, terminated,
        bootstrap, mask, time_dim, out, rolling_gamma,
    )[0]  # fmt: skip


def td_lambda_advantage_estimate(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    state_value: Tensor,
    next_state_value: Tensor | None,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rolling_gamma: bool | None = None,
    time_dim: int = -2,
    *,
    bootstrap: Tensor | None = None,
    mask: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """:func:`td_lambda_return_estimate` less ``state_value``."""
    return _returns(
        specs.TD_LAMBDA, ("advantage",), (gamma, lmbda), state_value, next_state_value, reward, done, terminated,
        bootstrap, mask, time_dim, out, rolling_gamma,
    )[0]  # fmt: skip


vec_td1_return_estimate = _vectorized(td1_return_estimate)
vec_td1_advantage_estimate = _vectorized(td1_advantage_estimate)
vec_td_lambda_return_estimate = _vectorized(td_lambda_return_estimate)
vec_td_lambda_advantage_estimate = _vectorized(td_lambda_advantage_estimate)


@remembered
def reward2go(
    reward: Tensor,
    done: Tensor,
    gamma: float | Tensor = 1.0,
    *,
    time_dim: int = -2,
    terminated: Tensor | None = None,
    bootstrap: Tensor | None = None,
    mask: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    r"""Discounted return :math:`G_t = r_t + \gamma (1 - \mathrm{done}_t) G_{t+1}` (Sutton & Barto 2018, eq. 3.9).

    Args:
        reward: ``[*B, T, *F]``.
        done: flags of the same shape.
        gamma: discount.
        terminated: the steps of ``done`` that nothing follows; read only with ``bootstrap``.
        bootstrap: value of what follows a truncated step and the end of the window, ``[*B, T, *F]`` or ``[*B, *F]``.
            ``None`` means that nothing does.
        time_dim, mask, out: see the module's notes.

    Returns:
        The return, ``[*B, T, *F]``.
    """
    _check("reward", reward, done=done, terminated=terminated)
    time = _time(time_dim, reward)
    (target,) = _outputs(out, ("value_target",), reward)
    mask = _expand("mask", mask, reward, time)
    bootstrap, behind = _bootstrap(bootstrap, reward, time)
    if bootstrap is None or terminated is None:
        terminated = done
    elif behind and not (reward.is_cuda or torch.compiler.is_compiling()):
        _refuse_lost_bootstrap(done, terminated, mask, time)
    (result, _) = evaluate(
        specs.RETURN,
        (reward, None),
        (_number("gamma", gamma, reward),),
        (target, None),
        time,
        like=reward,
        done=done,
        terminated=terminated,
        bootstrap=bootstrap,
        behind=behind,
        mask=mask,
    )
    return result


# ------------------------------------------------------------------------------------------------- off-policy returns


@remembered
def vtrace_advantage_estimate(
    gamma: float | Tensor,
    log_pi: Tensor,
    log_mu: Tensor,
    state_value: Tensor,
    next_state_value: Tensor | None,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    rho_thresh: float | Tensor = 1.0,
    c_thresh: float | Tensor = 1.0,
    time_dim: int = -2,
    *,
    lmbda: float | Tensor = 1.0,
    rho_pg_thresh: float | Tensor | None = None,
    bootstrap: Tensor | None = None,
    mask: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    r"""V-trace targets and policy-gradient advantages.

    .. math::
        \rho_t = \min(\bar\rho, \pi_t / \mu_t), \quad c_t = \lambda \min(\bar c, \pi_t / \mu_t), \quad
        \delta_t = \rho_t (r_t + \gamma (1 - \mathrm{term}_t) V'_t - V_t) \\
        v_t = V_t + \delta_t + \gamma c_t (1 - \mathrm{done}_t) (v_{t+1} - V_{t+1}) \\
        A_t = \min(\bar\rho_{pg}, \pi_t / \mu_t) (r_t + \gamma (1 - \mathrm{term}_t) v'_t - V_t)

    with :math:`v'_t = v_{t+1}` inside an episode and :math:`V'_t` where it or the window is cut.

    Espeholt et al. 2018, "IMPALA", arXiv:1802.01561, eq. 1, remarks 1 and 2, and section 4.2.

    Args:
        gamma: discount.
        log_pi, log_mu: log-probabilities of the taken actions under the learnt and under the behaviour policy,
            ``[*B, T, *F]``, ``[*B, T, 1]`` or ``[*B, T]``.
        state_value, next_state_value, reward: ``[*B, T, *F]``.
        done, terminated: flags of the same shape.
        rho_thresh, c_thresh: clipping thresholds of the importance weights.
        lmbda: decay of the trace.
        rho_pg_thresh: threshold of the advantage's weight. Defaults to ``rho_thresh``.
        time_dim, bootstrap, mask, out: see the module's notes.

    Returns:
        ``(advantage, value_target)``, each ``[*B, T, *F]``.
    """
    _check("state_value", state_value, next_state_value=next_state_value, reward=reward, done=done,
           terminated=terminated)  # fmt: skip
    time = _time(time_dim, state_value)
    log_pi, log_mu = _expand("log_pi", log_pi, state_value, time), _expand("log_mu", log_mu, state_value, time)
    _check("state_value", state_value, log_pi=log_pi, log_mu=log_mu)
    rho = _number("rho_thresh", rho_thresh, state_value)
    return evaluate(
        specs.VTRACE,
        (reward, state_value, state_value, log_pi, log_mu),
        (
            _number("gamma", gamma, state_value),
            _number("lmbda", lmbda, state_value),
            rho,
            _number("c_thresh", c_thresh, state_value),
            rho if rho_pg_thresh is None else _number("rho_pg_thresh", rho_pg_thresh, state_value),
        ),
        _outputs(out, specs.VTRACE.outputs, state_value),
        time,
        like=state_value,
        **_transition(state_value, next_state_value, done, terminated, bootstrap, mask, state_value, time),
    )


TRACES = ("retrace", "importance_sampling", "tree_backup", "q_lambda")


@remembered
def retrace_lambda_advantage_estimate(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    log_pi: Tensor | None,
    log_mu: Tensor | None,
    action_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    time_dim: int = -2,
    *,
    c_thresh: float | Tensor = 1.0,
    rho_thresh: float | Tensor = 1.0,
    trace: str = "retrace",
    mask: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Off-policy action-value targets, Retrace(:math:`\lambda`) and its relatives, with advantages.

    .. math::
        \delta_t = r_t + \gamma (1 - \mathrm{term}_t) E_\pi Q(s'_t, \cdot) - Q(s_t, a_t) \\
        Q^{ret}_t = Q(s_t, a_t) + \delta_t
            + \gamma c_{t+1} (1 - \mathrm{done}_t) (Q^{ret}_{t+1} - Q(s_{t+1}, a_{t+1})) \\
        A_t = \rho_t (r_t + \gamma (1 - \mathrm{term}_t) q'_t - Q(s_t, a_t))

    with :math:`\rho_t = \min(\bar\rho, \pi_t / \mu_t)` on the advantage alone, :math:`q'_t = Q^{ret}_{t+1}` inside an
    episode and :math:`E_\pi Q(s'_t, \cdot)` where it or the window is cut, and

    ========================= ======================================= ===================================
    ``trace``                 :math:`c_t`                             needs
    ========================= ======================================= ===================================
    ``"retrace"``             :math:`\lambda \min(\bar c, \pi / \mu)` ``log_pi``, ``log_mu``
    ``"importance_sampling"`` :math:`\lambda \pi / \mu`               ``log_pi``, ``log_mu``
    ``"tree_backup"``         :math:`\lambda \pi`                     ``log_pi``
    ``"q_lambda"``            :math:`\lambda`                         neither
    ========================= ======================================= ===================================

    Munos et al. 2016, "Safe and Efficient Off-Policy Reinforcement Learning", arXiv:1606.02647, eqs. 3-4 and table 1.

    Args:
        gamma, lmbda: discount and decay.
        log_pi, log_mu: log-probabilities of the taken actions under the target and the behaviour policy,
            ``[*B, T, *F]``, ``[*B, T, 1]`` or ``[*B, T]``. Where one of them is ``None``, the advantage's weight is 1.
        action_value: ``Q(s_t, a_t)``, ``[*B, T, *F]``.
        next_state_value: ``E_pi Q(s'_t, .)`` at the state really reached, same shape.
        reward, done, terminated: same shape.
        c_thresh, rho_thresh: clipping thresholds of the trace and of the advantage's weight.
        trace: the trace coefficient.
        time_dim, mask, out: see the module's notes.

    Returns:
        ``(advantage, value_target)``, each ``[*B, T, *F]``.
    """
    return _retrace(
        (True, True), gamma, lmbda, log_pi, log_mu, action_value, next_state_value, reward, done, terminated, time_dim,
        c_thresh, rho_thresh, trace, mask, out,
    )  # fmt: skip


@remembered
def retrace_lambda_return_estimate(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    log_pi: Tensor | None,
    log_mu: Tensor | None,
    action_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    time_dim: int = -2,
    *,
    c_thresh: float | Tensor = 1.0,
    trace: str = "retrace",
    mask: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The ``value_target`` of :func:`retrace_lambda_advantage_estimate` alone."""
    return _retrace(
        (False, True), gamma, lmbda, log_pi, log_mu, action_value, next_state_value, reward, done, terminated, time_dim,
        c_thresh, 1.0, trace, mask, out,
    )[1]  # fmt: skip


def _retrace(
    wanted, gamma, lmbda, log_pi, log_mu, action_value, next_state_value, reward, done, terminated, time_dim, c_thresh,
    rho_thresh, trace, mask, out,
):  # fmt: skip
    if trace not in TRACES:
        raise ValueError(f"trace must be one of {TRACES}, got {trace!r}.")
    needs = {"retrace": ("log_pi", "log_mu"), "importance_sampling": ("log_pi", "log_mu"), "tree_backup": ("log_pi",)}
    given = {"log_pi": log_pi, "log_mu": log_mu}
    for name in needs.get(trace, ()):
        if given[name] is None:
            raise ValueError(f"{name} is None, and the trace {trace!r} is made of it.")
    like = action_value
    if next_state_value is None:
        raise ValueError("next_state_value is None: Retrace needs the expectation of Q at every next state.")
    _check("action_value", like, next_state_value=next_state_value, reward=reward, done=done, terminated=terminated)
    time = _time(time_dim, like)
    log_pi, log_mu = _expand("log_pi", log_pi, like, time), _expand("log_mu", log_mu, like, time)
    _check("action_value", like, log_pi=log_pi, log_mu=log_mu)
    trace_log_pi = None if trace == "q_lambda" else log_pi
    trace_log_mu = None if trace in ("q_lambda", "tree_backup") else log_mu
    if log_pi is None or log_mu is None:
        log_pi = log_mu = None
    if all(wanted):
        outputs = _outputs(out, specs.RETRACE.outputs, like)
    else:
        outputs = (None, *_outputs(out, ("value_target",), like))
    return evaluate(
        specs.RETRACE,
        (reward, like, like, log_pi, log_mu, trace_log_pi, trace_log_mu),
        _retrace_numbers(gamma, lmbda, rho_thresh, c_thresh, trace, like),
        outputs,
        time,
        like=like,
        **_transition(None, next_state_value, done, terminated, None, mask, like, time),
    )


def _retrace_numbers(gamma, lmbda, rho_thresh, c_thresh, trace, like):
    return (
        _number("gamma", gamma, like),
        _number("lmbda", lmbda, like),
        _number("rho_thresh", rho_thresh, like),
        _number("c_thresh", c_thresh, like) if trace == "retrace" else math.inf,
    )


@remembered
def retrace_from_action_values(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    pi: Tensor,
    next_pi: Tensor,
    action_values: Tensor,
    next_action_values: Tensor,
    action: Tensor,
    log_mu: Tensor | None,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    *,
    c_thresh: float | Tensor = 1.0,
    rho_thresh: float | Tensor = 1.0,
    trace: str = "retrace",
    mask: Tensor | None = None,
    time_dim: int = -2,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Retrace(:math:`\lambda`) from values and probabilities of all ``A`` discrete actions.

    ``Q(s_t, a_t)`` and ``pi(a_t | s_t)`` are picked by the action's index, ``E_pi Q(s'_t, .)`` is the product of
    ``next_pi`` and ``next_action_values`` summed over actions. ``Q(s_t, a_t)`` may also come already picked.

    Args:
        pi: probabilities of the actions at ``s_t``, ``[*B, T, A]``.
        next_pi, next_action_values: probabilities and values of the actions at the state really reached, likewise.
        action_values: values of the actions at ``s_t``, likewise, or of the taken one alone, ``[*B, T, 1]``.
        action: index of the taken action, ``[*B, T, 1]`` or ``[*B, T]``, integer.
        log_mu: log-probability of the taken action under the behaviour policy, likewise; ``None`` with a trace that
            needs none.
        reward, done, terminated: ``[*B, T, 1]``.
        gamma, lmbda, c_thresh, rho_thresh, trace, mask, time_dim, out: as in :func:`retrace_lambda_advantage_estimate`.

    Returns:
        ``(advantage, value_target)``, each ``[*B, T, 1]``.
    """
    if trace not in TRACES:
        raise ValueError(f"trace must be one of {TRACES}, got {trace!r}.")
    _check("pi", pi, next_pi=next_pi, next_action_values=next_action_values)
    _check("reward", reward, done=done, terminated=terminated)
    if reward.shape != (*pi.shape[:-1], 1):
        raise ShapeError(
            f"reward has shape {tuple(reward.shape)}, expected {(*pi.shape[:-1], 1)}: that of pi with one number in "
            "place of the actions."
        )
    if not isinstance(action_values, Tensor):
        raise TypeError(f"action_values must be a tensor, got {type(action_values).__name__}.")
    picked = action_values.shape == reward.shape
    if not picked and action_values.shape != pi.shape:
        raise ShapeError(
            f"action_values has shape {tuple(action_values.shape)}, expected {tuple(pi.shape)} (values of all actions) "
            f"or {tuple(reward.shape)} (the value of the taken one)."
        )
    alike = ("reward", reward) if picked else ("pi", pi)
    _check(*alike, action_values=action_values)
    if not isinstance(action, Tensor) or action.is_floating_point() or action.dtype == torch.bool:
        dtype = getattr(action, "dtype", type(action).__name__)
        raise TypeError(f"action must hold indices (an integer dtype), got {dtype}.")
    for name, x in (("reward", reward), ("action", action)):
        if x.device != pi.device:
            raise ValueError(f"{name} is on {x.device}, pi on {pi.device}: they must share a device.")
    time = _time(time_dim, reward)
    action = _expand("action", action, reward, time)
    log_mu = _expand("log_mu", log_mu, reward, time)
    _check("reward", reward, log_mu=log_mu)
    if log_mu is None and trace in ("retrace", "importance_sampling"):
        raise ValueError(f"log_mu is None, and the trace {trace!r} is made of it.")
    weighted, kind = None if log_mu is None else pi, 0 if picked else 2
    return evaluate(
        specs.RETRACE,
        (
            reward,
            action_values,
            action_values,
            weighted,
            log_mu,
            None if trace == "q_lambda" else pi,
            None if trace in ("q_lambda", "tree_backup") else log_mu,
        ),
        _retrace_numbers(gamma, lmbda, rho_thresh, c_thresh, trace, reward),
        _outputs(out, specs.RETRACE.outputs, reward),
        time,
        like=reward,
        choice=Choice(action, next_pi, (0, kind, kind, 3, 0, 3, 0)),
        **_transition(None, next_action_values, done, terminated, None, mask, reward, time),
    )


# ----------------------------------------------------------------------------------------------- forward recurrences


@remembered
def eligibility_trace(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    gradient: Tensor,
    done: Tensor,
    *,
    ratio: Tensor | None = None,
    initial: Tensor | None = None,
    mask: Tensor | None = None,
    time_dim: int = -2,
    out: Tensor | None = None,
) -> Tensor:
    r"""Accumulating eligibility trace :math:`z_t = \rho_t (\gamma \lambda (1 - \mathrm{done}_{t-1}) z_{t-1} + g_t)`.

    Sutton & Barto 2018, eqs. 12.5 and (with the ratio) 12.25. The step that ends an episode still carries its trace;
    the next one starts afresh.

    Args:
        gamma, lmbda: discount and decay.
        gradient: gradient of the value, or features, ``[*B, T, D]``.
        done: flags, ``[*B, T, D]``, ``[*B, T, 1]`` or ``[*B, T]``.
        ratio: importance ratio :math:`\rho_t`, of any of these shapes. Defaults to 1.
        initial: the trace before the window, ``[*B, D]``. Defaults to 0.
        mask, time_dim, out: see the module's notes.

    Returns:
        The trace, ``[*B, T, D]``.
    """
    _check("gradient", gradient)
    time = _time(time_dim, gradient)
    done, ratio = _expand("done", done, gradient, time), _expand("ratio", ratio, gradient, time)
    _check("gradient", gradient, done=done, ratio=ratio)
    return _forward(
        specs.TRACE if ratio is None else specs.RATIO_TRACE,
        (gradient, done) if ratio is None else (gradient, done, ratio),
        (_number("gamma", gamma, gradient), _number("lmbda", lmbda, gradient)),
        initial,
        mask,
        out,
        gradient,
        time,
    )


@remembered
def episodic_prefix_sum(
    x: Tensor,
    done: Tensor,
    *,
    boundary: str = "ends_at",
    initial: Tensor | None = None,
    mask: Tensor | None = None,
    time_dim: int = -2,
    out: Tensor | None = None,
) -> Tensor:
    r"""Sum since the first step of the episode, :math:`S_t = x_t + (1 - \mathrm{cut}_t) S_{t-1}`.

    Blelloch 1993, "Prefix Sums and Their Applications", section 1.5 (segmented scan).

    Args:
        x: ``[*B, T, *F]``.
        done: flags, ``[*B, T, *F]``, ``[*B, T, 1]`` or ``[*B, T]``.
        boundary: ``"ends_at"``: ``done[t]`` marks the last step of an episode (``cut[t] = done[t - 1]``);
            ``"starts_at"``: the first (``cut[t] = done[t]``).
        initial: the sum before the window, ``[*B, *F]``. Defaults to 0.
        mask, time_dim, out: see the module's notes.

    Returns:
        The sum, ``[*B, T, *F]``.
    """
    _check("x", x)
    if boundary not in specs.PREFIX_SUM:
        raise ValueError(f"boundary must be one of {tuple(specs.PREFIX_SUM)}, got {boundary!r}.")
    time = _time(time_dim, x)
    done = _expand("done", done, x, time)
    _check("x", x, done=done)
    return _forward(specs.PREFIX_SUM[boundary], (x, done), (), initial, mask, out, x, time)


@remembered
def linear_recurrence(
    alpha: Tensor,
    beta: Tensor,
    *,
    initial: Tensor | None = None,
    reverse: bool = False,
    mask: Tensor | None = None,
    time_dim: int = -2,
    out: Tensor | None = None,
) -> Tensor:
    r""":math:`x_t = \alpha_t + \beta_t x_{t-1}`, or with ``reverse`` :math:`x_t = \alpha_t + \beta_t x_{t+1}`.

    Blelloch 1993, section 1.4.1. Where :math:`\beta_t` is exactly 0, what came before is selected away.

    Args:
        alpha, beta: ``[*B, T, *F]``.
        initial: ``x`` beyond the window on the side that the recurrence comes from, ``[*B, *F]``. Defaults to 0.
        reverse: whether it runs from the last step to the first.
        mask, time_dim, out: see the module's notes.

    Returns:
        The solution, ``[*B, T, *F]``.
    """
    _check("alpha", alpha, beta=beta)
    time = _time(time_dim, alpha)
    return _forward(specs.RECURRENCE[reverse], (alpha, beta), (), initial, mask, out, alpha, time)


def _forward(spec, inputs, hypers, initial, mask, out, like, time):
    rows = (*like.shape[:time], *like.shape[time + 1 :])
    if initial is not None:
        if initial.shape != rows:
            raise ShapeError(f"initial has shape {tuple(initial.shape)}, expected {rows}.")
        if initial.device != like.device:
            raise ValueError(f"initial is on {initial.device}, the other entries on {like.device}.")
    mask = _expand("mask", mask, like, time)
    return evaluate(
        spec, inputs, hypers, _outputs(out, spec.outputs, like), time, like=like, mask=mask, initial=initial
    )[0]


# ---------------------------------------------------------------------------------------------------- standardisation


def standardize(
    x: Tensor,
    *,
    mask: Tensor | None = None,
    groups: Tensor | None = None,
    dim: int | tuple[int, ...] | None = None,
    eps: float = 1e-4,
    correction: int = 1,
) -> Tensor:
    r""":math:`(x - \bar x) / \max(\sigma, \epsilon)` over the valid entries.

    Two passes, accumulated in float32 or wider. Fewer than two valid entries give 0; masked entries come out 0 and may
    hold anything.

    Args:
        x: any shape, floating-point.
        mask: valid entries; expands to ``x``, leading dimensions first.
        groups: integer ids; statistics are taken within each. Expands like ``mask``.
        dim: the dimensions that the statistics run over; the others keep theirs apart. Defaults to all.
        eps: floor of the standard deviation.
        correction: degrees of freedom taken off (1: unbiased, as TorchRL; 0: of the population).

    Returns:
        A tensor like ``x``.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"x must be a floating-point tensor, got {getattr(x, 'dtype', type(x).__name__)}.")
    if not x.numel():
        return x.clone()
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    if mask is not None:
        mask = _leading("mask", mask, x).bool()
        wide = torch.where(mask, wide, 0)
    dims = tuple(range(x.ndim)) if dim is None else tuple(d % x.ndim for d in ((dim,) if isinstance(dim, int) else dim))
    if groups is None:

        def total(y):
            return y.sum(dims, keepdim=True) if dims else y

    else:
        _, ids = torch.unique(_leading("groups", groups, x), return_inverse=True)
        apart = [d for d in range(x.ndim) if d not in dims]
        for d in apart:
            ids = ids * x.shape[d] + torch.arange(x.shape[d], device=x.device).reshape(
                [-1 if k == d else 1 for k in range(x.ndim)]
            )
        flat = ids.reshape(-1)
        size = int(flat.max()) + 1

        def total(y):
            return wide.new_zeros(size).index_add_(0, flat, y.expand(x.shape).reshape(-1))[flat].view(x.shape)

    valid = torch.ones_like(wide) if mask is None else mask.to(wide.dtype)
    count = total(valid).clamp_min(1)
    centered = wide
    for _ in range(2):  # the second takes off what rounding left of the first
        centered = (centered - total(centered) / count) * valid
    variance = total(centered.square()) / (count - correction).clamp_min(1)
    return (centered / variance.clamp_min(eps * eps).sqrt()).to(x.dtype)  # no root of 0: its gradient is infinite


def _leading(name: str, x: Tensor, like: Tensor) -> Tensor:
    """``x`` expanded to ``like``, with dimensions added at the end."""
    shape = (*x.shape, *(1,) * (like.ndim - x.ndim))
    if len(shape) != like.ndim or any(a not in (1, b) for a, b in zip(shape, like.shape, strict=True)):
        raise ShapeError(f"{name} has shape {tuple(x.shape)}, which does not expand to {tuple(like.shape)}.")
    return x.reshape(shape).expand(like.shape)
