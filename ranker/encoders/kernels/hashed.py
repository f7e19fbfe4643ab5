"""Dropout by hash within a kernel."""

import triton
import triton.language as tl

PROGRAMS = 1056  # of backward passes over tokens: eight for each of an H200's multiprocessors


@triton.jit
def kept(hashes, columns, THRESHOLD: tl.constexpr, COLUMN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """`ranker.encoders.dropout.hashed_dropout`'s choice; 32-bit products wrap around."""
    bits = hashes[:, None].to(tl.uint32, bitcast=True) + columns[None, :].to(tl.uint32) * COLUMN
    bits = (bits ^ (bits >> 16)) * FIRST
    bits = (bits ^ (bits >> 15)) * SECOND
    return bits.to(tl.int32, bitcast=True) >= THRESHOLD
