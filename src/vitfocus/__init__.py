"""vitfocus shows where a vision transformer looks, fixes it, and proves the difference.

The public functions and classes are imported on first use, which keeps `import vitfocus` and `vitfocus --help` fast.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import vitfocus.tasks  # noqa: F401  registers the models that a spec names by a prefix
from vitfocus.core import __version__
from vitfocus.core.registry import connect

if TYPE_CHECKING:
    from vitfocus.anatomy import anatomy, register
    from vitfocus.attention.diagnosis import Diagnosis, diagnose
    from vitfocus.attention.maps import attention_maps
    from vitfocus.core.errors import VitfocusError, VitfocusWarning
    from vitfocus.corruptions import corrupt
    from vitfocus.report import explore, report
    from vitfocus.robustness import evaluate
    from vitfocus.treatments import (
        AttentionDiversification,
        AttentionGate,
        ContextBroadcasting,
        ExtraBlock,
        QueryKeyNorm,
        Registers,
        SigmaReparam,
        SqueezeExcitation,
        TestTimeRegisters,
        TokenAwarePooling,
        UniformHead,
        applied,
        auxiliary_loss,
        find_registers,
        treat_,
        untreat_,
        untreated,
    )
    from vitfocus.treatments.save_load import create_model, load, open_model, push, save
    from vitfocus.treatments.weights import load_weights

_EXPORTS = {
    "vitfocus.anatomy": ("anatomy", "register"),
    "vitfocus.attention.diagnosis": ("Diagnosis", "diagnose"),
    "vitfocus.attention.maps": ("attention_maps",),
    "vitfocus.corruptions": ("corrupt",),
    "vitfocus.core.errors": ("VitfocusError", "VitfocusWarning"),
    "vitfocus.report": ("explore", "report"),
    "vitfocus.robustness": ("evaluate",),
    "vitfocus.treatments": ("applied", "auxiliary_loss", "find_registers", "treat_", "untreat_", "untreated"),
    "vitfocus.treatments.save_load": ("create_model", "load", "open_model", "push", "save"),
    "vitfocus.treatments.weights": ("load_weights",),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = [
    "AttentionDiversification",
    "AttentionGate",
    "ContextBroadcasting",
    "Diagnosis",
    "ExtraBlock",
    "QueryKeyNorm",
    "Registers",
    "SigmaReparam",
    "SqueezeExcitation",
    "TestTimeRegisters",
    "TokenAwarePooling",
    "UniformHead",
    "VitfocusError",
    "VitfocusWarning",
    "__version__",
    "anatomy",
    "applied",
    "attention_maps",
    "auxiliary_loss",
    "corrupt",
    "create_model",
    "diagnose",
    "evaluate",
    "explore",
    "find_registers",
    "load",
    "load_weights",
    "open_model",
    "push",
    "register",
    "report",
    "save",
    "treat_",
    "untreat_",
    "untreated",
]


class _Package(ModuleType):
    """Importing the package `vitfocus.anatomy` must not hide the function `vitfocus.anatomy(model)`."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    # Any other capitalised name may be a treatment, which `vitfocus.treatments` exports.
    module = _MODULE_OF.get(name, "vitfocus.treatments" if name[:1].isupper() else None)
    value = getattr(importlib.import_module(module), name, None) if module is not None else None
    if value is None:
        raise AttributeError(f"module 'vitfocus' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


connect()
