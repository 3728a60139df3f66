"""Every numeric case through every path that can take it: functions and TensorDict modules, on each device."""

import functools

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule

import rl_triton_td
import rl_triton_td.functional as F
from conftest import ALGORITHMS, CASES, INTERPRET, agree, case_arguments, case_results

KNOWN_FEEDS = {
    "base_gamma",
    "check_default",
    "compile",
    "container",
    "device_only",
    "dtype",
    "error_ok",
    "feature",
    "flag_dtype",
    "group_ddof",
    "layout",
    "memory",
    "rolling_gamma",
    "row_stride",
    "same_dtype",
    "shape",
    "shards",
    "steps",
}
TIME_DIM = {"BT1": -2, "BTF": -2, "BT": -1, "TB1": 0, "BTA1": 1, "T": -1, "reward_BT_rest_BT1": -2}
REFUSALS = (ValueError, TypeError, KeyError, RuntimeError)


def feed_of(case):
    feed = case.get("feed", {})
    assert feed.keys() <= KNOWN_FEEDS, f"the tests do not know how to feed {feed.keys() - KNOWN_FEEDS}"
    return feed


# -------------------------------------------------------------------------------------------------------- presentation
def present(case, device, team=False):
    """The estimator's name, its arguments laid out in memory as the case asks, and the time dimension.

    Team-level entries of a multi-agent case are expanded over the agents unless `team`, then they stay `[B, T, 1]`.
    """
    feed = feed_of(case)
    name, args = case_arguments(case)
    dtype = getattr(torch, feed.get("dtype", "float32"))
    flag_dtype = getattr(torch, feed.get("flag_dtype", "bool"))
    if name == "standardize":
        return name, {k: _typed(v, dtype, flag_dtype, device) for k, v in args.items()}, None
    layout = feed.get("layout", "BT1")
    shape = next(v.shape for k, v in args.items() if isinstance(v, torch.Tensor) and v.ndim > 1)
    agents = max((v.shape[2] for v in args.values() if isinstance(v, torch.Tensor) and v.ndim > 2), default=1)

    def laid_out(key, entry):
        if layout == "BT" or (layout == "reward_BT_rest_BT1" and key == "reward"):
            return entry
        if layout == "T":
            return entry[0]
        if layout == "BTF":
            return entry
        if layout == "TB1":
            return entry.transpose(0, 1).unsqueeze(-1).contiguous()
        if layout == "BTA1":
            if team and entry.ndim == 2:
                return entry[..., None]
            entry = entry if entry.ndim == 3 else entry[..., None].expand(*entry.shape, agents)
            return entry[..., None]
        return entry.unsqueeze(-1)

    for key, value in args.items():
        if isinstance(value, torch.Tensor):
            if value.ndim == 1:  # a hyperparameter per step
                value = value.expand(shape[:2])
            args[key] = _typed(laid_out(key, value), dtype, flag_dtype, device)
    if "memory" in feed:
        args = {"transposed": _transposed, "sliced": _sliced}[feed["memory"]](args)
    if "row_stride" in feed:
        args = _far_apart(args, feed["row_stride"])
    return name, args, TIME_DIM[layout]


def _typed(value, dtype, flag_dtype, device):
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device, flag_dtype if value.dtype == torch.bool else dtype)


def _series(args):
    return {k: v for k, v in args.items() if isinstance(v, torch.Tensor) and v.ndim > 1}


def _transposed(args):
    return args | {k: v.transpose(0, 1).contiguous().transpose(0, 1) for k, v in _series(args).items()}


def _sliced(args):
    """Every entry a slice of one wider buffer of its dtype, at its own offset."""
    series, out = _series(args), dict(args)
    for dtype in {v.dtype for v in series.values()}:
        keys = [k for k, v in series.items() if v.dtype == dtype]
        B, T, _ = series[keys[0]].shape
        buffer = torch.full((B, T + 2, 3 * len(keys)), 9, device=series[keys[0]].device).to(dtype)
        for i, key in enumerate(keys):
            out[key] = buffer[:, 1 : T + 1, 3 * i + 1 : 3 * i + 2]
            out[key].copy_(series[key])
    return out


