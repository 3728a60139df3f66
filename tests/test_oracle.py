"""TorchRL as the oracle: every estimator class against TorchRL's of the same name, on random rollouts and arguments.

Drawn: layout, place of time, flags, key names, values read or computed by a network, and the constructor's and the
call's arguments. In float64, to nine digits, every entry that either class writes. Where TorchRL is known to be wrong,
the rollout or the argument is left out, with the reason beside it.

Discounts are float64 tensors: TorchRL rounds numbers to float32.
"""

import copy
import logging
import pickle
import types

import pytest
import torch
import torchrl.objectives.value as torchrl_value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    NormalParamExtractor,
    TensorDictModule,
    set_composite_lp_aggregate,
    set_interaction_type,
)
from torch.distributions import Categorical
from torchrl.modules import IndependentNormal, OneHotCategorical, ProbabilisticActor, TanhNormal

import rl_triton_td
from conftest import agree

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torchrl")

ORACLE = settings(
    derandomize=True,
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
CLASSES = ("GAE", "MultiAgentGAE", "TD0Estimator", "TD1Estimator", "TDLambdaEstimator", "VTrace")
AVERAGES = {"GAE": "average_gae", "MultiAgentGAE": "average_gae", "VTrace": "average_adv"}  # the rest: average_rewards
CHUNKS = [{}, {"value_chunk_size": 1}, {"value_chunk_size": 2}, {"num_chunks": 2}, {"num_chunk": 3}]
RENAMED = {
    "advantage": ("agents", "adv"),
    "value_target": "target",
    "value": ("agents", "v"),
    "reward": ("world", "r"),
    "done": ("world", "end"),
    "terminated": "terminal",
    "steps_to_next_obs": "steps",
    "sample_log_prob": "log_mu",
}
DEFAULTS = {
    "advantage": "advantage",
    "value_target": "value_target",
    "value": "state_value",
    "reward": "reward",
    "done": "done",
    "terminated": "terminated",
    "steps_to_next_obs": "steps_to_next_obs",
    "sample_log_prob": "action_log_prob",
}
OBS = 3  # observed features


@pytest.fixture(autouse=True, scope="module")
def quiet():
    """TorchRL logs every shifted call on a rollout whose time dimension has no name."""
    logger = logging.getLogger("torchrl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def after(key):
    return ("next", *key) if isinstance(key, tuple) else ("next", key)


def number(x):
    return torch.tensor(x, dtype=torch.float64)


# ------------------------------------------------------------------------------------------------------------ rollouts
class Case(types.SimpleNamespace):
    """A rollout `data`, keys `names`, arguments of the constructor (`init`) and of a call (`call`); see `cases`."""

    def ours(self, **more):
        names = {k: v for k, v in self.names.items() if v != DEFAULTS[k]}
        return getattr(rl_triton_td, self.cls)(**(self.init | more), keys=names)

    def theirs(self, **more):
        estimator = getattr(torchrl_value, self.cls)(**(self.init | more))
        estimator.set_keys(**{k: v for k, v in self.names.items() if v != DEFAULTS[k]})
        return estimator

    def fresh(self):
        return self.data.clone()

    def narrow(self):
        """Whether a deviation is less than the floor of 1e-4, which is 1e-5 in TorchRL's V-trace alone."""
        with mode():
            advantage = self.theirs(average_adv=False)(self.fresh(), **self.call)[self.names["advantage"]]
        ids = self.data["task"] if self.group else torch.zeros(self.batch)
        ids = ids.view(*self.batch, *(1,) * (advantage.ndim - len(self.batch))).expand(advantage.shape)
        groups = [advantage[ids == i] for i in ids.unique()]
        return any(len(x) > 1 and x.std() < 1e-4 for x in groups)


def shifted_valid(done, terminated, time, budget):
    """The steps that TorchRL's `shifted=True` keeps, and of each row the last of them if a row is cut short."""
    T = done.shape[time]
    cut = (done.any(-1) & ~terminated.any(-1)).clone()
    cut.narrow(time, T - 1, 1).fill_(False)
    steps = torch.arange(T).view([-1 if d == time else 1 for d in range(cut.ndim)])
    valid = steps + cut.long().cumsum(time) - cut.long() + 1 < T + budget
    following = torch.cat([valid.narrow(time, 1, T - 1), torch.ones_like(valid.narrow(time, 0, 1))], time)
    return valid, valid & ~following


@st.composite
def cases(draw, cls, *, network=None, times=None, dispatched=False):
    """A `Case` of a class: values by a network or not (`None`: drawn), time given in one of `times`.

    `dispatched`: the default names, and shapes from which tensordict guesses the batch size right.
    """
    multi, vtrace, td = cls == "MultiAgentGAE", cls == "VTrace", cls.startswith("TD")
    flag = st.booleans()
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))

    def normal(*size):
        return torch.randn(*size, generator=g, dtype=torch.float64)

    # layout: [*B, T, *F] with time anywhere; *F are features, or agents with one feature
    T, others = draw(st.integers(1, 12)), draw(st.lists(st.integers(1, 3), max_size=2))
    how = draw(st.sampled_from(times or ("last", "named", *(() if td else ("constructor", "call")))))
    time = len(others) if how == "last" else draw(st.integers(0, len(others)))
    batch = [*others[:time], T, *others[time:]]
    agents = [draw(st.integers(1 + dispatched, 3))] if multi or (draw(flag) and not dispatched) else []
    features = (
        [1] if agents or vtrace else [draw(st.integers(1, OBS - dispatched))]
    )  # V-trace: one log-probability per value
    shape = [*batch, *agents, *features]
    team = multi and (dispatched or draw(flag))  # one reward and one set of flags for all agents
    signal = [*batch, 1] if team else shape

    names = DEFAULTS | (RENAMED if draw(flag) and not dispatched else {})
    network = draw(flag) if network is None else network
    shifted = network and how in ("last", "named") and draw(flag)  # TorchRL's shifted path ignores `time_dim`
    budget = draw(st.integers(1, 4)) if shifted else 1

    done = torch.rand(signal, generator=g) < draw(st.sampled_from([0.0, 0.1, 0.3, 0.7, 1.0]))
    terminated = done & (torch.rand(signal, generator=g) < draw(st.sampled_from([0.0, 0.5, 1.0])))
    whole, edge = shifted_valid(done, terminated, time, budget)
    if shifted:  # TorchRL lets the last step that it keeps go on, even one that is terminated
        edge = edge.unsqueeze(-1) & terminated.any(-1, keepdim=True)
        done, terminated = done & ~edge, terminated & ~edge
    reward = normal(*signal)
    truncated = done & ~terminated
    flags = {names["done"]: done, names["terminated"]: terminated, "truncated": truncated}
    if draw(flag) and not shifted and not dispatched:  # absent: as done
        del flags[names["terminated"]]
    data = TensorDict({"next": {names["reward"]: reward}}, batch)
    for key, entry in flags.items():
        data[after(key)] = entry

    consistent = draw(flag)

    def successor(x):
        """Random, or where the episode goes on that of the next step."""
        y = normal(*x.shape)
        if consistent and T > 1:
            ends = done.flatten(len(batch)).any(-1).narrow(time, 0, T - 1)
            ends = ends.view(*ends.shape, *(1,) * (x.ndim - len(batch)))
            y.narrow(time, 0, T - 1).copy_(torch.where(ends, y.narrow(time, 0, T - 1), x.narrow(time, 1, T - 1)))
        return y

    init = {"gamma": None, "differentiable": draw(flag), "value_network": None}
    call = {}
    existing = not network or draw(flag)
    if network or vtrace:
        data["obs"] = normal(*batch, *agents, OBS)
    if network:
        data["next", "obs"] = successor(data["obs"])
        init["value_network"] = net = TensorDictModule(linear(normal, OBS, features[0]), ["obs"], [names["value"]])
        init |= draw(st.sampled_from(CHUNKS))
        if "value_chunk_size" in init or "num_chunks" in init or "num_chunk" in init:
            init["value_chunk_dim"] = draw(st.integers(-len(batch), len(batch) - 1))
        init |= {
            "shifted": shifted,
            "shifted_budget": budget,
            "skip_existing": draw(st.sampled_from([None, False, True])),
        }
        if not vtrace:
            init["deactivate_vmap"] = draw(flag)
        given = (
            "no" if shifted else draw(st.sampled_from(["no", "params", "both"]))
        )  # TorchRL has no shifted path for it
        if given != "no":
            call["params"] = TensorDict.from_module(net).data.apply(lambda p: p + 0.3 * normal(*p.shape))
        if given == "both":
            call["target_params"] = call["params"].apply(lambda p: p + 0.3 * normal(*p.shape))
    if existing:
        data[names["value"]] = normal(*shape)
        data[after(names["value"])] = successor(data[names["value"]])

    # arguments
    steps = draw(flag) and not team  # TorchRL has no discount per step for all agents
    if steps:
        data[names["steps_to_next_obs"]] = torch.randint(1, 3, signal, generator=g)
    vectorized = (
        draw(st.sampled_from([None, False, True])) if cls in ("GAE", "MultiAgentGAE", "TDLambdaEstimator") else None
    )
    if cls == "TDLambdaEstimator":
        vectorized = bool(vectorized)
    if vectorized is not None:
        init["vectorized"] = vectorized
    # TorchRL's vectorised paths fail for 0 and drop what has decayed below 1e-7; TD(1) has no other
    free = not vectorized and cls != "TD1Estimator"
    init["gamma"] = number(draw(st.sampled_from([0.0, 0.3] * free + [0.8, 0.95, 0.99, 1.0])))
    if cls in ("GAE", "MultiAgentGAE", "TDLambdaEstimator"):
        # vectorised TD(lambda) with a discount per step takes powers of lambda in float32
        rounded = cls == "TDLambdaEstimator" and vectorized and steps
        lambdas = [0.5, 1.0] if rounded else [0.0, 0.3] * free + [0.6, 0.95, 1.0]
        init["lmbda"] = number(draw(st.sampled_from(lambdas)))
    group = draw(flag)
    if group:
        init["group_key"] = "task"
        data["task"] = torch.randint(0, 3, [*batch, 1] if draw(flag) else batch, generator=g)
    average = AVERAGES.get(cls, "average_rewards")
    # a single number has no deviation (NaN there); of the estimators, TorchRL's GAE alone leaves out invalid steps
    pooled = reward.numel() if not multi else T * torch.Size(others).numel()
    can = (pooled > 1 or group) and not (shifted and average != "average_gae")
    init[average] = draw(flag) and can
    if cls in ("GAE", "MultiAgentGAE"):
        # at the last step that a shifted path keeps, TorchRL marks an end, which with `auto_reset_env` ends all
        init["auto_reset_env"] = draw(flag) and not shifted and not dispatched
    if multi:
        init["agent_dim"] = draw(st.sampled_from([-2, len(batch)]))
    if how == "constructor":
        init["time_dim"] = time - draw(st.sampled_from([0, len(batch)]))
    elif how == "call":
        call["time_dim"] = time - draw(st.sampled_from([0, len(batch)]))
        if not td:
            init["time_dim"] = draw(st.integers(0, len(batch) - 1))  # overridden
    elif how == "named":
        data.names = ["time" if d == time else None for d in range(len(batch))]
    if vtrace:
        init["actor_network"] = actor = make_actor(linear(normal, OBS, 4))
        init |= {x: number(draw(st.sampled_from([0.5, 1.0, 1.7, 100.0]))) for x in ("rho_thresh", "c_thresh")}
        if draw(flag):
            init |= {x: float(init[x]) for x in ("rho_thresh", "c_thresh") if init[x] != 1.7}
        # TorchRL scores a fresh sample, or the mode: the mode is stored here (see `mode`), or no action at all
        if draw(flag):
            with torch.no_grad(), set_interaction_type(InteractionType.DETERMINISTIC):
                data["action"] = actor(data.select("obs"))["action"]
        data[names["sample_log_prob"]] = -normal(*batch, *agents).abs()
    case = Case(
        cls=cls, data=data, names=names, init=init, call=call, time=time, shifted=shifted, average=init[average],
        group=group, vectorized=vectorized, batch=batch, whole=whole, normal=normal,
    )  # fmt: skip
    if vtrace and case.average and case.narrow():
        init["average_adv"] = case.average = False
    return case


