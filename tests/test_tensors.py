"""Tensors that are more than memory: lazy signs, wrappers, tracers, autograd's view of what is written; interrupts."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

import rl_triton_td
import rl_triton_td.functional as F
from conftest import rollout
from rl_triton_td import _cpu

VALUES = ("state_value", "next_state_value", "reward", "done", "terminated")


def arguments(device, seed=0, N=4, T=5):
    x = rollout(N, T, seed=seed, dtype=torch.float32)
    return [x[k].to(device) for k in VALUES]


def gae(*args, **kwargs):
    return F.generalized_advantage_estimate(0.99, 0.95, *args, time_dim=1, **kwargs)


def test_one_memory_in_two_layouts(device):
    """The same addresses in the same layouts, but the arguments change places."""
    a = torch.randn(4, 4, device=device)
    done = torch.zeros(4, 4, dtype=torch.bool, device=device)
    for reward in (a, a.t(), a, a.t()):
        got = gae(a, a.t(), reward, done)
        wanted = gae(a.clone(), a.t().clone(), reward.clone(), done)
        torch.testing.assert_close(got, wanted)


def test_a_sign_that_was_put_off(device):
    value, next_value, reward, *flags = arguments(device)
    late = torch.complex(torch.zeros_like(reward), -reward).conj().imag
    assert late.is_neg()
    for _ in range(2):
        torch.testing.assert_close(gae(value, next_value, late, *flags), gae(value, next_value, reward, *flags))


def test_wrappers_and_zeros_without_memory():
    value, next_value, reward, *flags = arguments("cpu")
    wrapped = gae(value, next_value, TwoTensor(reward, 2 * reward), *flags)[0]
    torch.testing.assert_close(wrapped.a, gae(value, next_value, reward, *flags)[0])
    torch.testing.assert_close(wrapped.b, gae(value, next_value, 2 * reward, *flags)[0])
    zeros = torch._efficientzerotensor((4, 5))
    torch.testing.assert_close(gae(value, next_value, zeros, *flags), gae(value, next_value, zeros.clone(), *flags))


def test_tracers_see_the_call():
    first, second = arguments("cpu"), arguments("cpu", 1)
    graph = make_fx(gae)(*first)
    torch.testing.assert_close(graph(*second), gae(*second))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert gae(*first)[0].shape == (4, 5)


def test_forward_derivatives_are_not_lost_in_silence():
    value, next_value, reward, *flags = arguments("cpu")
    gae(value, next_value, reward, *flags)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(reward, torch.ones_like(reward))
        with pytest.raises(NotImplementedError, match="no derivatives in forward mode"):
            gae(value, next_value, dual, *flags)
        assert gae(value, next_value, reward, *flags)[0].shape == reward.shape


@pytest.mark.parametrize("calls", [1, 2])
def test_autograd_knows_what_was_overwritten(device, calls):
    args = arguments(device)
    out = tuple(torch.empty_like(args[0]) for _ in range(2))
    weight = torch.ones_like(args[0], requires_grad=True)
    for _ in range(calls):
        gae(*args, out=out)
    loss = (weight * out[0]).sum()
    gae(*args, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_leaf_that_requires_grad_is_no_output(device):
    args = arguments(device)
    out = tuple(torch.zeros_like(args[0], requires_grad=True) for _ in range(2))
    with pytest.raises(ValueError, match="out for advantage is a leaf that requires grad"):
        gae(*args, out=out)
    assert not out[0].any()
    with torch.no_grad():
        assert gae(*args, out=out)[0] is out[0]


def test_inference_mode(device):
    with torch.inference_mode():
        args = arguments(device)
        out = tuple(torch.empty_like(args[0]) for _ in range(2))
        for _ in range(3):
            torch.testing.assert_close(gae(*args, out=out), gae(*args))


@pytest.mark.parametrize("network_records", [False, True])
def test_values_of_a_network_carry_no_gradients(network_records):
    class Net(torch.nn.Linear):
        def forward(self, x):
            with torch.set_grad_enabled(network_records):
                return super().forward(x)

    critic = TensorDictModule(Net(3, 1), in_keys=["observation"], out_keys=["state_value"])
    after = {"observation": torch.randn(2, 6, 3), "reward": torch.randn(2, 6, 1)}
    after |= {k: torch.zeros(2, 6, 1, dtype=torch.bool) for k in ("done", "terminated")}
    td = TensorDict({"observation": torch.randn(2, 6, 3), "next": after}, [2, 6])
    rl_triton_td.GAE(gamma=0.99, lmbda=0.95, value_network=critic)(td)
    assert not td["state_value"].requires_grad and not td["advantage"].requires_grad


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs signals")
def test_an_interrupt_waits_for_the_threads():
    """Threads that go on writing would write into memory that is no longer there."""
    began, over = threading.Event(), []

    def slow():
        began.set()
        threading.Event().wait(0.5)
        over.append(True)

    others = [_cpu._pool(2).submit(slow)]
    began.wait()

    def interrupt(*_):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            _cpu._await(others)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert over


def test_a_damaged_cache_is_passed_by(tmp_path):
    pytest.importorskip("numba")
    program = (
        "import warnings, torch; warnings.simplefilter('error')\n"
        "import rl_triton_td.functional as F\n"
        "x = torch.ones(2, 3)\n"
        "print(F.reward2go(x, torch.zeros(2, 3, dtype=torch.bool), 0.5, time_dim=1).tolist())"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    for damaged in (False, True):
        for file in [*tmp_path.rglob("*.nbi"), *tmp_path.rglob("*.nbc")] if damaged else []:
            file.write_bytes(file.read_bytes()[:20])
        run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert run.stdout.strip() == str([[1.75, 1.5, 1.0]] * 2), run.stderr[-2000:]
