"""The treatments' and readings' arithmetic: written beside the papers' equations, and fast.

Each file has the plain reference first. `backend` forces an implementation; left alone, the tensors decide.
"""

from vitfocus.kernels.backends import backend

__all__ = ["backend"]
