"""Kernels of our own, written in Triton; nothing imports them where Triton is missing."""
