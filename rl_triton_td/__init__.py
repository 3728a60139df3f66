"""Credit assignment for TorchRL: advantages and value targets by fused Triton scans, behind TensorDict modules."""

from . import functional
from .estimators import *  # noqa: F403
from .estimators import __all__ as _estimators
from .installation import install, uninstall
from .transforms import ValueEstimatorTransform

__version__ = "0.1.0"
__all__ = ["ValueEstimatorTransform", "functional", "install", "uninstall", *_estimators]
