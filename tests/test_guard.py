"""Guards against regressions of cost: of counted work on any machine, of ratios of times on a GPU (``-m gpu_perf``).

Work is counted on a CPU, and where a GPU is only pretended: a call goes the way of one on a GPU's tensors, up to the
launch.
"""

import ctypes
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode

import rl_triton_td
from rl_triton_td import _cpu, _launch, _replay, _triton, functional, ops

sys.path.insert(0, str(Path(__file__).parents[1]))  # the benchmarks are not installed

from benchmarks import measure, registry  # noqa: E402
from benchmarks.registry import GAMMA, LMBDA, ROWS, Row  # noqa: E402
from benchmarks.suites import Shape  # noqa: E402

# -------------------------------------------------------------------------------------------------------- counted work
N, T, AGENTS = 8, 16, 3
WAYS = ("ours", "ours_out", "module", "module_out")
WORK = {  # Python calls of each of WAYS, and how often the modules ask a tensordict for something
    "gae": ((7, 7, 51, 47), (2, 0)),
    "gae_bootstrap": ((7, 7, 51, 47), (2, 0)),
    "gae_truncated": ((7, 7, 51, 47), (2, 0)),
    "gae_masked": ((7, 7, 54, 50), (2, 0)),
    "gae_per_step": ((7, 7, 51, 47), (2, 0)),
    "gae_masked_cut": ((7, 7, 54, 50), (2, 0)),
    "gae_of_agents": ((None, None, 51, 47), (2, 0)),
    "td0": ((8, 8, 51, 47), (2, 0)),
    "td0_advantage": ((8, 8),),
    "td1": ((8, 8, 51, 47), (2, 0)),
    "td1_advantage": ((8, 8),),
    "td_lambda": ((8, 8, 51, 47), (2, 0)),
    "td_lambda_advantage": ((8, 8),),
    "td_lambda_terminal": ((8, 8),),
    "reward2go": ((7, 7, 45, 43), (1, 0)),
    "reward2go_truncated": ((7, 7, 45, 43), (1, 0)),
    "vtrace": ((7, 7, 109, 105), (13, 11)),
    "vtrace_bootstrap": ((7, 7, 109, 105), (13, 11)),
    "vtrace_truncated": ((7, 7, 109, 105), (13, 11)),
    "vtrace_masked": ((7, 7, 112, 108), (13, 11)),
    "retrace": ((7, 7, 58, 54), (2, 0)),
    "retrace_return": ((7, 7),),
    "retrace_from_action_values": ((7, 7),),
    "retrace_taken": ((7, 7),),
    "eligibility_trace": ((7, 7, 43, 41), (1, 0)),
    "prefix_sum": ((7, 7, 51, 49), (1, 0)),
    "linear_recurrence": ((7, 7),),
}
SLACK = 1.15  # of Python calls, which versions of Python and PyTorch make more or fewer of
VIEWS = {f"aten.{name}.default" for name in ("view", "expand", "unsqueeze")}
DENSE = ROWS["gae"].reads
_advantage = partial(Row, reads=DENSE, outputs=("advantage",), reference="")
ROWS_MORE = (
    Row("gae_per_step", ROWS["gae"].function, "", DENSE + " gamma",
        module=lambda: rl_triton_td.GAE(gamma=torch.full((N, T, 1), GAMMA), lmbda=LMBDA)),
    Row("gae_of_agents", ROWS["gae"].function, "", DENSE,
        module=partial(rl_triton_td.MultiAgentGAE, gamma=GAMMA, lmbda=LMBDA)),
    Row("gae_masked_cut", ROWS["gae"].function, "", ROWS["gae_truncated"].reads + " mask", module=ROWS["gae"].module),
    _advantage("td0_advantage", "td0_advantage_estimate", hypers={"gamma": GAMMA}),
    _advantage("td1_advantage", "td1_advantage_estimate", hypers={"gamma": GAMMA}),
    _advantage("td_lambda_advantage", "td_lambda_advantage_estimate"),
    Row("vtrace_masked", ROWS["vtrace"].function, "", ROWS["vtrace"].reads + " mask", hypers={"gamma": GAMMA},
        module=ROWS["vtrace"].module),
    Row("retrace_return", "retrace_lambda_return_estimate", "", ROWS["retrace"].reads, ("value_target",)),
)  # fmt: skip
COUNTED = {**ROWS, **{row.name: row for row in ROWS_MORE}}


def forget():
    for function in vars(functional).values():
        if memory := getattr(function, "memory", None):
            memory.forget()


@pytest.fixture(autouse=True)
def forgotten():
    """What is remembered elsewhere, of a GPU that is only pretended or not."""
    forget()
    yield
    forget()


