"""Triton and numba, or their absence: the one module that knows what is installed and where it runs.

Coefficient functions are written once, in the arithmetic that Triton and PyTorch share. :func:`read_in` rebinds the
name ``tl`` of such a function (and of the functions it calls): to :class:`torch_language`, so that the CPU path
evaluates the very expression that the GPU kernel evaluates, or to a language of symbols, to derive gradients.
"""

from __future__ import annotations

import builtins
import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType

import torch


class torch_language:
    """The subset of ``triton.language`` that coefficient functions may use, on tensors."""

    exp = staticmethod(torch.exp)

    @staticmethod
    def where(condition, x, y):
        """``tl.where``; a condition known beforehand (an absent flag is ``False``) costs nothing."""
        if isinstance(condition, bool):
            return x if condition else y
        return torch.where(condition, x, y)


try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:  # no Triton on this platform: the CPU path needs none
    triton, tl = None, torch_language

    def jit(fn):
        return fn


INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs the kernels, on CPU tensors too."""

NUMBA = (
    not INTERPRETED
    and bool(importlib.util.find_spec("numba"))
    and os.environ.get("NUMBA_DISABLE_JIT") in (None, "", "0")
)
"""Whether loops are compiled for CPU tensors."""


def runs_kernels(device: torch.device) -> bool:
    """Whether tensors on ``device`` go through the Triton kernels."""
    return INTERPRETED or (triton is not None and device.type == "cuda")


@functools.cache
def read_in(language: type, fn: Callable) -> FunctionType:
    """A coefficient function whose ``tl`` is ``language``; a helper that the language has itself is taken from there.

    It lives in a twin of the function's module: ``torch.compile`` looks names up by module.
    """
    python = getattr(fn, "fn", fn)
    name = f"{python.__module__}.{language.__name__}"
    twin = sys.modules.setdefault(name, ModuleType(name, f"{python.__module__} read in {language.__name__}."))
    twin.tl = language
    for used in python.__code__.co_names:
        value = python.__globals__.get(used)
        if value is not fn and (hasattr(value, "fn") or isinstance(value, FunctionType)):
            setattr(twin, used, getattr(language, used, None) or read_in(language, value))
        elif isinstance(value, (int, float)):
            setattr(twin, used, value)
    twin.__dict__.setdefault("__builtins__", builtins)
    return FunctionType(python.__code__, twin.__dict__, python.__name__)
