"""Size of the blocks into which rows are cut. This module can be imported without Triton."""

BLOCK = 64  # number of tokens of a block
