"""The compiled CPU path, and the one in PyTorch that stands in for it without numba; the other tests run the former."""

import math
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import threading

import pytest
import torch
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import rl_triton_td.functional as F
from conftest import INTERPRET, agree, rollout, within
from rl_triton_td import GAE, _cpu, _triton, ops
from rl_triton_td.adjoint import EXP
from rl_triton_td.specs import SPECS, Spec, identity, jit, tl
from test_functional import ESTIMATORS, arguments, computed, every_estimator, expected, hold, with_values

pytestmark = pytest.mark.skipif(INTERPRET, reason="the interpreter runs the kernels on CPU tensors")
compiled = pytest.mark.skipif(not _triton.NUMBA, reason="needs numba")


@pytest.fixture
def in_pytorch(monkeypatch):
    monkeypatch.setattr(_triton, "NUMBA", False)


@pytest.fixture
def calls(monkeypatch):
    """The names of the specs that the compiled loop evaluates."""
    names, run = [], _cpu._Loop.run
    monkeypatch.setattr(_cpu._Loop, "run", lambda plan, *args: names.append(plan.spec.name) or run(plan, *args))
    return names


def entries(name, masked, N=4, T=23, **changes):
    x = rollout(N, T, seed=11, dtype=changes.pop("dtype", torch.float32))
    return arguments(name, x, **({"mask": x["mask"]} if masked else {}), **changes)


masks = pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])


# ----------------------------------------------------------------------------------------------------------- in PyTorch
@every_estimator
@masks
def test_without_numba(name, masked, in_pytorch, calls):
    hold(name, entries(name, masked), "cpu")
    assert not calls


@with_values
@masks
def test_successors_from_shifted_values_without_numba(name, masked, in_pytorch):
    x = rollout(4, 23, seed=11, dtype=torch.float32)
    shifted = {k: x[k] for k in ("state_value", "bootstrap", "done")} | {"next_state_value": None}
    hold(name, entries(name, masked, **shifted), "cpu")


