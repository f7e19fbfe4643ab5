"""The kernels compile in bfloat16 for two generations of GPUs and fit into their shared memory; no GPU is needed."""

from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="needs Triton (on Linux a part of the extra dev)")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from ranker.encoders.kernels import (  # noqa: E402
    add_norm,
    bias_gelu,
    block_backward,
    embedding_norm,
    first_attention,
    gated_activation,
    grouped_attention,
    grouped_attention_backward,
    list_attention,
    residual_norm,
    rotary_heads,
    rotation,
    short_attention,
    short_attention_backward,
    sums,
)

# bytes that a program may use, by compute capability (CUDA C++ Programming Guide, "Technical Specifications per
# Compute Capability", less 1 KB)
SHARED_MEMORY = {89: 99 * 1024, 90: 227 * 1024}
FLOAT32 = {"sums", "parts", "cos", "sin", "logits", "weights", "means", "slopes", "bias", "gain", "shift"}
FLOAT32 |= {"partial", "biases", "word_table", "position_table", "segment_table"}
INT32 = {"cu_seqlens", "cu_keys", "blocks", "hashes", "first_rows", "end_rows", "key_blocks"}
INT64 = {"token_ids", "position_ids", "segments", "token_rows", "lists", "cells", "places"}
NUMBERS = {"tokens", "num_tokens", "rows", "num_rows", "count", "num_lists", "num_blocks", "max_list"}
NUMBERS |= {"query_stride", "key_stride", "value_stride", "grad_stride", "x_stride"}


def shared_memory(kernel, capability: int, num_warps: int, num_stages: int = 3, **constants) -> int:
    """Compile a kernel and return the bytes of shared memory that a program takes."""
    signature, given, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], given[(index,)] = "constexpr", constants[name]
        elif name in NUMBERS or (name == "blocks" and kernel is residual_norm._backward):
            signature[name] = "i32"
        elif name == "others":
            signature[name] = "fp32"
        else:
            signature[name] = (
                "*fp32"
                if name in FLOAT32 or kernel is sums._sum
                else "*i32"
                if name in INT32
                else "*i64"
                if name in INT64
                else "*bf16"
            )
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=given, attrs=attributes)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps, "num_stages": num_stages}
    )
    assert compiled.asm["cubin"]
    return compiled.metadata.shared


# The memory depends on the head size; the branches that compile depend on the window, the lists and the sums of a bias.
@pytest.mark.parametrize(
    ("capability", "dim", "window", "lists", "bias"),
    [(89, 64, -1, True, True), (89, 128, 64, False, False), (90, 32, -1, False, True), (90, 128, -1, True, True)],
)
def test_attention_fits(capability: int, dim: int, window: int, lists: bool, bias: bool) -> None:
    launches = short_attention_backward.backward_launches(dim)
    assert launches[0][1]["SHORTEST"] == -1, "empty rows have a part in the sums, too"
    assert [settings["SHORTEST"] for _, settings in launches[1:]] == [
        settings["SIZE"] for _, settings in launches[:-1]
    ], "no row is left out"
    backward = {"SUMS": bias, "ROTARY": not bias}
    longest = {**backward, "SHORTEST": launches[-1][1]["SIZE"]}
    shape = {"SCALE": dim**-0.5, "HEADS": 12, "DIM": dim, "WINDOW": window, "LISTS": lists}
    for kernel, settings in [
        (short_attention._attend, short_attention.FORWARD),
        *((kernel, {**backward, **settings}) for kernel, settings in launches),
        *((kernel, {**longest, **settings}) for kernel, settings in block_backward.BLOCK_LAUNCHES),
    ]:
        assert shared_memory(kernel, capability, **shape, **settings) <= SHARED_MEMORY[capability]


# the rows of the second one have shared prefixes
@pytest.mark.parametrize(("capability", "dim", "window", "fields"), [(89, 64, 64, 2), (90, 128, -1, 5)])
def test_grouped_attention_fits(capability: int, dim: int, window: int, fields: int) -> None:
    shape = {"SCALE": dim**-0.5, "HEADS": 8, "GROUP": 2, "DIM": dim, "WINDOW": window, "FIELDS": fields}
    room = min(SHARED_MEMORY[capability], grouped_attention.WIDE_HEADS_NEED)
    for kernel, settings in [
        (grouped_attention._attend, grouped_attention.FORWARD),
        (grouped_attention_backward._queries_backward, grouped_attention_backward.QUERIES_BACKWARD),
        (grouped_attention_backward._keys_backward, grouped_attention_backward.KEYS_BACKWARD),
    ]:
        assert shared_memory(kernel, capability, **shape, **settings) <= room


