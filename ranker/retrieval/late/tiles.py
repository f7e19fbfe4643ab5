"""Inner products of a few float32 vectors of docs with a few query tokens, which stay in the processor's registers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ranker.retrieval.late.vector_code import FLOAT, INT, SHORT, WIDE, Call, repeated, word

ROWS, LANES = 4, 16  # vectors, and query tokens of a group, that a tile compares
GROUPS = 2 if WIDE else 1  # most groups of a tile: registers of AVX-512 hold two


def _tile(groups: int, store: Any) -> Any:
    """Make an intrinsic that computes a tile of `groups` groups and stores it by `store`.

    The intrinsic's arguments are:

    - vectors: Vectors, float32 [vectors, dim].
    - row: The first of `ROWS` vectors.
    - ahead: The first of `ROWS` vectors that will be read soon.
    - columns: Vectors of the query, as columns, float32 [groups, dim, LANES].
    - group: The first group of tokens.
    - out: Where to store.
    - scaling: For `_store_rounded`, see there.
    """

    def tile(typing: Any, vectors: Any, row: Any, ahead: Any, columns: Any, group: Any, out: Any, scaling: Any) -> Any:  # noqa: ARG001
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            call = Call(context, builder, signature.args, arguments)
            sums = _products(call, groups)
            for more in range(groups):
                own = builder.add(arguments[4], word(more))
                store(call, [builder.load(sums[number][more]) for number in range(ROWS)], own)
            return context.get_dummy_value()

        return types.void(vectors, types.intp, types.intp, columns, types.intp, out, scaling), code

    return intrinsic(tile)


def _products(call: Call, groups: int) -> list[list[Any]]:
    """Return variables with the inner products, each float32 [LANES], [ROWS][groups]."""
    builder, lanes = call.builder, ir.VectorType(FLOAT, LANES)
    dim = call.shape(0)[1]
    line = builder.shl(dim, word(2))  # bytes of a vector
    first, near = (builder.mul(call.arguments[place], line) for place in (1, 2))
    queries = [
        builder.mul(builder.add(call.arguments[4], word(more)), builder.shl(line, word(4))) for more in range(groups)
    ]
    sums = [[call.zeros(lanes) for _ in range(groups)] for _ in range(ROWS)]
    with cgutils.for_range(builder, dim) as loop:
        call.prefetch(0, builder.add(near, builder.shl(loop.index, word(4))))
        place = builder.shl(loop.index, word(6))
        tokens = [builder.load(call.at(3, builder.add(query, place), lanes), align=4) for query in queries]
        for number, own in enumerate(sums):
            start = builder.add(first, builder.mul(line, word(number)))
            element = builder.load(call.at(0, builder.add(start, builder.shl(loop.index, word(2))), FLOAT))
            value = repeated(builder, element, lanes)
            for token, total in zip(tokens, own, strict=True):
                product = builder.fmul(value, token, flags=("contract",))
                builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
    return sums


def _store_highest(call: Call, found: list[Any], group: Any) -> None:
    """Raise the highest similarities so far, `out`, float32 [groups, LANES], to those of the tile."""
    builder, lanes = call.builder, ir.VectorType(FLOAT, LANES)
    target = call.at(5, builder.shl(group, word(6)), lanes)
    result = builder.load(target, align=4)
    for value in found:
        result = builder.select(builder.fcmp_ordered(">", value, result), value, result)
    builder.store(result, target, align=4)


def _store_rounded(call: Call, found: list[Any], group: Any) -> None:
    """Write integers to `out`, int16 [vectors, groups * LANES], rounded towards 0.

    `scaling` is a factor and a summand for each token, float32 [2, groups, LANES].
    """
    builder, lanes, shorts = call.builder, ir.VectorType(FLOAT, LANES), ir.VectorType(SHORT, LANES)
    groups, width = call.shape(6)[1], call.shape(5)[1]
    factor, summand = (
        builder.load(call.at(6, builder.shl(place, word(6)), lanes), align=4)
        for place in (group, builder.add(group, groups))
    )
    for number, value in enumerate(found):
        whole = builder.fptosi(builder.fadd(builder.fmul(value, factor), summand), ir.VectorType(INT, LANES))
        place = builder.mul(builder.add(call.arguments[1], word(number)), width)
        offset = builder.shl(builder.add(place, builder.shl(group, word(4))), word(1))
        builder.store(builder.trunc(whole, shorts), call.at(5, offset, shorts), align=2)


highest, highest_wide = _tile(1, _store_highest), _tile(GROUPS, _store_highest)
rounded, rounded_wide = _tile(1, _store_rounded), _tile(GROUPS, _store_rounded)
