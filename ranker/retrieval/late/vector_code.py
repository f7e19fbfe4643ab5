"""Sums of table entries for `BLOCK` compressed vectors at a time, and what functions that build LLVM code share.

The byte shuffles of AVX2 look up 32 entries at once (Andre et al., 2015, "Cache locality is not enough:
high-performance nearest neighbor search with product quantization fast scan"). Numba cannot form them from a Python
loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

from ranker.retrieval.late.compiled import compiled

BLOCK = 32  # vectors whose residuals are stored together
HALF_SCALE = 2**14  # 1.0 as an integer scale

BYTE, SHORT, INT, WORD, FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_options: Any = config  # settings of NUMBA_CPU_NAME and NUMBA_CPU_FEATURES
_of_host = not (_options.CPU_NAME or _options.CPU_FEATURES)
# instructions of this processor; none if LLVM doesn't know the processor
_host = get_host_cpu_features().split(",") if _of_host else []
SHUFFLES, WIDE = "+avx2" in _host, "+avx512f" in _host


def word(number: int) -> Any:
    """Return a constant for addresses."""
    return ir.Constant(WORD, number)


def repeated(builder: Any, value: Any, kind: ir.VectorType) -> Any:
    """Return a vector whose elements are all `value`."""
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(INT, 0))
    places = ir.Constant(ir.VectorType(INT, kind.count), [0] * kind.count)
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), places)


@dataclass(frozen=True)
class Call:
    """A call of an intrinsic for which code is built.

    Args:
        context: Numba's context.
        builder: Builds the instructions.
        kinds: Types of the arguments.
        arguments: The arguments.
    """

    context: Any
    builder: Any
    kinds: Any
    arguments: Any

    def shape(self, place: int) -> Any:
        """Return the sizes of the array that is argument number `place`."""
        array = self.context.make_array(self.kinds[place])(self.context, self.builder, self.arguments[place])
        return cgutils.unpack_tuple(self.builder, array.shape)

    def at(self, place: int, offset: Any, kind: Any) -> Any:
        """Return the address `offset` bytes into the array that is argument number `place`, as one of a `kind`."""
        array = self.context.make_array(self.kinds[place])(self.context, self.builder, self.arguments[place])
        first = self.builder.bitcast(array.data, BYTE.as_pointer())
        return self.builder.bitcast(self.builder.gep(first, [offset]), kind.as_pointer())

    def prefetch(self, place: int, offset: Any) -> None:
        """Ask for the cache line `offset` bytes into the array that is argument number `place`."""
        pointer = BYTE.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, INT, INT, INT])
        function = self.builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        flags = [ir.Constant(INT, value) for value in (0, 3, 1)]  # a read, into all caches, of data
        self.builder.call(function, [self.at(place, offset, BYTE), *flags])

    def zeros(self, kind: ir.VectorType) -> Any:
        """Return a variable that holds a vector of zeros."""
        variable = cgutils.alloca_once(self.builder, kind)
        self.builder.store(ir.Constant(kind, [0] * kind.count), variable)
        return variable


@intrinsic
def fetch(typing: Any, values: Any, row: Any) -> Any:  # noqa: ARG001
    """Ask for the cache lines of `values[row]`, which will be read soon.

    Args:
        typing: Numba's typing context; a caller does not pass it.
        values: A contiguous array.
        row: Index of its first dimension.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        call = Call(context, builder, signature.args, arguments)
        size = word(values.dtype.bitwidth // 8)
        for length in call.shape(0)[1:]:
            size = builder.mul(size, length)
        first = builder.mul(arguments[1], size)
        with cgutils.for_range(builder, builder.lshr(builder.add(size, word(63)), word(6))) as loop:
            call.prefetch(0, builder.add(first, builder.shl(loop.index, word(6))))
        return context.get_dummy_value()

    return types.void(values, types.intp), code


@intrinsic
def shuffled_sums(
    typing: Any,  # noqa: ARG001
    blocks: Any,
    block: Any,  # noqa: ARG001
    table: Any,
    token: Any,  # noqa: ARG001
    start: Any,  # noqa: ARG001
    out: Any,
    later: Any,  # noqa: ARG001
) -> Any:
    """Compute `plain_sums` by the byte shuffles of AVX2, and fetch the residuals of block `later` into the cache."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        call = Call(context, builder, signature.args, arguments)
        num_bytes = call.shape(2)[1]
        size = builder.shl(builder.add(num_bytes, word(2)), word(5))  # bytes of a block
        residuals, ahead = builder.mul(arguments[1], size), builder.mul(arguments[6], size)
        entries = builder.mul(arguments[3], builder.shl(num_bytes, word(5)))
        total = call.zeros(ir.VectorType(SHORT, BLOCK))
        with cgutils.for_range(builder, builder.lshr(num_bytes, word(1))) as loop:
            offset = builder.shl(loop.index, word(6))  # of two bytes of each vector; a byte's tables are 32 bytes, too
            call.prefetch(0, builder.add(ahead, offset))
            part = _two_bytes(call, builder.add(residuals, offset), builder.add(entries, offset))
            wide = builder.zext(part, ir.VectorType(SHORT, BLOCK))
            builder.store(builder.add(builder.load(total), wide), total)
        last = builder.add(residuals, builder.shl(num_bytes, word(5)))
        _store_scaled(call, builder.load(total), last)
        return context.get_dummy_value()

    return types.void(blocks, types.intp, table, types.intp, types.intp, out, types.intp), code


def _two_bytes(call: Call, residuals: Any, entries: Any) -> Any:
    """Return the sums of the entries for two bytes of each vector, at most 4 * 63, uint8 [BLOCK]."""
    builder, kind, half = call.builder, ir.VectorType(BYTE, BLOCK), ir.VectorType(BYTE, BLOCK // 2)
    shuffle = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind, kind]), "llvm.x86.avx2.pshuf.b"
    )
    twice = ir.Constant(ir.VectorType(INT, BLOCK), [place % 16 for place in range(BLOCK)])
    part = ir.Constant(kind, [0] * BLOCK)
    for second in range(2):
        packed = builder.load(call.at(0, builder.add(residuals, word(32 * second)), kind), align=1)
        high, low = builder.lshr(packed, ir.Constant(kind, [4] * BLOCK)), builder.and_(
            packed, ir.Constant(kind, [15] * BLOCK)
        )  # fmt: skip
        for number, codes in enumerate((high, low)):
            where = builder.add(entries, word(32 * second + 16 * number))
            values = builder.load(call.at(2, where, half), align=1)
            values = builder.shuffle_vector(values, ir.Constant(half, ir.Undefined), twice)
            part = builder.add(part, builder.call(shuffle, [values, codes]))
    return part


def _store_scaled(call: Call, sums: Any, scales: Any) -> None:
    """Add the similarity with the centroid, multiply by the scales, and write the similarities."""
    builder, shorts, ints = call.builder, ir.VectorType(SHORT, BLOCK), ir.VectorType(INT, BLOCK)
    sums = builder.add(sums, repeated(builder, builder.trunc(call.arguments[4], SHORT), shorts))
    sums = builder.sext(builder.shl(sums, ir.Constant(shorts, [2] * BLOCK)), ints)
    scale = builder.sext(builder.load(call.at(0, scales, shorts), align=1), ints)
    product = builder.ashr(builder.mul(sums, scale), ir.Constant(ints, [16] * BLOCK))
    builder.store(builder.trunc(product, shorts), call.at(5, word(0), shorts), align=1)


@compiled
def plain_sums(
    blocks: np.ndarray,
    block: int,
    table: np.ndarray,
    token: int,
    start: int,
    out: np.ndarray,
    later: int,  # noqa: ARG001
) -> None:
    """Compute the similarities of a query token with `BLOCK` compressed vectors, in the integer units of the table.

    Args:
        blocks: Packed residuals, byte by byte, an even number of bytes; then, as the bytes of int16, the factors of the
            vectors times `HALF_SCALE`; uint8 [blocks, bytes + 2, BLOCK].
        block: Which block.
        table: Inner product of each value of each half byte, the high half first, uint8 [tokens, bytes, 2, 16], at most
            63.
        token: Which token.
        start: Similarity with the vectors' centroid, in the same units.
        out: Where to write the similarities, int16 [BLOCK].
        later: A block that will be read soon; not read here.
    """
    num_bytes = table.shape[1]
    for vector in range(BLOCK):
        total = np.int32(start)
        for place in range(num_bytes):
            byte = blocks[block, place, vector]
            total += np.int32(table[token, place, 0, byte >> 4]) + np.int32(table[token, place, 1, byte & 15])
        line, place = num_bytes + vector // (BLOCK // 2), 2 * (vector % (BLOCK // 2))
        scale = np.int32(blocks[block, line, place]) + (np.int32(blocks[block, line, place + 1]) << 8)
        out[vector] = np.int16(((total << 2) * scale) >> 16)


sums = shuffled_sums if SHUFFLES else plain_sums
