"""The arithmetic of treatments and readings, one folder per operation.

Each folder has `reference.py`, plain PyTorch beside the papers' equations; `chunked.py`, plain PyTorch in linear
memory, where it is needed; the GPU kernels, in `triton.py` or in files named after what they compute; and `op.py`, the
operation with its gradient, which chooses among them. `backend` forces one of them.
"""

from vitfocus.kernels.backends import backend

__all__ = ["backend"]