def linear(normal, inputs, outputs):
    module = torch.nn.Linear(inputs, outputs).double()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(normal(*p.shape))
    return module


def make_actor(module, distribution=Categorical, out=("logits",), **kwargs):
    body = TensorDictModule(module, ["obs"], list(out))
    return ProbabilisticActor(body, list(out), distribution_class=distribution, **({"return_log_prob": True} | kwargs))


def mode():
    return set_interaction_type(InteractionType.DETERMINISTIC)


def compare(case, ours, theirs, skip=()):
    """Every entry of two rollouts, and that they have the same ones; of a network's next values, those that count."""
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    over = case.data["next"].get(case.names["terminated"], case.data["next"][case.names["done"]])
    counts = ~over.flatten(len(case.batch)).all(-1)
    for key in ours.keys(True, True):
        if key not in skip:
            actual, wanted = ours[key], theirs[key]
            assert actual.dtype == wanted.dtype, key
            if key == after(case.names["value"]) and case.init["value_network"] is not None:
                actual, wanted = actual[counts], wanted[counts]
            agree(actual, wanted, 1e-9, 1e-9, str(key))


def unbiased(case, advantage, valid):
    """TorchRL divides by n, not n - 1, where it standardises the valid steps of a shifted rollout without groups."""
    valid = valid.view(*valid.shape, *(1,) * (advantage.ndim - valid.ndim)).expand(advantage.shape)
    agent = case.init.get("agent_dim")
    dims = [d for d in range(valid.ndim) if agent is None or d != agent % valid.ndim]
    n = valid.sum(dims, keepdim=True).double()
    return advantage * ((n - 1) / n).sqrt()


