"""What a module reads, refuses and writes: keys, messages, memory, and a TensorDict left as it was on bad input."""

import dataclasses

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule

import reference
import rl_triton_td
from conftest import agree, rollout
from rl_triton_td import specs
from rl_triton_td.functional import ShapeError

VALUES = ("state_value", "next_state_value", "reward", "done", "terminated")
HYPERS = {"gamma": 0.99, "lmbda": 0.95}


def batch(N=3, T=12, seed=0, device="cpu", nested=()):
    x = {k: v.unsqueeze(-1).to(device) for k, v in rollout(N, T, seed=seed, dtype=torch.float32).items() if v.ndim == 2}
    td = TensorDict({}, [N, T], device=device)
    td[(*nested, "state_value")] = x["state_value"]
    for name in ("reward", "done", "terminated"):
        td[("next", *nested, name)] = x[name]
    td[("next", *nested, "state_value")] = x["next_state_value"]
    return td, {k: v.squeeze(-1).cpu() for k, v in x.items()}


def same(a: TensorDict, b: TensorDict) -> bool:
    keys = set(a.keys(True, True))
    return keys == set(b.keys(True, True)) and all(torch.equal(a[k], b[k]) for k in keys)


def test_it_writes_what_the_reference_says(device):
    td, x = batch(device=device)
    out = rl_triton_td.GAE(**HYPERS).to(device)(td)
    assert out is td
    for key, e in zip(("advantage", "value_target"), reference.gae(0.99, 0.95, *(x[k] for k in VALUES)), strict=True):
        agree(td[key].squeeze(-1), e, 1e-5, 1e-5, key)


def test_existing_entries_are_written_in_their_own_memory(device):
    td, _ = batch(device=device)
    wanted = rl_triton_td.GAE(**HYPERS).to(device)(td.clone())
    td["advantage"] = advantage = torch.full_like(td["state_value"], torch.nan)
    td["value_target"] = target = torch.full_like(advantage, torch.nan)
    rl_triton_td.GAE(**HYPERS).to(device)(td.lock_())
    assert td["advantage"] is advantage and td["value_target"] is target
    assert torch.equal(advantage, wanted["advantage"]) and torch.equal(target, wanted["value_target"])


@pytest.mark.parametrize("misfit", ["shape", "dtype", "expanded", "tracked"])
def test_an_entry_that_does_not_fit_is_replaced(misfit):
    td, _ = batch()
    wanted = rl_triton_td.GAE(**HYPERS)(td.clone())["advantage"]
    td["advantage"] = old = {
        "shape": torch.zeros(3, 12),
        "dtype": torch.zeros(3, 12, 1, dtype=torch.float64),
        "expanded": torch.zeros(1, 1, 1).expand(3, 12, 1),
        "tracked": torch.zeros(3, 12, 1, requires_grad=True),
    }[misfit]
    rl_triton_td.GAE(**HYPERS)(td)
    assert torch.equal(td["advantage"], wanted) and (old == 0).all()


