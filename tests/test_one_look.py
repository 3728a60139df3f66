"""Values by one look at the network, against the network called on every state and on every successor."""

import copy
import pickle
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torchrl.collectors.utils import split_trajectories
from torchrl.data import MultiStep
from torchrl.modules import GRUModule, LSTMModule, OneHotCategorical, set_recurrent_mode

from conftest import agree
from rl_triton_td import (
    GAE,
    DiscountedReturn,
    MissingEntryError,
    MultiAgentGAE,
    RetraceEstimator,
    TD0Estimator,
    TD1Estimator,
    TDLambdaEstimator,
    VTrace,
)
from rl_triton_td.functional import ShapeError
from rl_triton_td.networks import PROBES

OBS, GAMMA, LMBDA = 4, 0.97, 0.9
RESULTS = ("advantage", "value_target")
INSIDE, TERMINATED, TRUNCATED = range(3)


# ----------------------------------------------------------------------------------------------------------- the pieces
class Counted(nn.Module):
    """A network that keeps the batch shape of every call."""

    def __init__(self, net, features=1):
        super().__init__()
        self.net, self.features, self.calls = net, features, []

    def forward(self, *inputs):
        self.calls.append(inputs[0].shape[: inputs[0].ndim - self.features])
        return self.net(torch.cat(inputs, -1) if len(inputs) > 1 else inputs[0])

    @property
    def rows(self):
        return [shape.numel() for shape in self.calls]


def mlp(out=1, seed=0, inputs=OBS):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, out)).double()


def critic(net=None, in_keys=("observation",), key="state_value", features=1):
    net = Counted(net or mlp(), features)
    return TensorDictModule(net, in_keys=list(in_keys), out_keys=[key])


def steps(kinds, seed=0, features=(OBS,), device="cpu"):
    """A rollout `[N, T]` whose steps are of given kinds, as a collector gives it: the row behind an end is a reset."""
    g = torch.Generator().manual_seed(seed)
    kinds = torch.as_tensor(kinds)
    N, T = kinds.shape
    states, resets = torch.randn(2, N, T + 1, *features, generator=g, dtype=torch.float64)
    terminated, truncated = (kinds == TERMINATED).unsqueeze(-1), (kinds == TRUNCATED).unsqueeze(-1)
    done = terminated | truncated
    after = states[:, 1:].clone()
    ends = done.view(N, T, *(1,) * len(features))
    following = torch.where(ends, resets[:, 1:], after)
    obs = torch.cat([states[:, :1], following[:, :-1]], 1)
    reward = torch.randn(N, T, 1, generator=g, dtype=torch.float64)
    is_init = torch.cat([torch.ones_like(done[:, :1]), done[:, :-1]], 1)
    return TensorDict(
        {
            "observation": obs,
            "is_init": is_init,
            "action": nn.functional.one_hot(torch.randint(3, (N, T), generator=g), 3).double(),
            "action_log_prob": -torch.rand(N, T, generator=g, dtype=torch.float64),
            "next": {
                "observation": after,
                "reward": reward,
                "done": done,
                "terminated": terminated,
                "truncated": truncated,
                "is_init": torch.zeros_like(done),
            },
        },
        [N, T],
        names=[None, "time"],
    ).to(device)


def some(N=4, T=24, rate=0.1, seed=0, **kwargs):
    g = torch.Generator().manual_seed(seed)
    kinds = torch.where(torch.rand(N, T, generator=g) < rate, torch.randint(1, 3, (N, T), generator=g), 0)
    kinds[0, -1], kinds[1, -1], kinds[2, -1], kinds[3 % N, T // 2] = TERMINATED, TRUNCATED, INSIDE, TRUNCATED
    return steps(kinds, seed, **kwargs)


def actor(seed=5):
    scores = TensorDictModule(mlp(3, seed), in_keys=["observation"], out_keys=["logits"])
    choice = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=OneHotCategorical)
    return ProbabilisticTensorDictSequential(scores, choice)


HYPERS = {"gamma": torch.tensor(GAMMA, dtype=torch.float64), "lmbda": torch.tensor(LMBDA, dtype=torch.float64)}
GAMMA_ALONE = {"gamma": HYPERS["gamma"]}
MAKERS = {
    "GAE": lambda **kw: GAE(**HYPERS, **kw),
    "TD0Estimator": lambda **kw: TD0Estimator(**GAMMA_ALONE, **kw),
    "TD1Estimator": lambda **kw: TD1Estimator(**GAMMA_ALONE, **kw),
    "TDLambdaEstimator": lambda **kw: TDLambdaEstimator(**HYPERS, **kw),
    "VTrace": lambda **kw: VTrace(**GAMMA_ALONE, actor_network=actor(), **kw),
}


