"""Devices, markers, random rollouts and the numeric cases shared by the tests.

A test that takes the `device` fixture runs on the CPU and, marked `gpu`, on CUDA. Its CPU run is marked `interpret`,
because `TRITON_INTERPRET=1 pytest -m interpret` sends the same CPU tensors through the kernels, unless the test or its
parameter set is marked `large`: too slow for the interpreter.
"""

import json
import math
import os
from pathlib import Path

import pytest
import torch

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
CASES = json.loads((Path(__file__).parent / "data" / "cases.json").read_text())


def pytest_configure(config):
    config.addinivalue_line("markers", "large: too large for Triton's interpreter")


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    no_cuda = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        on_cpu = getattr(item, "callspec", None) is not None and item.callspec.params.get("device") == "cpu"
        if on_cpu and not item.get_closest_marker("large"):
            item.add_marker(pytest.mark.interpret)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_cuda)


# ------------------------------------------------------------------------------------------------------------ rollouts
def rollout(N, T, seed=0, *, dense="arbitrary", done=0.15, terminated=0.5, valid=0.7, actions=3, dtype=torch.float64):
    """Random `[N, T]` entries under the package's argument names, as a dictionary.

    `dense="consistent"` makes V'_t equal V_{t+1} inside an episode (over valid steps), `"arbitrary"` leaves it random.
    `done`, `terminated` and `valid` are rates: of ends, of terminal ones among them, and of valid steps in `mask`.
    Drawn in float64, rounded once to `dtype`, so that a reference sees what the package sees.
    """
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    def rate(p, *shape):
        return torch.rand(*shape, generator=g) < p

    x = {name: normal(N, T) for name in ("reward", "state_value", "next_state_value", "action_value", "bootstrap")}
    x["log_pi"], x["log_mu"] = -0.5 * normal(N, T).abs(), -0.5 * normal(N, T).abs()
    x["done"] = rate(done, N, T)
    x["terminated"] = x["done"] & rate(terminated, N, T)
    x["mask"] = rate(valid, N, T)
    x["behind"] = normal(N)
    x["ratio"], x["gradient"], x["initial"] = (0.3 * normal(N, T)).exp(), normal(N, T), normal(N)
    x["pi"], x["next_pi"] = normal(N, T, actions).softmax(-1), normal(N, T, actions).softmax(-1)
    x["action_values"], x["next_action_values"] = normal(N, T, actions), normal(N, T, actions)
    x["action"] = torch.randint(actions, (N, T), generator=g)
    x["gammas"] = (0.8 + 0.2 * torch.rand(N, T, generator=g, dtype=torch.float64)).to(dtype)
    x["lambdas"] = torch.rand(N, T, generator=g, dtype=torch.float64).to(dtype)
    if dense == "consistent":
        inside = ~x["done"][:, :-1]
        x["next_state_value"][:, :-1] = torch.where(inside, x["state_value"][:, 1:], x["next_state_value"][:, :-1])
    return x


# -------------------------------------------------------------------------------------------------------------- cases
ALGORITHMS = {
    "gae": "gae",
    "td0": "td0_return",
    "td1": "td1_return",
    "td_lambda": "td_lambda_return",
    "returns": "reward_to_go",
    "vtrace": "vtrace",
    "retrace": "retrace",
    "traces": "eligibility_trace",
    "prefix_sum": "episodic_prefix_sum",
    "normalize": "standardize",
}
FLAGS = ("done", "terminated", "mask")
RENAMED = {
    "value": "state_value",
    "next_value": "next_state_value",
    "q": "action_value",
    "exp_q_next": "next_state_value",
}


