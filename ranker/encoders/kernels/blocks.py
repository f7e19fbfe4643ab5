"""Size of the blocks into which rows are cut, for the kernels and for code that runs without Triton."""

BLOCK = 64  # tokens per block when a kernel splits a row
