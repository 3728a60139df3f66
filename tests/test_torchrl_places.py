"""Every place in TorchRL where a value estimator is plugged in, run on the CPU against the float64 reference."""

import copy
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch.distributions import Categorical
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors.utils import split_trajectories
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from torchrl.envs import GymEnv, SerialEnv
from torchrl.modules import ActorValueOperator, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss, DDPGLoss, ValueEstimators
from torchrl.objectives.utils import _VALUE_ESTIMATOR_REGISTRY
from torchrl.objectives.value import GAE as TorchRLGAE
from torchrl.objectives.value import TDLambdaEstimator as TorchRLTDLambda
from torchrl.trainers import Trainer, ValueEstimatorHook
from torchrl.trainers.algorithms import PPOTrainer

import reference
import rl_triton_td
from conftest import agree, rollout
from rl_triton_td import (
    GAE,
    DiscountedReturn,
    EligibilityTrace,
    EpisodicPrefixSum,
    MissingEntryError,
    MultiAgentGAE,
    RetraceEstimator,
    TD0Estimator,
    TD1Estimator,
    TDLambdaEstimator,
    ValueEstimatorTransform,
    VTrace,
)

GAMMA, LMBDA = 0.95, 0.9
RESULTS = ("advantage", "value_target")
STEPS = 80  # long enough for a random policy to lose the pole
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torchrl", "ignore:PPOTrainer is an experimental")


