"""The estimators, each as the coefficients of one first-order linear recurrence.

``x[t] = u[t] + w[t] * x[t + 1]`` (or ``x[t - 1]`` for a forward one). A :class:`Spec` declares what is read, two
element-wise functions and what is written. Everything else is shared and knows no estimator: the scan, the tile plan,
masks, strides, dtypes, the CPU path, gradients and operators.

``done[t]`` ends the episode AT ``t``. What a coefficient function is handed as ``step = (done, next_value)`` is already
resolved: ``done`` holds at terminated and truncated steps and at the last step of the window (a window edge is an
episode cut there: it bootstraps once and carries nothing), ``next_value`` is the value of the state that the transition
really reached, selected to 0 where it terminated. Functions use arithmetic, comparisons, ``& | ~``, ``tl.where`` and
``tl.exp``, so that PyTorch can read them (:func:`._triton.read_in`) and gradients be derived (:mod:`.adjoint`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ._triton import jit, read_in, tl, torch_language

FLAGS = frozenset({"done", "terminated", "mask", "last"})
SPECS: dict[str, Spec] = {}


@dataclass(frozen=True, eq=False)
class Spec:
    """One estimator.

    Args:
        name: key in :data:`SPECS`.
        inputs: what a tile holds, in order. ``"value@1"`` is the value of the step's successor, ``"done@-1"`` the flag
            of its predecessor (0 outside the window; with a mask, that of the next or previous valid step).
        hypers: scalars or tensors, e.g. ``("gamma", "lmbda")``; ``"lmbda@1"`` is that of the successor.
        outputs: what may be asked for; what is not asked for costs nothing.
        coefficients: ``(step, tile, hypers) -> (u, w)``, or ``(u, w, u2, w2)`` for two recurrences in one pass.
        epilogue: ``(x, x_next, step, tile, hypers) -> outputs``; ``x`` and ``x_next`` hold one entry a recurrence.
        transition: whether ``step`` is wanted; without it the functions get ``step = ()``.
        reverse: whether time runs backward.
        looks_ahead: the outputs whose epilogue reads ``x_next``, the solution at the step's successor.
        recurrences: how many share the pass; 0 for none, where ``coefficients`` returns ``(u,)`` and ``x`` is ``u``.
    """

    name: str
    inputs: tuple[str, ...]
    hypers: tuple[str, ...]
    outputs: tuple[str, ...]
    coefficients: Callable
    epilogue: Callable
    transition: bool = True
    reverse: bool = True
    looks_ahead: tuple[str, ...] = ()
    recurrences: int = 1
    names: tuple[str, ...] = field(init=False)  # of the inputs
    flags: tuple[bool, ...] = field(init=False)  # whether an input is one
    shifts: tuple[int, ...] = field(init=False)  # of the inputs and then the hypers
    torch_coefficients: Callable = field(init=False, repr=False)
    torch_epilogue: Callable = field(init=False, repr=False)

    def __post_init__(self):
        parts = [entry.partition("@") for entry in self.inputs]
        object.__setattr__(self, "names", tuple(name for name, _, _ in parts))
        object.__setattr__(self, "flags", tuple(name in FLAGS for name, _, _ in parts))
        shifts = tuple(int(entry.partition("@")[2] or 0) for entry in (*self.inputs, *self.hypers))
        object.__setattr__(self, "shifts", shifts)
        object.__setattr__(self, "torch_coefficients", read_in(torch_language, self.coefficients))
        object.__setattr__(self, "torch_epilogue", read_in(torch_language, self.epilogue))
        SPECS[self.name] = self

    @property
    def causal(self) -> bool:
        """Whether the scan comes by every step before those that read it as their neighbour."""
        return {*self.shifts} <= {0, 1 if self.reverse else -1} and (self.reverse or not self.transition)


@jit
def identity(x, x_next, step, tile, hypers):
    return (x[0],)


@jit
def given(step, tile, hypers):
    return tile[0], tile[1]


@jit
def clipped(ratio, threshold):
    """``min(ratio, threshold)`` that keeps NaN."""
    return tl.where(ratio > threshold, threshold, ratio)


RECURRENCE = {
    reverse: Spec(
        f"{'backward' if reverse else 'forward'}_recurrence",
        ("alpha", "beta"),
        (),
        ("x",),
        given,
        identity,
        transition=False,
        reverse=reverse,
    )
    for reverse in (False, True)
}


# Schulman et al. 2015, arXiv:1506.02438, eqs. 10-16.


@jit
def gae_coefficients(step, tile, hypers):
    done, next_value = step
    reward, value = tile
    return reward + hypers[0] * next_value - value, tl.where(done, 0.0, hypers[0] * hypers[1])


@jit
def gae_epilogue(x, x_next, step, tile, hypers):
    return x[0], x[0] + tile[1]


GAE = Spec(
    "gae",
    ("reward", "value"),
    ("gamma", "lmbda"),
    ("advantage", "value_target"),
    gae_coefficients,
    gae_epilogue,
)


# The same with a second lambda for the critic's target (Yuan et al. 2025, arXiv:2503.01491, "decoupled GAE").


@jit
def decoupled_gae_coefficients(step, tile, hypers):
    done, next_value = step
    reward, value = tile
    delta = reward + hypers[0] * next_value - value
    return delta, tl.where(done, 0.0, hypers[0] * hypers[1]), delta, tl.where(done, 0.0, hypers[0] * hypers[2])


@jit
def decoupled_gae_epilogue(x, x_next, step, tile, hypers):
    return x[0], x[1] + tile[1]


DECOUPLED_GAE = Spec(
    "decoupled_gae",
    ("reward", "value"),
    ("gamma", "lmbda", "lmbda_critic"),
    ("advantage", "value_target"),
    decoupled_gae_coefficients,
    decoupled_gae_epilogue,
    recurrences=2,
)


# Sutton & Barto 2018: TD(0) eq. 6.2, lambda-return eqs. 12.2-12.3 (recursive form: exercise 12.1).


@jit
def return_epilogue(x, x_next, step, tile, hypers):
    return x[0], x[0] - tile[1]


@jit
def td0_coefficients(step, tile, hypers):
    done, next_value = step
    return (tile[0] + hypers[0] * next_value,)


TD0 = Spec(
    "td0",
    ("reward", "value"),
    ("gamma",),
    ("value_target", "advantage"),
    td0_coefficients,
    return_epilogue,
    recurrences=0,
)


@jit
def td_lambda_coefficients(step, tile, hypers):
    done, next_value = step
    gamma, lmbda = hypers
    bootstrap = tl.where(done, next_value, (1.0 - lmbda) * next_value)
    return tile[0] + gamma * bootstrap, tl.where(done, 0.0, gamma * lmbda)


TD_LAMBDA = Spec(
    "td_lambda",
    ("reward", "value"),
    ("gamma", "lmbda"),
    ("value_target", "advantage"),
    td_lambda_coefficients,
    return_epilogue,
)


# Discounted return, eq. 3.8 and 3.9 there; with a continuation value at cuts it is the TD(1) return.


@jit
def return_coefficients(step, tile, hypers):
    done, next_value = step
    return tile[0] + hypers[0] * tl.where(done, next_value, 0.0), tl.where(done, 0.0, hypers[0])


RETURN = Spec(
    "discounted_return",
    ("reward", "value"),
    ("gamma",),
    ("value_target", "advantage"),
    return_coefficients,
    return_epilogue,
)


# V-trace: Espeholt et al. 2018, arXiv:1802.01561, eq. 1 and remark 1 (recursive form), policy gradient in section 4.2.


@jit
def vtrace_coefficients(step, tile, hypers):
    done, next_value = step
    reward, value, value_after, log_pi, log_mu = tile
    gamma, lmbda, rho_thresh, c_thresh, rho_pg_thresh = hypers
    ratio = tl.exp(log_pi - log_mu)
    delta = clipped(ratio, rho_thresh) * (reward + gamma * next_value - value)
    return delta, tl.where(done, 0.0, gamma * lmbda * clipped(ratio, c_thresh))


@jit
def vtrace_epilogue(x, x_next, step, tile, hypers):
    done, next_value = step
    reward, value, value_after, log_pi, log_mu = tile
    target_after = tl.where(done, next_value, x_next[0] + value_after)
    rho = clipped(tl.exp(log_pi - log_mu), hypers[4])
    return rho * (reward + hypers[0] * target_after - value), x[0] + value


VTRACE = Spec(
    "vtrace",
    ("reward", "value", "value@1", "log_pi", "log_mu"),
    ("gamma", "lmbda", "rho_thresh", "c_thresh", "rho_pg_thresh"),
    ("advantage", "value_target"),
    vtrace_coefficients,
    vtrace_epilogue,
    looks_ahead=("advantage",),
)


# Retrace(lambda): Munos et al. 2016, arXiv:1606.02647, eqs. 3-4; the other traces of its table 1 differ in the
# log-ratio that `trace_log_pi - trace_log_mu` spells and in `c_thresh`. The value is Q(s_t, a_t), the next value
# E_pi Q(s'_t, .).


@jit
def retrace_coefficients(step, tile, hypers):
    done, next_value = step
    reward, value, value_after, log_pi, log_mu, trace_log_pi_after, trace_log_mu_after = tile
    gamma, lmbda_after, rho_thresh, c_thresh_after = hypers
    c_after = lmbda_after * clipped(tl.exp(trace_log_pi_after - trace_log_mu_after), c_thresh_after)
    return reward + gamma * next_value - value, tl.where(done, 0.0, gamma * c_after)


@jit
def retrace_epilogue(x, x_next, step, tile, hypers):
    done, next_value = step
    reward, value, value_after, log_pi, log_mu, trace_log_pi_after, trace_log_mu_after = tile
    target_after = tl.where(done, next_value, x_next[0] + value_after)
    rho = clipped(tl.exp(log_pi - log_mu), hypers[2])
    return rho * (reward + hypers[0] * target_after - value), x[0] + value


RETRACE = Spec(
    "retrace",
    ("reward", "value", "value@1", "log_pi", "log_mu", "trace_log_pi@1", "trace_log_mu@1"),
    ("gamma", "lmbda@1", "rho_thresh", "c_thresh@1"),
    ("advantage", "value_target"),
    retrace_coefficients,
    retrace_epilogue,
    looks_ahead=("advantage",),
)


# Accumulating eligibility trace, Sutton & Barto 2018, eq. 12.5; with a ratio, eq. 12.25 (off-policy).


@jit
def trace_coefficients(step, tile, hypers):
    gradient, done_before = tile
    return gradient, tl.where(done_before, 0.0, hypers[0] * hypers[1])


TRACE = Spec(
    "eligibility_trace",
    ("gradient", "done@-1"),
    ("gamma", "lmbda"),
    ("trace",),
    trace_coefficients,
    identity,
    transition=False,
    reverse=False,
)


@jit
def ratio_trace_coefficients(step, tile, hypers):
    gradient, done_before, ratio = tile
    return ratio * gradient, tl.where(done_before, 0.0, ratio * hypers[0] * hypers[1])


RATIO_TRACE = Spec(
    "off_policy_eligibility_trace",
    ("gradient", "done@-1", "ratio"),
    ("gamma", "lmbda"),
    ("trace",),
    ratio_trace_coefficients,
    identity,
    transition=False,
    reverse=False,
)


# Sum since the episode's first step; Blelloch 1993, "Prefix sums and their applications", section 1.5 (segmented scan).


@jit
def prefix_sum_coefficients(step, tile, hypers):
    return tile[0], tl.where(tile[1], 0.0, 1.0)


PREFIX_SUM = {
    boundary: Spec(
        f"prefix_sum_{boundary}",
        ("x", flag),
        (),
        ("total",),
        prefix_sum_coefficients,
        identity,
        transition=False,
        reverse=False,
    )
    for boundary, flag in (("ends_at", "done@-1"), ("starts_at", "done"))
}


# What a masked row's `x@1` and `x@-1` mean: x at the next and at the previous valid step.


@jit
def neighbour_coefficients(step, tile, hypers):
    return tl.where(tile[1], tile[0], 0.0), tl.where(tile[1], 0.0, 1.0)


NEIGHBOUR = {
    shift: Spec(
        f"valid_{'after' if shift > 0 else 'before'}",
        (f"x@{shift}", f"mask@{shift}"),
        (),
        ("x",),
        neighbour_coefficients,
        identity,
        transition=False,
        reverse=shift > 0,
    )
    for shift in (1, -1)
}