def wanted(td, name, net, successor=None, **kwargs):
    """An estimator's results where every state and successor went through the network one after the other."""
    td = td.clone()
    with torch.no_grad():
        for part, value in ((td, net), (td["next"], successor or net)):
            values = value.module.net(torch.cat([part[key] for key in value.in_keys], -1))
            part[value.out_keys[0]] = values
    return MAKERS[name](value_network=None, **kwargs)(td)


def check(out, expected, keys=RESULTS):
    for key in keys:
        agree(out[key], expected[key], 1e-10, 1e-10, key)


def needed(kinds):
    """Successors to evaluate: of truncated steps, and of the last ones unless terminated."""
    cut = kinds == TRUNCATED
    cut[:, -1] |= kinds[:, -1] == INSIDE
    return int(cut.sum())


# ------------------------------------------------------------------------------------------------------ the same values
kinds_of_steps = st.integers(1, 3).flatmap(
    lambda N: st.integers(1, 8).flatmap(
        lambda T: st.one_of(
            st.lists(st.lists(st.sampled_from([0] * 8 + [1, 2]), min_size=T, max_size=T), min_size=N, max_size=N),
            st.sampled_from([INSIDE, TERMINATED, TRUNCATED]).map(lambda kind: [[kind] * T] * N),
        )
    )
)


@pytest.mark.parametrize("name", MAKERS)
@settings(derandomize=True, deadline=None, max_examples=25)
@given(kinds=kinds_of_steps, time_major=st.booleans(), seed=st.integers(0, 99), twice=st.booleans())
def test_any_mix_of_ends(name, kinds, time_major, seed, twice):
    td, net = steps(kinds, seed), critic()
    count, bootstraps = td.numel(), needed(torch.tensor(kinds))
    expected = wanted(td, name, net)
    if time_major:
        td = td.transpose(0, 1)
    estimator = MAKERS[name](value_network=net)
    for again in range(1 + twice):
        net.module.calls.clear()
        out = estimator(td.clone())
        check(out.transpose(0, 1) if time_major else out, expected)
        successors = count if 2 * bootstraps > count else bootstraps
        if successors < count and not (again and estimator.__dict__["_probed"] is not None):
            successors += min(PROBES, count)
        assert net.module.rows == ([count, successors] if successors else [count])


def test_the_written_values():
    """Of the states and, as in TorchRL, of what comes after them; 0 where nothing does."""
    td, net = some(), critic()
    expected = wanted(td, "GAE", net)
    out = GAE(**HYPERS, value_network=net)(td)
    agree(out["state_value"], expected["state_value"], 1e-12, 1e-12)
    nothing = td["next", "terminated"]
    agree(out["next", "state_value"], expected["next", "state_value"].masked_fill(nothing, 0), 1e-12, 1e-12)


@pytest.mark.parametrize("name", MAKERS)
def test_on_the_device(name, device):
    td, net = some(device=device), critic().to(device)
    out = MAKERS[name](value_network=net).to(device)(td.clone())
    check(out, wanted(td.cpu(), name, critic()))


@pytest.mark.parametrize("name", MAKERS)
def test_value_estimate(name):
    td, net = some(), critic()
    estimator = MAKERS[name](value_network=net)
    agree(estimator.value_estimate(td.clone()), wanted(td, name, net)["value_target"], 1e-10, 1e-10)


# ------------------------------------------------------------------------------------------------- rows that differ
def test_a_next_observation_that_is_not_the_next_row():
    """Found to the bit, evaluated, and nothing else is; flags alone do not show it."""
    td, net = steps(torch.zeros(3, 20)), critic()
    td["next", "observation"][1, 7, 2] += 1e-15
    td["next", "observation"][2, 3] = 5.0
    estimator = GAE(**HYPERS, value_network=net)
    estimator(td.clone())
    net.module.calls.clear()
    check(estimator(td.clone()), wanted(td, "GAE", net))
    assert net.module.rows == [60, 3 + 2]
    trusting = GAE(**HYPERS, value_network=net, reuse_values=True)(td.clone())
    assert net.module.rows[2:] == [60, 3]
    assert (trusting["next", "state_value"] - wanted(td, "GAE", net)["next", "state_value"]).abs().max() > 1e-3


@pytest.mark.parametrize("vouched", [None, True])
def test_multi_step_returns(vouched):
    td, net = some(T=30), critic()
    td = MultiStep(gamma=GAMMA, n_steps=3)(td.exclude("is_init", ("next", "is_init")))
    assert (td["steps_to_next_obs"] > 1).any()
    check(GAE(**HYPERS, value_network=net, reuse_values=vouched)(td.clone()), wanted(td, "GAE", net))
    assert net.module.rows == [td.numel()] * 2


