r"""The gradient of a :class:`~.specs.Spec`, derived: a spec again, run the other way by the same kernel.

For ``x[t] = u[t] + w[t] * x[t + 1]`` with outputs ``o = E(x[t], x[t + 1])`` and their gradients ``g``,

.. math::
    p_t = g_t \frac{\partial E_t}{\partial x_t}, \qquad q_t = g_t \frac{\partial E_t}{\partial x_{t+1}}, \qquad
    b_t = w_t p_t + q_t + w_t b_{t-1}, \qquad a_t = p_t + b_{t-1}

where ``b`` is what a step hands on to its successor and ``a`` the whole gradient of ``x``. That of an entry ``e`` read
at ``t`` is ``a du/de + a x[t + 1] dw/de + g dE/de``: the coefficient functions are traced once with symbols and
differentiated in reverse. Forward recurrences are the mirror image; the adjoint of an adjoint is one more spec.

A gradient that a ``where`` selects away stays selected through every product that follows, so that what lies beyond a
cut does not reach it, NaN or not.

Griewank & Walther 2008, "Evaluating Derivatives", 2nd ed., section 3.2 (reverse mode).
"""

from __future__ import annotations

import functools
import linecache
import math
import re
from dataclasses import dataclass

from ._launch import HEAD
from ._triton import jit, read_in, tl
from .specs import SPECS, Spec

ARGUMENTS = {"coefficients": "step, tile, hypers", "epilogue": "x, x_next, step, tile, hypers"}
INPUTS = len(HEAD) - 2  # sources before the inputs; a choice of actions is made before anything is differentiated


class NotDifferentiable(TypeError):
    """A function of a spec does what no derivative is known of."""


@jit
def decayed(w, x):
    """``w * x``, and 0 where ``w`` is, whatever ``x`` may be."""
    return tl.where(w == 0, 0.0, w * x)


# -------------------------------------------------------------------------------------------------------- expressions


class Symbol:
    """An expression; equal ones are the same object."""

    made: dict[tuple, Symbol] = {}

    def __init__(self, form: str, args: tuple[Symbol, ...], value: float | None):
        self.form, self.args, self.value = form, args, value

    @classmethod
    def of(cls, form: str, *args: Symbol, value: float | None = None) -> Symbol:
        """``form`` is source text with ``{}`` for each of ``args``; ``value`` that of a constant."""
        key = (form, *map(id, args))
        if key not in cls.made:
            cls.made[key] = cls(form, args, value)
        return cls.made[key]

    def __bool__(self):
        raise NotDifferentiable("a branch on an entry's value has no derivative")

    def __add__(self, other):
        return _plus(self, _symbol(other))

    def __sub__(self, other):
        return _plus(self, _minus(_symbol(other)))

    def __mul__(self, other):
        return _times(self, _symbol(other))

    def __truediv__(self, other):
        return _over(self, _symbol(other))

    def __radd__(self, other):
        return _symbol(other) + self

    def __rsub__(self, other):
        return _symbol(other) - self

    def __rmul__(self, other):
        return _symbol(other) * self

    def __rtruediv__(self, other):
        return _symbol(other) / self

    def __neg__(self):
        return _minus(self)

    def __invert__(self):
        return Symbol.of("~{}", self)


def _infix(form, operator):
    setattr(Symbol, operator, lambda self, other: Symbol.of(form, self, _symbol(other)))