# ------------------------------------------------------------------------------------------------------------- forward
@pytest.mark.parametrize("cls", CLASSES)
@ORACLE
@given(draw=st.data())
def test_forward(cls, draw):
    """One call, and a second one that finds the results of the first."""
    case = draw.draw(cases(cls))
    ours, theirs = case.ours(), case.theirs()
    with mode():
        wanted = theirs(case.fresh(), **case.call)
        if case.average and case.shifted and not case.group:
            key = case.names["advantage"]
            wanted[key] = unbiased(case, wanted[key], wanted["shifted_valid"])
        actual = case.fresh()
        assert ours(actual, **case.call) is actual
        compare(case, actual, wanted)
        if case.average and cls.startswith("TD"):
            return  # the rewards are standardised already
        compare(case, ours(actual, **case.call), wanted)


@pytest.mark.parametrize("cls", CLASSES)
@ORACLE
@given(draw=st.data())
def test_dispatch(cls, draw):
    """Plain tensors in place of a tensordict, which stay as they are."""
    case = draw.draw(cases(cls, network=True, times=("last",), dispatched=True))
    case.call.pop("time_dim", None)
    ours, theirs = case.ours(), case.theirs()
    data = case.data.exclude("action")
    keys = {k: data.get(k) for k in theirs.in_keys if data.get(k, None) is not None}
    entries = {k if isinstance(k, str) else "_".join(k): entry.clone() for k, entry in keys.items()}
    before = {k: entry.clone() for k, entry in entries.items()}
    with mode():
        wanted = theirs(**entries, **case.call)
        assert all(torch.equal(entries[k], before[k]) for k in entries)
        actual = ours(**entries, **case.call)
    if not (case.average and cls.startswith("TD")):  # see `test_rewards_of_the_caller`
        assert all(torch.equal(entries[k], before[k]) for k in entries)
    for key, a, w in zip(("advantage", "value_target"), actual, wanted, strict=True):
        if key == "advantage" and case.average and case.shifted and not case.group:
            signal = entries["next_done"], entries["next_terminated"]
            w = unbiased(case, w, shifted_valid(*signal, case.time, case.init["shifted_budget"])[0])
        agree(a, w, 1e-9, 1e-9, key)


