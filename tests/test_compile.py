"""Under torch.compile, torch.export, torch.func, autocast and CUDA graphs: one operator, one graph, no new ones."""

import copy

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    CudaGraphModule,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torchrl.modules import NormalParamExtractor
from torchrl.objectives import ClipPPOLoss

import rl_triton_td
import rl_triton_td.functional as F
from conftest import INTERPRET, agree, rollout
from test_autograd import gradients, is_number, rows, with_hypers
from test_functional import ESTIMATORS, arguments, computed, picked_or_not

every_estimator = pytest.mark.parametrize("name", ESTIMATORS)
operator = torch.ops.rl_triton_td.evaluate.default
VALUES = ("state_value", "next_state_value", "reward", "done", "terminated")
HYPERS = {"gamma": 0.99, "lmbda": 0.95}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


class Counted(CompileCounterWithBackend):
    """A backend that counts graphs, and the operator's nodes in the last; no C++ compiler is needed on a CPU."""

    def __init__(self, device="cpu"):
        super().__init__("inductor" if device == "cuda" else "aot_eager")

    def operators(self):
        return sum(
            node.target is operator or "rl_triton_td" in str(node.target) for node in self.graphs[-1].graph.nodes
        )


def compiled(function, device="cpu", **kwargs):
    counted = Counted(device)
    return torch.compile(function, backend=counted, fullgraph=True, **kwargs), counted


# ------------------------------------------------------------------------------------------------------------ operator


def recorded(call):
    """The operator's calls within ``call``."""
    found = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is operator:
                found.append(args)
            return func(*args, **(kwargs or {}))

    with Record():
        call()
    return found


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("name", ["gae", "td0_return", "vtrace", "reward_to_go", "eligibility_trace"])
def test_opcheck(name, masked, device):
    """Of an estimator's operators as its gradients call them, and of their adjoints."""
    if INTERPRET and masked:
        pytest.skip("one of them is enough for the interpreter")
    x = rollout(2, 5, seed=60, dtype=torch.float32)
    args = with_hypers(name, x, "number", **({"mask": x["mask"]} if masked else {}))
    calls = recorded(lambda: gradients(name, args, device))
    assert {"'" in call[0] for call in calls} == {False, True}
    for spec, tensors, *layout in calls:
        tracked = [t.requires_grad and "'" not in spec for t in tensors]
        tensors = [t.detach().requires_grad_(tracks) for t, tracks in zip(tensors, tracked, strict=True)]
        torch.library.opcheck(operator, (spec, tensors, *layout))


# ----------------------------------------------------------------------------------------------------------- functions


@every_estimator
def test_functions_compile_whole(name, device):
    """One operator in the graph, forward and backward; no new graph when gamma and lambda change."""
    if INTERPRET:
        pytest.skip("of tracing, the interpreter knows nothing")
    x = rollout(3, 8, seed=61, dtype=torch.float32)
    args = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in with_hypers(name, x, "number").items()}
    args = {k: rows(v) if isinstance(v, torch.Tensor) and v.ndim else v for k, v in args.items()}
    leaves = [k for k, v in args.items() if is_number(v)]
    function = ESTIMATORS[name][0]
    call, counted = compiled(lambda rest, ours: function(**rest, **ours), device)
    rest = {k: v for k, v in args.items() if k not in leaves}
    for scale in (1.0, 0.5, 0.0):
        given = {k: args[k] * scale if k in ("gamma", "lmbda") else args[k] for k in leaves}
        results = []
        for run in (call, function):
            ours = {k: v.detach().clone().requires_grad_() for k, v in given.items()}
            outputs = call(rest, ours) if run is call else function(**rest, **ours)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            found = torch.autograd.grad([o.sin().sum() for o in outputs], list(ours.values()), allow_unused=True)
            results.append([*outputs, *(f for f in found if f is not None)])
        assert len(results[0]) == len(results[1])
        for a, b in zip(*results, strict=True):
            agree(a, b, 1e-5, 1e-5, name)
        if scale == 1.0:
            first = counted.frame_count
    assert counted.frame_count == first and counted.operators() == 1