for _sign, _operator in {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne"}.items():
    _infix(f"{{}} {_sign} {{}}", f"__{_operator}__")
for _sign, _operator in {"&": "and", "|": "or"}.items():
    _infix(f"{{}} {_sign} {{}}", f"__{_operator}__")
    _infix(f"{{}} {_sign} {{}}", f"__r{_operator}__")
Symbol.__hash__ = object.__hash__

ADD, SUBTRACT, MULTIPLY, DIVIDE, NEGATE = "{} + {}", "{} - {}", "{} * {}", "{} / {}", "-{}"
SELECT, EXP, DECAYED = "tl.where({}, {}, {})", "tl.exp({})", "decayed({}, {})"


def _symbol(x) -> Symbol:
    if isinstance(x, Symbol):
        return x
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise NotDifferentiable(f"{x!r} in an expression")
    x = float(x)
    return Symbol.of(repr(x) if math.isfinite(x) else f'float("{x}")', value=x)


ZERO, ONE = _symbol(0.0), _symbol(1.0)


def _plus(a, b):
    if a is ZERO:
        return b
    if b is ZERO:
        return a
    if a.form == b.form == SELECT and a.args[0] is b.args[0]:
        return _select(a.args[0], a.args[1] + b.args[1], a.args[2] + b.args[2])
    return Symbol.of(SUBTRACT, a, b.args[0]) if b.form == NEGATE else Symbol.of(ADD, a, b)


def _minus(a):
    if a is ZERO or a.form == NEGATE:
        return a.args[0] if a.args else a
    return _symbol(-a.value) if a.value is not None else Symbol.of(NEGATE, a)


def _times(a, b):
    if a is ZERO or b is ZERO:
        return ZERO
    if a is ONE or b is ONE:
        return b if a is ONE else a
    return Symbol.of(MULTIPLY, a, b)


def _over(a, b):
    return a if a is ZERO or b is ONE else Symbol.of(DIVIDE, a, b)


def _select(condition, a, b):
    a, b = _symbol(a), _symbol(b)
    if a.form == SELECT and a.args[0] is condition:
        a = a.args[1]
    if b.form == SELECT and b.args[0] is condition:
        b = b.args[2]
    return a if a is b else Symbol.of(SELECT, condition, a, b)


def _selects(gradient) -> bool:
    """Whether ``gradient`` is put together of what is selected away somewhere."""
    if gradient.form == ADD:
        return all(map(_selects, gradient.args))
    return gradient.form == SELECT and any(x is ZERO for x in gradient.args[1:])


def _within(gradient, change):
    """``change(gradient)`` for a linear ``change``, applied beneath what selects 0."""
    if gradient is ZERO:
        return ZERO
    if not _selects(gradient):
        return change(gradient)
    if gradient.form == ADD:
        return _plus(*(_within(x, change) for x in gradient.args))
    return _select(gradient.args[0], *(_within(x, change) for x in gradient.args[1:]))


def _decay(w, x):
    return ZERO if w is ZERO or x is ZERO else x if w is ONE else Symbol.of(DECAYED, w, x)


class symbolic_language:
    """``triton.language`` for symbols."""

    exp = staticmethod(lambda x: Symbol.of(EXP, _symbol(x)))
    where = staticmethod(_select)
    decayed = staticmethod(_decay)


def _parts(node: Symbol, gradient: Symbol):
    """What each argument of ``node`` gets of its gradient."""
    form, args = node.form, node.args
    if form in (ADD, SUBTRACT):
        yield args[0], gradient
        yield args[1], gradient if form == ADD else _within(gradient, _minus)
    elif form == NEGATE:
        yield args[0], _within(gradient, _minus)
    elif form == MULTIPLY:
        yield args[0], _within(gradient, lambda g: g * args[1])
        yield args[1], _within(gradient, lambda g: g * args[0])
    elif form == DIVIDE:
        share = _within(gradient, lambda g: g / args[1])
        yield args[0], share
        yield args[1], _within(share, lambda g: -(g * node))
    elif form == EXP:
        yield args[0], _within(gradient, lambda g: g * node)
    elif form == DECAYED:
        yield args[0], _within(gradient, lambda g: g * args[1])
        yield args[1], _within(gradient, lambda g: _decay(args[0], g))
    elif form == SELECT:
        yield args[1], _select(args[0], gradient, ZERO)
        yield args[2], _select(args[0], ZERO, gradient)


def _ordered(roots) -> list[Symbol]:
    """Everything that ``roots`` are made of, arguments first."""
    found: dict[Symbol, None] = {}

    def visit(node):
        if node not in found:
            for arg in node.args:
                visit(arg)
            found[node] = None

    for root in roots:
        visit(root)
    return list(found)


def _reverse(seeds: list[tuple[Symbol, Symbol]]) -> dict[Symbol, Symbol]:
    """The gradient of every symbol that ``seeds``, expressions and their gradients, are made of."""
    total: dict[Symbol, Symbol] = {}
    for root, gradient in seeds:
        total[root] = total.get(root, ZERO) + gradient
    for node in reversed(_ordered(root for root, _ in seeds)):
        for arg, part in _parts(node, total.get(node, ZERO)):
            total[arg] = total.get(arg, ZERO) + part
    return total


# -------------------------------------------------------------------------------------------------------------- specs


def _named(form: str, count: int) -> tuple[Symbol, ...]:
    return tuple(Symbol.of(form.format(k)) for k in range(count))


def _trace(spec: Spec, x: tuple[Symbol, ...], x_next: tuple[Symbol, ...]):
    """The maps and the outputs of ``spec`` in symbols of what a coefficient function is handed."""
    step = _named("step[{}]", 2) if spec.transition else ()
    tile, hypers = _named("tile[{}]", len(spec.inputs)), _named("hypers[{}]", len(spec.hypers))
    try:
        maps = read_in(symbolic_language, spec.coefficients)(step, tile, hypers)
        if not spec.recurrences:
            x = x_next = maps
        outputs = read_in(symbolic_language, spec.epilogue)(x, x_next, step, tile, hypers)
    except (AttributeError, TypeError) as error:
        raise NotDifferentiable(f"{spec.name}: {error}") from error
    return tuple(map(_symbol, maps)), tuple(map(_symbol, outputs))


def _function(spec_name: str, role: str, results):
    """A coefficient function or an epilogue that returns ``results``; the same source in every process."""
    name = re.sub(r"\W", "_", spec_name.replace("'", "_adjoint").replace("+", "_saving")) + f"_{role}"
    lines, names = [f"def {name}({ARGUMENTS[role]}):\n"], {}
    for node in _ordered(results):
        text = node.form.format(*(names[arg] for arg in node.args)) if node.args else node.form
        if node.args:
            lines.append(f"    v{len(lines)} = {text}\n")
            text = f"v{len(lines) - 1}"
        names[node] = text
    lines.append(f"    return ({', '.join(names[r] for r in results)},)\n")
    file, source = f"<{__name__}.{name}>", "".join(lines)
    linecache.cache[file] = (len(source), None, lines, file)  # where Triton looks for it
    namespace = {"tl": tl, "decayed": decayed, "__name__": f"{__name__}.{name}"}
    exec(compile(source, file, "exec"), namespace)
    return jit(namespace[name])


@functools.cache
def saving(spec: Spec) -> Spec:
    """``spec`` with outputs for what enters each step, and for the solution."""
    x, x_next = _named("x[{}]", spec.recurrences), _named("x_next[{}]", spec.recurrences)
    name = f"{spec.name}+"
    ahead = tuple(f"x_next{k}" for k in range(spec.recurrences))
    return Spec(
        name,
        spec.inputs,
        spec.hypers,
        (*spec.outputs, *ahead, *(f"x{k}" for k in range(spec.recurrences))),
        spec.coefficients,
        _function(name, "epilogue", (*_trace(spec, x, x_next)[1], *x_next, *x)),
        transition=spec.transition,
        reverse=spec.reverse,
        looks_ahead=(*spec.looks_ahead, *ahead),
        recurrences=spec.recurrences,
    )


@dataclass(frozen=True, eq=False)
class Adjoint:
    """The adjoint of a spec.

    Its inputs are those of the original, then ``terminated`` (with ``transition``), what enters each step and the
    solution (each a recurrence), and the gradients of the outputs. Sources are counted as the operator has them: the
    kernel's :data:`~._launch.HEAD` but for the choice, inputs, hypers, ``initial``.

    Args:
        original: the spec.
        spec: its adjoint.
        sources: of each output of the adjoint, the source of the original whose gradient it is.
        reads: of each output of the adjoint, the sources of its own that are read for it, flags apart.
    """

    original: Spec
    spec: Spec
    sources: tuple[int, ...]
    reads: tuple[frozenset[int], ...]

    def entries(self, original, solution, gradients) -> tuple:
        """The sources of the adjoint from those of the original, what enters each step with the solution, and the
        gradients of the outputs."""
        inputs, hypers = original[INPUTS : -1 - len(self.spec.hypers)], original[-1 - len(self.spec.hypers) : -1]
        terminated = (original[HEAD.index("terminated")],) if self.spec.transition else ()
        return (*original[:INPUTS], *inputs, *terminated, *solution, *gradients, *hypers, None)

    @property
    def saved(self) -> range:
        """The sources that hold what enters each step, and then the solution."""
        first = INPUTS + len(self.original.inputs) + self.spec.transition
        return range(first, first + 2 * self.original.recurrences)

    def asked(self, tracked, given) -> list[int]:
        """The outputs that are gradients of the sources ``tracked``, where of the original's outputs those have one
        that ``given`` says."""
        first = self.saved.stop
        gradients = {first + k for k, has_one in enumerate(given) if has_one}
        return [j for j, k in enumerate(self.sources) if k in tracked and self.reads[j] & gradients]

    def read(self, tracked, given) -> frozenset[int]:
        """The sources that are read for them, flags apart."""
        return frozenset().union(*(self.reads[j] for j in self.asked(tracked, given)))


@functools.cache
def adjoint(spec: Spec) -> Adjoint:
    """The adjoint of ``spec``; raises :class:`NotDifferentiable`."""
    count, n = spec.recurrences, len(spec.inputs)
    inputs = (
        *spec.inputs,
        *(("terminated",) if spec.transition else ()),
        *(f"x_next{k}" for k in range(count)),
        *(f"x{k}" for k in range(count)),
        *(f"grad_{name}" for name in spec.outputs),
    )
    tile, hypers = _named("tile[{}]", len(inputs)), _named("hypers[{}]", len(spec.hypers))
    done, next_value = _named("step[{}]", 2)
    first = n + spec.transition
    entering, x, grads = tile[first:][:count], tile[first + count :][:count], tile[first + 2 * count :]
    b, b_before = _named("x[{}]", count), _named("x_next[{}]", count)

    maps, outputs = _trace(spec, x, entering)
    u, w = maps[: 2 * count : 2], maps[1::2]
    direct = list(zip(outputs, grads, strict=True))
    here = _reverse(direct)
    p, q = ([here.get(symbol, ZERO) for symbol in symbols] for symbols in (x, entering))
    a = [own + before for own, before in zip(p, b_before, strict=True)]
    through_w = [whole * x_next for whole, x_next in zip(a, entering, strict=True)]
    total = _reverse([*direct, *zip(u, a, strict=True), *zip(w, through_w, strict=True)])
    maps = [m for k in range(count) for m in (_decay(w[k], p[k]) + q[k], w[k])] or [ZERO]

    found = []
    if spec.transition:
        gradient = total.get(next_value, ZERO)
        going_on = _select(tile[n], ZERO, gradient)  # where not terminated
        inside, cut = _select(done, ZERO, gradient), _select(done, going_on, ZERO)
        parts = {"next_value": going_on, "successor": inside, "bootstrap": cut}
        found += [(name, HEAD.index(name), part) for name, part in parts.items()]
    for k, name in enumerate((*spec.inputs, *spec.hypers)):
        symbol = tile[k] if k < n else hypers[k - n]
        found.append((name, INPUTS + k, ZERO if k < n and spec.flags[k] else total.get(symbol, ZERO)))
    if count:
        found.append(("initial", INPUTS + n + len(hypers), functools.reduce(Symbol.__add__, b)))
    found = [entry for entry in found if entry[2] is not ZERO]

    places = {symbol: {INPUTS + k} for k, symbol in enumerate((*tile, *hypers))}
    places[next_value] = {HEAD.index(name) for name in ("next_value", "successor", "bootstrap")}
    names, ahead, reads = [], [], []
    for name, _, expression in found:
        names.append(f"grad_{name.replace('@', '_')}")
        parts = set(_ordered([expression]))
        if parts & set(b_before):
            ahead.append(names[-1])
        if parts & {*b, *b_before}:
            parts.update(_ordered(maps))
        reads.append(frozenset().union(*(places.get(symbol, ()) for symbol in parts)))
    name = f"{spec.name}'"
    derived = Spec(
        name,
        inputs,
        spec.hypers,
        tuple(names),
        _function(name, "coefficients", maps),
        _function(name, "epilogue", [expression for _, _, expression in found]),
        transition=spec.transition,
        reverse=not spec.reverse,
        looks_ahead=tuple(ahead),
        recurrences=count,
    )
    return Adjoint(spec, derived, tuple(source for _, source, _ in found), tuple(reads))


@functools.cache
def differentiable(spec: Spec) -> bool:
    """Whether the adjoint of ``spec`` can be derived."""
    try:
        return adjoint(spec) is not None
    except NotDifferentiable:
        return False


def named(name: str) -> Spec:
    """The spec of that name, derived where it says so."""
    derived = {"'": lambda spec: adjoint(spec).spec, "+": saving}.get(name[-1])
    return derived(named(name[:-1])) if derived else SPECS[name]