def test_next_observations_of_another_kind():
    """Stored in half the bits, they are no rows."""
    td, net = some(), critic(nn.Sequential(Double(), mlp()))
    td["next", "observation"] = td["next", "observation"].float()
    check(GAE(**HYPERS, value_network=net)(td.clone()), wanted_by(td, net))
    assert net.module.rows == [td.numel()] * 2


class Double(nn.Module):
    def forward(self, x):
        return x.double()


def test_reordered_rows():
    td, net = some().reshape(-1), critic()
    td = td[torch.randperm(len(td), generator=torch.Generator().manual_seed(0))]
    td.names = None
    check(TD0Estimator(**GAMMA_ALONE, value_network=net)(td.clone()), wanted(td, "TD0Estimator", net))
    assert net.module.rows == [td.numel()] * 2


@pytest.mark.parametrize("vouched", [None, True])
@pytest.mark.parametrize("name", MAKERS)
def test_padded_trajectories(name, vouched):
    td, net = some(N=3, T=20, rate=0.2), critic()
    td = split_trajectories(td, done_key="done", prefix="collector")
    mask = td["collector", "mask"]
    assert not mask.all()
    out = MAKERS[name](value_network=net, reuse_values=vouched)(td.clone())
    expected = wanted(td, name, net)
    for key in RESULTS:
        agree(out[key][mask], expected[key][mask], 1e-10, 1e-10, key)
    if vouched:
        assert net.module.rows == [td.numel()] * 2


def test_a_step_that_is_no_transition():
    """Its observation is what the step before says, or it is not; either way values are those of two calls."""
    td, net = some(rate=0.0), critic()
    td["collector", "mask"] = torch.rand(td.shape, generator=torch.Generator().manual_seed(0)) < 0.8
    td["observation"][1, 5] = 9.0
    check(GAE(**HYPERS, value_network=net)(td.clone()), wanted(td, "GAE", net))


# ------------------------------------------------------------------------------------- observations that were dropped
def test_nan_at_ends():
    """Behind a terminal step it is nothing; at a truncated one the state's own observation stands in."""
    td, net = some(), critic()
    after, own = td["next", "observation"], td["observation"]
    over, cut = td["next", "terminated"].squeeze(-1), td["next", "truncated"].squeeze(-1)
    after[over] = torch.nan
    after[cut] = own[cut]
    expected = wanted(td, "GAE", net)
    after[cut] = torch.nan
    check(GAE(**HYPERS, value_network=net)(td.clone()), expected)
    dense = steps(torch.full((2, 6), TRUNCATED))
    dense["next", "observation"][0] = torch.nan
    kept = dense.clone()
    out = GAE(**HYPERS, value_network=net)(dense)
    agree(dense["next", "observation"], kept["next", "observation"], 0, 0)
    kept["next", "observation"][0] = kept["observation"][0]
    check(out, wanted(kept, "GAE", net))


def test_nan_inside_is_what_the_next_row_has():
    td = some(rate=0.0)
    td["observation"][1, 5] = td["next", "observation"][1, 4] = torch.nan
    net = critic()
    out = GAE(**HYPERS, value_network=net, bootstrap_slots=4)(td.clone())
    assert out["advantage"][0].isfinite().all() and out["advantage"][1, :5].isnan().all()
    estimator = GAE(**HYPERS, value_network=net)
    estimator(td.clone())
    assert net.module.rows[-1] == PROBES + needed_of(td)


def test_no_next_observations():
    """Where every end is terminal the rows say it all."""
    kinds = torch.zeros(2, 12, dtype=torch.long)
    kinds[0, 4] = kinds[:, -1] = TERMINATED
    td, net = steps(kinds), critic()
    expected = wanted(td, "GAE", net)
    del td["next", "observation"]
    check(GAE(**HYPERS, value_network=net)(td.clone()), expected)
    assert net.module.rows == [24, PROBES]
    td["next", "terminated"][1, -1] = False
    before = td.clone()
    with pytest.raises(MissingEntryError, match=r"GAE reads \('next', 'observation'\)"):
        GAE(**HYPERS, value_network=net)(td)
    assert set(td.keys(True, True)) == set(before.keys(True, True))


# --------------------------------------------------------------------------------------------------- entries and layout
def test_several_and_nested_keys(device):
    td, g = some(device=device), torch.Generator().manual_seed(1)
    goal = torch.randn(*td.shape, 3, generator=g, dtype=torch.float64).to(device)
    td["sensors", "goal"], td["next", "sensors", "goal"] = goal, goal.roll(-1, 1)
    td["next", "sensors", "goal"][0, 9] = 1.0  # in one of the keys alone
    net = critic(mlp(inputs=OBS + 3), ["observation", ("sensors", "goal")]).to(device)
    check(GAE(**HYPERS, value_network=net).to(device)(td.clone()), wanted(td, "GAE", net))
    assert net.module.rows[1] == PROBES + needed_of(td) + 1


