"""Calls remembered: the launch that a call came to, replayed where the same call comes again.

A launch is that of a kernel or of a compiled loop: a plan with ``run``, ``direct`` and ``repeatable``, and what it runs
on. Replays are ``_replay.c``, built by the C compiler that Triton launches with; where there is none, they are Python.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import threading
import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch._C._dynamo import guards
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from . import _triton

MEETING = -1  # the place of what a plan's `direct` gives to meet at


class Place(int):
    """Index of a tensor's pointer: those given, then those made."""


class _Recording(threading.local):
    launches: list | tuple | None = None  # of the call that is watched; a tuple where nothing is remembered


_recording = _Recording()
_TRACERS = torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE
_SILENT = (torch._C._are_functorch_transforms_active, False), (torch._C._get_tracing_state, None)
_TENSOR = object()  # stands for a tensor among the constants of a call
_UNTRIED = object()
_PLAIN = frozenset((float, int, bool, str, type(None)))


def traced() -> bool:
    """Whether a compiler, a tracer, a transform or a derivative follows what is done with any tensor."""
    return (
        torch.compiler.is_compiling()
        or any([ask() is not answer for ask, answer in _SILENT])
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        and any(torch._C._get_dispatch_mode(mode) is not None for mode in _TRACERS)
    )


def remembers() -> bool:
    """Whether launches are remembered now: not where there are none, while tracing, inside a watched call."""
    return _recording.launches is None and (_triton.NUMBA or torch.cuda.is_initialized()) and not traced()


class nothing_remembered:
    """Context manager: what is called inside is neither recalled nor remembered."""

    def __enter__(self):
        self.outer = _recording.launches
        if self.outer is None:
            _recording.launches = ()

    def __exit__(self, *_):
        _recording.launches = self.outer


RECALLED = 32  # calls that one memory looks through in C
TURNS = 16  # that a call waits for a place among them


class Memory:
    """Remembers the launch that a call came to, and does only that where the same call comes again.

    Remembered is what a call depends on but the data: its constants; dtype, device, shape, strides and alignment of its
    tensors. A call that did more than one launch on its own tensors and new outputs is never remembered.
    """

    def __init__(self):
        self.calls: dict[tuple, list[_Replay]] = {}
        self.replays: list = []  # of ``_replay.c``, most recent first
        self.recall = _unknown

    def __reduce__(self):  # a copy, or one from a file, starts afresh
        return Memory, ()

    def forget(self) -> None:
        self.calls.clear()
        self.replays.clear()

    def __call__(self, given, constants: list, tensors: list[Tensor], function, args=(), kwargs={}):  # noqa: B006
        """``function(*args, **kwargs)``, a call that depends on nothing but ``constants`` and ``tensors``.

        ``self.recall(*given)``, a tuple and a dictionary or ``None`` that hold the same, is the faster way to the
        result of a call that is known, and ``None`` for any other. It asks whether :func:`remembers`, but for
        ``torch.compiler.is_compiling()``.
        """
        if not tensors or isinstance(tensors[0], FakeTensor) or any([x.is_nested for x in tensors]):
            return function(*args, **kwargs)
        on_gpu = tensors[0].is_cuda
        if len({x.device for x in tensors}) > 1 or not (on_gpu or _triton.NUMBA and tensors[0].is_cpu):
            return function(*args, **kwargs)
        pointers = list(map(Tensor.data_ptr, tensors))
        if 0 in pointers or on_gpu and functools.reduce(operator.or_, pointers) & 15:  # which guards do not see
            return function(*args, **kwargs)
        guarded = tensors
        if len({*pointers}) < len(pointers):
            ids = list(map(id, tensors))
            guarded = dict(zip(ids, tensors, strict=True)).values()
            # who is whom, and who lies on whom
            constants = (*constants, *map(ids.index, ids), *map(pointers.index, pointers))
        try:
            replays = self.calls.get(key := tuple(constants), ())
        except TypeError:  # something unhashable, of which no launch comes
            return function(*args, **kwargs)
        for replay in replays:
            if replay.fits(*guarded):
                self._keep(replay, given, 16 if on_gpu else 1)
                return replay(tensors, pointers)
        _recording.launches = launches = []
        try:
            result = function(*args, **kwargs)
        finally:
            _recording.launches = None
        replay = _Replay.of(launches, tensors, pointers, guarded, result)
        if replay is not None:
            if not replays or len(replays) >= 64:
                if len(self.calls) >= 1024:
                    self.calls.clear()
                self.calls[key] = replays = []
            replays.insert(0, replay)
        return result

    def _keep(self, replay, given, alignment) -> None:
        """What came a second time is recalled from now on, among as few as are quickly looked through."""
        full = len(self.replays) >= RECALLED
        if full:  # the one unused for longest makes room, but not at once: many may take turns
            replay.turned_away += 1
            if replay.turned_away < TURNS:
                return
        if replay.call is _UNTRIED:
            replay.call = replay.native(given, alignment)
        if replay.call is None or replay.call in self.replays:
            return
        replay.turned_away = 0
        del self.replays[RECALLED - 1 :]
        self.replays.insert(0, replay.call)
        self.recall = functools.partial(_native().recall, self.replays)