# ------------------------------------------------------------------------------------------------------ value_estimate
@pytest.mark.parametrize("cls", CLASSES[2:5])
@ORACLE
@given(draw=st.data())
def test_value_estimate_of_returns(cls, draw):
    """By the network, its target parameters or the rollout's own next values; or with the next values given."""
    case = draw.draw(cases(cls, times=("last", "named") + (("call",) if cls != "TD0Estimator" else ())))
    if case.shifted and cls != "TD0Estimator":
        case.data["shifted_valid"] = case.whole
    params = case.call.pop("params", None)
    if params is not None:
        case.call["target_params"] = params
    if draw.draw(st.booleans()):
        case.call = {k: v for k, v in case.call.items() if k == "time_dim"}
        case.call["next_value"] = case.normal(*case.data[after(case.names["reward"])].shape)
    expected, actual = case.fresh(), case.fresh()
    wanted = case.theirs().value_estimate(expected, **case.call)
    result = case.ours().value_estimate(actual, **case.call)
    if case.shifted and cls != "TD0Estimator":  # 0 in ours, in TorchRL what came out
        dropped = ~case.whole.view(*case.whole.shape, *(1,) * (wanted.ndim - case.whole.ndim))
        assert (result.masked_select(dropped) == 0).all()
        wanted = wanted.masked_fill(dropped, 0)
    agree(result, wanted, 1e-9, 1e-9)
    compare(case, actual, expected)