def _far_apart(args, stride):
    """Three copies of the row, so far apart in one buffer a dtype that the last one starts past 2**31 elements."""
    series, out = _series(args), dict(args)
    for dtype in {v.dtype for v in series.values()}:
        keys = [k for k, v in series.items() if v.dtype == dtype]
        _, T, _ = series[keys[0]].shape
        buffer = torch.empty(2 * stride + T * len(keys), dtype=dtype, device=series[keys[0]].device)
        for i, key in enumerate(keys):
            out[key] = buffer.as_strided((3, T, 1), (stride, 1, 1), i * T)
            out[key].copy_(series[key].expand(3, T, 1))
    return out


def restore(x, case):
    """An output in the case's own layout, `[B, T]` or `[B, T, A]`."""
    layout = case.get("feed", {}).get("layout", "BT1")
    if "row_stride" in case.get("feed", {}):
        assert torch.equal(x[0], x[1]) and torch.equal(x[0], x[2])
        x = x[:1]
    if case["algorithm"] == "normalize" or layout in ("BT", "BTF"):
        return x
    if layout == "T":
        return x[None]
    if layout == "TB1":
        x = x.transpose(0, 1)
    assert x.shape[-1] == 1, f"{tuple(x.shape)}: a case of one feature"
    return x.squeeze(-1)


def check(case, outputs, args):
    for x in outputs:
        if x is not None and case.get("feed", {}).get("same_dtype"):
            assert x.dtype == args["state_value"].dtype
    outputs = [x if x is None else restore(x, case) for x in outputs]
    for label, actual, wanted in case_results(case, outputs):
        agree(actual, wanted, case["rtol"], case["atol"], label)


def refused(case, call):
    """What `call()` returns; None where the case allows a refusal and the message says what is wrong."""
    try:
        return call()
    except REFUSALS as error:
        named = ("reward", "done", "terminated", "state_value")
        if case.get("feed", {}).get("error_ok") and any(name in str(error) for name in named):
            return None
        raise


def skip_unfit(case, device):
    if case.get("feed", {}).get("device_only") and device != "cuda":
        pytest.skip("a buffer past 2**31 elements: on CUDA only")


def compiled(function):
    """Without a graph break; on the CPU without a C++ compiler."""
    torch._dynamo.reset()
    backend = "inductor" if torch.cuda.is_available() else "aot_eager"
    return torch.compile(function, fullgraph=True, backend=backend)


# ---------------------------------------------------------------------------------------------------------- functional
FUNCTIONAL = {
    "gae": (F.generalized_advantage_estimate, F.vec_generalized_advantage_estimate),
    "td0_return": (F.td0_return_estimate,),
    "td1_return": (F.td1_return_estimate, F.vec_td1_return_estimate),
    "td_lambda_return": (F.td_lambda_return_estimate, F.vec_td_lambda_return_estimate),
    "reward_to_go": (F.reward2go,),
    "vtrace": (F.vtrace_advantage_estimate,),
    "retrace": (F.retrace_lambda_advantage_estimate, F.retrace_lambda_return_estimate),
    "eligibility_trace": (F.eligibility_trace,),
    "episodic_prefix_sum": (F.episodic_prefix_sum,),
    "standardize": (F.standardize,),
}


def run_functional(case, device):
    name, args, time_dim = present(case, device)
    if time_dim is not None:
        args["time_dim"] = time_dim
    for function in FUNCTIONAL[name]:
        if function.__name__.startswith("vec_") and args.get("rolling_gamma") is False:
            continue  # refused there, as in TorchRL
        call = functools.partial(compiled(function) if feed_of(case).get("compile") else function, **args)
        outputs = refused(case, call)
        if outputs is None:
            continue
        if name == "retrace" and not isinstance(outputs, tuple):
            outputs = (None, outputs)
        check(case, outputs if isinstance(outputs, tuple) else (outputs,), args)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_functional(case, device):
    skip_unfit(case, device)
    if INTERPRET and len(str(case["inputs"])) > 20_000:
        pytest.skip("too long for the interpreter")
    run_functional(case, device)