# ----------------------------------------------------------------------------------------------------------- the pieces
def make_env():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def make_actor():
    torch.manual_seed(0)
    logits = TensorDictModule(torch.nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticActor(logits, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True)


def make_critic():
    torch.manual_seed(1)
    return ValueOperator(torch.nn.Linear(4, 1), in_keys=["observation"])


def gae(**kwargs):
    return GAE(gamma=GAMMA, lmbda=LMBDA, **kwargs)


def wanted(td, mask=None, time_dim=-1, keys=None):
    """GAE of a rollout's own entries by the reference; batch dimensions and time of the tensordict, one feature."""
    names = {"value": "state_value", "reward": "reward"} | (keys or {})
    entries = [td[names["value"]]]
    entries += [td["next"][name] for name in (names["value"], names["reward"], "done", "terminated")]
    rows = [x.squeeze(-1).movedim(time_dim, -1).reshape(-1, td.shape[time_dim]) for x in entries]
    results = reference.gae(GAMMA, LMBDA, *rows, mask=None if mask is None else mask.reshape(rows[0].shape))
    shape = td.shape[:time_dim] + td.shape[time_dim:][1:] + td.shape[time_dim:][:1]
    return [result.reshape(shape).movedim(-1, time_dim).unsqueeze(-1) for result in results]


def check(td, expected=None, tolerance=1e-5, keys=RESULTS, **kwargs):
    assert td["next", "done"].any() and not td["next", "done"].all()
    for key, result in zip(keys, wanted(td, **kwargs) if expected is None else expected, strict=True):
        agree(td[key], result, tolerance, tolerance, str(key))


def batch(N, T, seed=0, **kwargs) -> TensorDict:
    x = {k: v.unsqueeze(-1) for k, v in rollout(N, T, seed, **kwargs).items() if v.ndim == 2}
    after = {name: x[name] for name in ("reward", "done", "terminated")} | {"state_value": x["next_state_value"]}
    return TensorDict({"state_value": x["state_value"], "next": after}, [N, T])


def collect(collector) -> TensorDictBase:
    """The first batch, in memory of its own."""
    collector.set_seed(0)
    try:
        return next(iter(collector)).clone()
    finally:
        collector.shutdown()


# ----------------------------------------------------------------------------------------------------------- collectors
@pytest.mark.parametrize("envs", [1, 2])
def test_collector(envs):
    env = make_env() if envs == 1 else SerialEnv(envs, make_env)
    sizes = {"frames_per_batch": envs * STEPS, "total_frames": envs * STEPS}
    data = collect(Collector(env, make_actor(), **sizes, postproc=gae(value_network=make_critic())))
    assert data.names[-1] == "time" and data.shape[-1] == STEPS
    check(data)


def test_collector_time_major():
    """A batch `[T, envs]`: time is where its name says, or where the estimator is told."""
    sizes = {"frames_per_batch": 2 * STEPS, "total_frames": 2 * STEPS}

    def postproc(data):
        return gae(value_network=make_critic())(data.transpose(0, 1))

    data = collect(Collector(SerialEnv(2, make_env), make_actor(), **sizes, postproc=postproc))
    assert data.names == ["time", None] and data.shape == (STEPS, 2)
    check(data, time_dim=0)
    data.names = None
    other = gae(value_network=make_critic(), time_dim=0)(data.exclude(*RESULTS))
    check(other, [data[key] for key in RESULTS], 0)


def multi(cls, workers=2, **kwargs):
    """A collector whose workers take STEPS steps each per batch."""
    kwargs = {"postproc": gae(value_network=make_critic())} | kwargs
    sizes = {"frames_per_batch": STEPS * (workers if cls is MultiSyncCollector else 1), "total_frames": -1}
    return cls([make_env] * workers, make_actor(), **sizes, num_threads=1, **kwargs)


def test_multi_sync_collector_stacked():
    data = collect(multi(MultiSyncCollector, cat_results="stack"))
    assert data.names == [None, "time"] and data.shape == (2, STEPS)
    check(data)


def test_multi_sync_collector_concatenated():
    """Workers end to end along time: the estimator says so once; as slices, they are rows."""
    collector = multi(MultiSyncCollector, cat_results=0, postproc=None)
    data = collect(collector)
    assert data.shape == (2 * STEPS,)
    data["next", "done"][STEPS - 1] = data["next", "terminated"][STEPS - 1] = False  # whatever the seeds gave
    estimator = gae(value_network=make_critic())
    with pytest.warns(UserWarning, match="a trajectory runs into another"):
        estimator(data.clone())
    with torch.no_grad():
        estimator(data.clone())  # once: warnings are errors here
    transform = ValueEstimatorTransform(gae(value_network=make_critic()), at="sample", num_slices=2)
    check(transform(data).reshape(2, STEPS))


def test_multi_async_collector():
    data = collect(multi(MultiAsyncCollector, workers=1))
    assert data.shape == (STEPS,)
    check(data)


def test_split_trajectories():
    """The mask of padded trajectories is honoured without being named."""
    sizes = {"frames_per_batch": 2 * STEPS, "total_frames": -1}
    postproc = gae(value_network=make_critic())
    data = collect(Collector(make_env(), make_actor(), **sizes, split_trajs=True, postproc=postproc))
    mask = data["collector", "mask"]
    assert not mask.all()
    check(data, mask=mask)
    for key in RESULTS:
        assert (data[key][~mask] == 0).all()


def test_split_trajectories_by_hand():
    data = batch(3, 20)
    padded = split_trajectories(data, prefix="collector")
    results = gae()(data)
    padded = gae()(padded)
    for key in RESULTS:
        agree(padded[key][padded["collector", "mask"]], results[key].reshape(-1, 1), 1e-12, 1e-12, key)


def test_shared_buffer_of_a_collector():
    """The collector initialises the storage by a fake rollout: a transform of the buffer adds its entries to that."""
    buffer = ReplayBuffer(
        storage=LazyMemmapStorage(1000),
        sampler=SamplerWithoutReplacement(shuffle=False),
        transform=ValueEstimatorTransform(gae(value_network=make_critic()), at="extend"),
        batch_size=2 * STEPS,
    )
    collector = multi(MultiSyncCollector, postproc=None, replay_buffer=buffer)
    collector.set_seed(0)
    try:
        next(iter(collector))
        data = buffer.sample()
    finally:
        collector.shutdown()
    rows = data.reshape(2, STEPS)  # one per worker
    first, second = (set(row["collector", "traj_ids"].tolist()) for row in rows)
    assert not first & second
    check(rows)


def test_shared_buffer_and_postproc():
    """A postproc of the workers adds to what the storage was initialised with: declared, its entries are kept."""
    estimator = gae(value_network=make_critic())
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(1000), sampler=SamplerWithoutReplacement(shuffle=False), batch_size=2 * STEPS
    )
    sizes = {"frames_per_batch": STEPS, "total_frames": -1}
    buffer.extend(collect(Collector(make_env(), make_actor(), **sizes)))
    buffer.empty()
    ValueEstimatorTransform(estimator, at="extend").declare(buffer)
    collector = multi(MultiSyncCollector, postproc=estimator, replay_buffer=buffer)
    collector.set_seed(0)
    try:
        next(iter(collector))
        data = buffer.sample()
    finally:
        collector.shutdown()
    check(data.reshape(2, STEPS))


