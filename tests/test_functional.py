"""The tensor functions against the float64 reference, for every estimator, and what they promise about their inputs."""

import functools
import itertools

import pytest
import torch

import reference
import rl_triton_td.functional as F
from conftest import INTERPRET, agree, rollout, within

GAMMA, LMBDA = 0.99, 0.95
SHIFTED = {"next_state_value": None}
TRACES = ("retrace", "importance_sampling", "tree_backup", "q_lambda")
# name: function, reference, entries ("argument" or "argument=entry of the rollout"), further arguments
ESTIMATORS = {
    "gae": (
        F.generalized_advantage_estimate,
        reference.gae,
        "gamma lmbda state_value next_state_value reward done terminated",
        {},
    ),
    "vtrace": (
        F.vtrace_advantage_estimate,
        reference.vtrace,
        "gamma lmbda log_pi log_mu state_value next_state_value reward done terminated",
        {"rho_thresh": 1.1, "c_thresh": 0.9, "rho_pg_thresh": 1.3},
    ),
    "vtrace_defaults": (
        F.vtrace_advantage_estimate,
        reference.vtrace,
        "gamma log_pi log_mu state_value next_state_value reward done terminated",
        {},
    ),
    "gae_two_lambdas": (
        F.generalized_advantage_estimate,
        reference.gae,
        "gamma lmbda state_value next_state_value reward done terminated",
        {"lmbda_critic": 0.7},
    ),
    "td0_return": (F.td0_return_estimate, reference.td0_return, "gamma next_state_value reward terminated", {}),
    "td0_advantage": (
        F.td0_advantage_estimate,
        reference.td0_advantage,
        "gamma state_value next_state_value reward done terminated",
        {},
    ),
    "td1_return": (F.td1_return_estimate, reference.td1_return, "gamma next_state_value reward done terminated", {}),
    "td1_advantage": (
        F.td1_advantage_estimate,
        reference.td1_advantage,
        "gamma state_value next_state_value reward done terminated",
        {},
    ),
    "td_lambda_return": (
        F.td_lambda_return_estimate,
        reference.td_lambda_return,
        "gamma lmbda next_state_value reward done terminated",
        {},
    ),
    "td_lambda_advantage": (
        F.td_lambda_advantage_estimate,
        reference.td_lambda_advantage,
        "gamma lmbda state_value next_state_value reward done terminated",
        {},
    ),
    "reward_to_go": (F.reward2go, reference.reward_to_go, "gamma reward done terminated bootstrap", {}),
    "reward_to_go_alone": (F.reward2go, reference.reward_to_go, "gamma reward done", {}),
    **{
        f"retrace_{trace}": (
            F.retrace_lambda_advantage_estimate,
            reference.retrace,
            "gamma lmbda log_pi log_mu action_value next_state_value reward done terminated",
            {"trace": trace, "c_thresh": 0.9, "rho_thresh": 1.2},
        )
        for trace in TRACES
    },
    "retrace_return": (
        F.retrace_lambda_return_estimate,
        lambda *args, **kwargs: reference.retrace(*args, **kwargs)[1],
        "gamma lmbda log_pi log_mu action_value next_state_value reward done terminated",
        {},
    ),
    "eligibility_trace": (
        F.eligibility_trace,
        reference.eligibility_trace,
        "gamma lmbda gradient done ratio initial",
        {},
    ),
    "eligibility_trace_alone": (F.eligibility_trace, reference.eligibility_trace, "gamma lmbda gradient done", {}),
    "prefix_sum_ends_at": (F.episodic_prefix_sum, reference.episodic_prefix_sum, "x=reward done initial", {}),
    "prefix_sum_starts_at": (
        F.episodic_prefix_sum,
        reference.episodic_prefix_sum,
        "x=reward done",
        {"boundary": "starts_at"},
    ),
    "recurrence": (F.linear_recurrence, reference.linear_recurrence, "alpha=reward beta=gammas initial", {}),
    "recurrence_reversed": (
        F.linear_recurrence,
        reference.linear_recurrence,
        "alpha=reward beta=gammas initial",
        {"reverse": True},
    ),
}
HEADS = ("gae", "vtrace")
every_estimator = pytest.mark.parametrize("name", ESTIMATORS)
heads = pytest.mark.parametrize("name", HEADS)
with_values = pytest.mark.parametrize(
    "name",
    [
        name
        for name, (_, _, entries, _) in ESTIMATORS.items()
        if "next_state_value" in entries and "retrace" not in name
    ],
)
large = pytest.mark.large


def arguments(name, x, **changes):
    """The arguments of an estimator from a rollout's entries; `changes` replace or add some."""
    _, _, entries, extra = ESTIMATORS[name]
    args = {}
    for entry in entries.split():
        argument, _, source = entry.partition("=")
        args[argument] = (
            {"gamma": GAMMA, "lmbda": LMBDA}[argument] if argument in ("gamma", "lmbda") else x[source or argument]
        )
    return args | extra | changes


def tuple_of(x):
    return x if isinstance(x, tuple) else (x,)


def expected(name, args):
    return tuple_of(ESTIMATORS[name][1](**args))


