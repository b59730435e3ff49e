"""How robust a model is, by whose protocol, on which data.

`evaluate` runs a suite, `compare` tells a difference from noise. `suites/` lays out what is measured, `runner.py`
measures it, `scores.py` says what the numbers mean, `fingerprint.py` how they came about.
"""

from vitfocus.robustness.comparison import Comparison, compare
from vitfocus.robustness.evaluation import evaluate
from vitfocus.robustness.results import Scores, load_scores
from vitfocus.robustness.suites import SUITES

__all__ = ["SUITES", "Comparison", "Scores", "compare", "evaluate", "load_scores"]