def test_next_step_autoreset_rows():
    """Gymnasium's default: the step behind an end only resets. Masked, it is no transition."""
    gymnasium = pytest.importorskip("gymnasium")
    envs = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync")
    assert envs.metadata["autoreset_mode"] == gymnasium.vector.AutoresetMode.NEXT_STEP
    rng, critic = torch.Generator().manual_seed(0), make_critic()
    obs, _ = envs.reset(seed=0)
    resets, rows = torch.zeros(3, dtype=torch.bool), []
    for _ in range(60):
        after, reward, terminated, truncated, _ = envs.step(torch.randint(2, (3,), generator=rng).numpy())
        ends = {"terminated": torch.tensor(terminated), "truncated": torch.tensor(truncated)}
        ends["done"] = ends["terminated"] | ends["truncated"]
        after_td = {k: v.unsqueeze(-1) for k, v in ends.items()} | {"observation": torch.tensor(after)}
        after_td["reward"] = torch.tensor(reward, dtype=torch.float32).unsqueeze(-1)
        rows.append(TensorDict({"observation": torch.tensor(obs), "mask": ~resets, "next": after_td}, [3]))
        obs, resets = after, ends["done"]
    envs.close()
    data = gae(value_network=critic, keys={"mask": "mask"})(torch.stack(rows, 1))
    assert not data["mask"].all()
    check(data, mask=data["mask"])
    for n in range(3):  # the same as if the rows were not there
        valid = data[n, data[n]["mask"]]
        check(valid, [data[n][key][data[n]["mask"]] for key in RESULTS])


# ------------------------------------------------------------------------------------------------------ replay buffers
@pytest.mark.parametrize("at", ["extend", "sample"])
def test_replay_buffer(at):
    data = batch(4, 12)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(4),
        sampler=SamplerWithoutReplacement(),
        transform=ValueEstimatorTransform(gae(), at=at),
        batch_size=4,
    )
    buffer.extend(data)
    sample = buffer.sample()
    check(sample, tolerance=1e-12)
    assert ("advantage" in data.keys()) is False


