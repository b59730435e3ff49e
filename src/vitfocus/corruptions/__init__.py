"""The nineteen corruptions of ImageNet-C, CIFAR-C and their any-size form, batched, seeded, on CPU and GPU.

This package does not depend on models or suites. `apply.py` has the public function, `base.py` the published constants
and the random draws, and one file per family the corruptions.
"""

from vitfocus.core.metrics import CORRUPTIONS, EXTRA_CORRUPTIONS
from vitfocus.corruptions.apply import corrupt, fingerprint, parse
from vitfocus.corruptions.base import FLAVOURS

__all__ = ["CORRUPTIONS", "EXTRA_CORRUPTIONS", "FLAVOURS", "corrupt", "fingerprint", "parse"]