def computed(name, args, device="cpu", lay=lambda x: x.unsqueeze(-1), back=lambda x: x.squeeze(-1), **kwargs):
    """The package's results for `[N, T]` arguments that `lay` brings into a layout; `back` undoes it on the results."""
    args = {k: lay(v.to(device)) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    return tuple(back(x) for x in tuple_of(ESTIMATORS[name][0](**args, **kwargs)))


def hold(name, args, device, bound=1e-5, floor=1.0, **kwargs):
    actual, wanted = computed(name, args, device, **kwargs), expected(name, args)
    assert len(actual) == len(wanted)
    for i, (a, w) in enumerate(zip(actual, wanted, strict=True)):
        within(a, w, bound, floor, f"{name}, output {i}")
    return actual


# ----------------------------------------------------------------------------------------------------------- agreement
SHAPES = [(1, 1), (3, 7), (5, 64), (2, 130)]
LARGE = [pytest.param(4, 1000, marks=large), pytest.param(2, 5000, marks=large), pytest.param(1, 300_000, marks=large)]


@every_estimator
@pytest.mark.parametrize("N,T", SHAPES + LARGE)
def test_agrees_with_the_reference(name, N, T, device):
    x = rollout(N, T, seed=T, done=min(0.15, 50 / T), dtype=torch.float32)
    hold(name, arguments(name, x), device)


@every_estimator
@pytest.mark.parametrize("N,T", [(1, 1), (5, 23), (2, 130), LARGE[0]])
@pytest.mark.parametrize("valid", [0.7, 0.1])
def test_agrees_under_a_mask(name, N, T, valid, device):
    if INTERPRET and T == 130 and (valid == 0.1 or name not in HEADS):
        pytest.skip("two estimators are enough for the interpreter")
    x = rollout(N, T, seed=T + 1, valid=valid, dtype=torch.float32)
    hold(name, arguments(name, x, mask=x["mask"]), device)


@every_estimator
@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_agrees_without_and_with_nothing_but_ends(name, rate, device):
    for terminated in (0.0, 1.0):
        x = rollout(3, 37, seed=5, done=rate, terminated=terminated, dtype=torch.float32)
        hold(name, arguments(name, x), device)


@with_values
@pytest.mark.parametrize("N,T", [(1, 1), (4, 9), (3, 67), LARGE[0]])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_successors_from_shifted_values(name, N, T, masked, device):
    """Without next values: V_{t+1} inside an episode, `bootstrap` at truncated steps and behind the window."""
    x = rollout(N, T, seed=T + 2, dtype=torch.float32)
    args = {"next_state_value": None, "bootstrap": x["bootstrap"], "state_value": x["state_value"], "done": x["done"]}
    hold(name, arguments(name, x, **args, **({"mask": x["mask"]} if masked else {})), device)


@with_values
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("given", [False, True], ids=["zero", "value"])
def test_successors_with_one_value_behind_the_window(name, masked, given, device):
    x = rollout(4, 21, seed=3, terminated=1.0, dtype=torch.float32)
    args = {"next_state_value": None, "state_value": x["state_value"], "done": x["done"]}
    args["bootstrap"] = x["behind"] if given else None
    hold(name, arguments(name, x, **args, **({"mask": x["mask"]} if masked else {})), device)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_reward_to_go_with_one_value_behind_the_window(masked, device):
    x = rollout(4, 21, seed=3, terminated=1.0, dtype=torch.float32)
    mask = {"mask": x["mask"]} if masked else {}
    hold("reward_to_go", arguments("reward_to_go", x, bootstrap=x["behind"], **mask), device)


@pytest.mark.parametrize("name", ["td1_return", "td1_advantage", "td_lambda_return", "td_lambda_advantage"])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("rolling", [True, False])
def test_gamma_of_the_start_step(name, rolling, masked, device):
    x = rollout(3, 11, seed=4, dtype=torch.float32)
    changes = {"gamma": x["gammas"], "rolling_gamma": rolling} | ({"mask": x["mask"]} if masked else {})
    if "lambda" in name:
        changes["lmbda"] = x["lambdas"]
    hold(name, arguments(name, x, **changes), device)


@every_estimator
def test_terminated_without_done_is_done(name, device):
    x = rollout(3, 19, seed=6, dtype=torch.float32)
    x["terminated"] = x["terminated"] | rollout(3, 19, seed=7)["done"]
    args = arguments(name, x)
    if "terminated" in args:
        hold(name, args, device)


@pytest.mark.parametrize(
    "name", ["gae", "td_lambda_return", "td1_return", "td0_advantage", "vtrace", "retrace_retrace"]
)
def test_a_missing_terminated_is_done(name, device):
    x = rollout(3, 19, seed=6, dtype=torch.float32)
    hold(name, arguments(name, x, terminated=None), device)


ACTION_VALUES = ("pi", "next_pi", "action_values", "next_action_values")


def of_actions(x, device="cpu", picked=False):
    """The entries of :func:`F.retrace_from_action_values`, the taken action's value ``picked`` or not."""
    keys = (*ACTION_VALUES, "action", "log_mu", "reward", "done", "terminated")
    args = {key: (x[key] if x[key].ndim == 3 else x[key][..., None]).to(device) for key in keys}
    if picked:
        args["action_values"] = args["action_values"].gather(-1, args["action"])
    return args


picked_or_not = pytest.mark.parametrize("picked", [False, True], ids=["all", "picked"])


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@picked_or_not
def test_retrace_from_action_values(trace, masked, picked, device):
    x = rollout(3, 13, seed=8, actions=5, dtype=torch.float32)
    extra = {"trace": trace, "c_thresh": 0.8, "rho_thresh": 1.5}
    args, mask = of_actions(x, device, picked), x["mask"] if masked else None
    wanted = reference.retrace_from_action_values(GAMMA, LMBDA, **{k: x[k] for k in args}, mask=mask, **extra)
    extra["mask"] = None if mask is None else mask[..., None].to(device)
    for action in (args.pop("action"), x["action"].to(device)):
        out = tuple(torch.empty_like(args["reward"]) for _ in wanted)
        given = F.retrace_from_action_values(GAMMA, LMBDA, **args, action=action, **extra, out=out)
        actual = F.retrace_from_action_values(GAMMA, LMBDA, **args, action=action, **extra)
        for a, b, w in zip(actual, given, wanted, strict=True):
            within(a.squeeze(-1), w, 1e-5, 1.0)
            assert torch.equal(a, b)


@pytest.mark.parametrize("actions", [1, 4])
@pytest.mark.parametrize("time_dim", [0, 1])
@picked_or_not
def test_action_values_of_one_policy_in_any_layout(actions, time_dim, picked, device):
    """`next_pi` is `pi` itself; of one action, its value may be read either way."""
    x = rollout(3, 70, seed=11, actions=actions, dtype=torch.float32)
    x["next_pi"] = x["pi"]
    args = of_actions(x, device, picked)
    wanted = reference.retrace_from_action_values(GAMMA, LMBDA, **{k: x[k] for k in args})
    if time_dim == 0:
        args = {k: v.transpose(0, 1).contiguous() for k, v in args.items()}
    args["next_pi"] = args["pi"]
    in_place = (args["action_values"], torch.empty_like(args["reward"])) if picked else None
    for out in (None, None, None, in_place):  # the third call is replayed
        actual = F.retrace_from_action_values(GAMMA, LMBDA, **args, time_dim=time_dim, out=out)
        for a, w in zip(actual, wanted, strict=True):
            within(a.squeeze(-1).movedim(time_dim, 1), w, 1e-5, 1.0)


def test_retrace_without_log_probabilities(device):
    """Q(lambda) needs none, tree backup only those of the target policy; the advantage's ratio is then 1."""
    x = rollout(3, 17, seed=9, dtype=torch.float32)
    hold("retrace_q_lambda", arguments("retrace_q_lambda", x, log_pi=None, log_mu=None), device)
    hold("retrace_tree_backup", arguments("retrace_tree_backup", x, log_mu=None), device)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_eligibility_trace_of_a_gradient(masked, device):
    """One decay and one flag a step, D components."""
    x = rollout(3, 12, seed=10, dtype=torch.float32)
    gradient, initial = torch.randn(3, 12, 5), torch.randn(3, 5)
    mask = x["mask"] if masked else None
    wanted = reference.eligibility_trace(
        GAMMA, LMBDA, gradient, x["done"], ratio=x["ratio"], initial=initial, mask=mask
    )
    for done in (x["done"], x["done"][..., None], x["done"][..., None].expand(3, 12, 5)):
        actual = F.eligibility_trace(
            GAMMA,
            LMBDA,
            gradient.to(device),
            done.to(device),
            ratio=x["ratio"][..., None].to(device),
            initial=initial.to(device),
            mask=None if mask is None else mask.to(device),
        )
        within(actual.transpose(1, 2), wanted.transpose(1, 2), 1e-5, 1.0)


# ------------------------------------------------------------------------------------------------------ standardising
@pytest.mark.parametrize("correction", [0, 1])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("dim", [None, 1, (0, 1), (0, 1, 3)])
def test_standardize(correction, masked, dim, device):
    g = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(3, 8, 2, 1, generator=g) + 5
    mask = torch.rand(3, 8, 1, 1, generator=g) < 0.6
    kwargs = {"correction": correction, "dim": dim}
    wanted = reference.standardize(x, mask=mask if masked else None, **kwargs)
    poisoned = torch.where(mask, x, torch.nan) if masked else x
    actual = F.standardize(poisoned.to(device), mask=mask.to(device) if masked else None, **kwargs)
    agree(actual, wanted, 1e-5, 1e-5)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_standardize_by_group(masked, device):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(7, 6, 1, generator=g)
    groups = torch.tensor([4, -1, 4, 100, -1, 4, 7])  # the one of id 100 has all its entries masked or not
    mask = torch.rand(7, 6, 1, generator=g) < 0.5
    mask[3] = False
    wanted = reference.standardize(x, groups=groups, mask=mask if masked else None)
    actual = F.standardize(x.to(device), groups=groups.to(device), mask=mask.to(device) if masked else None)
    agree(actual, wanted, 1e-5, 1e-5)


def test_standardize_keeps_digits_beside_a_large_mean(device):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(2)) + 1e5
    agree(F.standardize(x.to(device)), reference.standardize(x), 1e-3, 1e-3)