def needed_of(td):
    cut = td["next", "done"].squeeze(-1).clone()
    cut[:, -1] = True
    return int((cut & ~td["next", "terminated"].squeeze(-1)).sum())


def test_frames():
    """uint8 images, with more dimensions than time's rows have features."""
    td = some(features=(2, 5, 5))
    for part in (td, td["next"]):
        part["observation"] = (part["observation"] * 64 + 128).clamp(0, 255).byte()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.conv, self.head = nn.Conv2d(2, 3, 3).double(), nn.Linear(27, 1).double()

        def forward(self, x):
            return self.head(self.conv(x.double().flatten(0, -4) / 255).flatten(1)).unflatten(0, x.shape[:-3])

    net = critic(Net(), features=3)
    check(GAE(**HYPERS, value_network=net)(td.clone()), wanted(td, "GAE", net))
    assert net.module.rows[1] == PROBES + needed_of(td)


def test_observations_without_features():
    td = some()
    for part in (td, td["next"]):
        part["observation"] = part["observation"][..., 0].clone()

    class Net(nn.Module):
        def forward(self, x):
            return torch.stack([x.sin()], -1)

    net = critic(Net(), features=0)
    check(GAE(**HYPERS, value_network=net)(td.clone()), wanted_by(td, net))
    assert net.module.rows[1] == PROBES + needed_of(td)


def wanted_by(td, net, **kwargs):
    td = td.clone()
    for part in (td, td["next"]):
        part["state_value"] = net.module.net(part["observation"])
    return GAE(**HYPERS, value_network=None, **kwargs)(td)


@pytest.mark.parametrize("own", [False, True], ids=["team", "each"])
def test_agents(own, device):
    td = some(features=(3, OBS), device=device)
    for name in ("reward", "done", "terminated"):
        x = td["next", name]
        td["next", name] = x.unsqueeze(-1).expand(*td.shape, 3, 1).clone() if own else x
    if own:  # one agent goes on: the step's successor counts
        first = td["next", "terminated"].nonzero()[0]
        td["next", "terminated"][tuple(first)] = False
    net = critic().to(device)
    alone = {"observation": "observation"}
    estimator = MultiAgentGAE(**HYPERS, value_network=net).to(device)
    out = estimator(td.clone())
    expected = td.clone()
    for part in (expected, expected["next"]):
        part["state_value"] = net.module.net(part[alone["observation"]])
    check(out, MultiAgentGAE(**HYPERS, value_network=None).to(device)(expected))
    assert net.module.rows[1] == 3 * (PROBES + needed_of_agents(td))


def needed_of_agents(td):
    done, over = (td["next", name].flatten(2) for name in ("done", "terminated"))
    cut = done.any(-1)
    cut[:, -1] = True
    return int((cut & ~over.all(-1)).sum())


@pytest.mark.parametrize("dim", [0, 1])
def test_lazy_stacks(dim):
    td, net = some(), critic()
    expected = wanted(td, "GAE", net)
    stack = LazyStackedTensorDict.lazy_stack([part.clone() for part in td.unbind(dim)], dim)
    stack.names = [None, "time"]
    check(GAE(**HYPERS, value_network=net)(stack), expected)
    assert net.module.rows == [td.numel(), PROBES + needed_of(td)]


def test_a_single_row_and_three_dimensions():
    td, net = some(), critic()
    expected = wanted(td, "GAE", net)
    check(GAE(**HYPERS, value_network=net)(td[0].clone()), expected[0])
    cube = td.reshape(2, 2, td.shape[1])
    out = GAE(**HYPERS, value_network=net, time_dim=0)(cube.permute(2, 0, 1))
    check(out.permute(1, 2, 0).reshape(td.shape), expected)
    assert net.module.calls[-1].numel() == PROBES + needed_of(td) and len(net.module.calls[-1]) == 3


def test_strided_observations():
    td, net = some(), critic()
    expected = wanted(td, "GAE", net)
    wide = torch.zeros(*td.shape, 2 * OBS, dtype=torch.float64)
    for part in (td, td["next"]):
        part["observation"] = wide.clone()[..., ::2].copy_(part["observation"])
    assert not td["observation"].is_contiguous()
    check(GAE(**HYPERS, value_network=net)(td), expected)
    assert net.module.rows[1] == PROBES + needed_of(td)


# -------------------------------------------------------------------------------------------------------------- chunks
@pytest.mark.parametrize(
    "chunks", [{"value_chunk_size": 1}, {"num_chunks": 3}, {"num_chunks": 3, "value_chunk_dim": 1}]
)
def test_chunks(chunks):
    td, net = some(rate=0.3), critic()
    check(GAE(**HYPERS, value_network=net, **chunks)(td.clone()), wanted(td, "GAE", net))
    first = net.module.rows[0]
    assert first < td.numel() and max(net.module.rows) == first
    assert sum(net.module.rows) == td.numel() + PROBES + needed_of(td)


