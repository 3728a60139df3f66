"""Gradients of every estimator: against finite differences and loops under autograd, and what they stay clear of."""

import functools
import json
import linecache
import subprocess
import sys

import pytest
import torch
from tensordict import TensorDict
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

import rl_triton_td
import rl_triton_td.functional as F
from conftest import INTERPRET, agree, rollout
from rl_triton_td import adjoint, specs
from rl_triton_td._launch import Tile, force_tile
from rl_triton_td.specs import Spec, identity, jit, tl
from test_functional import ESTIMATORS, SERIES, TRACES, arguments, computed, episodes, picked_or_not

every_estimator = pytest.mark.parametrize("name", ESTIMATORS)
WITH_VALUES = [
    n for n, (_, _, entries, _) in ESTIMATORS.items() if "next_state_value" in entries and "retrace" not in n
]
FEW = ("gae", "gae_two_lambdas", "td0_advantage", "vtrace", "retrace_retrace", "eligibility_trace", "recurrence")
N, T = 2, 4


class Calls(TorchDispatchMode):
    """The operator's calls: name and number of outputs."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.rl_triton_td.evaluate.default:
            self.found.append((args[0], sum(o >= 0 for o in args[3])))
        return func(*args, **(kwargs or {}))


def rows(x):
    return x.unsqueeze(-1)


def time_major(x):
    return x.t().unsqueeze(-1)


def check(name, args, check_with=gradcheck, lay=rows, **kwargs):
    """Against finite differences in float64, of every entry that is a number."""
    args = {k: lay(v) if isinstance(v, torch.Tensor) and v.ndim > 1 else v for k, v in args.items()}
    if args.get("initial") is not None or "bootstrap" in args and args["bootstrap"].ndim == 1:
        args |= {k: args[k].unsqueeze(-1) for k in ("initial", "bootstrap") if k in args and args[k].ndim == 1}
    tracked = [k for k, v in args.items() if isinstance(v, torch.Tensor) and v.is_floating_point()]
    leaves = [args[k].clone().requires_grad_() for k in tracked]
    function = ESTIMATORS[name][0]
    call = functools.partial(function, **kwargs)
    assert check_with(lambda *given: call(**args | dict(zip(tracked, given, strict=True))), leaves, fast_mode=True)


def with_hypers(name, x, form, **changes):
    """Arguments with gamma and lambda as tensors, `"number"`s or `"step"` by step."""
    args = arguments(name, x, **changes)
    forms = {"number": (torch.tensor(0.9).double(), torch.tensor(0.8).double()), "step": (x["gammas"], x["lambdas"])}
    given = dict(zip(("gamma", "lmbda"), forms[form], strict=True))
    return args | {k: v for k, v in given.items() if k in args}


# -------------------------------------------------------------------------------------------------- finite differences


@every_estimator
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("form", ["number", "step"])
def test_gradcheck(name, masked, form):
    x = rollout(N, T, seed=40, done=0.3)
    check(name, with_hypers(name, x, form, **({"mask": x["mask"]} if masked else {})))


@every_estimator
def test_gradcheck_time_first(name):
    x = rollout(N, T, seed=41, done=0.3)
    check(name, with_hypers(name, x, "step"), lay=time_major, time_dim=0)


@pytest.mark.parametrize("name", WITH_VALUES)
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("per_step", [False, True], ids=["behind", "steps"])
def test_gradcheck_of_shifted_values(name, masked, per_step):
    x = rollout(N, T, seed=42, done=0.3, terminated=0.5 if per_step else 1.0)
    changes = {"next_state_value": None, "state_value": x["state_value"], "done": x["done"]}
    changes["bootstrap"] = x["bootstrap"] if per_step else x["behind"]
    check(name, with_hypers(name, x, "number", **changes, **({"mask": x["mask"]} if masked else {})))


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("reverse", [False, True])
def test_gradcheck_of_what_enters_a_window(masked, reverse):
    """Rows without a valid step among them."""
    x = rollout(4, T, seed=43, valid=0.5)
    x["mask"][0], x["mask"][1] = False, torch.tensor([False, True, True, False])
    args = arguments("recurrence", x, reverse=reverse, **({"mask": x["mask"]} if masked else {}))
    check("recurrence", args)


@pytest.mark.parametrize("name", ["td1_return", "td_lambda_return"])
def test_gradcheck_of_the_start_steps_discount(name):
    x = rollout(N, T, seed=44, done=0.3)
    check(name, with_hypers(name, x, "step", rolling_gamma=False))


@pytest.mark.parametrize("trace", TRACES)
@picked_or_not
def test_gradcheck_from_action_values(trace, picked):
    x = rollout(N, T, seed=45, done=0.3)
    log_mu, *rest = (x[k].unsqueeze(-1) for k in ("log_mu", "reward", "done", "terminated"))
    if picked:
        x["action_values"] = x["action_values"].gather(-1, x["action"].unsqueeze(-1))
    leaves = [x[k].requires_grad_() for k in ("pi", "next_pi", "action_values", "next_action_values")]
    leaves += [log_mu.requires_grad_(), rest[0].requires_grad_()]

    def call(pi, next_pi, q, next_q, log_mu, reward):
        return F.retrace_from_action_values(
            0.9, 0.8, pi, next_pi, q, next_q, x["action"], log_mu, reward, *rest[1:], trace=trace, c_thresh=0.7
        )

    assert gradcheck(call, leaves)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize(
    "name", ["gae", "gae_two_lambdas", "td0_advantage", "vtrace", "retrace_retrace", "eligibility_trace", "recurrence"]
)
def test_gradgradcheck(name, masked):
    x = rollout(1, 3, seed=46, done=0.3)
    args = with_hypers(name, x, "number", **({"mask": x["mask"]} if masked else {}))
    check(name, args, functools.partial(gradgradcheck, gen_non_contig_grad_outputs=True))


@pytest.mark.parametrize("name", [name for name in FEW if name in WITH_VALUES])
@pytest.mark.parametrize("per_step", [False, True], ids=["behind", "steps"])
def test_gradgradcheck_of_shifted_values(name, per_step):
    """A factor of what has no gradient is 0, where the numbers it is made of were not kept too."""
    x = rollout(1, 3, seed=47, done=0.3, terminated=0.5 if per_step else 1.0)
    changes = {"next_state_value": None, "state_value": x["state_value"], "done": x["done"]}
    changes["bootstrap"] = x["bootstrap"] if per_step else x["behind"]
    args = arguments(name, x, **changes)
    check(name, args | ({"lmbda": x["lambdas"]} if "lmbda" in args else {}), gradgradcheck)


def test_second_derivatives_where_the_decay_is_zero():
    """Nothing is selected away there but NaN."""
    alpha, beta = torch.randn(2, 5, 1).double().requires_grad_(), torch.zeros(2, 5, 1).double().requires_grad_()
    assert gradgradcheck(lambda a, b: F.linear_recurrence(a, b), (alpha, beta))


def test_jacobians():
    """The backward pass in a batch of its own."""
    x = rollout(N, T, seed=47)
    given = [rows(x[k]) for k in ("reward", "gammas", "log_pi")]
    log_mu, *values = (rows(x[k]) for k in ("log_mu", "state_value", "next_state_value"))

    def call(reward, gamma, log_pi):
        return F.vtrace_advantage_estimate(gamma, log_pi, log_mu, *values, reward, rows(x["done"]))[0]

    wanted = torch.autograd.functional.jacobian(call, tuple(given))
    for a, b in zip(torch.func.jacrev(call, (0, 1, 2))(*given), wanted, strict=True):
        agree(a, b, 1e-12, 1e-12)


# ------------------------------------------------------------------------------------------------ loops under autograd


def loop_gae(x, gamma, lmbda):
    """A_t by recursion over valid steps, one number at a time."""
    advantage = [[torch.zeros(())] * x["reward"].shape[1] for _ in x["reward"]]
    for n, valid in enumerate(x["mask"].tolist()):
        carry, after = None, None
        for t in reversed([t for t, keep in enumerate(valid) if keep]):
            cut = bool(x["done"][n, t]) or after is None
            delta = x["reward"][n, t] - x["state_value"][n, t]
            if not x["terminated"][n, t]:
                delta = delta + gamma[n, t] * (x["bootstrap"][n, t] if cut else x["state_value"][n, after])
            carry = delta if cut else delta + gamma[n, t] * lmbda[n, t] * carry
            advantage[n][t], after = carry, t
    return torch.stack([torch.stack([a.double() for a in row]) for row in advantage])


def loop_vtrace(x, gamma, lmbda):
    """v_t and A_t of Espeholt et al. 2018, one number at a time; thresholds 1.1, 0.9 and 1.3."""
    steps = x["reward"].shape[1]
    outputs = []
    for n in range(len(x["reward"])):
        carry, row = None, [None] * steps
        for t in reversed(range(steps)):
            value, cut = x["state_value"][n, t], bool(x["done"][n, t]) or t == steps - 1
            ratio = (x["log_pi"][n, t] - x["log_mu"][n, t]).exp()
            step = torch.zeros(()).double() if x["terminated"][n, t] else x["next_state_value"][n, t]
            x_t = ratio.clamp(max=1.1) * (x["reward"][n, t] + gamma[n, t] * step - value)
            following = step
            if not cut:
                following = carry + x["state_value"][n, t + 1]
                x_t = x_t + gamma[n, t] * lmbda[n, t] * ratio.clamp(max=0.9) * carry
            advantage = ratio.clamp(max=1.3) * (x["reward"][n, t] + gamma[n, t] * following - value)
            row[t], carry = torch.stack((advantage, x_t + value)), x_t
        outputs.append(torch.stack(row, 1))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("layout", [rows, time_major], ids=["rows", "time-major"])
@pytest.mark.parametrize("steps", [1, 30])
def test_gae_like_a_loop_under_autograd(steps, layout, device):
    names = ("reward", "state_value", "bootstrap", "gammas", "lambdas")
    x = rollout(3, steps, seed=48)
    leaves = [x[k].requires_grad_() for k in names]
    weight = torch.randn(3, steps, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = torch.autograd.grad((weight * loop_gae(x, x["gammas"], x["lambdas"])).sum(), leaves, allow_unused=True)
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
        d = {
            k: layout(v.detach().to(dtype) if v.is_floating_point() else v).to(device)
            for k, v in x.items()
            if v.ndim == 2
        }
        given = [d[k].requires_grad_() for k in names]
        advantage, _ = F.generalized_advantage_estimate(
            d["gammas"], d["lambdas"], d["state_value"], None, d["reward"], d["done"], d["terminated"],
            bootstrap=d["bootstrap"], mask=d["mask"], time_dim=0 if layout is time_major else 1,
        )  # fmt: skip
        got = torch.autograd.grad((advantage * layout(weight).to(advantage)).sum(), given)
        for k, g, w in zip(names, got, wanted, strict=True):
            agree(g, layout(torch.zeros(3, steps) if w is None else w), bound, bound, f"{k}, {dtype}")


@pytest.mark.parametrize("layout", [rows, time_major], ids=["rows", "time-major"])
@pytest.mark.parametrize("steps", [1, 30])
def test_vtrace_like_a_loop_under_autograd(steps, layout, device):
    names = ("reward", "state_value", "next_state_value", "log_pi", "log_mu", "gammas", "lambdas")
    x = rollout(3, steps, seed=49)
    leaves = [x[k].requires_grad_() for k in names]
    weight = torch.randn(2, 3, steps, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = torch.autograd.grad((weight * loop_vtrace(x, x["gammas"], x["lambdas"])).sum(), leaves, allow_unused=True)
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 3e-5)):
        d = {
            k: layout(v.detach().to(dtype) if v.is_floating_point() else v).to(device)
            for k, v in x.items()
            if v.ndim == 2
        }
        given = [d[k].requires_grad_() for k in names]
        outputs = F.vtrace_advantage_estimate(
            d["gammas"], d["log_pi"], d["log_mu"], d["state_value"], d["next_state_value"], d["reward"], d["done"],
            d["terminated"], 1.1, 0.9, lmbda=d["lambdas"], rho_pg_thresh=1.3, time_dim=0 if layout is time_major else 1,
        )  # fmt: skip
        loss = sum((o * layout(w).to(o)).sum() for o, w in zip(outputs, weight, strict=True))
        got = torch.autograd.grad(loss, given)
        for k, g, w in zip(names, got, wanted, strict=True):
            agree(g, layout(torch.zeros(3, steps) if w is None else w), bound, bound, f"{k}, {dtype}")


# -------------------------------------------------------------------------------------------------- devices and kernels


@every_estimator
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_single_precision_like_double(name, masked, dtype, device):
    """The gradient on the device, in its own dtype, against that of float64 on the CPU."""
    if INTERPRET and (masked or dtype != torch.float32 or name not in FEW):
        pytest.skip("a few are enough for the interpreter")
    x = rollout(3, 33, seed=50, dtype=dtype)
    args = with_hypers(name, x, "number", **({"mask": x["mask"]} if masked else {}))
    wanted = gradients(name, {k: v.double() if is_number(v) else v for k, v in args.items()}, "cpu")
    got = gradients(name, args, device)
    bound = 3e-5 if dtype == torch.float32 else 2e-2
    for k in wanted:
        assert got[k].dtype == (args[k].dtype if isinstance(args[k], torch.Tensor) else got[k].dtype)
        scale = wanted[k].abs().max().clamp_min(1)
        agree(got[k] / scale.to(device), wanted[k] / scale, 0, bound, f"{name}: {k}")


def is_number(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def gradients(name, args, device):
    leaves = {k: v.detach().to(device).requires_grad_() for k, v in args.items() if is_number(v)}
    outputs = computed(name, args | leaves, device, lay=lambda x: rows(x) if x.ndim else x)
    g = torch.Generator().manual_seed(51)
    loss = sum((o * torch.randn(o.shape, generator=g).bfloat16().to(o)).sum() for o in outputs)
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {k: torch.zeros_like(v) if f is None else f for (k, v), f in zip(leaves.items(), found, strict=True)}


TILES = [Tile(1, 16, 1), Tile(4, 16, 1), Tile(2, 32, 1, 3), Tile(1, 16, 1, 100)]


@pytest.mark.parametrize("name", ["gae", "gae_two_lambdas", "vtrace", "eligibility_trace", "recurrence_reversed"])
@pytest.mark.parametrize("tile", TILES, ids=["one row", "rows together", "segments", "a segment a chunk"])
def test_every_tile_gives_the_same_gradient(name, tile, device):
    if device == "cpu" and not INTERPRET:
        pytest.skip("the CPU path has no tiles")
    if INTERPRET and (name not in ("gae", "vtrace") or tile is TILES[0]):
        pytest.skip("a few are enough for the interpreter")
    x = rollout(3, 70, seed=52, dtype=torch.float32)
    args = with_hypers(name, x, "number", mask=x["mask"])
    wanted = gradients(name, {k: v.double() if is_number(v) else v for k, v in args.items()}, device)
    with force_tile(tile):
        got = gradients(name, args, device)
    for k in wanted:
        scale = wanted[k].abs().max().clamp_min(1)
        agree(got[k] / scale, wanted[k] / scale, 0, 3e-5, f"{name}: {k}")


# ----------------------------------------------------------------------------------------------------------------- NaN


@every_estimator
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_number_stays_in_the_gradients_of_its_episode(name, bad, device):
    """Entries, and the gradient that comes in, are bad in one episode."""
    if name.startswith("recurrence"):
        pytest.skip("no episodes")
    if INTERPRET and (bad == torch.inf or name not in FEW):
        pytest.skip("a few are enough for the interpreter")
    x = rollout(3, 24, seed=53, done=0.25)
    number = x["done"].long().cumsum(1) if name == "prefix_sum_starts_at" else episodes(x["done"])
    at = number == number[:, 12:13]
    weight = torch.randn(3, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def run(x, weight):
        args = with_hypers(name, x, "step")
        leaves = {k: v.to(device).requires_grad_() for k, v in args.items() if is_number(v) and v.ndim > 1}
        outputs = computed(name, args | leaves, device)
        incoming = [weight.to(device)] * len(outputs)
        return torch.autograd.grad(outputs, list(leaves.values()), incoming, allow_unused=True)

    clean = run(x, weight)
    poisoned = {k: torch.where(at, bad, v) if k in (*SERIES, "gammas", "lambdas") else v for k, v in x.items()}
    for a, b in zip(run(poisoned, torch.where(at, bad, weight)), clean, strict=True):
        if a is not None:
            torch.testing.assert_close(a.cpu()[~at], b.cpu()[~at], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["gae", "td_lambda_return", "vtrace", "eligibility_trace_alone"])
def test_a_decay_of_zero_selects_in_gradients(name, device):
    """lambda = 0: a bad incoming gradient concerns its own step alone (and, of V-trace's advantage, the one after)."""
    x = rollout(2, 20, seed=54, done=0.0)
    weight = torch.randn(2, 20, dtype=torch.float64)
    at = torch.zeros(2, 20, dtype=torch.bool)
    at[:, 11] = True

    def run(weight):
        leaf = x["reward" if name != "eligibility_trace_alone" else "gradient"].clone().to(device).requires_grad_()
        args = arguments(name, x, lmbda=0.0) | {"reward" if "trace_" not in name else "gradient": leaf}
        outputs = computed(name, args, device)
        return torch.autograd.grad(outputs, leaf, [weight.to(device)] * len(outputs))[0].cpu()

    clean, bad = run(weight), run(torch.where(at, torch.nan, weight))
    at[:, 12] = name == "vtrace"
    assert torch.equal(clean[~at], bad[~at])


@pytest.mark.parametrize("name", ["vtrace", "retrace_retrace"])
def test_a_clipped_ratio_may_be_infinite(name, device):
    x = rollout(2, 9, seed=55)
    x["log_pi"][:, 4] = 1000.0
    leaves = [x[k].to(device).requires_grad_() for k in ("log_pi", "reward")]
    args = arguments(name, x, log_pi=leaves[0], reward=leaves[1])
    grads = torch.autograd.grad([o.sum() for o in computed(name, args, device)], leaves)
    assert all(g.isfinite().all() for g in grads) and (grads[0][:, 4] == 0).all()


# --------------------------------------------------------------------------------------------------- what is not asked


def test_what_is_not_asked_for_is_not_computed():
    x = {k: rows(v) for k, v in rollout(2, 5, seed=56).items() if v.ndim == 2}
    reward, value = x["reward"].requires_grad_(), x["state_value"]
    with Calls() as calls:
        advantage, target = F.generalized_advantage_estimate(
            0.9, 0.8, value, x["next_state_value"], reward, x["done"], x["terminated"]
        )
        torch.autograd.grad(advantage.sum(), reward)
    assert calls.found == [("gae", 2), ("gae'", 1)]


def test_what_is_kept_for_the_backward_pass():
    """Flags alone where the decay is not learnt; what enters each step where it is."""
    x = {k: rows(v) for k, v in rollout(2, 5, seed=57).items() if v.ndim == 2}
    kept = []

    def pack(x):
        kept.append(x)
        return x

    def run(gamma):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            F.generalized_advantage_estimate(
                gamma, 0.8, x["state_value"].requires_grad_(), x["next_state_value"], x["reward"], x["done"]
            )
        return [(k.dtype, k.ndim) for k in kept]

    flag, number, series = (torch.bool, 3), (torch.float64, 0), (torch.float64, 3)
    assert sorted(run(torch.tensor(0.9).double()), key=str) == sorted([flag, number, number], key=str)
    found = run(torch.tensor(0.9).double().requires_grad_())
    assert sorted(found, key=str) == sorted([flag, number, number, series, series], key=str)


@pytest.mark.parametrize("differentiable", [False, True])
def test_a_module_holds_a_graph_only_where_it_says_so(differentiable):
    x = {k: rows(v) for k, v in rollout(2, 5, seed=58).items() if v.ndim == 2}
    after = {"reward": x["reward"], "done": x["done"], "terminated": x["done"], "state_value": x["next_state_value"]}
    td = TensorDict({"state_value": x["state_value"].requires_grad_(), "next": after}, [2, 5])
    out = rl_triton_td.GAE(gamma=0.9, lmbda=0.8, differentiable=differentiable)(td)
    assert out["advantage"].requires_grad is differentiable
    if differentiable:
        assert torch.autograd.grad(out["advantage"].sum(), td["state_value"])[0].abs().sum() > 0


# --------------------------------------------------------------------------------------------------------- declarations


def spec_of(name, coefficients, epilogue=identity, inputs=("gradient", "decay"), outputs=("trace",), **kwargs):
    return Spec(name, inputs, (), outputs, coefficients, epilogue, transition=False, reverse=False, **kwargs)


@pytest.fixture
def declared():
    """A place for specs that are forgotten afterwards."""
    before = dict(specs.SPECS)
    yield
    specs.SPECS.clear()
    specs.SPECS.update(before)


def run_spec(spec, *inputs):
    return F._forward(spec, inputs, (), None, None, None, inputs[0], 1)


@jit
def quotient(step, tile, hypers):
    return 1.0 - tile[0] / (2.0 + tl.exp(-tile[1])), tl.where((tile[1] < 0.5) & ~(tile[0] > 1.0), 0.5 * tile[1], -0.3)


@jit
def squared(x, x_next, step, tile, hypers):
    return (x[0] * x[0] * tile[0] + x_next[0] * x_next[0] / 3.0,)


def test_a_declaration_of_ones_own(declared, device):
    """Quotients, comparisons, and an epilogue that is not linear in the solution."""
    spec = spec_of("quotient", quotient, squared, looks_ahead=("trace",))
    leaves = [x.double().to(device).requires_grad_() for x in torch.randn(2, 2, 4, 1)]
    with Calls() as calls:
        run_spec(spec, *leaves)
    assert calls.found == [("quotient+", 3)]
    assert gradcheck(lambda *given: run_spec(spec, *given), leaves)
    assert INTERPRET or gradgradcheck(lambda *given: run_spec(spec, *given), leaves)


@jit
def decayed_by_what_came_before(step, tile, hypers):
    gradient, ratio_before, done_before = tile
    return gradient, tl.where(done_before, 0.0, ratio_before)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_the_gradient_of_an_entry_read_one_step_before(declared, masked):
    spec = spec_of("before", decayed_by_what_came_before, inputs=("gradient", "ratio@-1", "done@-1"))
    x = {k: rows(v) for k, v in rollout(2, 5, seed=59, done=0.3).items() if v.ndim == 2}

    def call(gradient, ratio):
        mask = x["mask"] if masked else None
        return F._forward(spec, (gradient, ratio, x["done"]), (), None, mask, None, gradient, 1)

    assert gradcheck(call, [x[k].requires_grad_() for k in ("gradient", "ratio")])


@jit
def magnitude(step, tile, hypers):
    return abs(tile[0]), tile[1]


def test_what_has_no_derivation_is_differentiated_by_pytorch(declared):
    """Around the operator of the bare recurrence."""
    spec = spec_of("magnitude", magnitude)
    assert not adjoint.differentiable(spec)
    leaves = [x.double().requires_grad_() for x in torch.randn(2, 2, 4, 1)]
    with Calls() as calls:
        run_spec(spec, *leaves)
    assert calls.found == [("forward_recurrence+", 2)]
    assert gradcheck(lambda *given: run_spec(spec, *given), leaves)
    compiled = torch.compile(lambda *given: run_spec(spec, *given), fullgraph=True, backend="aot_eager")
    agree(compiled(*leaves), run_spec(spec, *leaves), 1e-12, 1e-12)


def test_two_declarations_of_one_name_are_refused(declared):
    first = spec_of("mine", specs.given)
    spec_of("mine", quotient)
    x = torch.randn(2, 4, 1, requires_grad=True)
    run_spec(first, x.detach(), x.detach())
    with pytest.raises(ValueError, match="Two specs are named 'mine'"):
        run_spec(first, x, x)


def test_the_operator_says_what_it_lacks():
    """Called past the functions, without the outputs that its gradient reads."""
    x = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="need outputs of forward_recurrence+"):
        torch.ops.rl_triton_td.evaluate("forward_recurrence", [x], [-1] * 7 + [0, 0, -1], [0], [0, 1], 1, False, False)


def test_sources_are_the_same_in_every_process():
    """Triton's cache on disk goes by them."""
    derive = """
import json, linecache
from rl_triton_td import adjoint, specs
for name in ("retrace", "gae", "vtrace"):
    adjoint.saving(adjoint.adjoint(specs.SPECS[name]).spec)
print(json.dumps({k: v[2] for k, v in linecache.cache.items() if k.startswith("<rl_triton_td")}))
"""
    for spec in (specs.VTRACE, specs.GAE, specs.RETRACE):
        adjoint.saving(adjoint.adjoint(spec).spec)
    run = subprocess.run([sys.executable, "-c", derive], capture_output=True, text=True, check=True)
    sources = json.loads(run.stdout)
    assert len(sources) == 9 and all(linecache.cache[file][2] == lines for file, lines in sources.items())