def test_standardize_of_too_little(device):
    """One entry, none, or equal ones: 0; a mask that keeps one entry as well."""
    assert F.standardize(torch.tensor([3.0], device=device)).tolist() == [0.0]
    assert F.standardize(torch.empty(0, 4, device=device)).shape == (0, 4)
    assert F.standardize(torch.full((5,), 7.0, device=device)).tolist() == [0.0] * 5
    x, mask = torch.tensor([1.0, torch.nan, 3.0], device=device), torch.tensor([True, False, False], device=device)
    assert F.standardize(x, mask=mask).tolist() == [0.0] * 3
    assert F.standardize(x, mask=torch.zeros_like(mask)).tolist() == [0.0] * 3


# -------------------------------------------------------------------------------------------------------------- dtypes
# dtype: relative rounding of one result (half a unit in the last place), bound of the recurrence (of the row's largest)
DTYPES = {
    torch.bfloat16: (2.0**-7 if INTERPRET else 2.0**-8, 1e-5),  # the interpreter's cast to bfloat16 truncates
    torch.float16: (2.0**-11, 1e-5),
    torch.float32: (0.0, 1e-5),
    torch.float64: (0.0, 1e-12),
}


@every_estimator
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_dtypes(name, dtype, device):
    """The recurrence runs in float32 or wider; a half-precision result is that one rounded once."""
    rounding, bound = DTYPES[dtype]
    args = arguments(name, rollout(3, 65, seed=11, dtype=dtype))
    for a, w in zip(computed(name, args, device), expected(name, args), strict=True):
        assert a.dtype == dtype
        agree(a, w, 1.01 * rounding, bound * max(1.0, w.abs().max().item()), name)


@heads
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=lambda d: str(d)[6:])
def test_the_output_has_the_dtype_of_the_values(name, dtype, device):
    x = rollout(2, 9, seed=12, dtype=torch.float32)
    args = arguments(name, x)
    args |= {k: args[k].to(dtype) for k in ("state_value", "next_state_value")}
    rounding, _ = DTYPES[dtype]
    for a, w in zip(computed(name, args, device), expected(name, args), strict=True):
        assert a.dtype == dtype
        agree(a, w, 1.01 * rounding, 1e-5 * max(1.0, w.abs().max().item()), name)


FLAG_DTYPES = {
    torch.uint8: (1, 2, 255),
    torch.int8: (1, -1, -128),
    torch.int64: (1, -3, 2**40),
    torch.float32: (1.0, 0.25, -2.0),
    torch.float16: (1.0, 0.25, -2.0),
    torch.float64: (1.0, 1e-300, -2.0),
}


@every_estimator
@pytest.mark.parametrize("dtype", FLAG_DTYPES, ids=lambda d: str(d)[6:])
def test_flags_of_any_dtype_are_true_when_non_zero(name, dtype, device):
    if INTERPRET and name not in HEADS:
        pytest.skip("two estimators are enough for the interpreter")
    x = rollout(3, 18, seed=13, dtype=torch.float32)
    args = arguments(name, x, mask=x["mask"])
    plain = computed(name, args, device)
    marks = torch.tensor(FLAG_DTYPES[dtype], dtype=dtype)[torch.arange(18) % 3]
    for key in ("done", "terminated", "mask"):
        if key in args:
            args[key] = torch.where(args[key], marks, torch.zeros((), dtype=dtype))
    for a, b in zip(computed(name, args, device), plain, strict=True):
        assert torch.equal(a, b)


# --------------------------------------------------------------------------------------------------------- error bound
LENGTHS = [1, 1000, pytest.param(100_000, marks=large), pytest.param(1_000_000, marks=[large, pytest.mark.slow])]
HYPERS = [(0.99, 0.95), (0.99, 1.0), (1.0, 1.0)]


@functools.lru_cache(maxsize=2)
def one_long_row(name, T, gamma, lmbda, dtype):
    x = rollout(1, T, seed=14, done=min(0.15, 2 / T), dtype=dtype)
    changes = {k: v for k, v in {"gamma": gamma, "lmbda": lmbda}.items() if k in ESTIMATORS[name][2].split()}
    args = arguments(name, x, **changes)
    return args, expected(name, args)


@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=["float32", "float64"])
@pytest.mark.parametrize("gamma,lmbda", HYPERS)
@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("name", ["gae", "vtrace", "td_lambda_return", "reward_to_go", "eligibility_trace_alone"])
def test_error_bound(name, T, gamma, lmbda, dtype, bound, device):
    if T == 1_000_000 and name not in ("gae", "reward_to_go"):
        pytest.skip("two estimators are enough at this length")
    if INTERPRET and T > 1 and (name not in HEADS or lmbda == 0.95):
        pytest.skip("two estimators are enough for the interpreter")
    args, wanted = one_long_row(name, T, gamma, lmbda, dtype)
    for a, w in zip(computed(name, args, device), wanted, strict=True):
        within(a, w, bound, 0.0 if T > 1 else 1.0, name)