# ---------------------------------------------------------------------------------------------------------- parameters
def test_parameters():
    """The same ones, whether or not by the same objects; or others for the successors, which are then all evaluated."""
    td, net, other_net = some(), critic(), critic(mlp(seed=9))
    params, other = TensorDict.from_module(net), TensorDict.from_module(other_net)
    estimator = GAE(**HYPERS, value_network=net)
    check(estimator(td.clone(), params=other, target_params=other.data), wanted(td, "GAE", other_net))
    check(estimator(td.clone(), params=params), wanted(td, "GAE", net))
    assert net.module.rows == [td.numel(), PROBES + needed_of(td), td.numel(), needed_of(td)]
    for call in ({"params": params, "target_params": other}, {"target_params": other}):
        check(estimator(td.clone(), **call), wanted(td, "GAE", net, other_net))
    assert net.module.rows[4:] == [td.numel()] * 4


def test_gradients():
    """To observations and to nothing else, as through two calls."""
    found = []
    for reuse in (None, False):
        td, net = some(), critic()
        obs = td["observation"].requires_grad_()
        out = GAE(**HYPERS, value_network=net, differentiable=True, reuse_values=reuse)(td)
        total = (out["advantage"] * torch.arange(td.numel()).view(*td.shape, 1)).sum() + out["value_target"].sum()
        grads = torch.autograd.grad(total, [obs, *net.parameters()], allow_unused=True)
        found.append(grads[0])
        assert all(grad is None for grad in grads[1:]) and all(p.requires_grad for p in net.parameters())
    agree(found[0], found[1], 1e-10, 1e-10)
    assert found[0].abs().max() > 0


# ------------------------------------------------------------------------------------- networks that look at the batch
def twice(monkeypatch, estimator):
    """TorchRL's calls, counted."""
    calls, theirs = [], estimator._call_value_nets
    monkeypatch.setattr(estimator, "_call_value_nets", lambda *a, **kw: calls.append(1) or theirs(*a, **kw))
    return calls


