"""`ValueEstimatorTransform`: replay buffers at extend and at sample, storages of every kind, slices, and its errors."""

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)
from torchrl.envs import GymEnv, TransformedEnv

import reference
from conftest import agree, rollout
from rl_triton_td import GAE, MissingEntryError, TDLambdaEstimator, ValueEstimatorTransform

GAMMA, LMBDA = 0.95, 0.9
RESULTS = ("advantage", "value_target")


def batch(N, T, seed=0, **kwargs):
    x = {k: v.unsqueeze(-1) for k, v in rollout(N, T, seed, **kwargs).items() if v.ndim == 2}
    after = {name: x[name] for name in ("reward", "done", "terminated")} | {"state_value": x["next_state_value"]}
    steps = torch.arange(T).expand(N, T).clone()
    ids = torch.arange(N).unsqueeze(-1).expand(N, T).clone()
    ids = ids * T + torch.nn.functional.pad(x["done"].squeeze(-1)[:, :-1], (1, 0)).cumsum(-1)
    entries = {"state_value": x["state_value"], "next": after, "step": steps, "collector": {"traj_ids": ids}}
    return TensorDict(entries, [N, T])


def wanted(td, mask=None):
    """GAE of a batch `[N, T]` by the reference."""
    entries = (td["state_value"], *(td["next", name] for name in ("state_value", "reward", "done", "terminated")))
    results = reference.gae(GAMMA, LMBDA, *(entry.squeeze(-1) for entry in entries), mask=mask)
    return [result.unsqueeze(-1) for result in results]


def check(td, expected):
    for key, result in zip(RESULTS, expected, strict=True):
        agree(td[key], result, 1e-12, 1e-12, key)


def gae(**kwargs):
    return GAE(gamma=GAMMA, lmbda=LMBDA, **kwargs)


def in_order():
    return SamplerWithoutReplacement(shuffle=False)


STORAGES = {
    "tensor": lambda: LazyTensorStorage(100),
    "memmap": lambda: LazyMemmapStorage(100),
    "list": lambda: ListStorage(100),
    "stack": lambda: LazyStackStorage(100),
}


@pytest.mark.parametrize("at", ["extend", "sample"])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_rows_of_trajectories(cls, storage, at):
    data = batch(6, 9)
    buffer = cls(
        storage=STORAGES[storage](),
        sampler=in_order(),
        transform=ValueEstimatorTransform(gae(), at=at),
        batch_size=6,
    )
    buffer.extend(data.clone())
    check(buffer.sample(), wanted(data))


@pytest.mark.parametrize("storage", ["tensor", "memmap"])
@pytest.mark.parametrize("announced", [{"slice_len": 5}, {"num_slices": 8}])
@pytest.mark.parametrize("sampler", [SliceSampler, SliceSamplerWithoutReplacement])
def test_slices_are_rows(sampler, announced, storage):
    data = batch(8, 20, done=0.04).reshape(-1)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(200) if storage == "tensor" else LazyMemmapStorage(200),
        sampler=sampler(slice_len=5, traj_key=("collector", "traj_ids")),
        transform=ValueEstimatorTransform(gae(), at="sample", **announced),
        batch_size=40,
    )
    buffer.extend(data)
    buffer.set_rng(torch.Generator().manual_seed(0))
    sample = buffer.sample()
    assert sample.shape == (40,)
    rows = sample.reshape(8, 5)
    assert (rows["step"].diff(dim=-1) == 1).all()
    stored = data[sample["index"].reshape(8, 5)]  # without the sampler's end-of-slice marks
    assert not stored["next", "done"].all()
    check(rows, wanted(stored))
    # the sampler's marks, written after the transform, say the same
    check(gae()(sample.exclude(*RESULTS)).reshape(8, 5), wanted(stored))


def test_results_at_extend_survive_slices():
    data = batch(4, 10, done=0.0)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(40),
        sampler=SliceSampler(slice_len=5, traj_key=("collector", "traj_ids")),
        transform=ValueEstimatorTransform(gae(), at="extend"),
        batch_size=20,
    )
    for row in data:  # time is what the estimator reads along, not the order of the storage
        buffer.extend(row)
    sample = buffer.sample()
    check(sample, [result.reshape(-1, 1)[sample["index"].flatten()] for result in wanted(data)])