@pytest.mark.parametrize("T", [5, 1000])
@pytest.mark.parametrize("installed", [False, pytest.param(True, marks=compiled)], ids=["without numba", "compiled"])
def test_nan_stays_in_its_episode(T, installed, monkeypatch):
    monkeypatch.setattr(_triton, "NUMBA", installed)
    args = entries("gae", False, T=T)
    args["done"][:, T // 2] = True
    clean = expected("gae", args)
    args["reward"][:, -1] = torch.nan
    for actual, wanted in zip(computed("gae", args), clean, strict=True):
        within(actual[:, : T // 2 + 1], wanted[:, : T // 2 + 1], 1e-5, 1.0)
        assert actual[:, -1].isnan().all()


# ------------------------------------------------------------------------------------------------------------- compiled
@compiled
@every_estimator
@masks
@pytest.mark.parametrize("layout", ["time-major", "every other", "expanded", "five dimensions"])
def test_any_layout(name, masked, layout, calls):
    args = entries(name, masked, N=8)

    def lay(x):
        rows = x.ndim == 1
        x = x[:, None] if rows else x
        if layout == "time-major":
            x = x.t().contiguous().t()
        elif layout == "every other":
            x = x.repeat_interleave(2, 0)[::2].repeat_interleave(3, 1)[:, ::3]
        elif layout == "expanded":
            return (x[:1].expand(8, -1)[:, 0] if rows else x[:1].expand(8, -1))[..., None]
        else:
            x = x.view(2, 2, 2, 1, -1).movedim(-1, 0).contiguous().movedim(0, -1)
        x = x[..., None]
        return x[..., 0, :] if rows else x

    def back(x):
        return x.squeeze(-1).reshape(8, -1)

    wanted = expected(name, {k: lay(v).squeeze(-1) if layout == "expanded" and isinstance(v, torch.Tensor) else v
                             for k, v in args.items()})  # fmt: skip
    for a, w in zip(computed(name, args, lay=lay, back=back), wanted, strict=True):
        within(a, w, 1e-5, 1.0, f"{name}, {layout}")
    assert calls


@compiled
@every_estimator
def test_double_precision_is_kept(name, calls):
    args = entries(name, False, dtype=torch.float64)
    for a, w in zip(computed(name, args), expected(name, args), strict=True):
        assert a.dtype == torch.float64
        within(a, w, 1e-12, 1.0, name)
    assert calls


@compiled
@pytest.mark.parametrize("kind", [torch.uint8, torch.int64, torch.float32])
def test_flags_of_any_dtype(kind):
    args = entries("vtrace", True)
    wanted = computed("vtrace", args)
    args |= {k: 2 * args[k].to(kind) for k in ("done", "terminated", "mask")}
    assert all(map(torch.equal, computed("vtrace", args), wanted))


@compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [False, True], ids=["new", "given"])
def test_half_precision(dtype, given):
    args = {k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for k, v in entries("gae", False).items()}  # fmt: skip
    out = {"out": tuple(torch.empty(4, 23, 1, dtype=dtype) for _ in range(2))} if given else {}
    for a, w in zip(computed("gae", args, **out), expected("gae", args), strict=True):
        assert a.dtype == dtype
        agree(a, w.to(dtype), 1e-2, 1e-2)


@compiled
@pytest.mark.parametrize("name", ["gae", "vtrace", "eligibility_trace", "retrace_retrace"])
@pytest.mark.parametrize("N,T", [(1, 3000), (301, 9), (70, 5)])
def test_threads_and_repetition_change_no_bit(name, N, T, monkeypatch):
    args = entries(name, True, N=N, T=T)
    once, again = computed(name, args), computed(name, args)
    threads = torch.get_num_threads()
    monkeypatch.setattr(_cpu, "SHARED", 1)
    try:
        torch.set_num_threads(3)
        shared = computed(name, args)
    finally:
        torch.set_num_threads(threads)
    for a, b, c in zip(once, again, shared, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


@compiled
def test_calls_from_several_threads():
    """Of which the first ones compile."""
    _cpu._functions.clear(), _cpu._plans.clear()
    names = ["gae", "vtrace", "td_lambda_return", "gae"]
    wanted = {name: expected(name, entries(name, False)) for name in names}
    failures = []

    def work(name):
        try:
            for _ in range(50):
                for a, w in zip(computed(name, entries(name, False)), wanted[name], strict=True):
                    within(a, w, 1e-5, 1.0, name)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def _child(queue, given):
    queue.put(computed("gae", given)[0].sum().item())


@compiled
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_starts_threads_of_its_own(monkeypatch):
    monkeypatch.setattr(_cpu, "SHARED", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    given = entries("gae", False)  # made here: PyTorch's own threads may hang in a forked process
    wanted = computed("gae", given)[0].sum().item()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_child, args=(queue, given), daemon=True)
    child.start()
    assert queue.get(timeout=20) == wanted
    child.join()


SCRIPT = """
import torch
from rl_triton_td import _cpu, functional
one = torch.ones(2, 3, 1)
advantage, _ = functional.generalized_advantage_estimate(0.5, 1.0, 0 * one, 0 * one, one, one.bool() & False)
assert advantage[0, :, 0].tolist() == [1.75, 1.5, 1.0], advantage
(plan,) = _cpu._plans.values()
print(plan.function.cache_hits)
"""


def run(cache):
    env = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    return subprocess.Popen([sys.executable, "-c", SCRIPT], env=env, stdout=subprocess.PIPE, text=True)


@compiled
@pytest.mark.slow
def test_processes_share_what_they_compile(tmp_path):
    """Two at once, and a third that finds it on disk; one whose cache cannot be written compiles for itself."""
    together = [run(tmp_path), run(tmp_path)]
    assert all(process.communicate()[0] and process.returncode == 0 for process in together)
    assert run(tmp_path).communicate()[0] == "1\n"
    (tmp_path / "file").write_text("")
    alone = run(tmp_path / "file")
    assert alone.communicate()[0] == "0\n" and alone.returncode == 0


@compiled
def test_exponentials_are_right_to_the_last_digit():
    import numba

    namespace = dict(_cpu._language(False))
    exec("def loop(x, y, n):\n    for j in range(n):\n        put(pointer(y), j, exp(get(pointer(x), j)))", namespace)
    loop = numba.njit("void(int64, int64, int64)", error_model="numpy")(namespace["loop"])
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e30, -1e30, 88.722839, -103.9])
    x = torch.cat((torch.linspace(-110, 95, 100_001), torch.linspace(-1e-3, 1e-3, 1001), special))
    y = torch.empty_like(x)
    loop(x.data_ptr(), y.data_ptr(), len(x))
    torch.testing.assert_close(y, x.double().exp().float(), rtol=2e-7, atol=2e-45, equal_nan=True)


# ----------------------------------------------------------------------------------------------------------- remembered
@pytest.fixture
def evaluated(monkeypatch):
    """The names of the specs that are evaluated by more than a loop that was remembered."""
    names, evaluate = [], _cpu.evaluate
    F.generalized_advantage_estimate.memory.forget()  # which is bounded
    monkeypatch.setattr(_cpu, "evaluate", lambda spec, *args: names.append(spec.name) or evaluate(spec, *args))
    return names


def gae_entries(seed, **changes):
    x = rollout(6, 11, seed=seed, dtype=torch.float32)
    args = {k: x[k][..., None] for k in ("state_value", "next_state_value", "reward", "done", "terminated")}
    return {"gamma": 0.9, "lmbda": 0.8, **args, **changes}


def gae_agrees(args, **kwargs):
    actual = F.generalized_advantage_estimate(**args, **kwargs)
    args = {k: v[..., 0] if isinstance(v, torch.Tensor) and v.ndim else v for k, v in args.items()}
    for a, w in zip(actual, expected("gae", args), strict=True):
        within(a[..., 0], w, 1e-5, 1.0)


@compiled
@pytest.mark.parametrize("kind", ["numbers", "tensors", "out", "over an input", "unaligned"])
def test_a_remembered_call_reads_what_it_is_given(kind, evaluated):
    """Other numbers, other memory, other discounts; what lies on 4 bytes is as good as what lies on 64."""
    for seed in range(3):
        for gamma in (0.9, 0.5):
            args, kwargs = gae_entries(seed, gamma=gamma), {}
            if kind == "tensors":
                args |= {"gamma": torch.tensor(gamma), "lmbda": torch.tensor(0.8)}
            elif kind == "out":
                kwargs["out"] = tuple(torch.empty_like(args["reward"]) for _ in range(2))
            elif kind == "over an input":
                args |= {"next_state_value": args["state_value"]}
                out = args["reward"].clone()
                over = F.generalized_advantage_estimate(**{**args, "reward": out}, out=(out, torch.empty_like(out)))
                assert torch.equal(over[0], F.generalized_advantage_estimate(**args)[0]) and over[0] is out
            elif kind == "unaligned":
                long = torch.cat((torch.zeros(1), args["reward"].flatten()))
                args["reward"] = long[1:].view(6, 11, 1)
                assert args["reward"].data_ptr() % 16
            if seed:
                evaluated.clear()
            gae_agrees(args, **kwargs)
            assert not seed or not evaluated


@compiled
def test_numbers_stay_as_long_as_what_remembers_them(evaluated):
    """The memory of calls with many discounts is bounded, and each finds its own."""
    gammas = [k / 1500 for k in range(1500)]
    for gamma in (*gammas, *gammas[-50:]):
        args = {k: v[:1] if isinstance(v, torch.Tensor) else v for k, v in gae_entries(0, gamma=gamma).items()}
        if gamma == gammas[-50]:
            evaluated.clear()
        advantage, _ = F.generalized_advantage_estimate(**args)
        last = args["reward"][0, -1] - args["state_value"][0, -1]
        last = last + gamma * args["next_state_value"][0, -1] * ~args["terminated"][0, -1]
        torch.testing.assert_close(advantage[0, -1], last)
    assert not evaluated
    assert len(F.generalized_advantage_estimate.memory.calls) <= 1024


@compiled
@pytest.mark.parametrize("kind", ["flags of numbers", "half precision", "gradients", "strides of no other"])
def test_what_takes_more_than_a_loop_is_not_remembered(kind, evaluated):
    for seed in range(3):
        args = gae_entries(seed)
        if kind == "flags of numbers":
            args["done"] = args["done"].float()
        elif kind == "half precision":
            args |= {k: args[k].bfloat16() for k in ("state_value", "next_state_value", "reward")}
            F.generalized_advantage_estimate(**args)
            continue
        elif kind == "gradients":
            args["reward"].requires_grad_()
            advantage, _ = F.generalized_advantage_estimate(**args)
            assert advantage.requires_grad
            assert torch.autograd.grad(advantage.sum(), args["reward"])[0].abs().sum() > 0
            args["reward"] = args["reward"].detach()
            with torch.no_grad():
                evaluated.clear()
                assert not F.generalized_advantage_estimate(**args)[0].requires_grad
            continue
        elif kind == "strides of no other":
            args |= {k: v.repeat(1, 2, 1)[:, ::2] for k, v in args.items() if isinstance(v, torch.Tensor)}
        gae_agrees(args)
    assert (len(evaluated) == 3) is (kind != "gradients")


@compiled
def test_a_lost_bootstrap_is_looked_for_in_every_call():
    args = gae_entries(0, next_state_value=None)
    args |= {"done": torch.zeros_like(args["done"]), "terminated": torch.zeros_like(args["done"])}
    for _ in range(3):
        F.generalized_advantage_estimate(**args)
    args["done"][2, 5] = True
    with pytest.raises(ValueError, match=r"step \(2, 5, 0\) is truncated"):
        F.generalized_advantage_estimate(**args)


@compiled
def test_tensors_without_memory():
    """Of a fake mode, or without entries; after a call that is remembered."""
    args = gae_entries(0)
    for _ in range(2):
        F.generalized_advantage_estimate(**args)
    with FakeTensorMode() as mode:
        fake = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
        for x in F.generalized_advantage_estimate(**fake):
            assert isinstance(x, FakeTensor) and x.shape == (6, 11, 1)
    empty = {k: v[:0] if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    for _ in range(2):
        assert F.generalized_advantage_estimate(**empty)[0].shape == (0, 11, 1)


@compiled
def test_a_module_remembers_what_it_read(evaluated):
    """Discounts in buffers are read anew, as are entries that come or go; other keys and attributes start afresh."""

    def rows(seed, **more):
        args = gae_entries(seed)
        after = {k: args[k] for k in ("reward", "done", "terminated")} | {"state_value": args["next_state_value"]}
        return TensorDict({"state_value": args["state_value"], "next": after, **more}, [6, 11])

    def agrees(td, gamma):
        args = gae_entries(0, gamma=gamma) | {k: td["next", k] for k in ("reward", "done", "terminated")}
        args |= {"state_value": td["state_value"], "next_state_value": td["next", "state_value"]}
        wanted = F.generalized_advantage_estimate(**args)
        assert torch.equal(td["advantage"], wanted[0]) and torch.equal(td["value_target"], wanted[1])

    module = GAE(gamma=0.9, lmbda=0.8)
    module(rows(0))
    evaluated.clear()
    found = [module(rows(1))]
    module.gamma.fill_(0.5)
    found.append(module(rows(2)))
    assert not evaluated
    agrees(found[0], torch.tensor(0.9))
    agrees(found[1], torch.tensor(0.5))
    masked = rows(3, mask=torch.zeros(6, 11, dtype=torch.bool))
    module.set_keys(mask="mask")
    assert not module(masked)["advantage"].any()


# -------------------------------------------------------------------------------------------------------------- vectors
td0 = pytest.mark.parametrize("name", ["td0_return", "td0_advantage"])


@compiled
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="looks for instructions of x86")
@pytest.mark.parametrize(
    "name,masked", [("td0_return", False), ("td0_return", True), ("td0_advantage", False), ("gae", False)]
)
def test_loops_are_made_of_vectors(name, masked, tmp_path, monkeypatch):
    monkeypatch.setattr(_cpu, "_functions", {})
    monkeypatch.setattr(_cpu, "_plans", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # of what is loaded from disk there is no assembly
    if name == "gae":
        F.generalized_advantage_estimate.memory.forget()
    computed(name, entries(name, masked, T=40))
    (plan,) = _cpu._plans.values()
    assert re.search(r"\bv?mulps\b", plan.function._library.get_asm_str())


@compiled
@td0
@masks
@pytest.mark.parametrize("T", [10, 300])
def test_vectors_change_no_bit(name, masked, T, monkeypatch):
    """With rows side by side or apart, time outermost, steps apart, a repeated row or step, over what is read."""
    args = entries(name, masked, N=3, T=T)
    layouts = {
        "side by side": lambda x: x[..., None],
        "apart": lambda x: torch.cat((x, x), 1)[:, :T, None],
        "time outermost": lambda x: x.repeat(40, 1).t().contiguous().t()[:3, :, None],
        "steps apart": lambda x: x.repeat_interleave(2, 1)[:, ::2, None],
    }

    def found():
        monkeypatch.setattr(_cpu, "_plans", {})
        results = {kind: computed(name, args, lay=lay)[0] for kind, lay in layouts.items()}
        for dim in (0, 1):
            reward = args["reward"].narrow(dim, 0, 1).expand(3, T)
            (results[dim],) = computed(name, args | {"reward": reward})
        given = {k: v[..., None] if isinstance(v, torch.Tensor) else v for k, v in args.items()}
        given["reward"] = given["reward"].clone()
        results["over what is read"] = ESTIMATORS[name][0](**given, out=given["reward"])[..., 0]
        return results

    results = found()
    monkeypatch.setattr(_cpu, "_elementwise", lambda *variant: False)
    for kind, wanted in found().items():
        assert torch.equal(results[kind], wanted), kind
        assert kind in (0, 1) or torch.equal(wanted, results["apart"]), kind


@compiled
@every_estimator
@pytest.mark.parametrize("spoilt", [False, True], ids=["finite", "NaN and infinity"])
def test_passes_over_pieces_change_no_bit(name, spoilt, monkeypatch):
    """Of 8 rows, 4 and 1; where a cut keeps out what is not finite too."""
    args = entries(name, False, N=13, T=150)
    if spoilt:
        entry = next(k for k, v in args.items() if isinstance(v, torch.Tensor) and v.is_floating_point() and v.ndim > 1)
        args[entry] = args[entry].clone()
        args[entry][2, 140], args[entry][9, 20], args[entry][12, 70] = torch.nan, torch.inf, -torch.inf

    def found():
        monkeypatch.setattr(_cpu, "_plans", {})
        if hasattr(ESTIMATORS[name][0], "memory"):
            ESTIMATORS[name][0].memory.forget()
        return computed(name, args)

    actual = found()
    monkeypatch.setattr(_cpu, "_units", lambda *layout: None)
    for a, w in zip(actual, found(), strict=True):
        torch.testing.assert_close(a, w, rtol=0, atol=0, equal_nan=True)


@compiled
@pytest.mark.parametrize("name", ["gae", "vtrace"])
def test_pieces_over_what_is_read(name):
    """With values shifted by a step, the first of a piece being what the piece before needs."""
    x = rollout(13, 150, seed=11, dtype=torch.float32)
    shifted = {k: x[k] for k in ("state_value", "bootstrap", "done")} | {"next_state_value": None}
    args = {k: v[..., None] if isinstance(v, torch.Tensor) and v.ndim > 1 else v
            for k, v in entries(name, False, N=13, T=150, **shifted).items()}  # fmt: skip
    wanted = ESTIMATORS[name][0](**args)
    args |= {k: args[k].clone() for k in ("state_value", "reward")}
    over = ESTIMATORS[name][0](**args, out=(args["state_value"], args["reward"]))
    assert all(map(torch.equal, over, wanted))


# ---------------------------------------------------------------------------------------------------------------- specs
@jit
def around(step, tile, hypers):
    before, here, after, flag = tile
    return before + hypers[0] * here - after, tl.where(flag, 0.0, hypers[1])


@jit
def unreadable(step, tile, hypers):
    return tile[0].cumsum(0), tile[0] * 0


@jit
def counting(step, tile, hypers):
    x, done = tile
    return x * done, tl.where(done & (x > 0), 0.5, 1.0) * ~done


@pytest.fixture
def declare():
    made = []

    def declare(*args, **kwargs):
        made.append(Spec(*args, identity, transition=False, **kwargs))
        return made[-1]

    yield declare
    for spec in made:
        SPECS.pop(spec.name)


def both(monkeypatch, spec, *args, **kwargs):
    """The output of ``spec``, compiled and in PyTorch."""
    like = args[0][0]
    made = ops.evaluate(spec, *args, (True,), 1, like=like, **kwargs)[0]
    monkeypatch.setattr(_triton, "NUMBA", False)
    return made, ops.evaluate(spec, *args, (True,), 1, like=like, **kwargs)[0]


@compiled
@masks
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", ["numbers", "tensors", "steps"])
def test_neighbours_on_both_sides(declare, masked, reverse, kind, monkeypatch, calls):
    """And written over what they are read from. A discount without time has no neighbours."""
    spec = declare("around", ("a@-1", "a", "a@1", "done@1"), ("g", "h@-1"), ("x",), around, reverse=reverse)
    x = rollout(3, 9, seed=2, dtype=torch.float32)
    a, hypers = x["reward"], (0.7, 0.4)
    if kind != "numbers":
        hypers = tuple(torch.tensor(h) for h in hypers) if kind == "tensors" else (x["gammas"], x["lambdas"])
    mask = x["mask"] if masked else None
    over = a.clone()
    ops.evaluate(spec, (over, over, over, x["done"]), hypers, (over,), 1, mask=mask, like=over)
    actual, wanted = both(monkeypatch, spec, (a, a, a, x["done"]), hypers, mask=mask)
    agree(actual, wanted, 1e-6, 1e-6)
    assert torch.equal(over, actual)
    assert "around" in calls


@compiled
def test_flags_in_arithmetic(declare, monkeypatch, calls):
    spec = declare("counting", ("a", "done"), (), ("x",), counting)
    x = rollout(3, 9, seed=2, dtype=torch.float32)
    agree(*both(monkeypatch, spec, (x["reward"], x["done"].float()), ()), 1e-6, 1e-6)
    assert calls


def test_what_cannot_be_traced_is_left_to_pytorch(declare, calls):
    spec = declare("unreadable", ("a",), (), ("x",), unreadable, recurrences=1)
    a = torch.randn(2, 5)
    (x,) = ops.evaluate(spec, (a,), (), (True,), 1, like=a)
    agree(x, a.cumsum(1), 1e-6, 1e-6)
    assert not calls


@jit
def exponential(step, tile, hypers):
    x, done = tile
    return x, tl.where(done, 0.0, tl.exp(x))


@compiled
@masks
@pytest.mark.parametrize("entries", [("a", "done"), ("a@1", "done@-1")], ids=["causal", "not"])
def test_what_does_not_compile_is_left_to_pytorch(declare, masked, entries, monkeypatch, calls):
    """With one warning; under gradients too."""
    spec = declare("exponential", entries, (), ("x",), exponential)
    wanted = declare("exponential_too", entries, (), ("x",), exponential)
    monkeypatch.setitem(_cpu.FORMS, EXP, "unheard_of({})")
    monkeypatch.setattr(_cpu, "_refused", set())
    x = rollout(3, 9, seed=2, dtype=torch.float32)
    a, kwargs = x["reward"], {"mask": x["mask"] if masked else None, "like": x["reward"]}
    with pytest.warns(UserWarning, match="exponential is evaluated in PyTorch.*unheard_of") as warned:
        for _ in range(2):
            (actual,) = ops.evaluate(spec, (a, x["done"]), (), (True,), 1, **kwargs)
    assert len(warned) == 1
    leaf = a.clone().requires_grad_()
    (tracked,) = ops.evaluate(spec, (leaf, x["done"]), (), (True,), 1, **kwargs)
    assert "exponential" not in calls
    monkeypatch.setattr(_triton, "NUMBA", False)
    (expected,) = ops.evaluate(wanted, (a, x["done"]), (), (True,), 1, **kwargs)
    agree(actual, expected, 1e-6, 1e-6)
    agree(tracked.detach(), expected, 1e-6, 1e-6)
    assert torch.autograd.grad(tracked.sum(), leaf)[0].isfinite().all()


@compiled
@pytest.mark.parametrize("name", ["gae", "vtrace"])
def test_gradients_run_compiled(name, monkeypatch, calls):
    args = {k: v[..., None] if isinstance(v, torch.Tensor) else v for k, v in entries(name, True).items()}

    def gradient():
        reward = args["reward"].clone().requires_grad_()
        advantage, target = ESTIMATORS[name][0](**{**args, "reward": reward})
        return torch.autograd.grad((advantage.square() + target).sum(), reward)[0]

    gradient()
    assert not any(called.endswith("'") for called in calls), "few steps are not worth compiling for"
    monkeypatch.setattr(ops, "DERIVED", 1)
    actual = gradient()
    assert any(called.endswith("'") for called in calls)
    monkeypatch.setattr(_triton, "NUMBA", False)
    agree(actual, gradient(), 1e-5, 1e-5)


@compiled
@pytest.mark.parametrize("steps", [1, 4])
def test_a_sum_over_many_steps_keeps_its_digits(steps):
    x = torch.full((steps, 1_000_000), 0.1)
    total = F.episodic_prefix_sum(x, torch.zeros_like(x, dtype=torch.bool), time_dim=-1)[:, -1]
    agree(total, torch.full((steps,), 0.1).double() * 1_000_000, 1e-7, 0)