@pytest.mark.parametrize("cls", ("GAE", "MultiAgentGAE", "VTrace"))
@ORACLE
@given(draw=st.data())
def test_value_estimate_of_advantages(cls, draw):
    """What TorchRL's `forward` writes: its `GAE.value_estimate` ignores `auto_reset_env`, V-trace has none."""
    case = draw.draw(cases(cls))
    ours, theirs = case.ours(), case.theirs()
    with mode():
        wanted = case.theirs(skip_existing=None)(case.fresh(), **case.call)  # only `forward` skips
        actual = case.fresh()
        result = ours.value_estimate(actual, **case.call)
    agree(result, wanted[case.names["value_target"]], 1e-9, 1e-9)
    compare(case, actual, wanted.exclude(case.names["advantage"], case.names["value_target"]))
    # it is always vectorised, see `cases`
    if cls == "VTrace" or case.init["auto_reset_env"] or case.init["gamma"] < 0.8 or case.init["lmbda"] < 0.6:
        return
    expected = theirs.value_estimate(case.fresh(), **case.call)
    if case.shifted:
        valid = case.whole.view(*case.whole.shape, *(1,) * (expected.ndim - case.whole.ndim))
        expected = expected.masked_fill(~valid, 0)
    agree(result, expected, 1e-9, 1e-9)


# ----------------------------------------------------------------------------------------------------------- gradients
def gradients(case, results, leaves):
    """Of all results in one weighted sum; `None` where nothing is reached is 0."""
    total = sum((case.weights[k] * x).sum() for k, x in results.items())
    if not total.requires_grad:
        return [torch.zeros_like(x) for x in leaves.values()]
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves.values(), strict=True)]


def leafy(case):
    """A rollout whose floating-point inputs are leaves; these by name."""
    data = case.fresh()
    keys = ["obs", ("next", "obs"), case.names["value"], after(case.names["value"]), after(case.names["reward"])]
    leaves = {k: data[k].requires_grad_() for k in keys if data.get(k, None) is not None}
    return data, leaves


@pytest.mark.parametrize("cls", CLASSES)
@ORACLE
@given(draw=st.data())
def test_gradients(cls, draw):
    """With respect to rewards, values, and observations under a network; its parameters are held out."""
    case = draw.draw(cases(cls))
    case.init["differentiable"] = True
    found = {}
    for name, estimator in (("theirs", case.theirs()), ("ours", case.ours())):
        data, leaves = leafy(case)
        if "params" in case.call:
            case.call = {k: v.detach().requires_grad_() if k != "time_dim" else v for k, v in case.call.items()}
            params = [p for k in case.call if k != "time_dim" for p in case.call[k].values(True, True)]
            leaves |= dict(enumerate(params))
        elif case.init["value_network"] is not None:
            leaves |= dict(enumerate(case.init["value_network"].parameters()))
        with mode():
            estimator(data, **case.call)
        written = [case.names[k] for k in ("advantage", "value_target", "value")]
        results = {k: data[k] for k in written}
        if name == "theirs":
            case.weights = {k: case.normal(*x.shape) for k, x in results.items()}
            if case.average and case.shifted and not case.group:
                key = case.names["advantage"]
                results[key] = unbiased(case, results[key], data["shifted_valid"])
        found[name] = dict(zip(leaves, gradients(case, results, leaves), strict=True))
    for key, wanted in found["theirs"].items():
        finite = wanted.isfinite()  # NaN where a group has a single entry, see `test_gradients_of_a_single_entry`
        agree(found["ours"][key][finite], wanted[finite], 1e-8, 1e-8, str(key))


@pytest.mark.parametrize("cls", CLASSES[:5])
@ORACLE
@given(draw=st.data())
def test_gradients_of_value_estimate(cls, draw):
    """Those that a loss takes: a return's reach the target parameters, GAE's stop before them."""
    td = cls.startswith("TD")
    case = draw.draw(cases(cls, network=True, times=("last", "named")))
    if not td and (case.init["auto_reset_env"] or case.init["gamma"] < 0.8 or case.init["lmbda"] < 0.6 or case.shifted):
        return  # see `test_value_estimate_of_advantages`
    if td:
        case.call.pop("params", None)
    found = []
    for estimator in (case.theirs(), case.ours()):
        data, leaves = leafy(case)
        case.call = {k: v.detach().requires_grad_() for k, v in case.call.items()}
        leaves |= dict(enumerate(p for params in case.call.values() for p in params.values(True, True)))
        result = estimator.value_estimate(data, **case.call)
        if not found:
            case.weights = {"target": case.normal(*result.shape)}
        found.append(dict(zip(leaves, gradients(case, {"target": result}, leaves), strict=True)))
    for key, wanted in found[0].items():
        finite = wanted.isfinite()
        agree(found[1][key][finite], wanted[finite], 1e-8, 1e-8, str(key))


