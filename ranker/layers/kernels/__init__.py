"""Kernels of our own, written in Triton; nothing imports them where Triton is missing."""

BLOCK = 64  # tokens of a row that a program works on, where it does not work on all
