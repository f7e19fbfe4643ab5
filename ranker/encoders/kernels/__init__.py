"""Triton kernels of the fastest path. Each module has one operation with its backward pass."""