def _unknown(args, kwargs):
    """Nothing is known yet."""


@functools.cache
def _native():
    """``_replay.c``, or ``None``."""
    if _triton.triton is None:
        return None
    source = Path(__file__).with_suffix(".c")
    try:
        from triton.runtime.build import compile_module_from_src

        native = compile_module_from_src(source.read_text(), "rl_triton_td_replay")
        connect(native)
    except Exception as error:  # no compiler, no header files of Python, no room for the cache
        if torch.cuda.is_initialized():
            warnings.warn(f"{source.name} is not compiled, and every call takes longer: {error!r}", stacklevel=2)
        return None
    return native


@functools.cache
def driver() -> tuple[int, int]:
    """Addresses of the driver's functions that launch a kernel and name an error; 0 where there is no driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1" if torch.version.cuda else "")
        return tuple(ctypes.cast(f, ctypes.c_void_p).value for f in (library.cuLaunchKernel, library.cuGetErrorString))
    except (OSError, AttributeError):
        return 0, 0


def connect(native) -> None:
    """Tell ``_replay.c`` what it asks, and whom."""
    native.setup(
        Tensor,
        Tensor.data_ptr,
        torch.is_grad_enabled,
        torch._C._increment_version,
        getattr(torch._C, "_cuda_getDevice", None),
        getattr(torch._C, "_cuda_getCurrentRawStream", None),
        (*_SILENT, (torch._C._len_torch_dispatch_stack, 0)),
        ((forward_ad, "_current_level", -1), (_recording, "launches", None)),
        *driver(),
    )


def remembered(function):
    """``function`` with a :class:`Memory` of its calls."""
    memory = Memory()

    @functools.wraps(function)
    def call(*args, **kwargs):
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if (found := memory.recall(args, kwargs)) is not None:
            return found
        if not remembers():
            return function(*args, **kwargs)
        constants, tensors = [torch.is_grad_enabled(), len(args), *kwargs], []
        for given in (*args, *kwargs.values()):
            kind = type(given)
            if kind in _PLAIN:
                constants.append(given)
            elif kind is Tensor or isinstance(given, Tensor):
                tensors.append(given)
                constants.append(_TENSOR)
            elif kind is tuple:
                constants.append(len(given))
                constants += (_TENSOR if isinstance(x, Tensor) else x for x in given)
                tensors += (x for x in given if isinstance(x, Tensor))
            else:
                constants.append(given)
        return memory((args, kwargs), constants, tensors, function, args, kwargs)

    call.memory = memory
    return call


def record(plan, sources, outputs, initial, kept=None) -> None:
    """``plan`` is launched on these tensors and numbers; ``kept`` is the memory of addresses among them."""
    if type(launches := _recording.launches) is list:
        launches.append((plan, sources, outputs, initial, kept))


def not_remembered() -> None:
    """What is being done is more than a launch: the call that it is part of is not remembered."""
    if type(launches := _recording.launches) is list:
        launches += (None, None)


def _like(output, tensors) -> int | None:
    """Which of ``tensors`` a new tensor like ``output`` can be made after."""
    for i, x in enumerate(tensors):
        if x.shape == output.shape and x.dtype == output.dtype and x.stride() == output.stride():
            return i
    return None


class _Replay:
    """One launch, with the arguments that its sources come from."""

    @classmethod
    def of(cls, launches, tensors, pointers, guarded, result):
        if len(launches) != 1:
            return None
        plan, sources, outputs, initial, kept = launches[0]
        if not plan.repeatable:
            return None
        self, known = cls(), len(pointers)
        self.plan, self.kept, self.likes, self.made, self.call = plan, kept, [], [], _UNTRIED
        self.turned_away = 0
        places, written = [], []
        for x in outputs:
            place = next((i for i, given in enumerate(tensors) if given is x), None)
            if x is not None and place is None:
                place, like = known + len(self.likes), _like(x, tensors)
                if like is None:
                    return None
                self.likes.append(like)
                self.made.append((type(x), x.device.type, tuple(x.shape), x.stride(), x.dtype))
            written.append(place)
        self.constants = [x for x in sources if not isinstance(x, Tensor)] + [None]
        numbers = itertools.count(known + len(self.likes))
        for x in (*sources, initial):
            if not isinstance(x, Tensor):
                places.append(next(numbers))
            elif x.data_ptr() in pointers:  # a view of an argument starts where the argument does
                places.append(pointers.index(x.data_ptr()))
            else:
                return None
        nothing = known + len(self.likes) + len(self.constants) - 1
        self.places = tuple(places), tuple(nothing if place is None else place for place in written)
        results = result if isinstance(result, tuple) else (result,)
        returned = [next((place for place, o in zip(written, outputs, strict=True) if o is x), None) for x in results]
        if None in returned:
            return None
        self.results, self.single = tuple(returned), not isinstance(result, tuple)
        self.overwritten = tuple(i for i in written if i is not None and i < known and not tensors[i].is_inference())
        self.aliases = tuple(map(pointers.index, pointers))
        self.device = tensors[0].device.index
        self.fits = guards.TensorGuards(*guarded, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        (*sources, self.initial), written = self.places
        self.sources, self.written = _several(sources), _several(written)
        self.returned = operator.itemgetter(*self.results) if self.single else _several(self.results)
        return self

    def __call__(self, tensors, pointers):
        made = [torch.empty_like(tensors[like]) for like in self.likes]
        known = [*pointers, *map(Tensor.data_ptr, made), *self.constants]
        self.plan.run(self.sources(known), self.written(known), None, known[self.initial])
        if self.overwritten:
            torch._C._increment_version([tensors[i] for i in self.overwritten])
        return self.returned([*tensors, *made])

    def native(self, given, alignment):
        """The same in ``_replay.c`` for calls like the one that was ``given``; ``None`` where that cannot be."""
        if (native := _native()) is None or any(kind is not Tensor for kind, *_ in self.made):
            return None
        known = len(self.aliases) + len(self.made)
        at = [*map(Place, range(known)), *self.constants]
        (*sources, initial), written = ([at[place] for place in places] for places in self.places)
        arguments = (
            *given,
            torch.is_grad_enabled(),
            self.fits,
            self.device,
            alignment,
            self.aliases,
            tuple((getattr(guards, f"_empty_strided_{device}"), *layout) for _, device, *layout in self.made),
            self.overwritten,
            self.results,
            self.single,
            (self.plan.run, self.places[0][:-1], self.places[1], self.places[0][-1], tuple(self.constants), self.kept),
            self.plan.direct(tuple(sources), tuple(written), initial),
        )
        try:
            return native.Call(*arguments)
        except OverflowError:  # more of them than there is room for
            return None


def _several(places):
    """:func:`operator.itemgetter` that gives a tuple for one place too."""
    return operator.itemgetter(*places) if len(places) > 1 else lambda entries: (entries[places[0]],)
