"""Triton kernels of the fast path."""
