"""The arithmetic of treatments and readings, one folder per operation.

Each folder has `reference.py`, plain PyTorch beside the papers' equations; `chunked.py`, plain PyTorch in linear
memory, where it is needed; `triton.py`, the GPU kernels; and `op.py`, the operator that chooses among them. `backend`
forces one of them.
"""

from vitfocus.kernels.backends import backend

__all__ = ["backend"]
