"""Evaluation of accuracy and robustness by published protocols.

`evaluate` runs a suite and `compare` compares two models image by image. `suites/` contains the suites, `engine.py`
runs them and `metrics.py` computes the scores. Names are imported on first use: listing the suites imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitfocus.robustness.evaluation import evaluate
    from vitfocus.robustness.results import Comparison, Scores, compare, load_scores
    from vitfocus.robustness.suites import SUITES

_HOMES = {
    "Comparison": "results",
    "compare": "results",
    "evaluate": "evaluation",
    "Scores": "results",
    "load_scores": "results",
    "SUITES": "suites",
}

__all__ = ["SUITES", "Comparison", "Scores", "compare", "evaluate", "load_scores"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
