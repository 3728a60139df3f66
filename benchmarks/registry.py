"""What is measured: one :class:`Row` an estimator, and the contenders that compute it.

Entries are ``[N, T, 1]`` tensors under the package's argument names (``behind``: ``[N, 1]``; ``pi``, ``action_values``
and their successors: ``[N, T, ACTIONS]``). A contender is a function of the entries that returns ``(call, fresh)``:
``fresh()`` makes, off the clock, what ``call`` takes; ``call`` returns the outputs in the order of the row.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from types import SimpleNamespace

import torch
import torch.nn.functional as nnf
from tensordict import TensorDict
from torchrl.objectives.value import functional as TRL

import rl_triton_td as rtd
from rl_triton_td import functional as F

GAMMA, LMBDA, ACTIONS = 0.99, 0.95, 4
PATHS = {
    **{name: ("next", name) for name in ("reward", "done", "terminated")},
    "next_state_value": ("next", "state_value"), "mask": ("collector", "mask"), "behind": "bootstrap",
    "action_value": "state_action_value", "x": ("next", "reward"),
}  # fmt: skip


class Unavailable(Exception):
    """The contender has no such estimator, or cannot run here."""


@dataclass(frozen=True)
class Row:
    """One estimator: the names of its functions, what it reads and what it writes."""

    name: str
    function: str  # of ours, and of TorchRL where that has it
    reference: str
    reads: str
    outputs: tuple[str, ...] = ("advantage", "value_target")
    hypers: dict | None = None  # else gamma and lmbda
    scan: Callable | None = None  # (entries as [N, T], scan) -> outputs, by a scan that is handed in
    module: Callable | None = None
    rl_triton: Callable | None = None  # (rl_triton, entries as [N, T]) -> call
    peer: str = ""  # rl-triton's row of the same inputs
    differs: tuple[str, ...] = ()  # outputs that rl-triton defines otherwise
    leaves: str = ""  # the row is the backward pass of the function: entries whose gradients are its outputs
    passed: dict | None = None  # entry: the arguments that it is, where that is not the one of its name

    @property
    def forward(self) -> bool:
        """Whether time runs forward."""
        return self.outputs[0] in ("trace", "total", "x") or bool(self.leaves)

    def arguments(self, d: dict) -> dict:
        """Of the function: hypers, entries, and ``next_state_value=None`` where it has to be said."""
        hypers = {"gamma": GAMMA, "lmbda": LMBDA} if self.hypers is None else self.hypers
        passed = {"behind": ("bootstrap",), **(self.passed or {})}
        given = {argument: x for name, x in d.items() for argument in passed.get(name, (name,))}
        lacks = "state_value" in d and "next_state_value" not in d
        return {**hypers, **({"next_state_value": None} if lacks else {}), **given}


# ---------------------------------------------------------------------------------------------------------------- data


def entries(row: Row, N, T, layout="rows", dtype=torch.float32, device="cpu", seed=0, done=0.02):
    """Random entries of ``row``; ``layout`` is "rows", "time" (time-major) or "sliced" (a window of longer rows)."""
    g = torch.Generator(device).manual_seed(seed)

    def empty(kind, depth=1):
        shape = {"rows": (N, T, depth), "time": (T, N, depth), "sliced": (N, T + 32, depth)}[layout]
        x = torch.empty(shape, dtype=kind, device=device)
        return x.transpose(0, 1) if layout == "time" else x[:, 8 : 8 + T] if layout == "sliced" else x

    def normal(depth=1, of=lambda x: x):
        return empty(dtype, depth).copy_(of(torch.empty((N, T, depth), device=device).normal_(generator=g)))

    def flag(rate):
        return empty(torch.bool).copy_(torch.rand((N, T, 1), generator=g, device=device) < rate)

    d = {}
    for name in row.reads.split():
        if name in ("done", "mask"):
            d[name] = flag(done if name == "done" else 0.9)
        elif name == "terminated":
            d[name] = flag(0.5).logical_and_(d["done"]) if "done" in d else flag(done / 2)
        elif name == "behind":
            d[name] = torch.randn((N, 1), generator=g, device=device).to(dtype)
        elif name == "action":
            d[name] = empty(torch.int64).copy_(torch.randint(ACTIONS, (N, T, 1), generator=g, device=device))
        elif name in ("log_pi", "log_mu"):
            d[name] = normal(of=lambda x: -0.5 * x.abs())
        elif name == "pi":
            d[name] = normal(ACTIONS, lambda x: x.softmax(-1))
        elif name == "next_pi":
            d[name] = empty(dtype, ACTIONS).copy_(d["pi"])
        elif name == "beta":
            d[name] = normal(of=lambda x: x.tanh() * 0.99)
        else:
            d[name] = normal(ACTIONS if name.endswith("action_values") else 1)
    if row.name == "td_lambda_terminal":
        d["done"][:, -1] = True  # rl-triton's plain call knows no value behind the window
    return d


def like(d):
    """The entry whose dtype and layout the outputs have."""
    names = ("state_value", "next_state_value", "action_value", "reward", "gradient", "alpha", "x", "grad_advantage")
    return next(d[name] for name in names if name in d)


def empty_outputs(row, d):
    return tuple(torch.empty_like(like(d)) for _ in row.outputs)


def bytes_moved(row, d):
    """Inputs read once and outputs written once."""
    x = like(d)
    return sum(e.numel() * e.element_size() for e in d.values()) + len(row.outputs) * x.numel() * x.element_size()


def flat(d):
    return {name: x[..., 0] if x.shape[-1] == 1 else x for name, x in d.items()}


# ---------------------------------------------------------------------------------------- recurrences by a given scan


def doubling(u, w, reverse):
    """Hillis and Steele 1986, "Data parallel algorithms": log2(T) steps, each over the whole row."""
    step, T = 1, u.shape[1]

    def shifted(x):
        return nnf.pad(x[:, step:], (0, step)) if reverse else nnf.pad(x[:, :-step], (step, 0))

    while step < T:
        u, w = u + w * shifted(u), w * shifted(w)
        step *= 2
    return u


def associative(u, w, reverse):
    from torch._higher_order_ops import associative_scan

    def combine(a, b):
        return b[0] + b[1] * a[0], b[1] * a[1]

    mode = "pointwise" if u.is_cuda else "generic"
    return associative_scan(combine, (u.float().contiguous(), w.float().contiguous()), 1, reverse, mode)[0]


def _after(x, edge=None):
    return torch.cat((x[:, 1:], torch.zeros_like(x[:, :1]) if edge is None else edge[:, None]), 1)


def _before(x):
    return torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)


def _next_value(d):
    """``(V'_t or 0, done or last, terminated)``."""
    done = d.get("done", d.get("terminated"))
    terminated = d.get("terminated", done)
    value = d.get("next_state_value")
    if value is None:
        value = _after(d["state_value"], d.get("behind"))
        if "bootstrap" in d:
            value = torch.where(done, d["bootstrap"], value)
            value = torch.cat((value[:, :-1], d["bootstrap"][:, -1:]), 1)
    cut = torch.cat((done[:, :-1], torch.ones_like(done[:, :1])), 1)
    return torch.where(terminated, 0.0, value), cut, terminated


def gae_scan(d, scan):
    value, _, _ = _next_value(d)
    advantage = scan(d["reward"] + GAMMA * value - d["state_value"], GAMMA * LMBDA * (~d["done"]), True)
    return advantage, advantage + d["state_value"]


def td0_scan(d, scan):
    return (d["reward"] + GAMMA * _next_value(d)[0],)


def td_lambda_scan(d, scan, lmbda=LMBDA):
    value, cut, _ = _next_value(d)
    u = d["reward"] + GAMMA * torch.where(cut, value, (1 - lmbda) * value)
    return (scan(u, GAMMA * lmbda * (~cut), True),)


def reward2go_scan(d, scan):
    u, done = d["reward"], d["done"]
    if "bootstrap" in d:
        cut = torch.cat((done[:, :-1], torch.ones_like(done[:, :1])), 1)
        u = u + GAMMA * torch.where(cut & ~d["terminated"], d["bootstrap"], 0.0)
    return (scan(u, GAMMA * (~done), True),)


def vtrace_scan(d, scan):
    value, cut, terminated = _next_value(d)
    rho = (d["log_pi"] - d["log_mu"]).exp().clamp_max(1.0)
    x = scan(rho * (d["reward"] + GAMMA * value - d["state_value"]), GAMMA * rho * (~cut), True)
    target = x + d["state_value"]
    return rho * (d["reward"] + GAMMA * torch.where(cut, value, _after(target)) - d["state_value"]), target


def retrace_scan(d, scan):
    value, cut, terminated = _next_value(d)
    rho = (d["log_pi"] - d["log_mu"]).exp().clamp_max(1.0)
    x = scan(d["reward"] + GAMMA * value - d["action_value"], GAMMA * LMBDA * _after(rho) * (~cut), True)
    target = x + d["action_value"]
    return rho * (d["reward"] + GAMMA * torch.where(cut, value, _after(target)) - d["action_value"]), target


def retrace_actions_scan(d, scan):
    taken = d["action"][..., None]
    if "action_value" not in d:
        d = {**d, "action_value": d["action_values"].gather(-1, taken)[..., 0]}
    d = {
        **d,
        "log_pi": d["pi"].gather(-1, taken)[..., 0].log(),
        "next_state_value": (d.get("next_pi", d["pi"]) * d["next_action_values"]).sum(-1),
    }
    return retrace_scan(d, scan)


def trace_scan(d, scan):
    return (scan(d["gradient"], GAMMA * LMBDA * (~_before(d["done"])), False),)


def prefix_scan(d, scan):
    return (scan(d["x"], (~_before(d["done"])).to(d["x"].dtype), False),)


def linear_scan(d, scan):
    return (scan(d["alpha"], d["beta"], False),)


# ----------------------------------------------------------------------------------------------------------- rl-triton


def _float_flags(d):
    """What rl-triton takes, made off the clock: float32 flags, exclusive of one another, and sparse continuations."""
    done, terminated = d["done"], d.get("terminated", d["done"])
    truncated = done & ~terminated
    value = d.get("bootstrap", d.get("next_state_value"))
    if value is not None:
        cut = truncated.clone()
        cut[:, -1] |= ~terminated[:, -1]
        value = torch.where(cut, value, 0.0)
    return done.float(), terminated.float(), truncated.float(), value


def rlt_gae(rlt, d):
    done, terminated, truncated, bootstrap = _float_flags(d)
    given = {"last_value": d["behind"]} if "behind" in d else {"truncateds": truncated, "bootstrap_values": bootstrap}
    first = done if "behind" in d else terminated
    return lambda: (rlt.compute_gae(d["reward"], d["state_value"], first, gamma=GAMMA, lambda_=LMBDA, **given), None)


def rlt_vtrace(rlt, d):
    done, terminated, truncated, bootstrap = _float_flags(d)
    given = {"last_value": d["behind"]} if "behind" in d else {"truncateds": truncated, "bootstrap_values": bootstrap}
    first = done if "behind" in d else terminated
    names = ("log_pi", "log_mu", "state_value", "reward")
    return lambda: rlt.compute_vtrace(*(d[name] for name in names), first, gamma=GAMMA, **given)[::-1]


def rlt_retrace(rlt, d):
    _, terminated, truncated, _ = _float_flags(d)
    pi, mu, q, next_q = d["pi"], d["log_mu"].exp(), d["action_value"], d["next_action_values"]
    given = (pi, mu, q, next_q, d["action"], d["reward"], terminated, truncated)
    return lambda: rlt.compute_retrace(*given, GAMMA, LMBDA)[::-1]


def rlt_lambda_returns(rlt, d):
    done, terminated, truncated, bootstrap = _float_flags(d)
    value = d["next_state_value"]
    if "terminated" in d:
        value = torch.where(d["done"], 0.0, value)
        return lambda: (rlt.compute_lambda_returns(d["reward"], value, terminated, truncated, GAMMA, LMBDA, bootstrap),)
    return lambda: (rlt.compute_lambda_returns(d["reward"], value, done, gamma=GAMMA, lambda_=LMBDA),)


def rlt_discounted_returns(rlt, d):
    done, terminated, truncated, bootstrap = _float_flags(d)
    if "terminated" in d:
        return lambda: (rlt.compute_discounted_returns(d["reward"], terminated, truncated, GAMMA, bootstrap),)
    return lambda: (rlt.compute_discounted_returns(d["reward"], done, gamma=GAMMA),)


def rlt_traces(rlt, d):
    done = d["done"].float()
    return lambda: (rlt.compute_eligibility_traces(d["gradient"], done, GAMMA, LMBDA),)


def rlt_prefix_sum(rlt, d):
    done = d["done"].float()
    return lambda: (rlt.compute_episodic_prefix_sum(d["x"], done),)


# ---------------------------------------------------------------------------------------------------------------- rows


class _Actor(torch.nn.Module):
    """A policy whose log-probability is an entry."""

    in_keys, dist_sample_keys = ["log_pi"], ["action"]

    def get_dist(self, tensordict):
        return SimpleNamespace(log_prob=lambda action: tensordict.get("log_pi"))


def _vtrace():
    return rtd.VTrace(gamma=GAMMA, actor_network=_Actor(), value_network=None)


_GAE = partial(rtd.GAE, gamma=GAMMA, lmbda=LMBDA, value_network=None)
_gae = partial(Row, function="generalized_advantage_estimate", reference="gae", scan=gae_scan, module=_GAE)
_vtrace_row = partial(Row, function="vtrace_advantage_estimate", reference="vtrace", hypers={"gamma": GAMMA},
                      scan=vtrace_scan, module=_vtrace, rl_triton=rlt_vtrace)  # fmt: skip
_return = partial(Row, outputs=("value_target",))
_reward2go = partial(_return, function="reward2go", reference="reward_to_go", hypers={"gamma": GAMMA},
                     scan=reward2go_scan, rl_triton=rlt_discounted_returns)  # fmt: skip
_td_lambda = partial(_return, function="td_lambda_return_estimate", reference="td_lambda_return", scan=td_lambda_scan,
                     rl_triton=rlt_lambda_returns)  # fmt: skip
_actions = partial(Row, function="retrace_from_action_values", reference="retrace_from_action_values",
                   scan=retrace_actions_scan)  # fmt: skip
_DENSE, _POLICY = "state_value next_state_value reward done terminated", " log_pi log_mu"

ROWS = {
    row.name: row
    for row in (
        _gae("gae", reads=_DENSE),
        _gae("gae_bootstrap", reads="state_value reward done behind", rl_triton=rlt_gae, peer="gae"),
        _gae("gae_truncated", reads="state_value reward done terminated bootstrap", rl_triton=rlt_gae,
             peer="gae_trunc"),
        _gae("gae_masked", reads=_DENSE + " mask", scan=None),
        _gae("gae_backward", reads="done terminated grad_advantage grad_value_target", reference="gae_backward",
             outputs=("grad_state_value", "grad_next_state_value", "grad_reward"), scan=None, module=None,
             leaves="state_value next_state_value reward"),
        _return("td0", function="td0_return_estimate", reference="td0_return", hypers={"gamma": GAMMA},
                reads="next_state_value reward terminated", scan=td0_scan,
                module=partial(rtd.TD0Estimator, gamma=GAMMA, value_network=None)),
        _return("td1", function="td1_return_estimate", reference="td1_return", hypers={"gamma": GAMMA},
                reads="next_state_value reward done terminated", scan=partial(td_lambda_scan, lmbda=1.0),
                module=partial(rtd.TD1Estimator, gamma=GAMMA, value_network=None)),
        _td_lambda("td_lambda", reads="next_state_value reward done terminated", peer="lambda_returns_trunc",
                   module=partial(rtd.TDLambdaEstimator, gamma=GAMMA, lmbda=LMBDA, value_network=None)),
        _td_lambda("td_lambda_terminal", reads="next_state_value reward done", peer="lambda_returns"),
        _reward2go("reward2go", reads="reward done", module=partial(rtd.DiscountedReturn, gamma=GAMMA),
                   peer="discounted_returns"),
        _reward2go("reward2go_truncated", reads="reward done terminated bootstrap", peer="discounted_returns_trunc",
                   module=partial(rtd.DiscountedReturn, gamma=GAMMA)),
        _vtrace_row("vtrace", reads=_DENSE + _POLICY, rl_triton=None),
        _vtrace_row("vtrace_bootstrap", reads="state_value reward done behind" + _POLICY, peer="vtrace"),
        _vtrace_row("vtrace_truncated", reads="state_value reward done terminated bootstrap" + _POLICY,
                    peer="vtrace_trunc"),
        Row("retrace", "retrace_lambda_advantage_estimate", "retrace", scan=retrace_scan,
            reads="action_value next_state_value reward done terminated" + _POLICY,
            module=partial(rtd.RetraceEstimator, gamma=GAMMA, lmbda=LMBDA)),
        _actions("retrace_from_action_values",
                 reads="pi next_pi action_values next_action_values action log_mu reward done terminated"),
        # rl-triton takes one policy for both states; its advantage has no continuation at cuts
        _actions("retrace_taken", reads="pi action_value next_action_values action log_mu reward done terminated",
                 passed={"pi": ("pi", "next_pi"), "action_value": ("action_values",)}, rl_triton=rlt_retrace,
                 peer="retrace", differs=("advantage",)),
        Row("eligibility_trace", "eligibility_trace", "eligibility_trace", "gradient done", ("trace",),
            scan=trace_scan, module=partial(rtd.EligibilityTrace, gamma=GAMMA, lmbda=LMBDA), rl_triton=rlt_traces,
            peer="eligibility_traces"),
        Row("prefix_sum", "episodic_prefix_sum", "episodic_prefix_sum", "x done", ("total",), {}, prefix_scan,
            rtd.EpisodicPrefixSum, rlt_prefix_sum, "prefix_sum"),
        Row("linear_recurrence", "linear_recurrence", "linear_recurrence", "alpha beta", ("x",), {}, linear_scan),
    )
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- contenders


def tensordict(row: Row, module, d: dict, outputs=None) -> TensorDict:
    """The entries where the module's default keys look for them."""
    data = dict(d)
    if row.name.startswith("td"):
        data["state_value"] = torch.zeros_like(like(d))  # the module writes the advantage too
        data.setdefault("done", d.get("terminated"))
    if "behind" in d:
        data["behind"] = d["behind"][:, None].expand(like(d).shape)
    if row.name == "vtrace" or "log_pi" in d and "state_value" in d:
        data["action"] = d["log_pi"]
    td = TensorDict({}, batch_size=like(d).shape[:2], device=like(d).device)
    paths = {"log_mu": module.tensor_keys.sample_log_prob} if "log_mu" in d else {}
    for name, x in data.items():
        td.set({**PATHS, **paths}.get(name, name), x)
    for name, x in outputs or ():
        td.set(name, x)
    return td


def _constant(call):
    return (lambda _: call()), (lambda: None)


def _call(row, function, d):
    """Of the function, or of its backward pass; the numbers at which that one starts play no part."""
    given = row.arguments(d)
    if not row.leaves:
        return _constant(partial(function, **given))
    incoming = [given.pop(name) for name in row.reads.split() if name.startswith("grad_")]
    leaves = {name: torch.zeros_like(like(d)).requires_grad_() for name in row.leaves.split()}

    def fresh():
        return function(**given, **leaves)

    return (lambda outputs: torch.autograd.grad(outputs, tuple(leaves.values()), incoming)), fresh


def _ours(row, d, out=False):
    function = getattr(F, row.function)
    if not out:
        return _call(row, function, d)
    if row.leaves:
        raise Unavailable("takes no out")
    outputs, given = empty_outputs(row, d), row.arguments(d)
    given["out"] = outputs if len(outputs) > 1 else outputs[0]
    return _constant(partial(function, **given))


def _module(row, d, out=False):
    if row.module is None:
        raise Unavailable("no module takes these entries")
    module = row.module().to(like(d).device)
    names = [getattr(module.tensor_keys, name) for name in module.writes]
    given = tensordict(row, module, d, [(name, torch.empty_like(like(d))) for name in names] if out else None)

    def call(td):
        return module(td)

    return call, (lambda: given) if out else given.copy


def _torchrl(row, d, prefix=""):
    function = getattr(TRL, prefix + row.function, None)
    if function is None or {"behind", "bootstrap", "mask", "pi"} & set(d):
        raise Unavailable("TorchRL has no such function")
    if not prefix and like(d).shape[1] > 4096:
        raise Unavailable("more than 4096 steps in Python")
    return _call(row, function, d)


@lru_cache(maxsize=1)
def _compiled(*key):
    torch._dynamo.reset()
    return {}


def _compile(function, *key):
    """The inputs and contenders of a case share what is compiled; the next case starts afresh."""
    compiled = _compiled(*key)
    if function not in compiled:
        compiled[function] = torch.compile(function, dynamic=False)
    return compiled[function]


def _torchrl_compiled(row, d):
    _torchrl(row, d, "vec_" if hasattr(TRL, f"vec_{row.function}") else "")
    given, error = row.arguments(d), "more than 32 steps to unroll"
    for name in (f"vec_{row.function}", row.function):
        serial = not name.startswith("vec_") and row.function != "reward2go"
        if not hasattr(TRL, name) or serial and like(d).shape[1] > 32 and row.name != "td0":
            continue
        compiled = _compile(getattr(TRL, name), row.name, like(d).shape, like(d).stride(), like(d).dtype)
        try:
            compiled(**given)
            return _constant(partial(compiled, **given))
        except Exception as e:
            error = f"{name}: {type(e).__name__}"
    raise Unavailable(f"does not compile ({error})")


@cache
def _by(row_scan, scan):
    return lambda d: row_scan(d, scan)


def _by_scan(row, d, scan):
    if row.scan is None:
        raise Unavailable("not written by a scan")
    compiled = _compile(_by(row.scan, scan), row.name, like(d).shape, like(d).stride(), like(d).dtype)
    return _constant(partial(compiled, flat(d)))


def _rl_triton(row, d):
    if row.rl_triton is None or not importlib.util.find_spec("rl_triton"):
        raise Unavailable("rl_triton is not installed, or has no such function")
    if like(d).dtype != torch.float32:
        raise Unavailable("float32 only")
    import rl_triton

    return _constant(row.rl_triton(rl_triton, flat(d)))


def _pufferlib(row, d):
    """PufferLib 3.0: rewards and flags one step later, nothing behind the window (its last step comes out 0)."""
    if row.name != "gae_bootstrap" or not importlib.util.find_spec("pufferlib") or like(d).dtype != torch.float32:
        raise Unavailable("pufferlib is not installed, or has no such function")
    import pufferlib._C  # noqa: F401

    value, reward, done = (x.contiguous() for x in map(flat(d).get, ("state_value", "reward", "done")))
    given = (value, _before(reward), _before(done).float(), torch.ones_like(value))

    def call():
        advantage = torch.zeros_like(value)
        torch.ops.pufferlib.compute_puff_advantage(*given, advantage, GAMMA, LMBDA, 1.0, 1.0)
        return advantage, None

    return _constant(call)


CONTENDERS = {
    "ours": _ours,
    "ours_out": partial(_ours, out=True),
    "module": _module,
    "module_out": partial(_module, out=True),
    "torchrl_serial": _torchrl,
    "torchrl_vec": partial(_torchrl, prefix="vec_"),
    "torchrl_compiled": _torchrl_compiled,
    "paper": partial(_by_scan, scan=doubling),
    "associative_scan": partial(_by_scan, scan=associative),
    "rl_triton": _rl_triton,
    "pufferlib": _pufferlib,
}


def load_plugin(path: str) -> None:
    """Add the contenders of a local file: ``CONTENDERS = {name: (row, entries) -> (call, fresh)}``.

    Those whose name starts with ``pufferlib`` are held to PufferLib's definition, as :func:`_pufferlib` has it.
    """
    spec = importlib.util.spec_from_file_location("benchmarks_plugin", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    CONTENDERS.update(module.CONTENDERS)


def results(row: Row, returned) -> tuple:
    """What a call returned, in the order of the row's outputs, ``[N, T]``."""
    if isinstance(returned, TensorDict):
        returned = tuple(returned.get(name) for name in row.outputs)
    returned = returned if isinstance(returned, tuple) else (returned,)
    return tuple(x if x is None or x.ndim == 2 else x[..., 0] for x in returned)


def reference(row: Row, d: dict, module, contender: str) -> tuple:
    """The float64 outputs, ``None`` where the contender defines another."""
    d = {n: (x.cpu() if x.dtype in (torch.bool, torch.int64) else x.cpu().double()) for n, x in flat(d).items()}
    if contender.startswith("pufferlib"):
        value = d["state_value"]
        d = {"behind": value[:, -1], **{n: x[:, :-1] for n, x in d.items() if n != "behind"}}
        advantage = nnf.pad(module.gae(**row.arguments(d))[0], (0, 1))
        return advantage, advantage + value
    expected = getattr(module, row.reference)(**row.arguments(d))
    expected = expected if isinstance(expected, tuple) else (expected,)
    skip = row.differs if contender == "rl_triton" else ()
    return tuple(None if name in skip else x for name, x in zip(row.outputs, expected, strict=True))