class TimeMixing(nn.Module):
    """Sees its past: values depend on which rows come with a state."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gru, self.head = nn.GRU(OBS, 6, batch_first=True).double(), nn.Linear(6, 1).double()

    def forward(self, x):
        return self.head(self.gru(x)[0])


@pytest.mark.parametrize("which", ["batch norm", "dropout", "past"])
def test_networks_that_look_at_the_batch(which, monkeypatch):
    layer = {"batch norm": nn.BatchNorm1d(OBS).double(), "dropout": nn.Dropout(), "past": nn.Identity()}[which]
    if which == "batch norm":
        layer = nn.Sequential(nn.Flatten(0, 1), layer, nn.Unflatten(0, (4, 24)))
    net = critic(TimeMixing() if which == "past" else nn.Sequential(layer, mlp()))
    td = some()
    estimator = GAE(**HYPERS, value_network=net, deactivate_vmap=True)
    calls = twice(monkeypatch, estimator)
    torch.manual_seed(0)
    out = estimator(td.clone())
    if which == "past":
        estimator(td.clone())
        assert net.module.rows == [96, PROBES + needed_of(td), *[96] * 4] and calls == [1, 1]
        same = GAE(**HYPERS, value_network=net, deactivate_vmap=True, reuse_values=False)(td.clone())
        check(out, same)
        return
    assert calls == [1] and net.module.rows == [96, 96]
    net.eval()
    if which == "dropout":
        check(estimator(td.clone()), wanted_by(td, net))
        assert calls == [1] and net.module.rows[2:] == [96, PROBES + needed_of(td)]
    net.train()
    forced = GAE(**HYPERS, value_network=net, reuse_values=True)
    if which == "dropout":
        forced(td.clone())
        assert net.module.rows[-1] == needed_of(td)


def test_a_network_that_is_replaced_or_changes_mode_is_looked_at_again():
    td, net = some(), critic()
    estimator = GAE(**HYPERS, value_network=net)
    rows = []
    for change in (lambda: None, lambda: None, net.eval, lambda: None):
        change()
        estimator(td.clone())
        rows.append(net.module.rows[-1] - needed_of(td))
    assert rows == [PROBES, 0, PROBES, 0]
    estimator(td[:, :10].clone())
    assert net.module.rows[-1] == PROBES + needed_of(td[:, :10])


def test_equal_values_show_nothing():
    """A head that starts at 0 hides whatever comes before it: it is looked at until it shows."""
    net = critic(TimeMixing())
    weight = net.module.net.head.weight.detach().clone()
    nn.init.zeros_(net.module.net.head.weight)
    td, estimator = some(), GAE(**HYPERS, value_network=net, deactivate_vmap=True)
    estimator(td.clone())
    assert "_probed" not in estimator.__dict__
    net.module.net.head.weight.data.copy_(weight)
    out = estimator(td.clone())
    check(out, GAE(**HYPERS, value_network=net, deactivate_vmap=True, reuse_values=False)(td.clone()))


@pytest.mark.parametrize("how", [{"reuse_values": False}, {"shifted": True}, {"skip_existing": True}])
def test_torchrl_keeps_its_calls(how, monkeypatch):
    td, net = some(), critic()
    estimator = GAE(**HYPERS, value_network=net, **how)
    calls = twice(monkeypatch, estimator)
    estimator(td.clone())
    assert calls == [1]
    if "skip_existing" in how:
        td["state_value"] = td["next", "state_value"] = torch.zeros(*td.shape, 1, dtype=torch.float64)
        net.module.calls.clear()
        estimator(td)
        assert net.module.calls == []


# ------------------------------------------------------------------------------------------------------------ recurrent
def recurrent(kind):
    torch.manual_seed(0)
    states = ["h", "c"][: 1 + (kind == "lstm")]
    layer = (LSTMModule if kind == "lstm" else GRUModule)(
        input_size=OBS,
        hidden_size=6,
        num_layers=2,
        in_keys=["observation", *states],
        out_keys=["features", *(("next", s) for s in states)],
    )
    head = TensorDictModule(Counted(nn.Linear(6, 1)), ["features"], ["state_value"])
    return TensorDictSequential(layer, head).double(), states


def stepped(net, states, td):
    """Values of states and successors, one step after the other, the memory cleared where an episode begins."""
    td, (N, T) = td.clone(), td.shape
    td["state_value"], td["next", "state_value"] = torch.zeros(2, N, T, 1, dtype=torch.float64)
    for n in range(N):
        memory = {s: torch.zeros(1, 2, 6, dtype=torch.float64) for s in states}
        for t in range(T):
            one = TensorDict({"observation": td["observation"][n, t : t + 1], **memory}, [1])
            one["is_init"] = td["is_init"][n, t : t + 1]
            with set_recurrent_mode(False), torch.no_grad():
                one = net(one)
                memory = {s: one["next", s] for s in states}
                after = TensorDict({"observation": td["next", "observation"][n, t : t + 1], **memory}, [1])
                after["is_init"] = torch.zeros(1, 1, dtype=torch.bool)
                after = net(after)
            td["state_value"][n, t], td["next", "state_value"][n, t] = one["state_value"][0], after["state_value"][0]
    return td


@pytest.mark.parametrize("how", ["plain", "time-major", "slots", "chunks", "row"])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_recurrent_networks(kind, how):
    """Resets inside rows, one of them where nothing ends; a bootstrap goes on from the state after its own step."""
    td = some(N=3, T=12, rate=0.2)
    forgetful = (~td["next", "done"][:, :-1] & ~td["is_init"][:, 1:]).nonzero()[3].tolist()
    td["is_init"][forgetful[0], forgetful[1] + 1] = True
    net, states = recurrent(kind)
    expected = GAE(**HYPERS, value_network=None)(stepped(net, states, td))
    kwargs = {"slots": {"bootstrap_slots": 16}, "chunks": {"value_chunk_size": 2}}.get(how, {})
    estimator, head = GAE(**HYPERS, value_network=net, **kwargs), net[1].module
    head.calls.clear()
    given = {"time-major": td.transpose(0, 1), "row": td[2]}.get(how, td).clone()
    with set_recurrent_mode(True):
        out = estimator(given)
    expected = expected[2] if how == "row" else expected
    check(out.transpose(0, 1) if how == "time-major" else out, expected)
    if how in ("plain", "time-major"):
        assert sum(head.rows[1:]) == needed_of(td) + 1 and needed_of(td) > 3
    with set_recurrent_mode(False):  # a network of single steps, with memory that the rollout holds
        memory = {s: torch.zeros(*given.shape, 2, 6, dtype=torch.float64) for s in states}
        given["next"].update(memory)
        given.update(memory)
        out = GAE(**HYPERS, value_network=net)(given.clone())
        check(out, GAE(**HYPERS, value_network=net, reuse_values=True)(given.clone()))


def test_a_recurrent_network_whose_memory_is_not_there():
    """Where a next observation differs inside a sequence, the state after that step is in no entry."""
    td = some(N=3, T=12, rate=0.2)
    net, states = recurrent("gru")
    td["next", "observation"][1, 4] = 1.0
    td["next", "done"][1, 4] = td["next", "terminated"][1, 4] = td["is_init"][1, 5] = False
    with set_recurrent_mode(True):
        out = GAE(**HYPERS, value_network=net)(td.clone())
        check(out, GAE(**HYPERS, value_network=net, reuse_values=False, deactivate_vmap=True)(td.clone()))
        slots = GAE(**HYPERS, value_network=net, bootstrap_slots=36)
        assert slots(td.clone())["advantage"][1, 4].isnan() and slots.bootstrap_overflow == 1


def test_discounted_return_of_a_recurrent_network():
    td = some(N=3, T=12, rate=0.2)
    net, states = recurrent("lstm")
    by_hand = stepped(net, states, td)
    by_hand["bootstrap"] = by_hand["next", "state_value"]
    with set_recurrent_mode(True):
        out = DiscountedReturn(**GAMMA_ALONE, value_network=net)(td)
    check(out, DiscountedReturn(**GAMMA_ALONE)(by_hand), ["value_target"])


# --------------------------------------------------------------------------------------------------------------- slots
def test_enough_slots(device):
    td, net = some(device=device), critic().to(device)
    for slots in (needed_of(td), 40, 200):
        estimator = GAE(**HYPERS, value_network=net, bootstrap_slots=slots).to(device)
        out = estimator(td.clone())
        check(out, wanted(td.cpu(), "GAE", critic()))
        assert net.module.rows[-2:] == [td.numel(), slots] and estimator.bootstrap_overflow == 0


def test_too_few_slots(device):
    """What finds no slot is counted, and its episode comes out NaN: all of it up to that step, and nothing else."""
    td, net = some(device=device), critic().to(device)
    few = needed_of(td) - 2
    estimator = GAE(**HYPERS, value_network=net, bootstrap_slots=few).to(device)
    out, expected = estimator(td.clone()), wanted(td.cpu(), "GAE", critic())
    assert estimator.bootstrap_overflow == 2
    done = td["next", "done"].cpu().squeeze(-1)
    cut = done & ~td["next", "terminated"].cpu().squeeze(-1)
    cut[:, -1] |= ~done[:, -1]
    lost = cut & (cut.flatten().cumsum(0).view(cut.shape) > few)
    assert lost.sum() == 2
    reach = torch.zeros_like(lost)
    for n, t in lost.nonzero().tolist():
        begin = max((s + 1 for s in range(t) if done[n, s]), default=0)
        reach[n, begin : t + 1] = True
    for key in RESULTS:
        agree(out[key].squeeze(-1), expected[key].squeeze(-1).masked_fill(reach, torch.nan), 1e-10, 1e-10, key)
    estimator(td.clone())
    assert estimator.bootstrap_overflow == 4 and "bootstrap_overflow" not in estimator.state_dict()


@pytest.mark.parametrize("name", ["VTrace", "TDLambdaEstimator", "Retrace", "DiscountedReturn"])
def test_slots_of_other_estimators(name):
    td, net = some(), critic(mlp(3), key="action_value") if name == "Retrace" else critic()
    makers = MAKERS | {"Retrace": retrace, "DiscountedReturn": lambda **kw: DiscountedReturn(**GAMMA_ALONE, **kw)}
    out, expected = (makers[name](value_network=net, **kw)(td.clone()) for kw in ({"bootstrap_slots": 30}, {}))
    check(out, expected, ["value_target"])


# ------------------------------------------------------------------------------------------ action values and returns
def retrace(**kwargs):
    return RetraceEstimator(**HYPERS, epsilon=0.2, **kwargs)


@pytest.mark.parametrize("policy", [None, actor])
@pytest.mark.parametrize("target", [False, True])
def test_retrace(policy, target):
    td, net = some(), critic(mlp(3), key="action_value")
    kwargs = {"actor_network": policy() if policy else None, "value_network": net}
    call = {}
    if target:
        call = {"params": TensorDict.from_module(net), "target_params": TensorDict.from_module(critic(mlp(3, seed=9)))}
    out, expected = (retrace(reuse_values=reuse, **kwargs)(td.clone(), **call) for reuse in (None, False))
    check(out, expected)
    first, second = net.module.rows[:2]
    assert first == td.numel() and second == (td.numel() if target else PROBES + needed_of(td))


def test_discounted_return():
    """The bootstraps alone; the first time, the states too, to see what kind of network it is."""
    td, net = some(), critic()
    expected = td.clone()
    expected["bootstrap"] = net.module.net(td["next", "observation"]).detach()
    expected = DiscountedReturn(**GAMMA_ALONE)(expected)
    estimator = DiscountedReturn(**GAMMA_ALONE, value_network=net)
    for _ in range(2):
        check(estimator(td.clone()), expected, ["value_target"])
    assert net.module.rows == [td.numel(), PROBES + needed_of(td), needed_of(td)]
    over = steps(torch.tensor([[0, 0, 0, 1], [0, 1, 0, 1]]))
    estimator.reuse_values = True
    check(estimator(over.clone()), DiscountedReturn(**GAMMA_ALONE)(over.clone()), ["value_target"])


def test_discounted_return_of_padded_trajectories():
    """The window's edge is the last step that counts, wherever padding begins and whatever it holds."""
    td, net = steps(torch.zeros(2, 8)), critic()
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 5:] = False
    td["observation"][1, 5:] = td["next", "observation"][1, 4]
    td["collector", "mask"] = mask
    estimator = DiscountedReturn(**GAMMA_ALONE, value_network=net)
    _, out = (estimator(td.clone()) for _ in range(2))
    assert net.module.rows == [16, PROBES + 2, 2]
    short = td[1:, :5].exclude("collector")
    short["bootstrap"] = net.module.net(short["next", "observation"]).detach()
    short = DiscountedReturn(**GAMMA_ALONE)(short)
    agree(out["value_target"][1:, :5], short["value_target"], 1e-10, 1e-10)


