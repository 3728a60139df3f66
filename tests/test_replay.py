"""Calls that are replayed in C: what is compared, what is passed to the driver, what is left to Python."""

import ctypes
import gc
import threading
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_triton_td import _replay, _triton
from rl_triton_td import functional as F
from rl_triton_td._replay import MEETING, Memory, nothing_remembered

native = _replay._native()
pytestmark = pytest.mark.skipif(native is None, reason="needs Triton and a C compiler")


@pytest.fixture(autouse=True)
def forgotten():
    """What other tests left, which may be as much as is recalled."""
    for function in (F.generalized_advantage_estimate, F.reward2go):
        function.memory.forget()


class Driver:
    """A GPU that is only pretended: what it was asked to launch, and what it answers."""

    def __init__(self):
        self.launches, self.status, self.device = [], 0, 3
        number, pointer = ctypes.c_uint, ctypes.c_void_p
        self._launch = ctypes.CFUNCTYPE(
            ctypes.c_int, pointer, *(number,) * 7, pointer, ctypes.POINTER(pointer), pointer
        )(self.launch)
        self._error = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))(self.error)
        native.setup(
            torch.Tensor, torch.Tensor.data_ptr, torch.is_grad_enabled, torch._C._increment_version,
            lambda: self.device, lambda device: 1000 + device, (), ((_replay._recording, "launches", None),),
            *(ctypes.cast(f, pointer).value for f in (self._launch, self._error)),
        )  # fmt: skip

    def launch(self, function, *sizes_stream_parameters):
        *sizes, stream, parameters, extra = sizes_stream_parameters
        read = [ctypes.cast(parameters[i], ctypes.POINTER(ctypes.c_uint64))[0] for i in range(self.count)]
        self.launches.append((function, sizes, stream, read, extra))
        return self.status

    def error(self, status, text):
        text[0] = b"out of luck"
        return 0


@pytest.fixture
def driver():
    yield Driver()
    _replay.connect(native)


def replay(
    tensors, *, made=(), overwritten=(), returned=(), single=False, device=3, slots=(), values=b"", meeting=None
):
    guard = torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    aliases = tuple(range(len(tensors)))
    python = (None, (), (), 0, (), None)
    direct = (7, (2, 3, 1), 64, 512, values, slots, meeting)
    return native.Call(
        tuple(tensors), {"gamma": 0.5}, torch.is_grad_enabled(), guard.check, device, 16, aliases, made, overwritten,
        returned, single, python, direct,
    )  # fmt: skip


def bits(x):
    return bytes(ctypes.c_float(x)).ljust(8, b"\0")


def test_what_the_driver_is_asked_for(driver):
    x, out, place = torch.ones(4, 8), torch.empty(4, 8), torch.zeros(2, dtype=torch.long)
    empty = torch._C._dynamo.guards._empty_strided_cpu
    calls = [
        replay(
            [x, out],
            made=((empty, (4, 8), (1, 4), torch.float64),),
            overwritten=(1,),
            returned=(2, 1),
            values=bytes(8) + bits(0.5) + bytes(8) + (2**40).to_bytes(8, "little") + bytes(16),
            slots=((0, 1), (2, 2), (4, 0), (5, MEETING)),
            meeting=lambda: place,
        )
    ]
    driver.count = 6
    before = out._version
    made, given = native.recall(calls, (x, out), {"gamma": 0.5})
    assert given is out and out._version == before + 1
    assert made.shape == (4, 8) and made.stride() == (1, 4) and made.dtype == torch.float64
    ((function, sizes, stream, read, extra),) = driver.launches
    assert function == 7 and sizes == [2, 3, 1, 64, 1, 1, 512] and stream == 1003 and extra is None
    half = int.from_bytes(bits(0.5), "little")
    assert read == [out.data_ptr(), half, made.data_ptr(), 2**40, x.data_ptr(), place.data_ptr()]


