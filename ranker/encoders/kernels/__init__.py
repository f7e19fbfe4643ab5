"""Triton kernels of the fast path; each module has one operation, forward and backward."""