@large
@pytest.mark.parametrize("T", [1000, 100_000])
def test_a_constant_reward_with_a_long_horizon(T, device):
    """gamma = 0.999 over ones adds up to 1 / (1 - gamma) = 1000; gamma is single-precision like the rewards."""
    gamma = torch.tensor(0.999).item()
    args = {"reward": torch.ones(1, T), "done": torch.zeros(1, T, dtype=torch.bool), "gamma": gamma}
    for a, w in zip(computed("reward_to_go", args, device), expected("reward_to_go", args), strict=True):
        within(a, w, 1e-5)


@every_estimator
@pytest.mark.parametrize("N,T", [(3, 66), pytest.param(3, 10_000, marks=large)])
def test_two_runs_are_bitwise_equal(name, N, T, device):
    x = rollout(N, T, seed=15, dtype=torch.float32)
    args = arguments(name, x)
    for a, b in zip(computed(name, args, device), computed(name, args, device), strict=True):
        assert torch.equal(a, b)


# ------------------------------------------------------------------------------------------------------------- layouts
def _column(x):
    return x.unsqueeze(-1)


def _time_major(x):
    return x.unsqueeze(-1) if x.ndim == 1 else x.transpose(0, 1).contiguous().unsqueeze(-1)


def _features(x):  # N = 6 rows as a batch of 2 and 3 features: [2, T, 3], [2, 3] for what has no time
    return x.reshape(2, 3, *x.shape[1:]).transpose(1, -1) if x.ndim > 1 else x.reshape(2, 3)


def _agents(x):  # [2, T, 3, 1]
    return _features(x).unsqueeze(-1)


def _two_batch_dims(x):  # [2, 3, T, 1]
    return x.reshape(2, 3, *x.shape[1:]).unsqueeze(-1)


def _wide(x):
    """A slice of a wider buffer in every dimension, whose other entries are NaN or ones."""
    shape = [n + 3 for n in x.shape] + [4]
    buffer = torch.full(shape, torch.nan if x.is_floating_point() else 1, device=x.device).to(x.dtype)
    view = buffer[tuple(slice(2, n + 2) for n in x.shape) + (slice(1, 2),)]
    return view.copy_(x.unsqueeze(-1))


def _transposed(x):
    return x.unsqueeze(-1) if x.ndim == 1 else x.t().contiguous().t().unsqueeze(-1)


def _every_other(x):
    return x.repeat_interleave(2, 0)[::2].unsqueeze(-1) if x.ndim == 1 else x.repeat_interleave(2, 1)[:, ::2, None]


LAYOUTS = {
    "time_major": (_time_major, lambda x: x.squeeze(-1).transpose(0, 1), 0),
    "time_major_negative": (_time_major, lambda x: x.squeeze(-1).transpose(0, 1), -3),
    "positive": (_column, lambda x: x.squeeze(-1), 1),
    "no_feature": (lambda x: x, lambda x: x, -1),
    "no_feature_positive": (lambda x: x, lambda x: x, 1),
    "features": (_features, lambda x: x.transpose(1, 2).reshape(6, -1), -2),
    "agents": (_agents, lambda x: x.squeeze(-1).transpose(1, 2).reshape(6, -1), -3),
    "agents_positive": (_agents, lambda x: x.squeeze(-1).transpose(1, 2).reshape(6, -1), 1),
    "two_batch_dims": (_two_batch_dims, lambda x: x.squeeze(-1).reshape(6, -1), -2),
    "slices": (_wide, lambda x: x.squeeze(-1), -2),
    "transposed": (_transposed, lambda x: x.squeeze(-1), -2),
    "every_other": (_every_other, lambda x: x.squeeze(-1), -2),
}


@every_estimator
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_layouts(name, layout, masked, device):
    if INTERPRET and (name not in HEADS or masked):
        pytest.skip("two estimators are enough for the interpreter")
    lay, back, time_dim = LAYOUTS[layout]
    x = rollout(6, 17, seed=16, dtype=torch.float32)
    args = arguments(name, x, **({"mask": x["mask"]} if masked else {}))
    hold(name, args, device, lay=lay, back=back, time_dim=time_dim)


@heads
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("behind", [False, True], ids=["per_step", "behind"])
def test_layouts_of_shifted_values(name, layout, behind, device):
    if INTERPRET and layout not in ("time_major", "features", "slices"):
        pytest.skip("three layouts are enough for the interpreter")
    lay, back, time_dim = LAYOUTS[layout]
    x = rollout(6, 17, seed=17, terminated=1.0 if behind else 0.5, dtype=torch.float32)
    args = arguments(name, x, next_state_value=None, bootstrap=x["behind" if behind else "bootstrap"])
    hold(name, args, device, lay=lay, back=back, time_dim=time_dim)


@heads
def test_one_series(name, device):
    x = rollout(1, 31, seed=18, dtype=torch.float32)
    for time_dim in (0, -1):
        hold(name, arguments(name, x), device, lay=lambda x: x[0], back=lambda x: x[None], time_dim=time_dim)


@heads
def test_expanded_entries(name, device):
    """Stride 0: one reward for all steps, one flag for all features."""
    x = rollout(2, 15, seed=19, dtype=torch.float32)
    args = arguments(name, x, reward=torch.tensor(0.5).expand(2, 15))
    hold(name, args, device)
    wide = {k: v for k, v in args.items() if isinstance(v, torch.Tensor)}
    wide = {k: v[..., None].expand(2, 15, 3).to(device) for k, v in wide.items()}
    wide |= {k: wide[k].clone() for k in ("state_value", "next_state_value")}
    outputs = tuple_of(ESTIMATORS[name][0](**(args | wide)))
    for a, w in zip(outputs, expected(name, args), strict=True):
        for feature in range(3):
            within(a[..., feature], w, 1e-5, 1.0)


