"""Our estimators under TorchRL's names: :func:`install` and :func:`uninstall`."""

from __future__ import annotations

import sys

from torchrl.objectives import utils as torchrl_utils
from torchrl.objectives import value as torchrl_value
from torchrl.objectives.value import functional as torchrl_functional

from . import estimators
from . import functional as F

_CLASSES = ("GAE", "MultiAgentGAE", "TD0Estimator", "TD1Estimator", "TDLambdaEstimator", "VTrace")
_FUNCTIONS = (*torchrl_functional.__all__, "reward2go")
# what TorchRL's names are bound to, by name; ours and TorchRL's
_OURS = {name: getattr(estimators, name) for name in _CLASSES} | {name: getattr(F, name) for name in _FUNCTIONS}
_THEIRS = {name: getattr(torchrl_value, name) for name in _CLASSES}
_THEIRS |= {name: getattr(torchrl_functional, name) for name in _FUNCTIONS}

_entries: dict | None = None  # of TorchRL's registry, while ours are installed


def _rebind(old: dict, new: dict) -> None:
    """In every TorchRL module that is loaded, ``new`` objects under the names that ``old`` ones have."""
    by_id = {id(old[name]): new[name] for name in old}
    for module_name, module in list(sys.modules.items()):
        if module_name == "torchrl" or module_name.startswith("torchrl."):
            for name, value in list(vars(module).items()):
                if id(value) in by_id:
                    setattr(module, name, by_id[id(value)])


class _Installed:
    """What :func:`install` returns: leaving its ``with`` block uninstalls."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        uninstall()


def install() -> _Installed:
    """Put our classes and functions in the place of TorchRL's, for losses, trainers and configurations at once.

    ``torchrl.objectives.value.GAE`` and its siblings, the functions of ``torchrl.objectives.value.functional`` and the
    registry behind ``loss.make_value_estimator`` point to ours until :func:`uninstall`, or until the end of
    ``with rl_triton_td.install():``. A name that was imported from TorchRL before into a module of your own stays what
    it was. Installing twice does nothing more.
    """
    global _entries
    if _entries is None:
        registry = torchrl_utils._VALUE_ESTIMATOR_REGISTRY
        _entries = dict(registry)
        ours = {_THEIRS[name]: _OURS[name] for name in _CLASSES}
        for key, entry in _entries.items():
            if entry.cls in ours:
                torchrl_utils.register_value_estimator(key, default_kwargs=entry.default_kwargs)(ours[entry.cls])
        _rebind(_THEIRS, _OURS)
    return _Installed()


def uninstall() -> None:
    """Leave TorchRL as it was before :func:`install`. Estimators made in between keep working."""
    global _entries
    if _entries is not None:
        torchrl_utils._VALUE_ESTIMATOR_REGISTRY.update(_entries)
        _entries = None
        _rebind(_OURS, _THEIRS)