# ------------------------------------------------------------------------------------------------------------- compiled
def test_a_compiled_network(device):
    td, net = some(device=device), critic().to(device)
    plain = wanted(td, "GAE", net)
    compiled = TensorDictModule(torch.compile(net.module.net, backend="eager"), ["observation"], ["state_value"])
    estimator = GAE(**HYPERS, value_network=compiled).to(device)
    for seed in range(3):
        data = some(seed=seed, device=device)
        check(estimator(data.clone()), plain if seed == 0 else wanted(data, "GAE", net))


@pytest.mark.parametrize("slots", [None, 40])
def test_a_compiled_estimator(slots):
    td, net, other_net = some(), critic(), critic(mlp(seed=9))
    estimator = GAE(**HYPERS, value_network=net, bootstrap_slots=slots)
    call = {} if slots else {"params": TensorDict.from_module(net), "target_params": TensorDict.from_module(other_net)}
    out = torch.compile(estimator, backend="eager", fullgraph=True)(td.clone(), **call)
    check(out, wanted(td, "GAE", net, net if slots else other_net))
    assert not slots or estimator.bootstrap_overflow == 0


# --------------------------------------------------------------------------------------------------------- arguments
def test_arguments():
    for bad in (1, "yes"):
        with pytest.raises(TypeError, match="reuse_values"):
            GAE(**HYPERS, value_network=critic(), reuse_values=bad)
    with pytest.raises(ValueError, match="bootstrap_slots"):
        GAE(**HYPERS, value_network=critic(), bootstrap_slots=0)
    for other in ({"reuse_values": False}, {"shifted": True}):
        with pytest.raises(ValueError, match="bootstrap_slots"):
            GAE(**HYPERS, value_network=critic(), bootstrap_slots=3, **other)