def test_one_tensor_is_returned_as_one(driver):
    x, driver.count = torch.ones(4), 0
    assert native.recall([replay([x], returned=(0,), single=True)], (x,), {"gamma": 0.5}) is x
    assert native.recall([replay([x], returned=(0,))], (x,), {"gamma": 0.5}) == (x,)


def unaligned():
    return torch.ones(33)[1:].view(4, 8)


X = torch.ones(4, 8)
OTHERS = {
    "another number": ((X,), {"gamma": 0.25}),
    "another type": ((X,), {"gamma": 1}),
    "another name": ((X,), {"lmbda": 0.5}),
    "a tensor for a number": ((X,), {"gamma": torch.tensor(0.5)}),
    "a number for a tensor": ((1.0,), {"gamma": 0.5}),
    "nothing for a tensor": ((None,), {"gamma": 0.5}),
    "one more": ((X, X), {"gamma": 0.5}),
    "a tuple": (((X,),), {"gamma": 0.5}),
    "no names": ((X,), {}),
    "another shape": ((X[:2],), {"gamma": 0.5}),
    "other strides": ((torch.ones(8, 4).T,), {"gamma": 0.5}),
    "another dtype": ((X.double(),), {"gamma": 0.5}),
    "another device": ((X.to("meta"),), {"gamma": 0.5}),
    "a subclass": ((torch.nn.Parameter(X, False),), {"gamma": 0.5}),
    "gradients": ((X.clone().requires_grad_(),), {"gamma": 0.5}),
    "a sign put off": ((torch._neg_view(X),), {"gamma": 0.5}),
    "unaligned": ((unaligned(),), {"gamma": 0.5}),
    "too many": ((X,) * 100, {"gamma": 0.5}),
}


@pytest.mark.parametrize("given", OTHERS.values(), ids=OTHERS)
def test_another_call_is_not_taken_for_it(driver, given):
    driver.count = 0
    calls = [replay([X], returned=(0,))]
    assert native.recall(calls, (X.clone(),), {"gamma": 0.5}) is not None and len(driver.launches) == 1
    assert native.recall(calls, *given) is None and len(driver.launches) == 1


def test_another_state_is_not_taken_for_it(driver):
    driver.count, calls, given = 0, [replay([X], returned=(0,))], ((X,), {"gamma": 0.5})
    with torch.no_grad():
        assert native.recall(calls, *given) is None
    with nothing_remembered():
        assert native.recall(calls, *given) is None
    driver.device = 0
    assert native.recall(calls, *given) is None
    driver.device = 3
    driver.status = 201  # a thread without a context
    assert native.recall(calls, *given) is None and len(driver.launches) == 1
    driver.status = 0
    assert native.recall(calls, *given) == (X,)


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_what_follows_or_watches_a_call_is_left_to_python():
    x = torch.zeros(3, 5, 1)
    args = (0.9, 0.8, x, x, x, x.bool(), x.bool())
    memory = F.generalized_advantage_estimate.memory
    for _ in range(2):
        F.generalized_advantage_estimate(*args)
    if not memory.replays:
        pytest.skip("nothing is remembered without numba")
    assert memory.recall(args, {}) is not None
    with Watching():
        assert memory.recall(args, {}) is None
    with torch.autograd.forward_ad.dual_level():
        assert memory.recall(args, {}) is None
    seen = []
    torch.func.vmap(lambda y: seen.append(memory.recall(args, {})) or y)(torch.zeros(2))
    torch.jit.trace(lambda y: seen.append(memory.recall(args, {})) or y, torch.zeros(2), check_trace=False)
    assert len(seen) >= 2 and seen == [None] * len(seen)