def case_arguments(case):
    """A case's estimator (its name in `reference`) and arguments: `[B, T]` or `[B, T, A]` tensors and plain floats.

    Time series come as float64, flags as bool; `gamma` and `lmbda` are floats or tensors that broadcast to `[B, T]`.
    """
    name, params = ALGORITHMS[case["algorithm"]], case.get("params", {})
    feed = case.get("feed", {})
    args = {}
    for key, value in case["inputs"].items():
        entry = torch.tensor(value, dtype=torch.float64)
        if "shape" in feed:
            entry = entry.reshape(feed["shape"][:-1])
        if key == "rho":
            key, entry = ("ratio", entry) if name == "eligibility_trace" else ("log_pi", entry.log())
        if key == "x":
            key = "gradient" if name == "eligibility_trace" else "x"
        args[RENAMED.get(key, key)] = entry != 0 if key in FLAGS else entry
    for key in ("gamma", "lmbda"):
        if key in params:
            value = params[key]
            args[key] = torch.tensor(value, dtype=torch.float64) if isinstance(value, list) else value
    series = next((v for v in args.values() if isinstance(v, torch.Tensor) and v.ndim > 1), None)
    if name == "standardize":
        args |= {"eps": params["eps"], "correction": params.get("ddof", 1)}
        args.pop("gamma", None)
    elif name == "retrace":
        args["log_mu"] = torch.zeros_like(args["log_pi"])
    elif name == "reward_to_go":
        args["bootstrap"] = args.pop("next_state_value", None)
    elif name in ("gae", "td0_return", "td1_return", "td_lambda_return", "vtrace"):
        args.setdefault("next_state_value", None)
    if name in ("reward_to_go", "eligibility_trace", "episodic_prefix_sum") and "done" not in args:
        args["done"] = torch.zeros(series.shape, dtype=torch.bool)
    for threshold in ("rho", "c"):
        if f"{threshold}_clip" in params:
            args[f"{threshold}_thresh"] = params[f"{threshold}_clip"]
    if feed.get("rolling_gamma") is False:
        args["rolling_gamma"] = False
    return name, args


def case_results(case, outputs):
    """(label, actual, wanted) of a case for the outputs an estimator returned: `expected` and `hand` numbers."""
    named = dict(zip(OUTPUTS[ALGORITHMS[case["algorithm"]]], outputs, strict=True))
    for source in ("expected", "hand"):
        for key, wanted in case.get(source, {}).items():
            actual = named[key]
            yield f"{source} {key}", actual, torch.tensor(wanted, dtype=torch.float64).reshape(actual.shape)


OUTPUTS = {
    "gae": ("advantage", "value_target"),
    "td0_return": ("value_target",),
    "td1_return": ("value_target",),
    "td_lambda_return": ("value_target",),
    "reward_to_go": ("returns",),
    "vtrace": ("advantage", "value_target"),
    "retrace": ("advantage", "target"),
    "eligibility_trace": ("trace",),
    "episodic_prefix_sum": ("prefix",),
    "standardize": ("normalized",),
}


def agree(actual, wanted, rtol, atol, label=""):
    """Equal within tolerances, with `NaN` exactly where it is wanted; compared in float64 on the CPU."""
    torch.testing.assert_close(
        actual.detach().cpu().double(),
        wanted.detach().cpu().double(),
        rtol=rtol,
        atol=atol,
        equal_nan=True,
        msg=lambda text: f"{label}: {text}" if label else text,
    )


def within(actual, wanted, bound, floor=0.0, label=""):
    """At most `bound` times the largest |x| of the row (`floor` at least) off; `NaN` where it is wanted.

    Time is the last dimension. Inputs are of order 1, so `floor=1` allows for cancellation in a short row.
    """
    actual, wanted = actual.detach().cpu().double(), wanted.detach().cpu().double()
    assert actual.shape == wanted.shape, f"{label}: {tuple(actual.shape)} against {tuple(wanted.shape)}"
    assert torch.equal(actual.isnan(), wanted.isnan()), f"{label}: NaN elsewhere than in the reference"
    if not wanted.numel():
        return
    error = torch.where(actual == wanted, 0.0, actual - wanted).nan_to_num(0.0, math.inf, -math.inf).abs()
    scale = (
        wanted.nan_to_num(0.0, 0.0, 0.0)
        .abs()
        .amax(-1, keepdim=True)
        .clamp_min(max(floor, torch.finfo(torch.float64).tiny))
    )
    worst = (error / scale).max().item()
    assert worst <= bound, f"{label}: off by {worst:.2e} of the row's largest value, {bound:.0e} allowed"