def test_padded_trajectories_by_their_mask():
    data, lengths = batch(4, 8, done=0.0), torch.tensor([8, 3, 5, 1])
    mask = torch.arange(8) < lengths.unsqueeze(-1)
    data["next", "done"] = data["next", "terminated"] = (torch.arange(8) == lengths.unsqueeze(-1) - 1).unsqueeze(-1)
    for entry in (data["next", "reward"], data["state_value"], data["next", "state_value"]):
        entry[~mask] = torch.nan
    data["collector", "mask"] = mask
    for at in ("extend", "sample"):
        transform = ValueEstimatorTransform(gae(), at=at, slice_len=8 if at == "sample" else None)
        buffer = ReplayBuffer(storage=LazyTensorStorage(4), sampler=in_order(), transform=transform, batch_size=4)
        buffer.extend(data.clone())
        check(buffer.sample(), wanted(data, mask))


@pytest.mark.parametrize("pad_output", [False, True])
def test_unequal_slices_by_the_sampler_s_marks(pad_output):
    data = batch(3, 12, done=0.3)
    sampler = SliceSampler(slice_len=6, traj_key=("collector", "traj_ids"), strict_length=False, pad_output=pad_output)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(36), sampler=sampler, batch_size=24)
    buffer.extend(data.reshape(-1))
    buffer.set_rng(torch.Generator().manual_seed(1))
    sample = buffer.sample()
    if pad_output:
        rows = sample.reshape(-1, 6)
        check(gae()(rows.clone()), wanted(rows, rows["collector", "mask"]))
        return
    check(gae()(sample.clone()), [result[0] for result in wanted(sample.unsqueeze(0))])
    buffer.append_transform(ValueEstimatorTransform(gae(), at="sample", slice_len=6))
    with pytest.raises(ValueError, match="strict_length=False"):
        for _ in range(3):
            buffer.sample()


# ------------------------------------------------------------------------------------------------- what storages drop
def preinitialised(kind, data):
    if kind == "memmap":
        buffer = ReplayBuffer(storage=LazyMemmapStorage(len(data)), sampler=in_order(), batch_size=len(data))
        buffer.extend(data)
        return buffer
    store = data.clone().zero_()
    store = {"shared": store.share_memory_, "plain": lambda: store}[kind]()
    storage = TensorStorage(store)
    storage._len = len(data)
    return ReplayBuffer(storage=storage, sampler=in_order(), batch_size=len(data))


@pytest.mark.parametrize("kind", ["memmap", "shared", "plain"])
def test_declared_entries_are_stored(kind):
    data = batch(5, 7)
    buffer = preinitialised(kind, data)
    transform = ValueEstimatorTransform(gae(keys={"advantage": ("agents", "advantage")}), at="extend")
    buffer.append_transform(transform)
    assert transform.declare(buffer) is buffer
    transform.declare(buffer)  # twice is once
    buffer.extend(data.clone())
    sample = buffer.sample()
    sample["advantage"] = sample["agents", "advantage"]
    check(sample, wanted(data))


@pytest.mark.parametrize("kind", ["memmap", "shared"])
def test_dropped_entries_are_reported(kind):
    data = batch(5, 7)
    buffer = preinitialised(kind, data)
    buffer.append_transform(ValueEstimatorTransform(gae(), at="extend"))
    buffer.extend(data.clone())
    with pytest.raises(MissingEntryError, match="'advantage', 'value_target'.*declare"):
        buffer.sample()


def test_declare_before_the_first_data_is_nothing():
    transform = ValueEstimatorTransform(gae(), at="extend")
    data = batch(5, 7)
    buffer = ReplayBuffer(storage=LazyMemmapStorage(5), sampler=in_order(), transform=transform, batch_size=5)
    transform.declare(buffer).extend(data.clone())
    check(buffer.sample(), wanted(data))