def test_no_case_is_dropped(monkeypatch):
    """Each case of the file reaches a function of the package (the one for CUDA alone is counted, not run)."""
    assert len(CASES) == len({case["name"] for case in CASES}) == 92
    reached = []

    def record(case, outputs, args):
        reached.append(case["name"])

    monkeypatch.setattr(f"{__name__}.check", record)
    monkeypatch.setattr(f"{__name__}.compiled", lambda function: function)
    for case in CASES:
        if case.get("feed", {}).get("device_only"):
            reached.append(case["name"])
            continue
        run_functional(case, "cpu")
        if case.get("feed", {}).get("error_ok") and case["name"] not in reached:
            reached.append(case["name"])
    assert set(reached) == {case["name"] for case in CASES}


# ------------------------------------------------------------------------------------------------------------- modules
MODULES = {
    "gae": "GAE",
    "td0_return": "TD0Estimator",
    "td1_return": "TD1Estimator",
    "td_lambda_return": "TDLambdaEstimator",
    "reward_to_go": "DiscountedReturn",
    "vtrace": "VTrace",
    "retrace": "RetraceEstimator",
    "eligibility_trace": "EligibilityTrace",
    "episodic_prefix_sum": "EpisodicPrefixSum",
}
# What a module has no argument for: statistics alone, gamma of the start step.
WITHOUT_MODULE = {
    case["name"] for case in CASES if case["algorithm"] == "normalize" or "rolling" in case.get("params", {})
}
NEXT = {"next_state_value": "state_value", "reward": "reward", "done": "done", "terminated": "terminated"}
# arguments whose entry goes by their own name, said through `keys`
NAMED = ("mask", "bootstrap", "ratio", "x")
HYPERS = ("gamma", "lmbda", "rho_thresh", "c_thresh")


class Stored(torch.distributions.Distribution):
    """A policy that gives every action the log-probability that the case says."""

    arg_constraints = {}

    def __init__(self, log_pi):
        self.log_pi = log_pi
        super().__init__(log_pi.shape, validate_args=False)

    def log_prob(self, action):
        return self.log_pi

    def sample(self, sample_shape=()):
        raise AssertionError("V-trace scores the stored action, it samples none")

    rsample = sample
    mode = mean = deterministic_sample = property(sample)


def actor():
    copy = TensorDictModule(torch.nn.Identity(), in_keys=["log_pi"], out_keys=["stored"])
    policy = ProbabilisticTensorDictModule(
        in_keys={"log_pi": "stored"}, out_keys=["action"], distribution_class=Stored, return_log_prob=True
    )
    return ProbabilisticTensorDictSequential(copy, policy)


def module_and_tensordict(case, device, prefix=()):
    """The module of a case and its TensorDict; `prefix` nests every entry, as in `("agents", "reward")`."""
    feed = feed_of(case)
    name, args, time_dim = present(case, device, team=True)
    hypers = {k: args.pop(k) for k in HYPERS if k in args}
    if "base_gamma" in feed:
        hypers["gamma"] = feed["base_gamma"]
        args["steps_to_next_obs"] = torch.tensor(feed["steps"], device=device)[..., None]
    values = next(v for k, v in args.items() if k in ("state_value", "reward", "x", "gradient"))
    batch = values.shape[:1] if feed.get("layout") == "T" else values.shape[:2]
    cls = MODULES[name] if feed.get("layout") != "BTA1" else "MultiAgentGAE"
    if name in ("td0_return", "td1_return", "td_lambda_return"):
        args["state_value"] = torch.zeros_like(values)
    if args.get("next_state_value", 0) is None:
        args["bootstrap"] = torch.zeros_like(values)
    names = ["time", None] if feed.get("layout") == "TB1" else None
    args = {k: v for k, v in args.items() if v is not None}
    td = TensorDict({}, batch, names=names, device=device)
    for key, value in args.items():
        value = value if value.shape[: len(batch)] == batch else value.expand(*batch, *value.shape[len(batch) :])
        entry = {"log_mu": "action_log_prob", "action_value": "state_action_value"}.get(key, key)
        td[("next", *prefix, NEXT[key]) if key in NEXT else (*prefix, entry)] = value
    keys = {k: (*prefix, k) for k in NAMED if k in args}
    if prefix:
        keys |= {k: (*prefix, k) for k in ("reward", "done", "terminated", "advantage", "value_target")}
        keys["value"] = (*prefix, "state_value")
    kwargs = {"keys": keys} if keys else {}
    if cls not in ("EligibilityTrace", "EpisodicPrefixSum"):
        kwargs["value_network"] = None
    if name == "vtrace":
        td["action"] = torch.zeros_like(values)
        kwargs |= {"actor_network": actor()}
    module = getattr(rl_triton_td, cls)(**hypers, **kwargs)
    return module.to(device), td