@pytest.mark.parametrize("average", ["average_gae", "average_rewards"])
def test_gradients_of_a_single_entry(average):
    """What is standardised alone is 0, and so is its gradient: NaN in TorchRL."""
    case = plain(average)
    case.data["task"] = torch.tensor([[0, 0, 0, 1]])
    data = case.fresh()
    reward = data["next", "reward"].requires_grad_()
    case.ours(differentiable=True, group_key="task")(data)
    (grad,) = torch.autograd.grad(data["advantage"].sum(), reward)
    assert grad.isfinite().all()


def test_gradients_of_next_values():
    """The next values that are written lead to the next observations; the results do not."""
    case = plain("average_gae")
    case.data["obs"], case.data["next", "obs"] = torch.randn(2, 1, 4, OBS, dtype=torch.float64)
    net = TensorDictModule(torch.nn.Linear(OBS, 1).double(), ["obs"], ["state_value"])
    found = []
    for estimator in (case.theirs, case.ours):
        data = case.fresh()
        obs = data["next", "obs"].requires_grad_()
        data["obs"].requires_grad_()
        estimator(value_network=net, differentiable=True, average_gae=False)(data)
        found.append(
            [
                torch.autograd.grad(data[k].sum(), obs, retain_graph=True, materialize_grads=True)[0]
                for k in (("next", "state_value"), "advantage")
            ]
        )
    for wanted, actual in zip(*found, strict=True):
        agree(actual, wanted, 1e-9, 1e-9)
    assert found[0][0].abs().max() > 0 and not found[0][1].any()


# -------------------------------------------------------------------------------------------------------- by hand
def plain(average):
    """A row of four steps without ends, for an estimator that standardises."""
    cls = "GAE" if average == "average_gae" else "TD1Estimator"
    g = torch.Generator().manual_seed(0)
    value, following, reward = torch.randn(3, 1, 4, 1, generator=g, dtype=torch.float64)
    ends = torch.zeros(1, 4, 1, dtype=torch.bool)
    after = {"state_value": following, "reward": reward, "done": ends, "terminated": ends.clone()}
    init = {"gamma": number(0.9), "value_network": None, average: True} | (
        {"lmbda": number(0.9)} if cls == "GAE" else {}
    )
    return Case(cls=cls, data=TensorDict({"state_value": value, "next": after}, [1, 4]), names=DEFAULTS, init=init)


@pytest.mark.parametrize("dispatched", [False, True])
def test_rewards_of_the_caller(dispatched):
    """Standardised rewards are a new entry: the tensor that the caller holds stays as it is."""
    case = plain("average_rewards")
    net = TensorDictModule(torch.nn.Linear(OBS, 1).double(), ["obs"], ["state_value"])
    obs, following = torch.randn(2, 1, 4, OBS, dtype=torch.float64)
    after = case.data["next"].exclude("state_value").to_dict()
    reward = after["reward"].clone()
    for estimator in (case.theirs(value_network=net), case.ours(value_network=net)):
        if dispatched:
            estimator(obs=obs, next_obs=following, **{f"next_{k}": x for k, x in after.items()})
        else:
            estimator(TensorDict({"obs": obs, "next": after | {"obs": following}}, [1, 4]))
        assert torch.equal(after["reward"], reward)


@pytest.mark.parametrize("cls", ["TD0Estimator", "TD1Estimator", "TDLambdaEstimator", "DiscountedReturn"])
def test_masked_rewards_take_no_part(cls):
    """The statistics of `average_rewards` are those of the valid steps; TorchRL knows no mask."""
    data = plain("average_rewards").data
    data["valid"] = torch.tensor([[True, True, True, False]])
    init = {"gamma": 0.9, "average_rewards": True} | ({"lmbda": 0.9} if cls == "TDLambdaEstimator" else {})
    estimator = getattr(rl_triton_td, cls)(**init)
    wanted = estimator(data[:, :3].clone())
    estimator.set_keys(mask="valid")
    data["next", "reward"][:, 3] = torch.nan
    actual = estimator(data)
    for key in estimator.out_keys:
        agree(actual[key][:, :3], wanted[key], 1e-9, 1e-9, key)
        assert (actual[key][:, 3] == 0).all()


# ------------------------------------------------------------------------------------------------- V-trace on policy
class Heads(torch.nn.Module):
    """The parameters of both distributions of `composite`."""

    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Linear(OBS, 4)
        self.normal = torch.nn.Sequential(torch.nn.Linear(OBS, 4), NormalParamExtractor())

    def forward(self, obs):
        return self.logits(obs), *self.normal(obs)


