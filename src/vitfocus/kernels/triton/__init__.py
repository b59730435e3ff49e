"""The Triton kernels. Nothing here is imported before a kernel is asked for: Triton is not everywhere torch is."""