def test_flags_that_do_not_fit_are_named():
    td = some()
    td.auto_batch_size_(1)
    td["next", "done"] = td["next", "done"][:, :-1]
    td["next"].batch_size = td.batch_size
    with pytest.raises(ShapeError, match="done"):
        GAE(**HYPERS, value_network=critic())(td)


def test_copies():
    td = some()
    estimator = GAE(**HYPERS, value_network=critic(), bootstrap_slots=30)
    expected = estimator(td.clone())
    for other in (copy.deepcopy(estimator), pickle.loads(pickle.dumps(estimator))):
        check(other(td.clone()), expected)


# ----------------------------------------------------------------------------------------------------------------- GPU
@pytest.mark.gpu
def test_slots_wait_for_nothing_and_can_be_captured():
    td, net = some(N=64, T=32, device="cuda"), critic().cuda()
    hypers = {"gamma": 0.97, "lmbda": 0.9, "device": "cuda"}
    estimator = GAE(**hypers, value_network=net, bootstrap_slots=300)
    static = estimator(td.clone())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        estimator(static)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    estimator.bootstrap_overflow.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        estimator(static)
    for seed in range(3):
        data = some(N=64, T=32, seed=seed, device="cuda")
        static.update_(data.select(*static.keys(True, True), strict=False))
        graph.replay()
        check(static, GAE(**hypers, value_network=net, reuse_values=False, deactivate_vmap=True)(data))
    assert estimator.bootstrap_overflow == 0


@pytest.mark.gpu
def test_the_device_is_waited_for_once():
    td, net = some(N=64, T=32, device="cuda"), critic().cuda()
    estimator = GAE(gamma=0.97, lmbda=0.9, device="cuda", value_network=net)
    estimator(td.clone())
    data = td.clone()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            estimator(data)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("synchronizing" in str(wait.message) for wait in waits) == 1