@pytest.fixture
def launched(monkeypatch):
    """The outputs of every launch, as pointers; ``"compiled"`` for one that Triton is asked for."""
    seen = []

    def launch(plan, sources, outputs, before, initial):
        if plan.compiled:
            plan.run(sources, _launch._pointers(outputs), before, initial)
        else:
            plan.compiled = True
            seen.append("compiled")

    monkeypatch.setattr(_launch._Launch, "__call__", launch)
    monkeypatch.setattr(_launch._Launch, "run", lambda plan, sources, outputs, before, initial: seen.append(outputs))
    monkeypatch.setattr(_launch, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(_launch, "_launches", {})
    monkeypatch.setattr(ops, "runs_kernels", lambda device: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return seen


def prepared(name, way, steps=T):
    """``(call, fresh)`` of a contender of the benchmarks."""
    row = COUNTED[name]
    d = registry.entries(row, N, steps)
    if way.startswith("module"):
        d.pop("gamma", None)
        if name == "gae_of_agents":
            d |= {key: d[key].unsqueeze(2).repeat(1, 1, AGENTS, 1) for key in ("state_value", "next_state_value")}
    return registry.CONTENDERS[way](row, d)


class Operators(TorchDispatchMode):
    """Names of PyTorch's operators that run inside."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def operators(call, x):
    with Operators() as mode:
        call(x)
    return mode.seen


def python_calls(call, x):
    """Of functions, those in C too."""
    seen, outer = [], sys.getprofile()
    sys.setprofile(lambda frame, event, function: seen.append(event))
    try:
        call(x)
    finally:
        sys.setprofile(outer)
    return sum(event in ("call", "c_call") for event in seen)


ASKED = ("_get_str", "_get_tuple", "_set_str", "_set_tuple", "__getitem__", "__setitem__", "get", "set", "select",
         "exclude", "copy", "clone", "keys", "values", "items")  # fmt: skip


def asked(call, x):
    """``{(method, key): times}`` of tensordicts."""
    seen = Counter()

    def counting(name, method):
        def ask(self, *args, **kwargs):
            seen[name, args[0] if args and type(args[0]) in (str, tuple) else None] += 1
            return method(self, *args, **kwargs)

        return ask

    with pytest.MonkeyPatch.context() as patch:
        for name in ASKED:
            patch.setattr(TensorDict, name, counting(name, getattr(TensorDict, name)))
        call(x)
    return seen


every_way = pytest.mark.parametrize(
    "name, way, ceiling, questions",
    [
        pytest.param(name, way, ceiling, asks[0][k - 2] if k >= 2 else 0, id=f"{name}-{way}")
        for name, (ceilings, *asks) in WORK.items()
        for k, (way, ceiling) in enumerate(zip(WAYS, ceilings, strict=False))
        if ceiling is not None
    ],
)


def results(name, way):
    """Names of what a call writes, and the operators that make memory for it."""
    outputs = COUNTED[name].outputs
    if way.startswith("module") and name.startswith("td"):
        outputs = ("advantage", "value_target")
    return outputs, [] if way.endswith("_out") else ["aten.empty_like.default"] * len(outputs)


def addresses(written, way, outputs):
    if way.startswith("module"):
        written = tuple(written.get(key) for key in outputs)
    return {x.data_ptr() for x in (written if isinstance(written, tuple) else (written,))}


@pytest.mark.skipif(_replay._native() is None, reason="needs Triton and a C compiler")
@every_way
def test_a_call_is_one_launch_and_little_else(launched, name, way, ceiling, questions):
    call, fresh = prepared(name, way)
    outputs, made = results(name, way)
    first = operators(call, fresh())  # the first call of a layout launches through Triton
    assert launched == ["compiled"]
    assert [name for name in first if name not in VIEWS] == made
    call(fresh()), call(fresh())  # the third one is recalled
    launched.clear()

    assert min(python_calls(call, x) for x in (fresh(), fresh())) <= SLACK * ceiling + 1
    written = call(fresh())
    assert len(launched) == 3 and addresses(written, way, outputs) == set(launched[-1]) - {None}
    answers = asked(call, fresh())
    assert answers.total() <= questions, answers
    assert operators(call, fresh()) == made


def watched(monkeypatch):
    """What every compiled loop is given, as numbers."""
    seen, kept, direct = [], [], _cpu._Loop.direct

    def watching(plan, *places):
        address, *rest, values, slots, meeting = direct(plan, *places)
        loop = ctypes.CFUNCTYPE(None, ctypes.c_int64)

        def run(given):
            seen.append(list((ctypes.c_int64 * (len(values) // 8)).from_address(given)))
            loop(address)(given)

        kept.append(loop(run))
        return ctypes.cast(kept[-1], ctypes.c_void_p).value, *rest, values, slots, meeting

    monkeypatch.setattr(_cpu._Loop, "direct", watching)
    return seen


@pytest.mark.skipif(not _triton.NUMBA or _replay._native() is None, reason="needs numba and a C compiler")
@every_way
def test_a_call_on_a_cpu_is_one_loop_and_little_else(name, way, ceiling, questions, monkeypatch):
    if "action" in COUNTED[name].reads.split():
        pytest.skip("the taken action's values are gathered first")
    outputs, made = results(name, way)
    call, fresh = prepared(name, way)
    call(fresh()), call(fresh())  # the third one is recalled
    assert min(python_calls(call, x) for x in (fresh(), fresh())) <= SLACK * ceiling + 1

    forget()
    looped = watched(monkeypatch)
    call, fresh = prepared(name, way)
    operators(call, fresh())  # a mode that watches is one more thing that a call depends on
    call(fresh()), call(fresh())
    monkeypatch.setattr(_cpu, "evaluate", None)
    looped.clear()
    written = call(fresh())
    assert len(looped) == 1 and addresses(written, way, outputs) == {*looped[0][-len(outputs) :]}
    answers = asked(call, fresh())
    assert answers.total() <= questions, answers
    assert operators(call, fresh()) == made


def test_long_rows_are_one_launch(launched):
    call, fresh = prepared("gae", "ours", 50_000)
    call(fresh())
    launched.clear()
    made = operators(call, fresh())
    assert [len(outputs) for outputs in launched] == [2]
    assert made == ["aten.empty_like.default"] * 2


def test_a_backward_pass_is_one_launch(launched):
    call, fresh = prepared("gae_backward", "ours")
    call(fresh())
    launched.clear()
    outputs = fresh()
    assert len(launched) == 1
    assert operators(call, outputs) == ["rl_triton_td.evaluate.default"] and len(launched) == 2


# ------------------------------------------------------------------------------------------------------ ratios of times
WIDE, ODD, SQUARE, TIME_MAJOR = Shape(65536, 256), Shape(16384, 1000), Shape(4096, 4096), Shape(65536, 256, "time")
HALF = Shape(8192, 2560)  # which leaves a third of the next power of two empty
FEW, FEWER = Shape(16384, 1024, "time"), Shape(4096, 4096, "time")  # rows, side by side
STRUNG, ANYWHERE = Shape(65536, 255), Shape(16384, 1001)  # several to a tile; begins that suit nothing
RATIOS = {  # device time over that of a kernel that copies as many bytes
    "gae": {WIDE: 1.05, ODD: 1.05, HALF: 1.05, SQUARE: 1.05, TIME_MAJOR: 1.08, FEW: 1.05, FEWER: 1.08, STRUNG: 1.03,
            ANYWHERE: 1.03},
    "gae_bootstrap": {WIDE: 1.05, ODD: 1.06, HALF: 1.1, SQUARE: 1.12, TIME_MAJOR: 1.1, STRUNG: 1.1},
    "gae_masked": {WIDE: 1.08, SQUARE: 1.08},
    "gae_backward": {WIDE: 1.08},
    "td_lambda": {WIDE: 1.03, ODD: 1.03, HALF: 1.05, SQUARE: 1.04, FEW: 1.05},
    "reward2go": {WIDE: 1.06, ODD: 1.08, HALF: 1.1, SQUARE: 1.14, TIME_MAJOR: 1.12, FEW: 1.1, FEWER: 1.2, STRUNG: 1.1},
    "vtrace": {WIDE: 1.03, ODD: 1.03, HALF: 1.03, SQUARE: 1.05, FEW: 1.05, FEWER: 1.06, STRUNG: 1.03, ANYWHERE: 1.06},
    "vtrace_bootstrap": {SQUARE: 1.06},
    "retrace": {WIDE: 1.03, ODD: 1.03, HALF: 1.1, SQUARE: 1.1, FEW: 1.05, STRUNG: 1.03},
    "retrace_from_action_values": {WIDE: 1.03, SQUARE: 1.08},
    "retrace_taken": {WIDE: 1.05, SQUARE: 1.1},
    "eligibility_trace": {WIDE: 1.08, HALF: 1.1, TIME_MAJOR: 1.1, STRUNG: 1.12},
    "prefix_sum": {WIDE: 1.08},
}  # fmt: skip


@pytest.mark.gpu_perf
@pytest.mark.gpu
@pytest.mark.parametrize(
    "name, shape, ceiling",
    [
        pytest.param(name, shape, ceiling, id=f"{name}-{shape.N}x{shape.T}-{shape.layout}")
        for name, ceilings in RATIOS.items()
        for shape, ceiling in ceilings.items()
    ],
)
def test_time_on_the_device_is_that_of_a_copy(name, shape, ceiling):
    case = measure.Case(ROWS[name], shape, "cuda")
    assert case.bytes >= 1e8
    figures = case.measure("ours", False, 120)
    assert figures["note"] is None, figures["note"]
    ratio = figures["device_us"] / measure.copy_us(case.bytes, case.device)
    print(f"ratio {ratio:.3f}")
    assert ratio <= ceiling, f"{ratio:.3f} times the copy, {ceiling} allowed"


@pytest.mark.gpu_perf
@pytest.mark.gpu
def test_a_module_takes_little_longer_than_its_function():
    case = measure.Case(ROWS["gae"], Shape(4096, 128), "cuda")
    figures = dict(case.in_turn(("ours_out", "module_out"), False, 120))
    assert not any(f["note"] for f in figures.values()), figures
    ratio = figures["module_out"]["back_to_back_us"] / figures["ours_out"]["back_to_back_us"]
    print(f"ratio {ratio:.3f}")
    assert ratio <= 2.3, f"{ratio:.3f} times the function"
