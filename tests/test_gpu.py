"""What only a GPU can show: offsets past 2^31, streams, graphs, remembered launches, speed beside TorchRL."""

import time

import pytest
import torch
from tensordict import TensorDict
from torchrl.objectives.value import GAE as TorchRLGAE

import rl_triton_td
import rl_triton_td.functional as F
from conftest import rollout

pytestmark = pytest.mark.gpu
MANY = 2**31 + 1  # = 3 * 715827883
VALUES = ("state_value", "next_state_value", "reward", "done", "terminated")


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape,time_dim",
    [((3, MANY // 3), 1), ((MANY // 3, 3), 1), ((3, MANY // 3), 0)],
    ids=["long", "many", "time-major"],
)
def test_more_than_2_to_the_31_elements(shape, time_dim):
    reward = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    ends = torch.ones((), dtype=torch.bool, device="cuda").expand(shape)
    assert torch.equal(F.reward2go(reward, ends, 0.9, time_dim=time_dim), reward)


def test_the_current_stream_is_used():
    x = {k: v.cuda() for k, v in rollout(64, 200, dtype=torch.float32).items()}
    wanted = F.generalized_advantage_estimate(0.99, 0.95, *(x[k] for k in VALUES), time_dim=1)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)
        late = {k: x[k].clone() for k in VALUES}
        got = F.generalized_advantage_estimate(0.99, 0.95, *late.values(), time_dim=1)
    stream.synchronize()
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)


def test_a_captured_call_follows_its_inputs():
    x = {k: v.cuda() for k, v in rollout(32, 100, dtype=torch.float32).items()}
    estimator = rl_triton_td.GAE(gamma=0.99, lmbda=0.95).cuda()
    after = {"reward": x["reward"], "done": x["done"], "terminated": x["terminated"], "state_value": None}
    after["state_value"] = x["next_state_value"]
    empty = torch.empty_like(x["reward"])
    td = TensorDict(
        {"state_value": x["state_value"], "next": after, "advantage": empty, "value_target": empty.clone()}, [32, 100]
    )
    estimator(td)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        estimator(td)
    for seed in range(5):
        td["next", "reward"].copy_(rollout(32, 100, seed=seed, dtype=torch.float32)["reward"])
        estimator.gamma.fill_(0.9 + 0.01 * seed)
        graph.replay()
        got = td["advantage"].clone()
        assert torch.equal(got, estimator(td.clone())["advantage"])


def test_rows_in_segments_meet_apart_on_every_stream_and_in_every_graph():
    """Launches that run at once, of one plan: on several streams, from two graphs, and beside both."""
    x = {k: v.cuda() for k, v in rollout(8, 20000, dtype=torch.float32).items()}
    values = [x[k] for k in VALUES]

    def call(out=None):
        return F.generalized_advantage_estimate(0.99, 0.95, *values, time_dim=1, out=out)

    wanted = F.generalized_advantage_estimate(0.99, 0.95, *(v.cpu() for v in values), time_dim=1)
    call()
    graphs, written = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        outs = [tuple(torch.empty_like(values[0]) for _ in range(2)) for _ in range(3)]
        with torch.cuda.graph(graph):
            for out in outs:
                call(out)
        written += outs
    streams, results = [torch.cuda.Stream() for _ in range(6)], []
    torch.cuda.synchronize()
    for turn in range(60):
        for k, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if k < len(graphs):
                    graphs[k].replay()
                else:
                    results.append(call())
        if turn % 20 == 19:
            torch.cuda.synchronize()
            for got in (*written, *results):
                for a, b in zip(got, wanted, strict=True):
                    torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-4)
            results.clear()
            for out in written:
                out[0].zero_()
            torch.cuda.synchronize()


def test_a_remembered_call_reads_what_it_is_given():
    """The same layout again: other numbers, other memory, other discounts, arguments that share memory, `out`."""
    for seed in range(4):
        x = {k: v.cuda() for k, v in rollout(16, 50, seed=seed, dtype=torch.float32).items()}
        args = [x[k] for k in VALUES]
        for gamma in (0.9, 0.99):
            got = F.generalized_advantage_estimate(gamma, 0.95, *args, time_dim=1)
            wanted = F.generalized_advantage_estimate(gamma, 0.95, *(a.cpu() for a in args), time_dim=1)
            out = (torch.empty_like(args[0]), torch.empty_like(args[0]))
            assert F.generalized_advantage_estimate(gamma, 0.95, *args, time_dim=1, out=out)[0] is out[0]
            for a, b, c in zip(got, wanted, out, strict=True):
                torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-5)
                assert torch.equal(a, c)
            on_cpu = F.generalized_advantage_estimate(torch.tensor(gamma), 0.95, *args, time_dim=1)
            torch.testing.assert_close(on_cpu, got, rtol=1e-6, atol=1e-6)
        shared = F.generalized_advantage_estimate(0.9, 0.95, args[0], args[0], *args[2:], time_dim=1)
        apart = F.generalized_advantage_estimate(0.9, 0.95, args[0], args[0].clone(), *args[2:], time_dim=1)
        assert torch.equal(shared[0], apart[0])


def test_no_memory_beyond_the_outputs():
    x = {k: v.cuda() for k, v in rollout(512, 256, dtype=torch.float32).items()}
    args = [x[k] for k in VALUES]
    out = (torch.empty_like(args[0]), torch.empty_like(args[0]))
    F.generalized_advantage_estimate(0.99, 0.95, *args, time_dim=1, out=out)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    F.generalized_advantage_estimate(0.99, 0.95, *args, time_dim=1, out=out)
    assert torch.cuda.max_memory_allocated() == before


@pytest.mark.gpu_perf
def test_forty_times_faster_than_torchrl():
    shape = (4096, 128, 1)
    done = torch.rand(shape, device="cuda") < 0.02
    after = {
        "reward": torch.randn(shape, device="cuda"),
        "done": done,
        "state_value": torch.randn(shape, device="cuda"),
    }
    after["terminated"] = done & (torch.rand(shape, device="cuda") < 0.5)
    td = TensorDict({"state_value": torch.randn(shape, device="cuda"), "next": after}, shape[:2])

    def seconds(module, calls):
        best = float("inf")
        for _ in range(4):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                module(td)
            torch.cuda.synchronize()
            best = min(best, (time.perf_counter() - start) / calls)
        return best

    kwargs = {"gamma": 0.99, "lmbda": 0.95, "value_network": None}
    ours = seconds(rl_triton_td.GAE(**kwargs).cuda(), 100)
    theirs = min(seconds(TorchRLGAE(**kwargs, vectorized=v).cuda(), 5) for v in (True, False))
    assert theirs / ours >= 40, f"ours {ours * 1e6:.1f} us, TorchRL {theirs * 1e6:.1f} us"