@pytest.mark.parametrize(("capability", "dim"), [(89, 64), (90, 128)])
def test_kernels_of_lists_fit(capability: int, dim: int) -> None:
    shape = {"HEADS": 12, "DIM": dim, "SPLITS": list_attention.SPLITS}
    for kernel, settings in [
        *((list_attention._keys_backward, {"SCALE": dim**-0.5, **more}) for more in list_attention.LAUNCHES.values()),
        (list_attention._add_to_first, {"num_warps": 1}),
    ]:
        assert shared_memory(kernel, capability, **shape, **settings) <= SHARED_MEMORY[capability]
    tensors = {"SCALED": True, "KEYS": 32, **list_attention.TENSORS}
    assert shared_memory(list_attention._list_tensors, capability, **tensors) < 1024


@pytest.mark.parametrize("capability", [89, 90])
def test_the_other_kernels_fit(capability: int) -> None:
    room = SHARED_MEMORY[capability]
    shape = {"HEADS": 12, "WIDTH": 16, "DIM": 768}
    launches = [
        (first_attention._logits, {"SCALE": 0.125, **shape, **first_attention.TOKENS}),
        (first_attention._tokens_backward, {"SCALE": 0.125, **shape, **first_attention.TOKENS}),
        (first_attention._mix, {**shape, "SOFTMAX": True, **first_attention.MIX}),
        (first_attention._mix, {**shape, "SOFTMAX": False, **first_attention.MIX}),
        (bias_gelu._forward, {"DIM": 3072, **bias_gelu.FORWARD}),
        (bias_gelu._backward, {"DIM": 3072, **bias_gelu.BACKWARD}),
    ]
    hashed = {
        "THRESHOLD": 0,
        "SCALE": 1.1,
        "EPSILON": 1e-12,
        "DIM": 768,
        "WIDTH": 1024,
        "DROP": True,
        "COLUMN": 0x9E3779B1,
        "FIRST": 0x7FEB352D,
        "SECOND": 0x846CA68B,
    }
    launches += [
        (kernel, {**hashed, **launch})
        for kernel, launch in (
            (residual_norm._forward, residual_norm.FORWARD),
            (residual_norm._backward, residual_norm.BACKWARD),
            (embedding_norm._backward, {"OFFSET": 0, "SEGMENTS": 4, "WORDS_ONLY": False, **embedding_norm.BACKWARD}),
        )
    ]
    for words_only in (False, True):
        launches += [
            (embedding_norm._forward, {**hashed, "OFFSET": 0, "WORDS_ONLY": words_only, **embedding_norm.FORWARD}),
            (embedding_norm._backward,
             {**hashed, "OFFSET": 0, "SEGMENTS": 2, "WORDS_ONLY": words_only, **embedding_norm.BACKWARD}),
        ]  # fmt: skip
    launches += [
        (add_norm._forward, {**hashed, **add_norm.FORWARD}),
        (add_norm._backward, {**hashed, **add_norm.BACKWARD}),
        (rotation._rotate, {"SIGN": 1.0, "HEADS": 12, "HALF": 32, **rotation.LAUNCH}),
    ]
    gated = {name: value for name, value in hashed.items() if name not in ("EPSILON", "WIDTH")}
    launches += [
        (
            kernel,
            {**gated, **stride, "ACTIVATION": activation, "DROP": drop, "DIM": dim,
             **gated_activation.LAUNCH[activation]},
        )
        for kernel, stride in ((gated_activation._forward, {}), (gated_activation._backward, {"STRIDE": 3104}))
        for activation, drop, dim in (("gelu", True, 1152), ("silu", False, 3072))
    ]  # fmt: skip
    heads = {"EPSILON": 1e-6, "HEADS": 16, "KEY_HEADS": 8, "NORM": True}
    launches.append((rotary_heads._forward, {**heads, **rotary_heads._block(128, rotary_heads.FORWARD)}))
    for trained, dim in ((False, 128), (True, 128), (False, 256)):
        more = {"VALUE_HEADS": 8, "GAINS": trained, "STEPS": rotary_heads.STEPS if trained else 1}
        launches.append((rotary_heads._backward, {**heads, **more, **rotary_heads._block(dim, rotary_heads.BACKWARD)}))
    launches.append((sums._sum, {"WIDTH": 2304, **sums.SUM}))
    # a kernel with several variants is compiled in every other one for each generation
    variants: dict[Any, list[dict[str, Any]]] = {}
    for kernel, settings in launches:
        variants.setdefault(kernel, []).append(settings)
    for kernel, settings in variants.items():
        for variant in settings[capability == 90 :: 2] or settings:
            assert shared_memory(kernel, capability, **variant) <= room