BAD = {
    "a reward without its last dimension": (("next", "reward"), lambda x: x.squeeze(-1), ShapeError, "reward"),
    "an integer reward": (("next", "reward"), lambda x: x.long(), TypeError, "reward"),
    "an integer value": ("state_value", lambda x: x.long(), TypeError, "state_value"),
    "a next value of another shape": (("next", "state_value"), lambda x: x.expand(3, 12, 2), ShapeError, "value"),
    "no reward": (("next", "reward"), None, KeyError, "('next', 'reward')"),
    "no value": ("state_value", None, KeyError, "'state_value'"),
    "no next value and no bootstrap": (("next", "state_value"), None, KeyError, "('next', 'state_value')"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("cls", ["GAE", "TDLambdaEstimator", "TD0Estimator"])
def test_bad_input_is_named_and_leaves_the_tensordict_alone(case, cls):
    key, change, error, named = BAD[case]
    td, _ = batch()
    if change is None:
        del td[key]
    else:
        td[key] = change(td[key])
    before = td.clone()
    hypers = HYPERS if cls != "TD0Estimator" else {"gamma": 0.99}
    with pytest.raises(error) as raised:
        getattr(rl_triton_td, cls)(**hypers)(td)
    assert named in str(raised.value)
    assert same(td, before)


def test_bad_input_behind_a_network_leaves_the_tensordict_alone():
    td, _ = batch()
    td["obs"], td["next", "obs"] = torch.randn(2, 3, 12, 4)
    td = td.exclude("state_value", ("next", "state_value"))
    td["next", "reward"] = td["next", "reward"].squeeze(-1)
    before = td.clone()
    critic = TensorDictModule(torch.nn.Linear(4, 1), in_keys=["obs"], out_keys=["state_value"])
    with pytest.raises(ShapeError, match="reward"):
        rl_triton_td.GAE(**HYPERS, value_network=critic)(td)
    assert same(td, before)


def test_an_empty_tensordict():
    with pytest.raises(KeyError, match=r"GAE reads \('next', 'reward'\).*holds nothing"):
        rl_triton_td.GAE(**HYPERS)(TensorDict({}, [2, 3]))
    with pytest.raises(RuntimeError, match="at least one dimension"):
        rl_triton_td.GAE(**HYPERS)(TensorDict({}, []))


@pytest.mark.parametrize("name", ["mask", "bootstrap", "truncated"])
def test_a_named_entry_must_be_there(name):
    td, _ = batch()
    with pytest.raises(KeyError, match=f"mine_{name}"):
        rl_triton_td.GAE(**HYPERS, keys={name: f"mine_{name}"})(td)


def test_keys_say_what_is_read_and_written():
    names = {name: ("agents", name) for name in ("reward", "done", "terminated", "advantage", "value_target")}
    names["value"] = ("agents", "state_value")
    estimator = rl_triton_td.GAE(**HYPERS, keys=names)
    td, x = batch(nested=("agents",))
    assert all(key in td.keys(True) for key in estimator.in_keys)
    read = td.select(*estimator.in_keys)
    estimator(read)
    assert set(read.keys(True, True)) - set(td.keys(True, True)) == set(estimator.out_keys)
    agree(read["agents", "advantage"].squeeze(-1), reference.gae(0.99, 0.95, *(x[k] for k in VALUES))[0], 1e-5, 1e-5)


def test_done_from_its_parts():
    td, x = batch()
    td["next", "truncated"] = td["next", "done"] & ~td["next", "terminated"]
    wanted = rl_triton_td.GAE(**HYPERS)(td.clone())["advantage"]
    del td["next", "done"]
    assert torch.equal(rl_triton_td.GAE(**HYPERS)(td)["advantage"], wanted)


def test_tensors_in_place_of_a_tensordict():
    td, x = batch()
    advantage, target = rl_triton_td.GAE(**HYPERS)(
        state_value=td["state_value"],
        next_reward=td["next", "reward"],
        next_done=td["next", "done"],
        next_terminated=td["next", "terminated"],
        next_state_value=td["next", "state_value"],
    )
    wanted = rl_triton_td.GAE(**HYPERS)(td)
    assert torch.equal(advantage, wanted["advantage"]) and torch.equal(target, wanted["value_target"])


def test_a_discount_set_between_calls():
    td, x = batch()
    estimator = rl_triton_td.GAE(**HYPERS)
    estimator(td)
    estimator.gamma.fill_(0.5)
    estimator(td)
    wanted = reference.gae(0.5, 0.95, *(x[k] for k in VALUES))[0]
    agree(td["advantage"].squeeze(-1), wanted, 1e-5, 1e-5)


def q_rollout():
    torch.manual_seed(0)
    network = TensorDictModule(torch.nn.Linear(4, 3), in_keys=["observation"], out_keys=["action_value"])
    done = torch.rand(2, 5, 1) < 0.3
    after = {"observation": torch.randn(2, 5, 4), "reward": torch.randn(2, 5, 1), "done": done, "terminated": done}
    entries = {"observation": torch.randn(2, 5, 4), "action": torch.randint(3, (2, 5)), "next": after}
    return network, TensorDict({**entries, "action_log_prob": -torch.ones(2, 5)}, [2, 5])


def test_values_that_a_policy_left_behind():
    """A collector's policy writes values of states, not of their successors."""
    network, td = q_rollout()
    estimator = rl_triton_td.RetraceEstimator(gamma=0.9, lmbda=0.8, value_network=network, epsilon=0.1)
    wanted = estimator(td.clone())["value_target"]
    torch.testing.assert_close(estimator(network(td.clone()))["value_target"], wanted)
    critic = TensorDictModule(torch.nn.Linear(4, 1), in_keys=["observation"], out_keys=["state_value"])
    gae = rl_triton_td.GAE(**HYPERS, value_network=critic)
    torch.testing.assert_close(gae(critic(td.clone()))["advantage"], gae(td.clone())["advantage"])


@pytest.mark.parametrize("cls", ["RetraceEstimator", "GAE"])
def test_parameters_of_a_target_network_alone(cls):
    network, td = q_rollout()
    if cls == "GAE":
        network = TensorDictModule(torch.nn.Linear(4, 1), in_keys=["observation"], out_keys=["state_value"])
    estimator = getattr(rl_triton_td, cls)(**HYPERS, value_network=network)
    own = TensorDict.from_module(network).data
    other = own.apply(lambda p: p + 0.1)
    alone = estimator(td.clone(), target_params=other)["value_target"]
    torch.testing.assert_close(alone, estimator(td.clone(), params=own, target_params=other)["value_target"])
    assert not torch.allclose(alone, estimator(td.clone())["value_target"])


def test_what_the_actor_reads_is_among_the_keys():
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(torch.nn.Linear(2, 3), in_keys=["pixels"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=torch.distributions.Categorical),
    )
    trace = rl_triton_td.VTrace(gamma=0.9, actor_network=actor)
    assert {"action_log_prob", "pixels", "action"} <= set(trace.in_keys)
    network, _ = q_rollout()
    retrace = rl_triton_td.RetraceEstimator(gamma=0.9, lmbda=0.8, value_network=network, actor_network=actor)
    assert {"action", "action_log_prob", "pixels", ("next", "pixels")} <= set(retrace.in_keys)


def test_a_declaration_that_does_not_fit_is_refused():
    with pytest.raises(TypeError, match="reads values"):
        type("Mine", (rl_triton_td.SpecEstimator,), {"spec": specs.TD0})
    two = dataclasses.replace(specs.TRACE, name="two_outputs", outputs=("trace", "more"))
    with pytest.raises(TypeError, match="must have one output"):
        type("Mine", (rl_triton_td.SpecEstimator,), {"spec": two})
    del specs.SPECS["two_outputs"]
