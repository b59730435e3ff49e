"""The nineteen corruptions of ImageNet-C, CIFAR-C and their any-size form, batched, seeded, on CPU and GPU.

A bottom room: nothing here knows of models or suites. `apply.py` holds the one public call, `constants.py` the
published numbers, `draws.py` the randomness, and one file a family the corruptions themselves.
"""

from vitfocus.corruptions.apply import corrupt, fingerprint, parse
from vitfocus.corruptions.constants import CORRUPTIONS, EXTRA_CORRUPTIONS, FLAVOURS

__all__ = ["CORRUPTIONS", "EXTRA_CORRUPTIONS", "FLAVOURS", "corrupt", "fingerprint", "parse"]
