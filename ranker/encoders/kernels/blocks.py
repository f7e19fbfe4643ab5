"""The cut of rows into blocks, which those who launch kernels and the kernels have to agree on; no Triton is needed to read it."""

BLOCK = 64  # tokens of a row that a program works on, where it does not work on all