@every_estimator
def test_functions_with_numbers_and_changing_shapes(name, device):
    """A number that changes makes one new graph, with numbers as inputs; so do shapes that change; then no more."""
    if INTERPRET:
        pytest.skip("of tracing, the interpreter knows nothing")
    call, counted = compiled(ESTIMATORS[name][0], device)
    for step, (N, T) in enumerate(((3, 8), (3, 8), (3, 8), (4, 9), (5, 11), (6, 12))):
        x = rollout(N, T, seed=step, dtype=torch.float32)
        hypers = {"gamma": 0.9 - 0.1 * step, "lmbda": 0.8 - 0.1 * step}
        args = arguments(name, x)
        args |= {k: v for k, v in hypers.items() if k in args}
        args = {k: rows(v).to(device) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
        before, (outputs, wanted) = counted.frame_count, (f(**args) for f in (call, ESTIMATORS[name][0]))
        for a, b in zip(*(o if isinstance(o, tuple) else (o,) for o in (outputs, wanted)), strict=True):
            agree(a, b, 1e-5, 1e-5, name)
        assert counted.frame_count == before or step in (0, 1, 3)


@pytest.mark.parametrize("name", ["gae", "vtrace", "td_lambda_return"])
def test_masks_bootstraps_and_outputs_given_compile(name, device):
    x = rollout(3, 8, seed=62, dtype=torch.float32)
    changes = {"next_state_value": None, "bootstrap": x["bootstrap"], "state_value": x["state_value"]}
    args = arguments(name, x, mask=x["mask"], done=x["done"], **changes)
    wanted = computed(name, args, device)
    call, counted = compiled(lambda **kwargs: computed(name, kwargs, device))
    for a, b in zip(call(**args), wanted, strict=True):
        agree(a, b, 1e-5, 1e-5)
    out = tuple(torch.empty(3, 8, 1, device=device) for _ in wanted)
    call, _ = compiled(lambda out, **kwargs: computed(name, kwargs, device, out=out))
    call(out if len(out) > 1 else out[0], **args)
    for a, b in zip(out, wanted, strict=True):
        agree(a.squeeze(-1), b, 1e-5, 1e-5)


@picked_or_not
def test_retrace_from_action_values_compiles(picked, device):
    x = {k: v.to(device) for k, v in rollout(3, 8, seed=63, dtype=torch.float32).items()}
    log_mu, reward, done, terminated = (rows(x[k]) for k in ("log_mu", "reward", "done", "terminated"))

    def call(q):
        rest = (x["next_pi"], q, x["next_action_values"], x["action"], log_mu, reward, done, terminated)
        return F.retrace_from_action_values(0.9, 0.8, x["pi"], *rest)

    if picked:
        x["action_values"] = x["action_values"].gather(-1, rows(x["action"]))
    q, grads = x["action_values"].requires_grad_(), []
    run, counted = compiled(call)
    for f in (run, call):
        outputs = f(q)
        grads.append([*outputs, *torch.autograd.grad(sum(o.sum() for o in outputs), q)])
    for a, b in zip(*grads, strict=True):
        agree(a, b, 1e-5, 1e-5)
    assert counted.frame_count == counted.operators() == 1


# ------------------------------------------------------------------------------------------------------------- modules


def critic():
    torch.manual_seed(0)
    return TensorDictModule(torch.nn.Linear(4, 1), in_keys=["observation"], out_keys=["state_value"])


def actor():
    torch.manual_seed(1)
    return ProbabilisticTensorDictSequential(
        TensorDictModule(
            torch.nn.Sequential(torch.nn.Linear(4, 4), NormalParamExtractor()), ["observation"], ["loc", "scale"]
        ),
        ProbabilisticTensorDictModule(
            ["loc", "scale"],
            ["action"],
            distribution_class=Independent,
            return_log_prob=True,
        ),
    )


class Independent(torch.distributions.Independent):
    """Of normal numbers; without checks of what it is given, which would look at it."""

    def __init__(self, loc, scale):
        super().__init__(torch.distributions.Normal(loc, scale, validate_args=False), 1, validate_args=False)


def batch(N=3, T=8, seed=0, device="cpu"):
    x = {k: rows(v) for k, v in rollout(N, T, seed=seed, dtype=torch.float32).items() if v.ndim == 2}
    g = torch.Generator().manual_seed(seed)
    observation, action = torch.randn(N, T + 1, 4, generator=g), torch.randn(N, T, 2, generator=g)
    return TensorDict(
        {
            "observation": observation[:, :-1],
            "action": action,
            "action_log_prob": x["log_mu"].squeeze(-1),
            "log_pi": x["log_pi"].squeeze(-1),
            "gradient": x["gradient"],
            "state_value": x["state_value"],
            "state_action_value": x["action_value"],
            "collector": {"mask": x["mask"].squeeze(-1)},
            "next": {
                "observation": observation[:, 1:],
                "reward": x["reward"],
                "done": x["done"],
                "terminated": x["terminated"],
                "state_value": x["next_state_value"],
            },
        },
        [N, T],
        device=device,
    )


MODULES = {
    "GAE": lambda: rl_triton_td.GAE(**HYPERS),
    "GAE, standardised": lambda: rl_triton_td.GAE(**HYPERS, average_gae=True),
    "MultiAgentGAE": lambda: rl_triton_td.MultiAgentGAE(**HYPERS),
    "TD0Estimator": lambda: rl_triton_td.TD0Estimator(gamma=0.99),
    "TD1Estimator": lambda: rl_triton_td.TD1Estimator(gamma=0.99),
    "TDLambdaEstimator": lambda: rl_triton_td.TDLambdaEstimator(**HYPERS),
    "RetraceEstimator": lambda: rl_triton_td.RetraceEstimator(**HYPERS),
    "DiscountedReturn": lambda: rl_triton_td.DiscountedReturn(gamma=0.99),
    "EligibilityTrace": lambda: rl_triton_td.EligibilityTrace(**HYPERS),
    "EpisodicPrefixSum": lambda: rl_triton_td.EpisodicPrefixSum(),
    "VTrace": lambda: rl_triton_td.VTrace(gamma=0.99, actor_network=actor()),
}
WITH_NETWORK = {
    "GAE": lambda: rl_triton_td.GAE(**HYPERS, value_network=critic()),
    "GAE, differentiable": lambda: rl_triton_td.GAE(**HYPERS, value_network=critic(), differentiable=True),
    "TDLambdaEstimator": lambda: rl_triton_td.TDLambdaEstimator(**HYPERS, value_network=critic()),
    "VTrace": lambda: rl_triton_td.VTrace(gamma=0.99, actor_network=actor(), value_network=critic()),
}


def _check_module(module, device):
    eager = copy.deepcopy(module)  # an eager call may note what a compiled one would read
    call, counted = compiled(module, device)
    for step, (N, T) in enumerate(((3, 8), (3, 8), (5, 9), (6, 11), (8, 12))):
        td = batch(N, T, seed=step, device=device)
        if isinstance(module, rl_triton_td.MultiAgentGAE):
            for key in ("state_value", ("next", "state_value")):
                td[key] = td[key].unsqueeze(-2).expand(N, T, 2, 1)
        before, (got, wanted) = counted.frame_count, (f(td.clone()) for f in (call, eager))
        for key in module.out_keys:
            agree(got[key], wanted[key], 1e-5, 1e-5, f"{key}")
        assert counted.frame_count == before or step in (0, 2), "compiled anew"
        for buffers in (module._buffers, eager._buffers):
            for discount in {"gamma", "lmbda"} & set(buffers):
                buffers[discount].mul_(0.9)


@pytest.mark.parametrize("name", MODULES)
def test_modules_compile_whole(name, device):
    """No new graph when gamma or lambda change, one when the batch's shape first does."""
    if INTERPRET:
        pytest.skip("of tracing, the interpreter knows nothing")
    _check_module(MODULES[name]().to(device), device)


@pytest.mark.parametrize("name", WITH_NETWORK)
def test_modules_with_networks_compile_whole(name, device):
    if INTERPRET:
        pytest.skip("of tracing, the interpreter knows nothing")
    module = WITH_NETWORK[name]()
    for network in ("value_network", "actor_network"):
        if module.__dict__.get(network) is not None:
            module.__dict__[network].to(device)
    _check_module(module.to(device), device)


def ppo(device="cpu"):
    loss = ClipPPOLoss(actor().to(device), critic().to(device), entropy_bonus=False)
    loss.make_value_estimator(rl_triton_td.GAE, **HYPERS)
    return loss.to(device)


def total(losses):
    return sum(v for k, v in losses.items() if k.startswith("loss"))


def test_a_ppo_loss_that_computes_its_advantage_inside(device):
    if INTERPRET:
        pytest.skip("of tracing, the interpreter knows nothing")
    loss, eager = ppo(device), ppo(device)
    call, counted = compiled(loss, device)
    for step, (N, T) in enumerate(((3, 8), (3, 8), (5, 9), (6, 11))):
        td, before = batch(N, T, seed=step, device=device), counted.frame_count
        found = []
        for f, owner in ((call, loss), (eager, eager)):
            value = total(f(td.clone()))
            found.append((value, *torch.autograd.grad(value, list(owner.parameters()))))
        for a, b in zip(*found, strict=True):
            agree(a, b, 1e-4, 1e-5)
        # tensordict notes classes that it meets, once
        assert counted.frame_count == before or step < 3


def test_export():
    """Of tensors, under their entries' names, with any batch and time."""

    class Wrapper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.estimator = rl_triton_td.GAE(**HYPERS)

        def forward(self, state_value, reward, done, terminated, next_state_value):
            return self.estimator(
                state_value=state_value, next_reward=reward, next_done=done, next_terminated=terminated,
                next_state_value=next_state_value,
            )  # fmt: skip

    def given(N, T):
        x = rollout(N, T, seed=N, dtype=torch.float32)
        return {k: rows(x[k]) for k in ("state_value", "reward", "done", "terminated", "next_state_value")}

    shape = {0: torch.export.Dim("batch"), 1: torch.export.Dim("time")}
    args = given(3, 8)
    program = torch.export.export(Wrapper(), (), args, dynamic_shapes=dict.fromkeys(args, shape), strict=False)
    for N, T in ((3, 8), (5, 11)):
        for a, b in zip(program.module()(**given(N, T)), Wrapper()(**given(N, T)), strict=True):
            agree(a, b, 1e-6, 1e-6)
    program = program.run_decompositions()
    assert [n for n in program.graph.nodes if n.target is operator], "the operator is in the exported graph"


# ---------------------------------------------------------------------------------------------------- torch.func, modes


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("tracked", [False, True])
def test_vmap_over_an_ensemble_of_critics(masked, tracked, device):
    """Values and discounts with a dimension of critics; rewards, flags and masks shared."""
    x = {k: v.to(device) for k, v in rollout(3, 8, seed=64, dtype=torch.float32).items()}
    mask = rows(x["mask"]) if masked else None
    values = rows(torch.stack([x["state_value"], x["bootstrap"], x["gradient"]], 1)).requires_grad_(tracked)
    gamma = torch.tensor([0.9, 0.8, 0.7], device=device, requires_grad=tracked)

    def call(value, gamma, flags=("done", "terminated")):
        return F.generalized_advantage_estimate(
            gamma, 0.9, value, None, rows(x["reward"]), *(rows(x[k]) for k in flags), mask=mask,
            bootstrap=rows(x["next_state_value"]),
        )  # fmt: skip

    got = torch.func.vmap(call, in_dims=(1, 0), out_dims=1)(values, gamma)
    wanted = [torch.stack(o, 1) for o in zip(*(call(values[:, i], gamma[i]) for i in range(3)), strict=True)]
    for a, b in zip(got, wanted, strict=True):
        agree(a, b, 1e-6, 1e-6)
    if tracked:
        grads = [torch.autograd.grad([o.square().sum() for o in outputs], (values, gamma)) for outputs in (got, wanted)]
        for a, b in zip(*grads, strict=True):
            agree(a, b, 1e-5, 1e-5)


def test_vmap_of_what_enters_and_of_a_module(device):
    x = {k: v.to(device) for k, v in rollout(3, 8, seed=65, dtype=torch.float32).items()}
    initial = torch.randn(4, 3, 1, device=device)

    def call(initial):
        return F.eligibility_trace(0.9, 0.8, rows(x["gradient"]), rows(x["done"]), initial=initial)

    agree(torch.func.vmap(call)(initial), torch.stack([call(i) for i in initial]), 1e-6, 1e-6)
    module, td = rl_triton_td.TDLambdaEstimator(**HYPERS).to(device), batch(device=device)
    scale = torch.tensor([1.0, -2.0], device=device)

    def estimate(scale):
        return module(td.clone().set("state_value", td["state_value"] * scale))["advantage"]

    agree(torch.func.vmap(estimate)(scale), torch.stack([estimate(s) for s in scale]), 1e-5, 1e-5)


def test_gradients_by_transforms(device):
    x = {k: rows(v).to(device) for k, v in rollout(3, 8, seed=66, dtype=torch.float32).items() if v.ndim == 2}

    def loss(gamma, reward):
        values = (x["state_value"], x["next_state_value"], reward, x["done"], x["terminated"])
        return F.vtrace_advantage_estimate(gamma, x["log_pi"], x["log_mu"], *values)[0].square().sum()

    gammas = torch.tensor([0.9, 0.7], device=device)
    got = torch.func.vmap(torch.func.grad(loss, (0, 1)), in_dims=(0, None))(gammas, x["reward"])
    for i, gamma in enumerate(gammas):
        leaves = (gamma.detach().requires_grad_(), x["reward"].detach().requires_grad_())
        for a, b in zip(got, torch.autograd.grad(loss(*leaves), leaves), strict=True):
            agree(a[i], b, 1e-4, 1e-4)


def test_autocast(device):
    """Values of half precision from a critic: results have their dtype, arithmetic is single precision."""
    with torch.autocast(device, torch.bfloat16):
        td = critic().to(device)(batch(device=device))
        td["next", "state_value"] = td["state_value"].flip(0)
        assert td["state_value"].dtype == torch.bfloat16
        got = rl_triton_td.GAE(**HYPERS).to(device)(td.clone())["advantage"]
        tracked = td.clone().set("state_value", td["state_value"].clone().requires_grad_())
        differentiable = rl_triton_td.GAE(**HYPERS, differentiable=True).to(device)(tracked)["advantage"]
    wide = td.apply(lambda x: x.float() if x.is_floating_point() else x)
    wanted = rl_triton_td.GAE(**HYPERS).to(device)(wide)["advantage"].bfloat16()
    for result in (got, differentiable):
        assert result.dtype == torch.bfloat16
        agree(result, wanted, 0 if not INTERPRET else 1e-2, 0)  # the interpreter's cast truncates


def test_inference_mode(device):
    x = {k: rows(v).to(device) for k, v in rollout(3, 8, seed=67, dtype=torch.float32).items() if v.ndim == 2}
    wanted = F.generalized_advantage_estimate(0.9, 0.8, *(x[k] for k in VALUES), mask=x["mask"])
    with torch.inference_mode():
        for args in (x, {k: v.clone() for k, v in x.items()}):
            got = F.generalized_advantage_estimate(0.9, 0.8, *(args[k] for k in VALUES), mask=args["mask"])
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        td = rl_triton_td.GAE(**HYPERS).to(device)(batch(device=device))
    assert td["advantage"].is_inference() and not td["advantage"].requires_grad


# --------------------------------------------------------------------------------------------------------- CUDA graphs

SIZE = (64, 48)


def post_processing():
    """Advantages, a return and a trace; standardised, weighted: what runs between a rollout and an update."""
    return TensorDictSequential(
        rl_triton_td.GAE(**HYPERS, average_gae=True),
        rl_triton_td.DiscountedReturn(gamma=0.9, keys={"value_target": "return"}),
        rl_triton_td.EligibilityTrace(**HYPERS),
        TensorDictModule(torch.tanh, in_keys=["advantage"], out_keys=["weight"]),
    ).to("cuda")


def results(td):
    return {k: td[k].clone() for k in ("advantage", "value_target", "return", "trace", "weight")}


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_a_captured_step_stays_right(masked):
    """Ten thousand replays; entries and discounts change in place between them."""
    step, td = post_processing(), batch(*SIZE, device="cuda")
    if not masked:
        del td["collector", "mask"]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(td.copy())
    torch.cuda.current_stream().wait_stream(stream)
    captured, graph = td.copy(), torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            step(captured)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for seed in range(10_000):
        if seed % 500 == 0:
            td.update_(batch(*SIZE, seed=seed).to("cuda"), keys_to_update=list(td.keys(True, True)))
            step[0].gamma.fill_(0.9 + 0.09 * (seed % 1000) / 1000)
            step[2].lmbda.fill_(0.5 + 0.4 * (seed % 3000) / 3000)
            torch.cuda.synchronize()
        td["next", "reward"].add_(0.01)
        graph.replay()
        if seed % 500 == 499:
            wanted = results(step(td.copy()))
            for key, value in results(captured).items():
                torch.testing.assert_close(value, wanted[key], rtol=0, atol=0, msg=f"{key} after {seed} replays")


@pytest.mark.gpu
def test_a_cuda_graph_module():
    step = post_processing()
    captured = CudaGraphModule(step, warmup=3)
    for seed in range(20):
        td = batch(*SIZE, seed=seed, device="cuda")
        step[0].gamma.fill_(0.9 + 0.001 * seed)
        wanted, got = results(step(td.copy())), results(captured(td.copy()))
        for key in wanted:
            torch.testing.assert_close(got[key], wanted[key], rtol=0, atol=0, msg=f"{key}, call {seed}")


@pytest.mark.gpu
def test_a_captured_gradient_stays_right():
    """Forward and backward of a loss on the advantage, in one graph."""
    x = {k: rows(v).cuda() for k, v in rollout(*SIZE, seed=68, dtype=torch.float32).items() if v.ndim == 2}
    value, gamma = x["state_value"].requires_grad_(), torch.tensor(0.9, device="cuda", requires_grad=True)

    def step():
        outputs = F.vtrace_advantage_estimate(
            gamma, x["log_pi"], x["log_mu"], value, x["next_state_value"], x["reward"], x["done"], x["terminated"]
        )
        return torch.autograd.grad(sum(o.square().sum() for o in outputs), (value, gamma))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(100):
        x["reward"].copy_(rows(rollout(*SIZE, seed=seed, dtype=torch.float32)["reward"]))
        gamma.data.fill_(0.9 + 0.0005 * seed)
        graph.replay()
        for a, b in zip(captured, step(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_reduced_overhead(dynamic):
    """Inductor's own CUDA graphs around functions, a module and their gradients."""
    module = rl_triton_td.GAE(**HYPERS, differentiable=True).to("cuda")
    call = torch.compile(module, fullgraph=True, mode="reduce-overhead", dynamic=dynamic)
    for seed in range(6):
        shape = (64, 48 + 16 * (seed % 2)) if dynamic else SIZE
        td = batch(*shape, seed=seed, device="cuda")
        module.gamma.fill_(0.9 + 0.01 * seed)
        found = []
        for f in (call, module):
            torch.compiler.cudagraph_mark_step_begin()
            leaf = td["state_value"].clone().requires_grad_()
            out = f(td.clone().set("state_value", leaf))
            found.append((out["advantage"].clone(), *torch.autograd.grad(out["advantage"].square().sum(), leaf)))
        for a, b in zip(*found, strict=True):
            agree(a, b, 1e-5, 1e-5)


@pytest.mark.gpu_perf
@pytest.mark.gpu
def test_a_replay_takes_little_more_than_its_kernels():
    step, td = post_processing(), batch(4096, 128, device="cuda")
    for _ in range(3):
        step(td.copy())
    captured, graph = td.copy(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(captured)
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
    kernels = sum(e.self_device_time_total for e in profile.key_averages()) / 20
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        start.record()
        for _ in range(20):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / 20 * 1e3)
    assert best <= 1.2 * kernels, f"replay {best:.1f} us, kernels {kernels:.1f} us"
