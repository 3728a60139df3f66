"""Every Python block of the README, run as it stands."""

import pickle
import re
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch.distributions import Categorical
from torchrl.envs import GymEnv
from torchrl.modules import ProbabilisticActor, ValueOperator

import reference
from conftest import agree, rollout

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def block(containing: str) -> str:
    (found,) = (b for b in BLOCKS if containing in b)
    return found


@pytest.fixture
def names():
    pytest.importorskip("gymnasium")
    torch.manual_seed(0)
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    logits = TensorDictModule(torch.nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"])
    policy = ProbabilisticActor(
        logits, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True, spec=env.action_spec
    )
    return {
        "env": env,
        "policy": policy,
        "critic": ValueOperator(torch.nn.Linear(4, 1), in_keys=["observation"]),
        "rollout": env.rollout(20, policy, break_when_any_done=False).detach(),
        "torch": torch,
    }


def test_every_block_is_run_here():
    assert len(BLOCKS) == 6 and all(len(b.splitlines()) < 25 for b in BLOCKS)


def test_collector(names, capsys):
    exec(block("Collector"), names)
    names["collector"].shutdown()
    assert "torch.Size([64, 1]) torch.Size([64, 1])" in capsys.readouterr().out


def test_names_of_its_own(names):
    x = {k: v.unsqueeze(-1) for k, v in rollout(3, 9, dtype=torch.float32).items() if v.ndim == 2}
    after = {"done": x["done"], "terminated": x["terminated"], "agents": {"reward": x["reward"]}}
    after["agents"]["value"] = x["next_state_value"]
    names["batch"] = TensorDict({"agents": {"value": x["state_value"]}, "next": after}, [3, 9])
    exec(block("names ="), names)
    advantage, _ = reference.gae(
        0.99,
        0.95,
        *(x[k].squeeze(-1) for k in ("state_value", "next_state_value", "reward", "done", "terminated")),
    )
    agree(names["batch"]["weight"].squeeze(-1), advantage.tanh(), 1e-5, 1e-5, "weight")


def test_in_place_of_torchrl(names):
    import torchrl.objectives.value

    import rl_triton_td

    original = torchrl.objectives.value.GAE
    try:
        exec(block("install"), names)
        assert isinstance(names["loss"].value_estimator, rl_triton_td.GAE)
        assert names["losses"]["loss_critic"].requires_grad
    finally:
        rl_triton_td.uninstall()
    assert torchrl.objectives.value.GAE is original


def test_function(names):
    names |= {k: v.unsqueeze(-1) for k, v in rollout(3, 9, dtype=torch.float32).items() if v.ndim == 2}
    exec(block("time_dim=1"), names)
    assert names["advantage"].shape == (3, 9, 1)


def test_new_estimator(device, tmp_path, monkeypatch):
    # Triton reads the source of a kernel's functions from their file
    (tmp_path / "readme_estimator.py").write_text(block("FollowOnTrace"))
    monkeypatch.syspath_prepend(tmp_path)
    from readme_estimator import FollowOnTrace

    x = rollout(3, 20, seed=5, dtype=torch.float32)
    ratio = (x["log_pi"] - x["log_mu"]).exp()
    entries = {"interest": x["reward"], "ratio": ratio, "next": {"done": x["done"]}}
    td = TensorDict(entries, [3, 20]).unsqueeze(-1).to(device)
    td.batch_size = [3, 20]
    estimator = pickle.loads(pickle.dumps(FollowOnTrace(gamma=0.9))).to(device)
    assert estimator.in_keys == ["interest", ("next", "done"), "ratio"] and estimator.out_keys == ["emphasis"]
    got = estimator(td)["emphasis"]
    for row in range(3):
        trace = 0.0
        for t in range(20):
            carried = 0.0 if t == 0 or x["done"][row, t - 1] else 0.9 * ratio[row, t - 1].item() * trace
            trace = x["reward"][row, t].item() + carried
            assert got[row, t].item() == pytest.approx(trace, rel=1e-4, abs=1e-4)
    with pytest.raises(KeyError, match="'ratio'"):
        estimator(td.exclude("ratio"))


def test_a_compiled_gradient(names):
    exec(block("torch.compile"), names)
    gamma, reward, ends = (names[k] for k in ("gamma", "reward", "ends"))
    step = 1e-3
    plus, minus = (
        reference.reward_to_go(reward.squeeze(-1), ends.squeeze(-1), 0.99 + s).square().mean() for s in (step, -step)
    )
    agree(gamma.grad, (plus - minus) / (2 * step), 1e-3, 1e-3)
