"""What must hold for any rollout: the reductions, invariances and boundaries of the recurrences.

Drawn: rows, steps, rates of ends, terminal ends and valid steps, dtype, layout, gamma, lambda. Derandomised, so that a
run is reproducible; fewer examples in the interpreter, which takes a hundred times as long.
"""

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import reference
import rl_triton_td.functional as F
from conftest import INTERPRET, agree, rollout, within

settings.register_profile(
    "tests",
    deadline=None,
    max_examples=8 if INTERPRET else 50,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("tests")

RATES = st.sampled_from([0.0, 0.1, 0.3, 0.6, 1.0])
DISCOUNTS = st.sampled_from([0.0, 0.3, 0.9, 0.99, 1.0])
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-12}
LAYOUTS = {  # from [N, T] (or [N]) to the layout, back, time_dim
    "BT1": (lambda x: x[..., None], lambda x: x[..., 0], -2),
    "BT": (lambda x: x, lambda x: x, -1),
    "TB1": (lambda x: x.t()[..., None] if x.ndim > 1 else x[:, None], lambda x: x[..., 0].t(), 0),
    "TF": (lambda x: x.t().contiguous() if x.ndim > 1 else x, lambda x: x.t(), -2),
    "1BT11": (lambda x: x[None, ..., None, None], lambda x: x[0, ..., 0, 0], 2),
}


@st.composite
def rollouts(draw, masked=True, dtypes=tuple(BOUNDS), **fixed):
    """A rollout of `conftest` with its dtype, layout, gamma and lambda under "dtype", "layout", "gamma", "lmbda"."""
    dtype = draw(st.sampled_from(dtypes))
    x = rollout(
        draw(st.integers(1, 4)),
        draw(st.integers(0, 40)),
        seed=draw(st.integers(0, 2**20)),
        **({"done": draw(RATES), "terminated": draw(RATES), "valid": draw(RATES), "dtype": dtype} | fixed),
    )
    if not (masked and draw(st.booleans())):
        x["mask"] = None
    x |= {"dtype": dtype, "layout": draw(st.sampled_from(sorted(LAYOUTS)))}
    for single, every in (("gamma", "gammas"), ("lmbda", "lambdas")):
        x[single] = draw(DISCOUNTS)
        x[f"{single}_or_tensor"] = x[every] if draw(st.booleans()) else x[single]
    return x