def test_declare_needs_a_tensordict():
    buffer = ReplayBuffer(storage=ListStorage(5))
    buffer.extend(batch(5, 7))
    assert ValueEstimatorTransform(gae(), at="extend").declare(buffer) is buffer  # takes any entry as it is
    buffer = ReplayBuffer(storage=LazyTensorStorage(5))
    buffer.extend(torch.zeros(5))
    with pytest.raises(TypeError, match="LazyTensorStorage holds no tensordict"):
        ValueEstimatorTransform(gae(), at="extend").declare(buffer)


# --------------------------------------------------------------------------------------------------- module and errors
def test_keys_and_copies():
    extend, sample = (ValueEstimatorTransform(gae(), at=at) for at in ("extend", "sample"))
    assert (sample.in_keys, sample.out_keys) == (gae().in_keys, gae().out_keys)
    assert (extend.in_keys_inv, extend.out_keys_inv) == (gae().in_keys, gae().out_keys)
    assert extend.in_keys == extend.out_keys == sample.in_keys_inv == sample.out_keys_inv == []
    data = batch(2, 5)
    for clone in (copy.deepcopy(sample), pickle.loads(pickle.dumps(sample)), sample.to("cpu"), sample.clone()):
        check(clone(data.clone()), wanted(data))
    check(extend.inv(data.clone()), wanted(data))


def test_any_estimator():
    data = batch(4, 6)
    transform = ValueEstimatorTransform(TDLambdaEstimator(gamma=GAMMA, lmbda=LMBDA), at="sample", num_slices=4)
    flat = data.reshape(-1)
    assert transform(flat) is flat
    entries = (data["next", name].squeeze(-1) for name in ("state_value", "reward", "done", "terminated"))
    expected = reference.td_lambda_return(GAMMA, LMBDA, *entries)
    agree(flat["value_target"].reshape(4, 6), expected, 1e-12, 1e-12)


def test_single_transitions_names_and_no_steps():
    data = batch(1, 7)[0]
    data["collector", "traj_ids"] = torch.arange(7)  # no two of a trajectory
    data.names = ["time"]
    transform = ValueEstimatorTransform(gae(), at="sample", slice_len=1)
    expected = [result.reshape(7, 1) for result in wanted(data.reshape(7, 1))]
    check(transform(data), expected)
    assert data.names == ["time"]
    assert transform(data[:0])["advantage"].shape == (0, 1)


def test_errors():
    with pytest.raises(ValueError, match='at must be "extend" or "sample"'):
        ValueEstimatorTransform(gae(), at="add")
    with pytest.raises(ValueError, match="exclude each other"):
        ValueEstimatorTransform(gae(), at="sample", slice_len=3, num_slices=3)
    with pytest.raises(ValueError, match='slice_len is for at="sample"'):
        ValueEstimatorTransform(gae(), at="extend", slice_len=3)
    with pytest.raises(ValueError, match="num_slices must be positive"):
        ValueEstimatorTransform(gae(), at="sample", num_slices=0)
    with pytest.raises(ValueError, match="time last, but the estimator has time_dim=0"):
        ValueEstimatorTransform(gae(time_dim=0), at="sample", slice_len=3)
    flat = batch(4, 6).reshape(-1)
    keys = set(flat.keys(True, True))
    with pytest.raises(ValueError, match="A flat batch of 24 steps"):
        ValueEstimatorTransform(gae(), at="sample")(flat)
    with pytest.raises(ValueError, match="24 steps is not made of slices of 7 steps"):
        ValueEstimatorTransform(gae(), at="sample", slice_len=7)(flat)
    with pytest.raises(ValueError, match="24 steps is not made of 5 slices"):
        ValueEstimatorTransform(gae(), at="sample", num_slices=5)(flat)
    with pytest.raises(ValueError, match="not made of slices of 12"):
        ValueEstimatorTransform(gae(), at="sample", slice_len=12)(batch(4, 6, done=0.0).reshape(-1))
    with pytest.raises(ValueError, match="Slices of 7 steps do not fit"):
        ValueEstimatorTransform(gae(), at="sample", slice_len=7)(batch(4, 6))
    assert set(flat.keys(True, True)) == keys
    for at in ("extend", "sample"):
        with pytest.raises(ValueError, match="not an env"):
            TransformedEnv(GymEnv("CartPole-v1"), ValueEstimatorTransform(gae(), at=at))