def test_tensors_that_are_one_and_tensors_that_lie_on_one_another(driver):
    x, y, driver.count = torch.ones(4, 8), torch.ones(4, 8), 0
    guard = torch._C._dynamo.guards.TensorGuards(x, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    rest = ((), (), (0,), False, (None, (), (), 0, (), None), (7, (1, 1, 1), 32, 0, b"", (), None))
    one = native.Call((x, x), None, True, guard, 3, 16, (0, 0), *rest)
    two = replay([x, y], returned=(0,))
    assert native.recall([one], (y, y), None) == (y,)
    assert native.recall([one], (x, y), None) is None and native.recall([one], (x, x.view(4, 8)), None) is None
    assert native.recall([two], (y, x), {"gamma": 0.5}) == (y,)
    assert native.recall([two], (x, x), {"gamma": 0.5}) is None
    assert native.recall([two], (x, x.view(4, 8)), {"gamma": 0.5}) is None
    assert len(driver.launches) == 2


def test_an_error_of_the_driver_names_it(driver):
    driver.count, driver.status = 0, 700
    with pytest.raises(RuntimeError, match=r"out of luck \(CUDA error 700\)"):
        native.recall([replay([X], returned=(0,))], (X,), {"gamma": 0.5})


def test_what_is_asked_may_fail(driver):
    def broken():
        raise LookupError("nowhere to meet")

    driver.count = 1
    call = replay([X], returned=(0,), values=bytes(8), slots=((0, MEETING),), meeting=broken)
    with pytest.raises(LookupError, match="nowhere"):
        native.recall([call], (X,), {"gamma": 0.5})
    assert not driver.launches
    with pytest.raises(TypeError):
        native.recall(X)
    with pytest.raises(OverflowError):
        native.Call((X,) * 40, None, *call_fields()[2:])
    with pytest.raises(ValueError, match="alias"):
        native.Call((X, X), None, *call_fields()[2:])


def call_fields():
    return ((X,), None, True, bool, None, 1, (0,), (), (), (0,), True, (None, (), (), 0, (), None), None)


def test_the_last_one_comes_first(driver):
    driver.count, tensors = 0, [torch.ones(n) for n in (3, 4, 5)]
    calls = first, second, third = [replay([x], returned=(0,)) for x in tensors]
    calls = list(calls)
    native.recall(calls, (tensors[2],), {"gamma": 0.5})
    assert calls == [third, first, second]
    native.recall(calls, (tensors[2],), {"gamma": 0.5})
    assert calls == [third, first, second]


def test_no_list_is_looked_into(driver):
    """It may lose its entries to another thread while the kernel is launched."""
    driver.count, out = 0, [torch.empty(4), torch.empty(4)]
    one = (tuple(out),), {"gamma": 0.5}
    guard = torch._C._dynamo.guards.TensorGuards(*out, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    rest = ((), (), (0, 1), False, (None, (), (), 0, (), None), (7, (1, 1, 1), 32, 0, b"", (), None))
    call = native.Call(*one, True, guard, 3, 16, (0, 1), *rest)
    assert native.recall([call], *one) == tuple(out)
    assert native.recall([call], (out,), {"gamma": 0.5}) is None
    assert native.recall([replay(out, returned=(0, 1))], (out,), {"gamma": 0.5}) is None
    assert native.recall([replay(out, returned=(0, 1))], tuple(out), {"gamma": 0.5}) == tuple(out)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
def test_a_nested_tensor_is_no_known_one(driver):
    driver.count, nested = 0, torch.nested.nested_tensor([torch.ones(8), torch.ones(8)])
    assert native.recall([replay([X], returned=(0,))], (nested,), {"gamma": 0.5}) is None
    x, memory = torch.zeros(2, 5, 1), F.generalized_advantage_estimate.memory
    args = [0.9, 0.8, x, x, x, x.bool(), x.bool()]
    for _ in range(2):
        F.generalized_advantage_estimate(*args)
    args[2] = torch.nested.nested_tensor([x[0], x[1]])
    for _ in range(2):
        with pytest.raises((RuntimeError, ValueError)):
            F.generalized_advantage_estimate(*args)
        memory.recall = _replay._unknown


class Subclass(torch.Tensor):
    pass


def test_a_subclass_stays_one():
    value = torch.zeros(2, 5, 1).as_subclass(Subclass)
    x = torch.zeros(2, 5, 1)
    types = [type(F.generalized_advantage_estimate(0.9, 0.8, value, x, x, x.bool(), x.bool())[0]) for _ in range(4)]
    assert len({*types}) == 1


def test_nothing_is_kept_where_nothing_is_remembered():
    seen = []
    x = torch.zeros(2, 5, 1)
    with nothing_remembered():
        seen.append(weakref.ref(F.reward2go(x, x.bool(), 0.9)))
        gc.collect()
        assert seen[0]() is None


def test_tensors_of_several_devices_are_not_remembered():
    memory, calls = Memory(), []
    for _ in range(3):
        memory(((), None), [1], [torch.zeros(3), torch.zeros(3, device="meta")], lambda: calls.append(1))
    assert len(calls) == 3 and not memory.calls and not memory.replays


def test_what_is_recalled_is_no_more_than_can_be_looked_through(monkeypatch):
    memory = F.reward2go.memory
    for _ in range(60):
        for steps in range(1, 41):
            F.reward2go(torch.ones(1, steps, 1), torch.zeros(1, steps, 1, dtype=torch.bool), 0.5)
    if not _triton.NUMBA:
        pytest.skip("nothing is remembered without numba")
    assert 0 < len(memory.replays) <= 32

    settled = torch.ones(1, 50, 1), torch.zeros(1, 50, 1, dtype=torch.bool), 0.5
    for _ in range(20):
        F.reward2go(*settled)
    monkeypatch.setattr(Memory, "__call__", None)  # the way in Python
    assert F.reward2go(*settled).shape == (1, 50, 1)
    assert len(memory.replays) == 32


def test_nothing_is_kept_of_a_call(driver):
    driver.count = 0
    x, y = torch.ones(4, 8), torch.ones(4, 8)
    calls, seen = [replay([x], returned=(0,))], weakref.ref(x)
    del x
    gc.collect()
    assert seen() is None
    for _ in range(3):
        native.recall(calls, (y,), {"gamma": 0.5})
    seen = weakref.ref(y)
    del y
    assert seen() is None


def test_a_function_goes_on_in_c_and_in_python_alike(monkeypatch):
    """Computed, replayed in Python and replayed in C, in several threads: the same bits."""
    torch.manual_seed(0)
    memory = F.reward2go.memory
    given = [(torch.randn(4, 6, 1), torch.rand(4, 6, 1) < 0.2) for _ in range(8)]

    def results():
        return [F.reward2go(reward, done, 0.9) for reward, done in given]

    with nothing_remembered():
        computed = results()
    results()
    results()
    if not memory.replays:
        pytest.skip("nothing is remembered without numba")
    (call,) = memory.replays
    found = []
    threads = [threading.Thread(target=lambda: found.extend(results() for _ in range(50))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert memory.replays == [call] and len(found) == 200
    monkeypatch.setattr(memory, "recall", _replay._unknown)
    monkeypatch.setattr(memory, "_keep", lambda *_: None)
    found.append(results())
    for result in found:
        assert all(torch.equal(x, y) for x, y in zip(result, computed, strict=True))


def test_a_copy_remembers_nothing():
    memory = Memory()
    memory.replays.append(replay([X], returned=(0,)))
    made, arguments = memory.__reduce__()
    assert made(*arguments).replays == []


def test_without_a_compiler_calls_are_replayed_in_python(monkeypatch):
    monkeypatch.setattr(_replay, "_native", lambda: None)
    memory = F.reward2go.memory
    torch.manual_seed(0)
    reward, done = torch.randn(2, 3, 6, 1), torch.rand(2, 3, 6, 1) < 0.3
    results = [[F.reward2go(r, d, 0.9) for r, d in zip(reward, done, strict=True)] for _ in range(2)]
    assert not memory.replays
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