def call(function, x, device, args):
    """`function(**args)` in the rollout's layout; the results come back as `[N, T]` on the CPU."""
    lay, back, time_dim = LAYOUTS[x["layout"]]
    args = {k: lay(v.to(device)) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    out = function(**args, time_dim=time_dim)
    return tuple(back(o).cpu() for o in out) if isinstance(out, tuple) else back(out).cpu()


def pick(x, *names, **more):
    return {name: x[name] for name in names} | more


FLAGS = ("done", "terminated", "mask")
DENSE = ("state_value", "next_state_value", "reward", *FLAGS)
gae = functools.partial(call, F.generalized_advantage_estimate)
td_lambda = functools.partial(call, F.td_lambda_return_estimate)
td0 = functools.partial(call, F.td0_return_estimate)
vtrace = functools.partial(call, F.vtrace_advantage_estimate)
retrace = functools.partial(call, F.retrace_lambda_advantage_estimate)
returns = functools.partial(call, F.reward2go)

# name: function, reference, entries
BACKWARD = {
    "gae": (F.generalized_advantage_estimate, reference.gae, (*DENSE, "gamma", "lmbda")),
    "td_lambda": (
        F.td_lambda_return_estimate,
        reference.td_lambda_return,
        ("next_state_value", "reward", *FLAGS, "gamma", "lmbda"),
    ),
    "vtrace": (F.vtrace_advantage_estimate, reference.vtrace, (*DENSE, "log_pi", "log_mu", "gamma", "lmbda")),
    "retrace": (
        F.retrace_lambda_advantage_estimate,
        reference.retrace,
        ("action_value", "next_state_value", "reward", *FLAGS, "log_pi", "log_mu", "gamma", "lmbda"),
    ),
    "returns": (F.reward2go, reference.reward_to_go, ("reward", *FLAGS, "bootstrap", "gamma")),
}
FORWARD = {
    "eligibility_trace": (
        F.eligibility_trace,
        reference.eligibility_trace,
        ("gradient", "done", "mask", "ratio", "initial", "gamma", "lmbda"),
    ),
    "prefix_sum": (
        lambda *, reward, **kwargs: F.episodic_prefix_sum(reward, **kwargs),
        lambda *, reward, **kwargs: reference.episodic_prefix_sum(reward, **kwargs),
        ("reward", "done", "mask", "initial"),
    ),
}
every = pytest.mark.parametrize("name", BACKWARD | FORWARD)
backward = pytest.mark.parametrize("name", BACKWARD)


def results(name, x, device, **changes):
    function, _, entries = (BACKWARD | FORWARD)[name]
    out = call(function, x, device, pick(x, *entries) | changes)
    return out if isinstance(out, tuple) else (out,)


# ----------------------------------------------------------------------------------------------------------- reference
@every
@given(x=rollouts())
def test_agrees_with_the_reference(name, device, x):
    _, wanted, entries = (BACKWARD | FORWARD)[name]
    tensors = {k: x[f"{k}_or_tensor"] for k in ("gamma", "lmbda") if k in entries}
    wanted = wanted(**(pick(x, *entries) | tensors))
    for a, w in zip(
        results(name, x, device, **tensors), wanted if isinstance(wanted, tuple) else (wanted,), strict=True
    ):
        assert a.dtype == x["dtype"]
        within(a, w, BOUNDS[x["dtype"]], 1.0)


@given(x=rollouts(), reverse=st.booleans())
def test_linear_recurrence(device, x, reverse):
    args = {"alpha": x["reward"], "beta": x["state_value"].tanh(), "initial": x["initial"]} | pick(x, "mask")
    actual = call(F.linear_recurrence, x, device, args | {"reverse": reverse})
    within(actual, reference.linear_recurrence(**args, reverse=reverse), BOUNDS[x["dtype"]], 1.0)


@given(x=rollouts())
def test_shifted_values_are_the_dense_ones(device, x):
    """V_{t+1} and a bootstrap, or the same numbers written out per transition."""
    if x["mask"] is not None:
        x["mask"] = torch.ones_like(x["mask"])
    args = pick(x, "state_value", "reward", *FLAGS, "gamma", "lmbda")
    dense = torch.cat([x["state_value"][:, 1:], x["bootstrap"][:, -1:]], 1)
    dense = torch.where(x["done"], x["bootstrap"], dense)
    for function, more in ((gae, {}), (vtrace, pick(x, "log_pi", "log_mu"))):
        short = function(x, device, args | more | {"next_state_value": None, "bootstrap": x["bootstrap"]})
        for a, b in zip(short, function(x, device, args | more | {"next_state_value": dense}), strict=True):
            within(a, b, BOUNDS[x["dtype"]], 1.0)


# ---------------------------------------------------------------------------------------------------------- reductions
@given(x=rollouts())
def test_gae_of_lambda_one_is_the_discounted_return(device, x):
    flags = pick(x, "reward", *FLAGS, "gamma", "bootstrap")
    target = gae(x, device, flags | {"lmbda": 1.0, "state_value": x["state_value"], "next_state_value": None})[1]
    within(target, returns(x, device, flags), 3 * BOUNDS[x["dtype"]], 1.0)


@given(x=rollouts())
def test_lambda_zero_is_td0(device, x):
    args = pick(x, "next_state_value", "reward", *FLAGS, "gamma")
    wanted = td0(x, device, args)
    advantage = call(F.td0_advantage_estimate, x, device, args | pick(x, "state_value"))
    within(td_lambda(x, device, args | {"lmbda": 0.0}), wanted, BOUNDS[x["dtype"]], 1.0)
    for a, w in zip(gae(x, device, args | pick(x, "state_value", lmbda=0.0)), (advantage, wanted), strict=True):
        within(a, w, BOUNDS[x["dtype"]], 1.0)


@given(x=rollouts())
def test_td_lambda_of_one_is_td1(device, x):
    args = pick(x, "next_state_value", "reward", *FLAGS, "gamma")
    wanted = call(F.td1_return_estimate, x, device, args)
    within(td_lambda(x, device, args | {"lmbda": 1.0}), wanted, BOUNDS[x["dtype"]], 1.0)


@given(x=rollouts())
def test_on_policy_vtrace_is_gae(device, x):
    args = pick(x, *DENSE, "gamma", "lmbda")
    _advantage, target = gae(x, device, args)
    vs = vtrace(x, device, args | {"log_pi": x["log_pi"], "log_mu": x["log_pi"]})[1]
    within(vs, target, 2 * BOUNDS[x["dtype"]], 1.0)


@given(x=rollouts(dense="consistent", masked=False))
def test_on_policy_retrace_of_one_action_is_td_lambda(device, x):
    """With one action Q is V and E_pi Q(s', .) is V', and V' = V_{t+1} inside an episode."""
    args = pick(x, "next_state_value", "reward", *FLAGS, "gamma", "lmbda")
    wanted = td_lambda(x, device, args)
    more = {"action_value": x["state_value"], "log_pi": x["log_pi"], "log_mu": x["log_pi"]}
    within(retrace(x, device, args | more)[1], wanted, 3 * BOUNDS[x["dtype"]], 1.0)


@given(x=rollouts(dense="consistent", masked=False))
def test_gae_and_td_lambda_have_one_target(device, x):
    """Where V' = V_{t+1} inside an episode, GAE + V is the lambda-return."""
    args = pick(x, "next_state_value", "reward", *FLAGS, "gamma", "lmbda")
    target = gae(x, device, args | pick(x, "state_value"))[1]
    within(target, td_lambda(x, device, args), 3 * BOUNDS[x["dtype"]], 1.0)


@given(x=rollouts(done=1.0, terminated=0.0))
def test_rows_of_truncations_are_td0(device, x):
    args = pick(x, "next_state_value", "reward", *FLAGS, "gamma")
    wanted, bound = td0(x, device, args), BOUNDS[x["dtype"]]
    values, ratio = pick(x, "state_value"), {"log_pi": x["log_pi"], "log_mu": x["log_pi"]}
    within(gae(x, device, args | values | pick(x, "lmbda"))[1], wanted, bound, 1.0)
    within(td_lambda(x, device, args | pick(x, "lmbda")), wanted, bound, 1.0)
    within(vtrace(x, device, args | values | ratio)[1], wanted, bound, 1.0)
    within(retrace(x, device, args | ratio | pick(x, "lmbda", "action_value"))[1], wanted, bound, 1.0)
    tail = pick(x, "reward", *FLAGS, "gamma", bootstrap=x["next_state_value"])
    within(returns(x, device, tail), wanted, bound, 1.0)


# ------------------------------------------------------------------------------------------------------------- windows
def windows(x, cut):
    first = {k: v[:, :cut] if isinstance(v, torch.Tensor) and v.ndim == 2 else v for k, v in x.items()}
    second = {k: v[:, cut:] if isinstance(v, torch.Tensor) and v.ndim == 2 else v for k, v in x.items()}
    return first, second


@given(x=rollouts(masked=False), data=st.data())
def test_two_windows_are_the_whole_row(device, x, data):
    """The value behind the first window is what the second one says of its first step."""
    T = x["reward"].shape[1]
    cut = data.draw(st.integers(0, T))
    first, second = windows(x, cut)
    bound = 2 * BOUNDS[x["dtype"]]

    args = ("next_state_value", "reward", *FLAGS, "gamma", "lmbda")
    whole, later = td_lambda(x, device, pick(x, *args)), td_lambda(x, device, pick(second, *args))
    if 0 < cut < T:
        mixed = (1 - x["lmbda"]) * first["next_state_value"][:, -1] + x["lmbda"] * later[:, 0]
        value = first["next_state_value"].clone()
        value[:, -1] = torch.where(first["done"][:, -1], value[:, -1], mixed)
        first["next_state_value"] = value
    joined = torch.cat([td_lambda(x, device, pick(first, *args)), later], 1)
    within(joined, whole, bound, 1.0)

    args = ("reward", *FLAGS, "gamma", "bootstrap")
    whole, later = returns(x, device, pick(x, *args)), returns(x, device, pick(second, *args))
    if 0 < cut < T:
        value = first["bootstrap"].clone()
        value[:, -1] = torch.where(first["done"][:, -1], value[:, -1], later[:, 0])
        first["bootstrap"] = value
    within(torch.cat([returns(x, device, pick(first, *args)), later], 1), whole, bound, 1.0)


@every
@given(x=rollouts(), data=st.data())
def test_nothing_crosses_an_end(name, device, x, data):
    """A row cut behind an end gives what the whole row gives."""
    T = x["reward"].shape[1]
    if T < 2:
        return
    cut = data.draw(st.integers(1, T - 1))
    x["done"] = x["done"].clone()
    x["done"][:, cut - 1] = True
    if x["mask"] is not None:
        x["mask"] = x["mask"].clone()
        x["mask"][:, cut - 1] = True
    first, second = windows(x, cut)
    second["initial"] = torch.zeros_like(x["initial"])
    parts = [results(name, part, device) for part in (first, second)]
    for whole, a, b in zip(results(name, x, device), *parts, strict=True):
        within(torch.cat([a, b], 1), whole, BOUNDS[x["dtype"]], 1.0)


# --------------------------------------------------------------------------------------------------------- invariances
@every
@given(x=rollouts(), data=st.data())
def test_permuting_rows_permutes_outputs(name, device, x, data):
    N = x["reward"].shape[0]
    order = torch.tensor(data.draw(st.permutations(range(N))))
    moved = {k: v[order] if isinstance(v, torch.Tensor) else v for k, v in x.items()}
    for a, b in zip(results(name, moved, device), results(name, x, device), strict=True):
        within(a, b[order], 0.1 * BOUNDS[x["dtype"]], 1.0)


LINEAR = ("reward", "state_value", "next_state_value", "action_value", "bootstrap", "gradient", "initial")


@every
@given(x=rollouts(), power=st.integers(-6, 6))
def test_scaling_by_a_power_of_two_is_exact(name, device, x, power):
    scaled = x | {k: x[k] * 2.0**power for k in LINEAR}
    for a, b in zip(results(name, scaled, device), results(name, x, device), strict=True):
        assert torch.equal(a, b * 2.0**power)


@every
@given(x=rollouts(dtypes=(torch.float64,)), a=st.floats(-3, 3), b=st.floats(-3, 3))
def test_linear_in_rewards_and_values(name, device, x, a, b):
    y = rollout(*x["reward"].shape, seed=1)
    mixed = x | {k: a * x[k] + b * y[k] for k in LINEAR}
    other = x | {k: y[k] for k in LINEAR}
    for xy, fx, fy in zip(
        results(name, mixed, device), results(name, x, device), results(name, other, device), strict=True
    ):
        agree(xy, a * fx + b * fy, 1e-10, 1e-10)


@given(x=rollouts(dtypes=(torch.float64,), masked=False))
def test_the_gradient_of_a_backward_recurrence_is_a_forward_one(device, x):
    """x_t = alpha_t + beta_t x_{t+1}: with g = dL/dx, dL/dalpha_t = g_t + beta_{t-1} dL/dalpha_{t-1}."""
    if not x["reward"].numel():
        return
    alpha = x["reward"].clone().to(device).requires_grad_()
    beta = x["state_value"].tanh().to(device).requires_grad_()
    g = x["next_state_value"].to(device)
    out = F.linear_recurrence(alpha, beta, reverse=True, time_dim=-1)
    grad_alpha, grad_beta = torch.autograd.grad((out * g).sum(), (alpha, beta))
    before = torch.cat([torch.zeros_like(beta[:, :1]), beta[:, :-1]], 1).detach()
    agree(grad_alpha, F.linear_recurrence(g, before, time_dim=-1), 1e-10, 1e-12)
    after = torch.cat([out[:, 1:], torch.zeros_like(out[:, :1])], 1).detach()
    agree(grad_beta, grad_alpha * after, 1e-10, 1e-12)


@given(x=rollouts(dtypes=(torch.float64,)))
def test_the_gradient_of_gae_runs_forward(device, x):
    """dL/dr of GAE with dL/dA = g is the eligibility trace of g."""
    if not x["reward"].numel():
        return
    if x["mask"] is not None:
        x["next_state_value"] = x["next_state_value"].masked_fill(~x["mask"], torch.nan)
    reward = x["reward"].clone().to(device).requires_grad_()
    lay, _, time_dim = LAYOUTS[x["layout"]]
    args = {
        k: lay(v.to(device)) if isinstance(v, torch.Tensor) else v for k, v in pick(x, *DENSE, "gamma", "lmbda").items()
    }
    args["reward"] = lay(reward)
    advantage, _ = F.generalized_advantage_estimate(**args, time_dim=time_dim)
    (grad,) = torch.autograd.grad((advantage * lay(x["gradient"].to(device))).sum(), reward)
    wanted = reference.eligibility_trace(
        x["gamma"], x["lmbda"], x["gradient"], x["done"] | x["terminated"], mask=x["mask"]
    )
    agree(grad, wanted, 1e-10, 1e-12)


# ---------------------------------------------------------------------------------------------------------- boundaries
SERIES = (*LINEAR[:-1], "log_pi", "log_mu", "ratio")


@every
@given(x=rollouts(), bad=st.sampled_from([torch.nan, torch.inf, -torch.inf]))
def test_masked_steps_may_hold_anything(name, device, x, bad):
    if x["mask"] is None:
        return
    dirty = x | {k: x[k].masked_fill(~x["mask"], bad) for k in SERIES}
    dirty |= {k: torch.where(x["mask"], x[k], ~x[k]) for k in ("done", "terminated")}
    for a, b in zip(results(name, dirty, device), results(name, x, device), strict=True):
        assert torch.equal(a, b)
        assert (a[~x["mask"]] == 0).all()


@every
@given(x=rollouts(), bad=st.sampled_from([torch.nan, torch.inf, -torch.inf]), data=st.data())
def test_a_bad_number_stays_in_its_episode(name, device, x, bad, data):
    N, T = x["reward"].shape
    if not T:
        return
    n, t = data.draw(st.integers(0, N - 1)), data.draw(st.integers(0, T - 1))
    ends = x["done"] if x["mask"] is None else x["done"] & x["mask"]
    number = ends.long().cumsum(1) - ends.long()
    episode = torch.zeros(N, T, dtype=torch.bool)
    episode[n] = number[n] == number[n, t]
    dirty = dict(x)
    for key in data.draw(st.sets(st.sampled_from(SERIES), min_size=1)):
        dirty[key] = x[key].clone()
        dirty[key][n, t] = bad
    for a, b in zip(results(name, dirty, device), results(name, x, device), strict=True):
        assert torch.equal(a[~episode], b[~episode])


@backward
@given(x=rollouts(), bad=st.sampled_from([torch.nan, torch.inf]))
def test_the_value_behind_a_terminal_step_never_shows(name, device, x, bad):
    dirty = x | {k: x[k].masked_fill(x["terminated"], bad) for k in ("next_state_value", "bootstrap")}
    for a, b in zip(results(name, dirty, device), results(name, x, device), strict=True):
        assert torch.equal(a, b)


@given(
    x=rollouts(),
    correction=st.sampled_from([0, 1]),
    dim=st.sampled_from([None, 0, 1, (0, 1)]),
    grouped=st.booleans(),
)
def test_standardize(device, x, correction, dim, grouped):
    mask = x["mask"]
    groups = torch.arange(x["reward"].shape[0]) % 2 if grouped and dim is None else None
    wanted = reference.standardize(x["reward"], mask=mask, groups=groups, dim=dim, correction=correction)
    values = x["reward"] if mask is None else x["reward"].masked_fill(~mask, torch.nan)
    actual = F.standardize(
        values.to(device),
        mask=None if mask is None else mask.to(device),
        groups=None if groups is None else groups.to(device),
        dim=dim,
        correction=correction,
    )
    assert actual.dtype == x["dtype"]
    agree(actual, wanted, 1e-4, 1e-4)
