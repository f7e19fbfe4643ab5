"""Hashed dropout inside of a Triton kernel."""

import triton
import triton.language as tl

PROGRAMS = 1056  # number of Triton programs of a backward pass over tokens: eight per multiprocessor of an H200


@triton.jit
def kept(hashes, columns, THRESHOLD: tl.constexpr, COLUMN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Return True for values that `ranker.encoders.dropout.hashed_dropout` keeps, [tokens, columns]."""
    bits = hashes[:, None].to(tl.uint32, bitcast=True) + columns[None, :].to(tl.uint32) * COLUMN
    bits = (bits ^ (bits >> 16)) * FIRST
    bits = (bits ^ (bits >> 15)) * SECOND
    return bits.to(tl.int32, bitcast=True) >= THRESHOLD