@heads
def test_mask_shapes(name, device):
    x = rollout(6, 17, seed=20, dtype=torch.float32)
    x["mask"] = x["mask"][::3].repeat_interleave(3, 0)  # one mask for the three features of a batch entry
    args = arguments(name, x)
    wanted = expected(name, args | {"mask": x["mask"]})
    args = {k: _features(v).to(device) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    mask = x["mask"][::3].to(device)  # [2, T]
    for shape in (mask, mask[..., None], mask[..., None].expand(2, 17, 3)):
        for a, w in zip(tuple_of(ESTIMATORS[name][0](**args, mask=shape)), wanted, strict=True):
            within(a.transpose(1, 2).reshape(6, 17), w, 1e-5, 1.0)


# ---------------------------------------------------------------------------------------------------- gamma and lambda
FORMS = {
    "scalar": (lambda x: torch.tensor(0.9), lambda h: h),
    "one": (lambda x: torch.tensor([0.9]), lambda h: h),
    "per_step": (lambda x: x[:1], lambda h: h[0, :, None, None]),
    "per_sequence": (
        lambda x: x[:, :1].reshape(2, 3, 1)[:, :1].expand(2, 3, 1).reshape(6, 1),
        lambda h: h[::3, :, None, None],
    ),
    "per_agent": (lambda x: x[:3, :1].repeat(2, 1), lambda h: h[:3]),
    "full": (lambda x: x, _agents),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["gae", "vtrace", "td_lambda_return", "retrace_retrace", "eligibility_trace"])
def test_gamma_and_lambda_as_tensors(name, form, device):
    """Floats, 0-d tensors and what broadcasts to [2, T, 3, 1], each mixed with a float for the other one."""
    if INTERPRET and name not in HEADS:
        pytest.skip("two estimators are enough for the interpreter")
    x = rollout(6, 17, seed=21, dtype=torch.float32)
    make, shape = FORMS[form]
    gamma, lmbda = make(x["gammas"]), make(x["lambdas"])
    for given in ({"gamma": gamma}, {"lmbda": lmbda}, {"gamma": gamma, "lmbda": lmbda}):
        args = arguments(name, x)
        wanted = expected(name, args | given)
        args = {k: _agents(v).to(device) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
        given = {k: shape(v).to(device) for k, v in given.items()}
        actual = tuple_of(ESTIMATORS[name][0](**(args | given), time_dim=-3))
        for a, w in zip(actual, wanted, strict=True):
            within(a.squeeze(-1).transpose(1, 2).reshape(6, 17), w, 1e-5, 1.0, f"{name}, {list(given)}")


@pytest.mark.parametrize("gamma,lmbda", [(0.0, 0.95), (0.99, 0.0), (0.0, 0.0), (1, 1), (0.9, 1e-9)])
@every_estimator
def test_extreme_gamma_and_lambda(name, gamma, lmbda, device):
    if INTERPRET and name not in HEADS:
        pytest.skip("two estimators are enough for the interpreter")
    x = rollout(2, 13, seed=22, dtype=torch.float32)
    changes = {k: v for k, v in {"gamma": gamma, "lmbda": lmbda}.items() if k in ESTIMATORS[name][2].split()}
    hold(name, arguments(name, x, **changes), device)


# --------------------------------------------------------------------------------------------------------------- empty
@every_estimator
@pytest.mark.parametrize("N,T", [(0, 5), (3, 0), (0, 0)])
def test_empty_in_empty_out(name, N, T, device):
    x = rollout(N, T, seed=23, dtype=torch.float32)
    for out in computed(name, arguments(name, x), device):
        assert out.shape == (N, T) and out.dtype == torch.float32


@pytest.mark.parametrize("T", [0, 3])
def test_shifted_values_of_an_empty_window(T, device):
    x = rollout(0 if T else 2, T, seed=23, dtype=torch.float32)
    for out in computed("gae", arguments("gae", x, next_state_value=None), device):
        assert out.shape == x["reward"].shape


# ----------------------------------------------------------------------------------------------------------------- NaN
SERIES = (
    "reward",
    "state_value",
    "next_state_value",
    "action_value",
    "log_pi",
    "log_mu",
    "bootstrap",
    "gradient",
    "ratio",
)


def episodes(done, mask=None):
    """The number of each step's episode, counted along the row over valid steps."""
    ends = done & mask if mask is not None else done
    return ends.long().cumsum(1) - ends.long()


@every_estimator
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("T", [16, 130])
def test_a_bad_number_stays_in_its_episode(name, bad, T, device):
    if name.startswith("recurrence"):
        pytest.skip("no episodes")
    if INTERPRET and (T == 130 or bad == torch.inf):
        pytest.skip("one of them is enough for the interpreter")
    x = rollout(3, T, seed=24, done=0.25, dtype=torch.float32)
    done = x["done"]
    number = episodes(done)
    if name == "prefix_sum_starts_at":
        number = done.long().cumsum(1)
    clean = computed(name, arguments(name, x), device)
    at = number == number[:, T // 2 : T // 2 + 1]
    poisoned = {k: torch.where(at, bad, v) if k in SERIES else v for k, v in x.items()}
    for a, b in zip(computed(name, arguments(name, poisoned), device), clean, strict=True):
        torch.testing.assert_close(a.cpu()[~at], b.cpu()[~at], rtol=0, atol=0, msg=f"{name}: leaves its episode")


@every_estimator
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_masked_steps_may_hold_anything(name, bad, device):
    if INTERPRET and bad == torch.inf:
        pytest.skip("one of them is enough for the interpreter")
    x = rollout(4, 41, seed=25, dtype=torch.float32)
    mask = x["mask"]
    clean = computed(name, arguments(name, x, mask=mask), device)
    dirty = {k: torch.where(mask, v, bad) if k in (*SERIES, "gammas", "lambdas") else v for k, v in x.items()}
    dirty |= {k: torch.where(mask, x[k], ~x[k]) for k in ("done", "terminated")}
    for a, b in zip(computed(name, arguments(name, dirty, mask=mask), device), clean, strict=True):
        assert torch.equal(a, b)
        assert (a.cpu()[~mask] == 0).all()


@pytest.mark.parametrize("name", [name for name, e in ESTIMATORS.items() if "next_state_value" in e[2]])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_next_value_of_a_terminated_step_never_shows(name, bad, device):
    x = rollout(4, 41, seed=26, dtype=torch.float32)
    clean = computed(name, arguments(name, x), device)
    x["next_state_value"] = torch.where(x["terminated"], bad, x["next_state_value"])
    for a, b in zip(computed(name, arguments(name, x), device), clean, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["gae", "td_lambda_return", "td1_return", "vtrace", "reward_to_go"])
def test_a_bad_bootstrap_that_nobody_needs_never_shows(name, device):
    """Inside an episode and at terminated steps the bootstrap is not read."""
    x = rollout(4, 41, seed=27, dtype=torch.float32)
    changes = {"bootstrap": x["bootstrap"]}
    if name != "reward_to_go":
        changes |= {"next_state_value": None, "state_value": x["state_value"]}
    clean = computed(name, arguments(name, x, **changes), device)
    needed = x["done"] & ~x["terminated"]
    needed[:, -1] |= ~x["terminated"][:, -1]
    changes["bootstrap"] = torch.where(needed, x["bootstrap"], torch.nan)
    for a, b in zip(computed(name, arguments(name, x, **changes), device), clean, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["gae", "vtrace", "td_lambda_return", "retrace_retrace", "eligibility_trace_alone"])
@pytest.mark.parametrize("form", ["float", "tensor"])
def test_a_decay_of_zero_selects(name, form, device):
    """lambda = 0: a step's result depends on no other step, so a NaN reward stays where it is."""
    x = rollout(2, 20, seed=28, done=0.0, dtype=torch.float32)
    lmbda = 0.0 if form == "float" else torch.zeros(2, 20)
    clean = computed(name, arguments(name, x, lmbda=lmbda), device)
    at = torch.zeros(2, 20, dtype=torch.bool)
    at[:, 11] = True
    for key in ("reward", "gradient"):
        x[key] = torch.where(at, torch.nan, x[key])
    for i, (a, b) in enumerate(zip(computed(name, arguments(name, x, lmbda=lmbda), device), clean, strict=True)):
        if name in HEADS[1:] + ("retrace_retrace",) and i == 0:
            at[:, 10] = True  # the advantage reads the target of the next step
        torch.testing.assert_close(a.cpu()[~at], b.cpu()[~at], rtol=0, atol=0)
        at[:, 10] = False


# ----------------------------------------------------------------------------------------------------------------- out=
@pytest.mark.parametrize("name", [name for name in ESTIMATORS])
@pytest.mark.parametrize("wide", [False, True], ids=["packed", "slices"])
def test_out(name, wide, device):
    if INTERPRET and wide and name not in HEADS:
        pytest.skip("two estimators are enough for the interpreter")
    x = rollout(3, 14, seed=29, dtype=torch.float32)
    args = arguments(name, x, mask=x["mask"])
    fresh = computed(name, args, device, back=lambda x: x)
    given = tuple(_wide(torch.zeros(3, 14, device=device)) if wide else torch.full_like(f, torch.nan) for f in fresh)
    out = given if len(given) > 1 else given[0]
    returned = computed(name, args, device, back=lambda x: x, out=out)
    for r, g, f in zip(returned, given, fresh, strict=True):
        assert r is g or r.data_ptr() == g.data_ptr()
        assert torch.equal(g, f)


# ----------------------------------------------------------------------------------------------------------- gradients
@every_estimator
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_gradients(name, masked, device):
    """The derivative along a random direction, against central differences of the reference."""
    x = rollout(2, 9, seed=30, dtype=torch.float64)
    args = arguments(name, x, **({"mask": x["mask"]} if masked else {}))
    _check_derivative(name, args, [k for k, v in args.items() if _is_series(v)], device)


@pytest.mark.parametrize("name", ["gae", "vtrace", "td_lambda_return", "retrace_retrace", "eligibility_trace"])
def test_gradients_of_gamma_and_lambda(name, device):
    x = rollout(2, 9, seed=31, dtype=torch.float64)
    args = arguments(name, x, gamma=x["gammas"], lmbda=x["lambdas"])
    _check_derivative(name, args, ["gamma", "lmbda"], device)


@with_values
def test_gradients_of_shifted_values(name, device):
    x = rollout(2, 9, seed=32, dtype=torch.float64)
    args = arguments(
        name, x, next_state_value=None, bootstrap=x["bootstrap"], state_value=x["state_value"], done=x["done"]
    )
    _check_derivative(name, args, [k for k, v in args.items() if _is_series(v)], device)


def _is_series(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _check_derivative(name, args, wanted, device, step=1e-6):
    g = torch.Generator().manual_seed(33)
    direction = {k: torch.randn(args[k].shape, generator=g, dtype=torch.float64) for k in wanted}
    plus = expected(name, args | {k: args[k] + step * d for k, d in direction.items()})
    minus = expected(name, args | {k: args[k] - step * d for k, d in direction.items()})
    weights = [torch.randn(p.shape, generator=g, dtype=torch.float64) for p in plus]
    slope = sum((w * (p - m)).sum() for w, p, m in zip(weights, plus, minus, strict=True)) / (2 * step)

    leaves = {k: args[k].to(device).requires_grad_() for k in wanted}
    outputs = computed(name, args | leaves, device)
    loss = sum((w.to(device) * out).sum() for w, out in zip(weights, outputs, strict=True))
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    ours = sum((direction[k] * grad.cpu()).sum() for k, grad in zip(leaves, gradients, strict=True) if grad is not None)
    agree(ours, slope, 1e-6, 1e-6, f"{name}: derivative")


@every_estimator
def test_gradients_stay_clean_of_masked_steps(name, device):
    x = rollout(3, 12, seed=34, dtype=torch.float64)
    mask = x["mask"]
    x = {k: torch.where(mask, v, torch.nan) if k in (*SERIES, "gammas") else v for k, v in x.items()}
    args = arguments(name, x, mask=mask)
    leaves = {k: v.to(device).requires_grad_() for k, v in args.items() if _is_series(v)}
    loss = sum(out.sum() for out in computed(name, args | leaves, device))
    for key, grad in zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True), strict=True):
        assert grad is None or grad.isfinite().all(), f"{name}: the gradient of {key} is not finite"
        if grad is not None and grad.ndim > 1:
            assert (grad.cpu()[~mask] == 0).all(), f"{name}: {key} gets a gradient at masked steps"


# -------------------------------------------------------------------------------------------------------------- errors
def columns(name="gae", **changes):
    x = rollout(3, 3, seed=35, dtype=torch.float32)
    args = arguments(name, x)
    return {k: v.unsqueeze(-1) if isinstance(v, torch.Tensor) else v for k, v in args.items()} | changes


def series_of(name):
    return [k for k, v in columns(name).items() if isinstance(v, torch.Tensor) and k != "initial"]


EVERY_ENTRY = [(name, key) for name in ESTIMATORS for key in series_of(name)]


def message(error_types, name, args):
    with pytest.raises(error_types) as info:
        ESTIMATORS[name][0](**args)
    return str(info.value)


@pytest.mark.parametrize("name,key", EVERY_ENTRY)
def test_a_missing_feature_dimension_is_named(name, key):
    """[B, T] against [B, T, 1] with B == T: never a silent [B, B]."""
    args = columns(name)
    args[key] = args[key].squeeze(-1)
    if name.startswith(("eligibility", "prefix_sum")) and key in ("done", "ratio") or "log_" in key:
        # what may come as [B, T] is taken for that, or refused
        try:
            actual = tuple_of(ESTIMATORS[name][0](**args))
        except F.ShapeError as error:
            assert key in str(error), f"{key} is not named in: {error}"  # noqa: PT017
        else:
            for a, b in zip(actual, tuple_of(ESTIMATORS[name][0](**columns(name))), strict=True):
                assert torch.equal(a, b)
        return
    text = message(F.ShapeError, name, args)
    assert key in text or series_of(name)[0] == key, f"{key} is not named in: {text}"


@pytest.mark.parametrize("name,key", EVERY_ENTRY)
def test_a_wrong_length_is_named(name, key):
    args = columns(name)
    args[key] = torch.cat([args[key], args[key]], 1)
    text = message(F.ShapeError, name, args)
    assert any(k in text for k in series_of(name)) and "6" in text, text


def test_shape_errors_are_value_and_runtime_errors():
    assert issubclass(F.ShapeError, ValueError) and issubclass(F.ShapeError, RuntimeError)


@pytest.mark.parametrize("key", ["reward", "done", "terminated", "next_state_value"])
@heads
def test_mixed_devices_are_named(name, key):
    args = columns(name)
    args[key] = args[key].to("meta")
    text = message((ValueError, TypeError, RuntimeError), name, args)
    assert key in text and "meta" in text, text


@pytest.mark.parametrize("name,key", [(name, key) for name, key in EVERY_ENTRY if key not in ("done", "terminated")])
def test_values_that_are_not_floating_point_are_named(name, key):
    args = columns(name)
    args[key] = args[key].long()
    text = message((TypeError, ValueError), name, args)
    assert key in text, text


@pytest.mark.parametrize("time_dim", [3, -4, 17])
@every_estimator
def test_a_bad_time_dim_is_named(name, time_dim):
    text = message((ValueError, IndexError, TypeError), name, columns(name, time_dim=time_dim))
    assert "time_dim" in text, text


@with_values
def test_a_truncated_step_without_a_bootstrap_is_an_error(name):
    x = rollout(2, 6, seed=36, dtype=torch.float32)
    x["done"], x["terminated"] = torch.zeros(2, 6, dtype=torch.bool), torch.zeros(2, 6, dtype=torch.bool)
    x["done"][1, 2] = True
    for bootstrap in (None, x["behind"]):
        changes = {"next_state_value": None, "state_value": x["state_value"], "done": x["done"], "bootstrap": bootstrap}
        args = arguments(name, x, **changes)
        args = {k: v.unsqueeze(-1) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
        assert "bootstrap" in message(ValueError, name, args)


@pytest.mark.gpu
@with_values
def test_a_truncated_step_without_a_bootstrap_is_nan_on_cuda(name):
    """No synchronisation to find out: the episode that lacks a value shows it."""
    x = rollout(2, 6, seed=36, dtype=torch.float32)
    x["done"], x["terminated"] = torch.zeros(2, 6, dtype=torch.bool), torch.zeros(2, 6, dtype=torch.bool)
    x["done"][1, 2] = True
    args = arguments(name, x, next_state_value=None, state_value=x["state_value"], done=x["done"])
    for out in computed(name, args, "cuda"):
        assert out[1, 2].isnan() and out[0].isfinite().all() and out[1, 3:].isfinite().all()


def test_a_bootstrap_beside_next_values_is_named():
    assert "bootstrap" in message((ValueError, TypeError), "gae", columns(bootstrap=torch.zeros(3, 3, 1)))


def test_shifted_values_need_values():
    args = columns("td_lambda_return", next_state_value=None)
    assert "state_value" in message((ValueError, TypeError), "td_lambda_return", args)


@pytest.mark.parametrize(
    "name,key,value",
    [
        ("retrace_retrace", "trace", "watkins"),
        ("prefix_sum_ends_at", "boundary", "middle"),
        ("gae", "mask", torch.ones(3, 4, dtype=torch.bool)),
        ("gae", "gamma", torch.full((4, 3, 1), 0.9)),
        ("gae", "lmbda", torch.full((4, 3, 1), 0.9)),
        ("gae", "out", (torch.empty(3, 4, 1), torch.empty(3, 4, 1))),
        ("retrace_retrace", "log_pi", None),
        ("retrace_retrace", "log_mu", None),
    ],
)
def test_other_bad_arguments_are_named(name, key, value):
    text = message((ValueError, TypeError, KeyError), name, columns(name, **{key: value}))
    assert key in text, text


@picked_or_not
@pytest.mark.parametrize(
    "key,change,error",
    [
        *((key, lambda x: x.repeat_interleave(2, -1), F.ShapeError) for key in ACTION_VALUES),
        *((key, lambda x: x[:, :-1], F.ShapeError) for key in (*ACTION_VALUES, "reward", "action", "log_mu", "done")),
        ("action_values", lambda x: x[..., 0], F.ShapeError),
        *((key, torch.Tensor.tolist, TypeError) for key in (*ACTION_VALUES, "reward", "action", "log_mu")),
        *((key, lambda x: x.long(), TypeError) for key in (*ACTION_VALUES, "reward", "log_mu")),
        ("action", lambda x: x.float(), TypeError),
        *((key, lambda x: x.to("meta"), ValueError) for key in (*ACTION_VALUES, "reward", "action", "log_mu", "done")),
    ],
)
def test_bad_entries_of_action_values_are_named(key, change, error, picked):
    args = of_actions(rollout(3, 4, seed=35, actions=3, dtype=torch.float32), picked=picked)
    args[key] = change(args[key])
    with pytest.raises(error, match=rf"\b{key}\b"):
        F.retrace_from_action_values(GAMMA, LMBDA, **args)


def test_a_bootstrap_of_the_wrong_shape_is_named():
    args = columns(next_state_value=None, bootstrap=torch.zeros(4, 1))
    assert "bootstrap" in message(F.ShapeError, "gae", args)


# ------------------------------------------------------------------------------------------------------ names, numbers
@pytest.mark.parametrize("name", ["gae", "td1_return", "td1_advantage", "td_lambda_return", "td_lambda_advantage"])
def test_the_vectorised_names_give_the_same_numbers(name):
    function = ESTIMATORS[name][0]
    x = rollout(3, 20, seed=39, dtype=torch.float32)
    args = {k: v[..., None] if _is_entry(v) else v for k, v in arguments(name, x, mask=x["mask"]).items()}
    vectorised = getattr(F, f"vec_{function.__name__}")
    for a, b in zip(tuple_of(vectorised(**args)), tuple_of(function(**args)), strict=True):
        assert torch.equal(a, b)


def _is_entry(value):
    return isinstance(value, torch.Tensor)


def test_positional_arguments_come_in_torchrl_order():
    x = {k: v[..., None] for k, v in rollout(2, 5, seed=37, dtype=torch.float32).items() if v.ndim == 2}
    v, nv, r, d, t = (x[k] for k in ("state_value", "next_state_value", "reward", "done", "terminated"))
    named = {"next_state_value": nv, "reward": r, "done": d, "terminated": t}
    for ours, again in (
        (F.generalized_advantage_estimate(0.9, 0.8, v, nv, r, d, t), computed_columns("gae", state_value=v, **named)),
        (F.td_lambda_return_estimate(0.9, 0.8, nv, r, d, t), computed_columns("td_lambda_return", **named)),
        (
            F.td_lambda_advantage_estimate(0.9, 0.8, v, nv, r, d, t),
            computed_columns("td_lambda_advantage", state_value=v, **named),
        ),
    ):
        for a, b in zip(tuple_of(ours), again, strict=True):
            assert torch.equal(a, b)
    assert torch.equal(F.td0_return_estimate(0.9, nv, r, t), F.td0_return_estimate(0.9, nv, r, terminated=t))
    assert torch.equal(F.td1_return_estimate(0.9, nv, r, d, t), F.td1_return_estimate(0.9, nv, r, done=d, terminated=t))
    assert torch.equal(F.reward2go(r, d, 0.9), F.reward2go(reward=r, done=d, gamma=0.9))


def computed_columns(name, **named):
    return tuple_of(ESTIMATORS[name][0](gamma=0.9, lmbda=0.8, **named))


def column(*values, device="cpu"):
    return torch.tensor(values, device=device)[None, :, None]


def test_hand_gae(device):
    """gamma = .5, lmbda = 1, a time limit at step 1 that bootstraps with 4, a window edge that bootstraps with 2.

    step 3: 1 + .5 * 2 - 2 = 0; step 2: 1 + .5 * 2 - 2 + .5 * 0 = 0; step 1: 1 + .5 * 4 - 2 = 1, nothing from step 2;
    step 0: 1 + .5 * 2 - 2 + .5 * 1 = .5
    """
    advantage, target = F.generalized_advantage_estimate(
        0.5,
        1.0,
        column(2.0, 2.0, 2.0, 2.0, device=device),
        column(2.0, 4.0, 2.0, 2.0, device=device),
        column(1.0, 1.0, 1.0, 1.0, device=device),
        column(False, True, False, False, device=device),
        column(False, False, False, False, device=device),
    )
    assert advantage.flatten().tolist() == [0.5, 1.0, 0.0, 0.0]
    assert target.flatten().tolist() == [2.5, 3.0, 2.0, 2.0]


def test_hand_td_lambda_window_edge_bootstraps_once(device):
    """gamma = lmbda = .5, V' = 8: step 1: 1 + .5 * 8 = 5 exactly; step 0: 1 + .5 * (.5 * 8 + .5 * 5) = 4.25."""
    no = column(False, False, device=device)
    target = F.td_lambda_return_estimate(
        0.5, 0.5, column(8.0, 8.0, device=device), column(1.0, 1.0, device=device), no, no
    )
    assert target.flatten().tolist() == [4.25, 5.0]


def test_hand_vtrace(device):
    """gamma = 1, ratios 2 and 1/2, rho_thresh = 1.5, c_thresh = 1, V = 1, V' = 1 then 3, rewards 1.

    step 1: rho = .5: delta = .5 * (1 + 3 - 1) = 1.5, vs = 2.5, advantage = .5 * (1 + 3 - 1) = 1.5
    step 0: rho = 1.5, c = 1: delta = 1.5 * (1 + 1 - 1) = 1.5, vs = 1 + 1.5 + 1 * 1.5 = 4,
            advantage = 1.5 * (1 + 2.5 - 1) = 3.75
    """
    no, log2 = column(False, False, device=device), 0.6931471805599453
    advantage, target = F.vtrace_advantage_estimate(
        1.0,
        column(log2, -log2, device=device),
        column(0.0, 0.0, device=device),
        column(1.0, 1.0, device=device),
        column(1.0, 3.0, device=device),
        column(1.0, 1.0, device=device),
        no,
        no,
        rho_thresh=1.5,
    )
    agree(target.flatten(), torch.tensor([4.0, 2.5]), 1e-6, 0)
    agree(advantage.flatten(), torch.tensor([3.75, 1.5]), 1e-6, 0)


def test_hand_retrace(device):
    """gamma = 1, lmbda = 1, ratios 1/4 and 1/2, Q = 1, E_pi Q' = 2 then 4, rewards 1.

    step 1: delta = 1 + 4 - 1 = 4, target = 5, advantage = .5 * 4 = 2
    step 0: delta = 1 + 2 - 1 = 2, x = 2 + .5 * 4 = 4 (c of step 1, not of step 0), target = 5,
            advantage = .25 * (1 + 5 - 1) = 1.25
    """
    no, log2 = column(False, False, device=device), 0.6931471805599453
    advantage, target = F.retrace_lambda_advantage_estimate(
        1.0,
        1.0,
        column(-2 * log2, -log2, device=device),
        column(0.0, 0.0, device=device),
        column(1.0, 1.0, device=device),
        column(2.0, 4.0, device=device),
        column(1.0, 1.0, device=device),
        no,
        no,
    )
    agree(target.flatten(), torch.tensor([5.0, 5.0]), 1e-6, 0)
    agree(advantage.flatten(), torch.tensor([1.25, 2.0]), 1e-6, 0)


def test_hand_reward_to_go(device):
    """gamma = .5: step 3: 1 + .5 * 4 = 3; step 2: 1 + .5 * 3 = 2.5;

    step 1, truncated: 1 + .5 * 8 = 5; step 0: 1 + .5 * 5 = 3.5.
    """
    ones = column(1.0, 1.0, 1.0, 1.0, device=device)
    done, never = column(False, True, False, False, device=device), column(False, False, False, False, device=device)
    bootstrap = column(9.0, 8.0, 9.0, 4.0, device=device)
    total = F.reward2go(ones, done, 0.5, terminated=never, bootstrap=bootstrap)
    assert total.flatten().tolist() == [3.5, 5.0, 2.5, 3.0]
    # without `terminated` the end at step 1 is terminal; without a bootstrap nothing stands behind the window
    assert F.reward2go(ones, done, 0.5).flatten().tolist() == [1.5, 1.0, 1.5, 1.0]


def test_hand_prefix_sums(device):
    """Ends at steps 1 and 2: 1, 1+2 | 3 | 4, 4+5. Starts at steps 1 and 2: 1 | 2 | 3, 3+4, 3+4+5."""
    x, flag = column(1.0, 2.0, 3.0, 4.0, 5.0, device=device), column(False, True, True, False, False, device=device)
    assert F.episodic_prefix_sum(x, flag).flatten().tolist() == [1.0, 3.0, 3.0, 4.0, 9.0]
    assert F.episodic_prefix_sum(x, flag, boundary="starts_at").flatten().tolist() == [1.0, 2.0, 3.0, 7.0, 12.0]


def test_hand_masked_gae(device):
    """gamma = lmbda = 1, steps 1 and 2 are no transitions.

    step 3: 1 - .5 = .5; step 0, whose successor is step 3: .5 - .25 + .5 = .75
    """
    nan = torch.nan
    advantage, target = F.generalized_advantage_estimate(
        1.0,
        1.0,
        column(0.25, nan, 9.0, 0.5, device=device),
        None,
        column(0.0, 9.0, nan, 1.0, device=device),
        column(False, True, False, True, device=device),
        column(False, True, False, True, device=device),
        mask=column(True, False, False, True, device=device),
    )
    assert advantage.flatten().tolist() == [0.75, 0.0, 0.0, 0.5]
    assert target.flatten().tolist() == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("a,b", list(itertools.combinations(TRACES, 2)))
def test_the_traces_differ(a, b):
    x = rollout(2, 9, seed=38, dtype=torch.float32)
    results = [computed(f"retrace_{t}", arguments(f"retrace_{t}", x))[1] for t in (a, b)]
    assert not torch.allclose(*results)