def continuous(distribution):
    body = torch.nn.Sequential(torch.nn.Linear(OBS, 4), NormalParamExtractor()).double()
    return make_actor(body, distribution, ("loc", "scale"))


def composite_actor():
    out = [("params", "discrete", "logits"), ("params", "continuous", "loc"), ("params", "continuous", "scale")]
    names = {name: ("action", name) for name in ("discrete", "continuous")}
    kinds = {"discrete": Categorical, "continuous": IndependentNormal}
    return ProbabilisticActor(
        TensorDictModule(Heads().double(), ["obs"], out),
        in_keys=["params"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": kinds, "name_map": names},
        return_log_prob=True,
    )


ACTORS = {
    "categorical": lambda: make_actor(torch.nn.Linear(OBS, 4).double()),
    "one_hot": lambda: make_actor(torch.nn.Linear(OBS, 4).double(), OneHotCategorical),
    "tanh_normal": lambda: continuous(TanhNormal),
    "independent_normal": lambda: continuous(IndependentNormal),
    "composite": composite_actor,
    "composite_aggregated": composite_actor,
}


def on_policy(name):
    """An actor and a rollout of its own, `[2, 30]`."""
    torch.manual_seed(0)
    actor = ACTORS[name]()
    data = TensorDict({"obs": torch.randn(2, 30, OBS, dtype=torch.float64)}, [2, 30])
    with set_interaction_type(InteractionType.RANDOM), torch.no_grad():
        actor(data)
    done = torch.rand(2, 30, 1) < 0.2
    entries = {"done": done, "terminated": done & (torch.rand(2, 30, 1) < 0.5)}
    entries |= {key: torch.randn(2, 30, 1, dtype=torch.float64) for key in ("reward", "state_value")}
    data["state_value"] = torch.randn(2, 30, 1, dtype=torch.float64)
    return actor, data.update({"next": TensorDict(entries, [2, 30])})


def estimate(actor, data, **kwargs):
    """V-trace, clipped nowhere."""
    estimator = rl_triton_td.VTrace(
        gamma=number(0.9), actor_network=actor, value_network=None, rho_thresh=1e6, c_thresh=1e6, **kwargs
    )
    keys = list(actor.log_prob_keys)
    estimator.set_keys(sample_log_prob=keys[0] if len(keys) == 1 else keys)
    return estimator(data.clone())["value_target"]


@pytest.mark.parametrize("name", ACTORS)
def test_fresh_data_is_on_policy(name):
    """Every ratio is 1: the target is GAE's with lambda 1."""
    with set_composite_lp_aggregate(name.endswith("aggregated")):
        actor, data = on_policy(name)
        gae = rl_triton_td.GAE(gamma=number(0.9), lmbda=number(1.0), value_network=None)
        wanted = gae(data.clone())["value_target"]
        agree(estimate(actor, data), wanted, 1e-6, 1e-6)
        for parameter in actor.parameters():
            parameter.data *= 1.5
        assert (estimate(actor, data) - wanted).abs().max() > 1e-2  # not for every policy


@pytest.mark.parametrize("name", ACTORS)
def test_the_stored_action_is_scored(name):
    """However the actor would choose now, and whatever it has drawn since: nothing is sampled."""
    with set_composite_lp_aggregate(name.endswith("aggregated")):
        actor, data = on_policy(name)
        state = torch.get_rng_state()
        wanted = estimate(actor, data)
        assert torch.equal(torch.get_rng_state(), state)
        for kind in (InteractionType.RANDOM, InteractionType.DETERMINISTIC, InteractionType.MEAN):
            with set_interaction_type(kind):
                assert torch.equal(estimate(actor, data, differentiable=True), wanted)


# -------------------------------------------------------------------------------------------------------------- copies
def critic(out="state_value", size=1):
    return TensorDictModule(torch.nn.Linear(OBS, size).double(), ["obs"], [out])


def retrace(**kwargs):
    actor = make_actor(torch.nn.Linear(OBS, 4).double())
    return rl_triton_td.RetraceEstimator(value_network=critic("action_value", 4), actor_network=actor, **kwargs)


def vtrace(gamma, lmbda):
    actor = make_actor(torch.nn.Linear(OBS, 4).double())
    return rl_triton_td.VTrace(gamma=gamma, rho_thresh=lmbda, actor_network=actor, value_network=critic())


def trace(**kwargs):
    return rl_triton_td.EligibilityTrace(**kwargs, keys={"gradient": "obs"})


MAKERS = {  # of gamma and lambda
    "GAE": lambda **kwargs: rl_triton_td.GAE(**kwargs, value_network=critic()),
    "MultiAgentGAE": lambda **kwargs: rl_triton_td.MultiAgentGAE(**kwargs, value_network=critic()),
    "TD0Estimator": lambda gamma, lmbda: rl_triton_td.TD0Estimator(gamma=gamma, value_network=critic()),
    "TD1Estimator": lambda gamma, lmbda: rl_triton_td.TD1Estimator(gamma=gamma, value_network=critic()),
    "TDLambdaEstimator": lambda **kwargs: rl_triton_td.TDLambdaEstimator(**kwargs, value_network=critic()),
    "VTrace": vtrace,
    "RetraceEstimator": retrace,
    "RetraceEstimator_greedy": lambda **kwargs: rl_triton_td.RetraceEstimator(
        **kwargs, value_network=critic("action_value", 4), epsilon=0.1
    ),
    "DiscountedReturn": lambda gamma, lmbda: rl_triton_td.DiscountedReturn(gamma=gamma),
    "EligibilityTrace": trace,
    "EpisodicPrefixSum": lambda gamma, lmbda: rl_triton_td.EpisodicPrefixSum(),
}


def make(name, gamma=0.95, lmbda=0.9):
    torch.manual_seed(0)
    return MAKERS[name](gamma=gamma, lmbda=lmbda)


def rollouts_of(dtype=torch.float64):
    data = on_policy("categorical")[1].exclude("logits", "state_value", ("next", "state_value"))
    data["next", "obs"] = torch.randn(2, 30, OBS, dtype=torch.float64)
    return data.apply(lambda x: x.to(dtype) if x.is_floating_point() else x)


def results(estimator, data):
    return estimator(data.clone()).select(*estimator.out_keys)


def same(a, b, tolerance=0.0):
    for key in b.keys(True, True):
        assert a[key].dtype == b[key].dtype
        agree(a[key], b[key], tolerance, tolerance, str(key))


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_copies(name, called):
    estimator, data = make(name), rollouts_of()
    wanted = results(make(name), data)
    if called:
        results(estimator, data)
    for other in (pickle.loads(pickle.dumps(estimator)), copy.deepcopy(estimator)):
        assert type(other) is type(estimator)
        assert (other.in_keys, other.out_keys) == (estimator.in_keys, estimator.out_keys)
        same(results(other, data), wanted)
        for buffer in other.buffers():
            buffer.mul_(0.5)
    same(results(estimator, data), wanted)  # a copy's buffers are its own


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_state_dict(name, tensors):
    """A state dict carries the discounts: to nine digits as tensors, to seven as numbers, exactly where they agree."""

    def hypers(*values):
        return map(number, values) if tensors else values

    estimator, data = make(name, *hypers(0.95, 0.9)), rollouts_of()
    state, wanted = estimator.state_dict(), results(estimator, data)
    theirs = getattr(torchrl_value, name, None)
    if theirs is not None and name != "VTrace":
        names = ["gamma", *(["lmbda"] if "Lambda" in name or "GAE" in name else [])]
        assert sorted(state) == sorted(names)
    other = make(name, *hypers(0.5, 0.5))
    other.load_state_dict(state)
    same(results(other, data), wanted, 0.0 if tensors else 1e-6)
    other = make(name, *hypers(0.95, 0.9))
    other.load_state_dict(state)
    same(results(other, data), wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", MAKERS)
def test_to_dtype(name, dtype):
    """Results follow the rollout's dtype; a module moved to double precision keeps the number it was given."""
    estimator, data = make(name), rollouts_of(dtype)
    for attribute in ("value_network", "actor_network"):
        if getattr(estimator, attribute, None) is not None:
            getattr(estimator, attribute).to(dtype)
    wanted = results(estimator, data)
    moved = copy.deepcopy(estimator).to(dtype)
    assert all(buffer.dtype == dtype for buffer in moved.buffers())
    same(results(moved, data), wanted, 1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("name", MAKERS)
def test_to_device(name, device):
    """Moved, and not moved where the rollout is elsewhere: the discounts follow."""
    estimator, data = make(name), rollouts_of()
    wanted = results(estimator, data)
    for attribute in ("value_network", "actor_network"):
        if getattr(estimator, attribute, None) is not None:
            getattr(estimator, attribute).to(device)
    for other in (copy.deepcopy(estimator).to(device), estimator):
        actual = results(other, data.to(device))
        assert all(x.device.type == device for x in actual.values(True, True))
        same(actual.cpu(), wanted, 1e-9)