def test_module_is_a_replay_buffer_transform():
    """Without our transform: a module is a transform at sample, for trajectories."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), batch_size=4, transform=gae())
    buffer.extend(batch(4, 12))
    check(buffer.sample(), tolerance=1e-12)


# ---------------------------------------------------------------------------------------------------- losses, trainers
def ppo_loss(**kwargs):
    return ClipPPOLoss(make_actor(), make_critic(), **kwargs)


def ppo_rollout(T=STEPS):
    torch.manual_seed(3)
    env = make_env()
    env.set_seed(3)
    return env.rollout(T, make_actor(), break_when_any_done=False).detach()


@pytest.mark.parametrize("form", ["class", "instance", "enum"])
def test_make_value_estimator(form):
    data, loss = ppo_rollout(), ppo_loss()
    if form == "class":
        loss.make_value_estimator(GAE, gamma=GAMMA, lmbda=LMBDA, value_network=loss.critic_network)
    elif form == "instance":
        loss.make_value_estimator(gae(value_network=loss.critic_network))
    else:
        with rl_triton_td.install():
            loss.make_value_estimator(ValueEstimators.GAE, gamma=GAMMA, lmbda=LMBDA)
    assert type(loss.value_estimator) is GAE
    given = gae(value_network=make_critic())(data.clone())
    check(given)
    found = loss(data.clone())
    torch.testing.assert_close(found, loss(given), rtol=1e-5, atol=1e-5)
    oracle = ppo_loss()
    oracle.make_value_estimator(ValueEstimators.GAE, gamma=GAMMA, lmbda=LMBDA)
    assert type(oracle.value_estimator) is TorchRLGAE
    torch.testing.assert_close(found, oracle(data.clone()), rtol=1e-5, atol=1e-5)


def test_loss_set_keys_reaches_the_estimator():
    loss = ppo_loss()
    loss.make_value_estimator(gae(value_network=loss.critic_network))
    loss.set_keys(reward="gain", advantage="adv", value_target="target", done="over", terminated="dead")
    data = ppo_rollout()
    for new, old in (("gain", "reward"), ("over", "done"), ("dead", "terminated")):
        data["next"].rename_key_(old, new)
    given = loss.value_estimator(data.clone())
    given["next", "done"], given["next", "terminated"] = data["next", "over"], data["next", "dead"]
    check(given, keys=("adv", "target"), expected=wanted(given, keys={"reward": "gain"}))
    torch.testing.assert_close(loss(data), loss(given), rtol=1e-5, atol=1e-5)


def test_value_estimate_by_a_loss():
    """Losses of Q-functions call `value_estimate` alone, with their own next values, without a time dimension."""

    def loss(estimator):
        torch.manual_seed(0)
        actor = TensorDictModule(torch.nn.Linear(3, 2), ["observation"], ["action"])
        value = ValueOperator(torch.nn.Bilinear(3, 2, 1), in_keys=["observation", "action"])
        made = DDPGLoss(actor, value, delay_actor=True, delay_value=True)
        made.make_value_estimator(estimator, gamma=GAMMA)
        return made

    g = torch.Generator().manual_seed(0)
    after = {name: torch.rand(16, 1, generator=g) < 0.3 for name in ("done", "terminated")}
    after["done"] |= after["terminated"]
    after |= {"observation": torch.randn(16, 3, generator=g), "reward": torch.randn(16, 1, generator=g)}
    entries = {"observation": torch.randn(16, 3, generator=g), "action": torch.rand(16, 2, generator=g), "next": after}
    data = TensorDict(entries, [16])
    oracle = loss(ValueEstimators.TD0)
    with rl_triton_td.install():
        ours = loss(ValueEstimators.TD0)
    assert type(ours.value_estimator) is TD0Estimator
    torch.testing.assert_close(ours(data.clone()), oracle(data.clone()), rtol=1e-5, atol=1e-5)


def test_trainer_hook():
    data, loss = ppo_rollout(), ppo_loss()
    estimator = gae(value_network=make_critic())
    hook = ValueEstimatorHook(estimator)
    collector = Collector(make_env(), make_actor(), frames_per_batch=STEPS, total_frames=STEPS)
    collector.set_seed(0)  # a rollout in which an episode ends
    trainer = Trainer(
        collector=collector,
        total_frames=STEPS,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=loss,
        optimizer=torch.optim.SGD(loss.parameters(), lr=0.1),
        progress_bar=False,
    )
    hook.register(trainer)
    seen = []
    trainer.register_op("pre_optim_steps", lambda: None)
    trainer.register_op("process_optim_batch", lambda td: seen.append(td.clone()) or td)
    trainer.train()
    check(seen[0])
    assert hook(None) is None
    other = ValueEstimatorHook(GAE(gamma=0.5, lmbda=0.5, value_network=make_critic()))
    other.load_state_dict(hook.state_dict())
    check(other(data))


@pytest.mark.parametrize("installed", [False, True])
def test_ppo_trainer(installed):
    loss = ppo_loss()
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(STEPS), sampler=SamplerWithoutReplacement(), batch_size=STEPS // 2
    )
    with rl_triton_td.install() if installed else pytest.MonkeyPatch.context():
        trainer = PPOTrainer(
            collector=Collector(make_env(), make_actor(), frames_per_batch=STEPS, total_frames=STEPS),
            total_frames=STEPS,
            frame_skip=1,
            optim_steps_per_batch=1,
            loss_module=loss,
            optimizer=torch.optim.SGD(loss.parameters(), lr=0.1),
            replay_buffer=buffer,
            progress_bar=False,
            enable_logging=False,
            num_epochs=1,
            gamma=GAMMA,
            lmbda=LMBDA,
            gae=None if installed else gae(value_network=loss.critic_network),
        )
        hook = trainer._modules["value_estimator"]
        assert type(hook.value_estimator) is GAE
        data = ppo_rollout()
        hook.value_estimator.average_gae = False
        check(hook(data))
        trainer.train()
    assert len(buffer) == STEPS and set(RESULTS) < set(buffer[:].keys())


# --------------------------------------------------------------------------------------------------------- multi-agent
@pytest.mark.parametrize("team", [True, False])
@pytest.mark.parametrize("cls", [GAE, MultiAgentGAE])
def test_multi_agent(cls, team):
    N, T, agents = 3, 11, 2
    own = [batch(N, T, seed) for seed in range(agents)]
    for td in own[1:] if team else ():
        for key in ("reward", "done", "terminated"):
            td["next", key] = own[0]["next", key]
    stacked = {key: torch.stack([td["next", key] for td in own], 2) for key in ("reward", "done", "terminated")}
    after = {"agents": {"state_value": torch.stack([td["next", "state_value"] for td in own], 2)}}
    names = {"value": ("agents", "state_value"), "advantage": ("agents", "advantage")}
    names["value_target"] = ("agents", "value_target")
    if team:
        after |= {key: own[0]["next", key] for key in stacked}
    else:
        after["agents"] |= stacked
        names |= {key: ("agents", key) for key in stacked}
    values = {"state_value": torch.stack([td["state_value"] for td in own], 2)}
    data = cls(gamma=GAMMA, lmbda=LMBDA, keys=names)(TensorDict({"agents": values, "next": after}, [N, T]))
    for key in RESULTS:
        assert data["agents", key].shape == (N, T, agents, 1)
    for agent, td in enumerate(own):
        for key, result in zip(RESULTS, wanted(td), strict=True):
            agree(data["agents", key][:, :, agent], result, 1e-12, 1e-12, key)


# ------------------------------------------------------------------------------------------------- kinds of tensordict
def test_lazy_stack_along_time_and_batch():
    data = batch(4, 9)
    steps = LazyStackedTensorDict(*data.unbind(1), stack_dim=1)
    rows = LazyStackedTensorDict(*data.unbind(0), stack_dim=0)
    for td in (steps, rows):
        check(gae()(td), tolerance=1e-12)
        assert isinstance(td, LazyStackedTensorDict)
        check(gae()(td), tolerance=1e-12)  # the entries are there now


@pytest.mark.parametrize("kind", ["memmap", "shared", "locked", "plain"])
def test_existing_entries_stay_where_they_are(kind, tmp_path):
    data = batch(4, 9)
    for key in RESULTS:
        data[key] = torch.full_like(data["state_value"], torch.nan)
    td = {
        "memmap": lambda: data.memmap(tmp_path),
        "shared": data.share_memory_,
        "locked": data.lock_,
        "plain": lambda: data,
    }[kind]()
    assert td.is_locked == (kind != "plain")
    before = {key: td[key].data_ptr() for key in RESULTS}
    assert gae()(td) is td
    check(td, tolerance=1e-12)
    assert {key: td[key].data_ptr() for key in RESULTS} == before
    if kind == "memmap":
        check(TensorDict.load_memmap(tmp_path), tolerance=1e-12)


@pytest.mark.parametrize("kind", ["memmap", "shared", "locked"])
def test_locked_without_entries(kind, tmp_path):
    data = batch(4, 9)
    td = {"memmap": lambda: data.memmap(tmp_path), "shared": data.share_memory_, "locked": data.lock_}[kind]()
    with pytest.raises(RuntimeError, match="lock"):
        gae()(td)


@pytest.mark.parametrize("dim", [0, 1])
def test_named_time(dim):
    data = batch(5, 9)
    td = (data.transpose(0, 1) if dim == 0 else data).clone()
    td.names = ["time", "env"] if dim == 0 else ["env", "time"]
    check(gae()(td), time_dim=dim, tolerance=1e-12)
    td.names = None
    plain = td.exclude(*RESULTS)
    check(gae(time_dim=dim)(plain.clone()), time_dim=dim, tolerance=1e-12)
    check(gae().forward(plain.clone(), time_dim=dim - 2), time_dim=dim, tolerance=1e-12)


def test_squeezed_time_of_a_single_row():
    data = batch(1, 9, done=0.5)
    check(gae()(data[0].clone()), [result[0] for result in wanted(data)], 1e-12)


# ------------------------------------------------------------------------------------------------------------- modules
def make_vtrace():
    return VTrace(gamma=GAMMA, actor_network=make_actor(), value_network=make_critic())


MAKERS = {
    "gae": lambda: gae(value_network=make_critic()),
    "td0": lambda: TD0Estimator(gamma=GAMMA, value_network=make_critic()),
    "td1": lambda: TD1Estimator(gamma=GAMMA, value_network=make_critic()),
    "td_lambda": lambda: TDLambdaEstimator(gamma=GAMMA, lmbda=LMBDA, value_network=make_critic()),
    "vtrace": make_vtrace,
    "returns": lambda: DiscountedReturn(gamma=GAMMA),
    "trace": lambda: EligibilityTrace(gamma=GAMMA, lmbda=LMBDA, keys={"gradient": "observation"}),
    "prefix_sum": lambda: EpisodicPrefixSum(),
}


@pytest.mark.parametrize("name", MAKERS)
def test_copies(name):
    """Pickled, deep-copied and moved, before and after a call: the same numbers."""
    data, estimator = ppo_rollout(), MAKERS[name]()
    expected = estimator(data.clone()).select(*estimator.out_keys)
    for original in (estimator, MAKERS[name]()):
        for other in (pickle.loads(pickle.dumps(original)), copy.deepcopy(original), copy.deepcopy(original).to("cpu")):
            assert (other.in_keys, other.out_keys) == (estimator.in_keys, estimator.out_keys)
            assert (other(data.clone()).select(*estimator.out_keys) == expected).all()


def test_copies_of_a_loss():
    data, loss = ppo_rollout(), ppo_loss()
    loss.make_value_estimator(gae(value_network=loss.critic_network))
    torch.testing.assert_close(copy.deepcopy(loss)(data.clone()), loss(data.clone()))


@pytest.mark.parametrize("name", MAKERS)
def test_keys_are_what_is_read_and_written(name):
    """A rollout of `in_keys` alone suffices, and only the `out_keys` and the values of the states are new."""
    estimator, data = MAKERS[name](), ppo_rollout()
    narrow = data.select(*estimator.in_keys)
    before = set(narrow.keys(True, True))
    estimator(narrow)
    values = {"state_value", ("next", "state_value")} if getattr(estimator, "value_network", None) else set()
    assert set(narrow.keys(True, True)) - before == set(estimator.out_keys) | values
    # of the flags one stands in for the other, and for an action that is not there the policy's own
    for key in set(estimator.in_keys) - {("next", "done"), ("next", "terminated"), "action"}:
        with pytest.raises((KeyError, RuntimeError)):
            MAKERS[name]()(data.select(*(k for k in estimator.in_keys if k != key)))


def test_select_out_keys():
    data = batch(3, 8)
    estimator = gae().select_out_keys("value_target")
    assert estimator.out_keys == ["value_target"]
    out = estimator(data.clone())
    assert "advantage" not in out.keys()
    agree(out["value_target"], wanted(data)[1], 1e-12, 1e-12)
    estimator.reset_out_keys()
    check(estimator(data.clone()), tolerance=1e-12)


def test_sequence():
    """A critic, an estimator with keys of its own, and a module that reads what it wrote."""
    critic = ValueOperator(torch.nn.Linear(4, 1), in_keys=["observation"])
    after = ValueOperator(critic.module, in_keys=[("next", "observation")], out_keys=[("next", "state_value")])
    estimator = gae(keys={"advantage": "gain"})
    sign = TensorDictModule(torch.sign, ["gain"], ["sign"])
    chain = TensorDictSequential(critic, after, estimator, sign)
    flags = [("next", "reward"), ("next", "done"), ("next", "terminated")]
    assert set(chain.in_keys) == {"observation", ("next", "observation"), *flags}
    assert {"gain", "value_target", "sign"} < set(chain.out_keys)
    data = chain(ppo_rollout()).detach()
    check(data, keys=("gain", "value_target"))
    assert torch.equal(data["sign"], data["gain"].sign())
    chosen = chain.select_out_keys("sign")(ppo_rollout())
    assert "gain" not in chosen.keys() and torch.equal(chosen["sign"], data["sign"])
    assert chain.select_subsequence(out_keys=["gain"])[-1] is estimator


def test_keys_shorthand():
    names = {"value": ("a", "v"), "reward": "r", "advantage": ("a", "adv"), "value_target": "vt", "mask": "valid"}
    short, long = gae(keys=names), gae()
    long.set_keys(**names)
    assert short.tensor_keys == long.tensor_keys
    assert (short.in_keys, short.out_keys) == (long.in_keys, long.out_keys)
    flags = [("next", "r"), ("next", "done"), ("next", "terminated")]
    assert short.in_keys == [("a", "v"), *flags, ("next", "a", "v"), "valid"]
    with pytest.raises(KeyError):
        gae(keys={"rewards": "r"})
    with pytest.raises(MissingEntryError, match="valid"):
        gae(keys={"mask": "valid"})(batch(2, 5))


def test_value_and_policy_in_one_operator():
    """TorchRL's shared trunk: the value operator's input is hidden, and is computed for the next state too."""
    torch.manual_seed(0)
    trunk = TensorDictModule(torch.nn.Linear(4, 6), ["observation"], ["hidden"])
    policy = TensorDictModule(torch.nn.Linear(6, 2), ["hidden"], ["logits"])
    actor = ProbabilisticActor(policy, ["logits"], distribution_class=Categorical, return_log_prob=True)
    both = ActorValueOperator(trunk, actor, ValueOperator(torch.nn.Linear(6, 1), in_keys=["hidden"]))
    check(gae(value_network=both.get_value_operator())(ppo_rollout()))


def test_retrace_estimator_from_a_buffer():
    N, T = 4, 10
    x = rollout(N, T, seed=2)
    after = {name: x[name].unsqueeze(-1) for name in ("reward", "done", "terminated")}
    after["state_value"] = x["next_state_value"].unsqueeze(-1)
    entries = {"state_action_value": x["action_value"].unsqueeze(-1), "log_pi": x["log_pi"], "next": after}
    data = TensorDict(entries | {"action_log_prob": x["log_mu"]}, [N, T])
    buffer = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(N * T),
        sampler=SamplerWithoutReplacement(shuffle=False),
        transform=ValueEstimatorTransform(RetraceEstimator(gamma=GAMMA, lmbda=LMBDA), at="sample", slice_len=T),
        batch_size=N * T,
    )
    buffer.extend(data.reshape(-1))
    sample = buffer.sample().reshape(N, T)
    names = ("log_pi", "log_mu", "action_value", "next_state_value", "reward", "done", "terminated")
    expected = reference.retrace(GAMMA, LMBDA, *(x[name] for name in names))
    check(sample, [result.unsqueeze(-1) for result in expected], 1e-12)


# ------------------------------------------------------------------------------------------------------------- install
def fresh(script: str, *arguments: str) -> str:
    """What a script prints in a process of its own."""
    command = [sys.executable, "-W", "error:::rl_triton_td", "-c", textwrap.dedent(script), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_install_in_a_fresh_process(device):
    """TorchRL's PPO loss runs none of TorchRL's recurrences, and all of them again afterwards."""
    fresh(
        """
        import collections, functools, sys
        import torch, torchrl.objectives  # every module of losses is loaded: dreamer_v3 binds the functions by name
        from torchrl.objectives.value import functional

        calls = collections.Counter()

        def counted(f):
            @functools.wraps(f)
            def wrapper(*args, **kwargs):
                calls[f.__name__] += 1
                return f(*args, **kwargs)
            return wrapper

        wrapped = {}
        for name in [*functional.__all__, "reward2go"]:
            wrapped[id(getattr(functional, name))] = counted(getattr(functional, name))
        for name, module in list(sys.modules.items()):
            if name.startswith("torchrl"):
                for key, value in list(vars(module).items()):
                    if id(value) in wrapped:
                        setattr(module, key, wrapped[id(value)])

        import rl_triton_td
        from tensordict import TensorDict
        from tensordict.nn import TensorDictModule
        from torch.distributions import Categorical
        from torchrl.modules import ProbabilisticActor, ValueOperator
        from torchrl.objectives import A2CLoss, ClipPPOLoss, ValueEstimators

        device = sys.argv[1]
        g = torch.Generator().manual_seed(0)
        N, T = 3, 32
        flags = {"done": torch.rand(N, T, 1, generator=g) < 0.1}
        flags["terminated"] = flags["done"] & (torch.rand(N, T, 1, generator=g) < 0.5)
        after = flags | {"reward": torch.randn(N, T, 1, generator=g), "observation": torch.randn(N, T, 4, generator=g)}
        entries = {"observation": torch.randn(N, T, 4, generator=g), "next": after}
        entries |= {"action": torch.randint(2, (N, T), generator=g), "action_log_prob": torch.full((N, T), -0.7)}
        data = TensorDict(entries, [N, T]).to(device)

        def losses():
            out = []
            for cls in (ClipPPOLoss, A2CLoss):
                for kind in ("GAE", "TD0", "TD1", "TDLambda"):
                    torch.manual_seed(0)
                    logits = TensorDictModule(torch.nn.Linear(4, 2), ["observation"], ["logits"])
                    actor = ProbabilisticActor(
                        logits, ["logits"], distribution_class=Categorical, return_log_prob=True
                    )
                    loss = cls(actor, ValueOperator(torch.nn.Linear(4, 1), in_keys=["observation"])).to(device)
                    loss.make_value_estimator(ValueEstimators[kind])
                    result = loss(data.clone()).detach()
                    out.append(torch.stack([result["loss_objective"], result["loss_critic"].mean()]))
            return torch.stack(out)

        theirs = losses()
        assert sum(calls.values()) >= 8, calls
        calls.clear()
        rl_triton_td.install()
        ours = losses()
        assert not calls, calls
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        rl_triton_td.uninstall()
        assert torch.equal(losses(), theirs)
        assert sum(calls.values()) >= 8, calls
        """,
        device,
    )


def test_install_before_a_lazy_import():
    """Modules that TorchRL imports late take our names, and give them back."""
    fresh(
        """
        import sys
        import rl_triton_td
        theirs = __import__("torchrl.objectives.value", fromlist=["GAE"]).GAE
        assert "torchrl.trainers.algorithms.on_policy" not in sys.modules
        rl_triton_td.install()
        import torchrl.trainers.algorithms.on_policy as late
        from torchrl.objectives.value import GAE
        assert late.GAE is GAE is rl_triton_td.GAE
        rl_triton_td.uninstall()
        from torchrl.objectives.value import GAE
        assert late.GAE is GAE is theirs
        """
    )


def test_install_is_idempotent_and_a_context():
    import torchrl.objectives.dreamer_v3 as dreamer
    from torchrl.objectives.value import advantages, functional

    def state():
        names = [(module, name) for module in (advantages, functional, dreamer) for name in sorted(vars(module))]
        bound = [id(getattr(module, name)) for module, name in names if "estimat" in name.lower() or "GAE" in name]
        return bound, [(key, id(entry)) for key, entry in _VALUE_ESTIMATOR_REGISTRY.items()]

    before = state()
    rl_triton_td.uninstall()  # of nothing is nothing
    assert state() == before
    with rl_triton_td.install():
        inside = state()
        assert inside != before
        assert _VALUE_ESTIMATOR_REGISTRY[ValueEstimators.TDLambda].cls is TDLambdaEstimator
        assert rl_triton_td.install() is not None and state() == inside
        assert advantages.GAE is GAE and functional.td_lambda_return_estimate is dreamer.td_lambda_return_estimate
        made = advantages.TDLambdaEstimator(gamma=GAMMA, lmbda=LMBDA, value_network=None)
        assert type(made) is TDLambdaEstimator and isinstance(made, TorchRLTDLambda)
    assert state() == before
    with pytest.raises(RuntimeError, match="inside"), rl_triton_td.install():
        raise RuntimeError("inside")
    assert state() == before
    made(batch(2, 5))  # made in between, and still at work