def outputs_of(case, module, td):
    """What the module wrote, in the order of the functional estimator's outputs."""
    keys = module.tensor_keys
    advantage, target = (td.get(getattr(keys, k, k), None) for k in ("advantage", "value_target"))
    name = ALGORITHMS[case["algorithm"]]
    if name in ("gae", "vtrace", "retrace"):
        return advantage, target
    if name in ("td0_return", "td1_return", "td_lambda_return", "reward_to_go"):
        return (target,)
    (key,) = module.out_keys
    return (td[key],)


def run_module(case, device, **kwargs):
    module, td = module_and_tensordict(case, device, **kwargs)
    args = {"state_value": td.get("state_value", None)}
    feed = feed_of(case)
    if feed.get("container") == "lazy":
        for dim in (0, 1):
            stack = lazy_stack(list(td.clone().unbind(dim)), dim)
            check(case, outputs_of(case, module, module(stack)), args)
        return
    call = compiled(module) if feed.get("compile") else module
    written = refused(case, lambda: call(td))
    if written is not None:
        check(case, outputs_of(case, module, written), args)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case["name"] not in WITHOUT_MODULE], ids=lambda case: case["name"]
)
def test_module(case, device):
    skip_unfit(case, device)
    if INTERPRET and len(str(case["inputs"])) > 20_000:
        pytest.skip("too long for the interpreter")
    prefix = ("agents",) if feed_of(case).get("container") == "nested" else ()
    run_module(case, device, prefix=prefix)


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in CASES
        if case["algorithm"] == "normalize" and not case.get("feed", {}).keys() & {"group_ddof", "shards"}
    ],
    ids=lambda case: case["name"],
)
def test_standardised_advantage(case, device):
    """With gamma = 0 and V = 0 the advantage is the reward, so `average_gae` standardises the case's numbers."""
    _, args, _ = present(case, device)
    x = args["x"][None, :, None]
    no = torch.zeros_like(x, dtype=torch.bool)
    after = {"reward": x, "state_value": torch.zeros_like(x), "done": no, "terminated": no}
    td = TensorDict({"state_value": torch.zeros_like(x), "next": after}, x.shape[:2])
    keys = {}
    if "mask" in args:
        td["mask"], keys = args["mask"][None, :, None], {"mask": "mask"}
    module = rl_triton_td.GAE(gamma=0.0, lmbda=0.0, value_network=None, average_gae=True, keys=keys).to(device)
    check(case, (module(td)["advantage"].flatten(),), {})


@pytest.mark.parametrize("name", ["gae_time_major", "vtrace_time_major_square"])
@pytest.mark.parametrize("how", ["constructor", "call"])
def test_time_dim_of_a_module(name, how, device):
    """Time as the first batch dimension, said by argument instead of by name."""
    case = next(case for case in CASES if case["name"] == name)
    module, td = module_and_tensordict(case, device)
    td.names = None
    if how == "constructor":
        module.time_dim = 0
        check(case, outputs_of(case, module, module(td)), {})
    else:
        check(case, outputs_of(case, module, module(td, time_dim=0)), {})
