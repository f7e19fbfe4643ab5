"""Write a model folder as ONNX graphs, from padded rows of token ids to scores, or to a vector per row or token."""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from ranker.errors import ConfigError
from ranker.export._modules import has_modules, is_multi_vector, read_modules
from ranker.release.onnx_modules import PooledModules, Scores, TokenVectors

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
# names of outputs in optimum and sentence-transformers
LOGITS, VECTORS, TOKEN_VECTORS, DOC_MASK = "logits", "sentence_embedding", "token_embeddings", "doc_mask"
PAIRS, QUERIES, DOCS = "model.onnx", "query.onnx", "doc.onnx"


def write_graphs(folder: Path, layout: Path, dtype: str = "float32") -> list[str]:
    """Write the graphs of a model folder; return their names.

    A graph takes int64 arrays [rows, columns] with the names in the tokenizer's output (`INPUTS`), for any numbers of
    rows and columns, with padding at the end of rows. The output of a cross-encoder is `logits` [rows, 1], the scores;
    that of a model with a vector per text is `sentence_embedding` [rows, dim]. A model with a vector per token has two
    outputs: `token_embeddings` [rows, columns, dim], and `doc_mask`, int64 [rows, columns], which is 1 if a token of a
    doc has a vector. All tokens of a query have vectors, its expansion included.

    Args:
        folder: Where to write.
        layout: A sequence classification model, or modules of sentence-transformers: Transformer, Pooling, Dense,
            LayerNorm and Normalize, or Transformer, Dense, MultiVectorMask and Normalize.
        dtype: `float32`, or `fp16`, for weights in half precision with the same inputs and outputs.

    Raises:
        ConfigError: torch can't export the model.
    """
    if not has_modules(layout):
        graphs: dict[str, tuple[nn.Module, Path, list[str]]] = {PAIRS: (Scores(layout), layout, [LOGITS])}
    elif is_multi_vector(layout):
        chain = read_modules(layout)["query"]
        graphs = {PAIRS: (TokenVectors(chain), chain[0].folder, [TOKEN_VECTORS, DOC_MASK])}
    else:
        sides = read_modules(layout)
        chains = [sides["query"]] if sides["query"] == sides["document"] else [sides["query"], sides["document"]]
        names = [PAIRS] if len(chains) == 1 else [QUERIES, DOCS]
        graphs = {}
        for name, chain in zip(names, chains, strict=True):
            part = PooledModules(chain)
            graphs[name] = (part, chain[0].folder, [LOGITS if part.scores else VECTORS])
    for name, (module, texts, outputs) in graphs.items():
        _export(module.eval(), AutoTokenizer.from_pretrained(texts, trust_remote_code=False), outputs, folder / name)
        if dtype == "fp16":
            _halve(folder / name)
    return list(graphs)


def quantize(path: Path) -> None:
    """Quantize the encoder's weight matrices to int8, column by column; onnxruntime quantizes inputs at run time.

    Weights use 7 bits: on a CPU with AVX2 or AVX-512 but without VNNI, onnxruntime adds two products in 16 bits, which
    overflow with 8 bits (onnxruntime's documentation, "Quantize ONNX models", on saturation).

    Embeddings, norms and the head on pooled states stay in float32, because the head takes little time, and its
    rounding errors would directly change the scores.

    Args:
        path: A graph, which is replaced.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    whole = onnx.load(path)
    # the shapes that torch 2.11 writes inside the graph contradict the shapes that onnx 1.23 infers
    del whole.graph.value_info[:]
    level = logging.getLogger().level
    logging.getLogger().setLevel(
        logging.ERROR
    )  # onnxruntime warns on the root logger that its own optimizer did not run
    try:
        # linear layers on [rows, columns, dim] are MatMul, linear layers on pooled [rows, dim] are Gemm
        quantize_dynamic(
            whole,
            path,
            op_types_to_quantize=["MatMul"],
            per_channel=True,
            reduce_range=True,
            weight_type=QuantType.QInt8,
        )
    finally:
        logging.getLogger().setLevel(level)


def _export(module: nn.Module, tokenizer: Any, outputs: list[str], path: Path) -> None:
    rows = tokenizer(["a b c", "d"], ["e f g h", "i"], padding=True, return_tensors="pt")
    names = [name for name in tokenizer.model_input_names if name in INPUTS]
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    try:
        with _quiet(), torch.no_grad():
            program = torch.onnx.export(
                _Named(module, names),
                tuple(rows[name] for name in names),
                dynamo=True,
                input_names=names,
                output_names=outputs,
                dynamic_shapes=(tuple(dict(free) for _ in names),),
                verbose=False,
            )
    except Exception as error:  # torch.export and the translation raise errors of many classes
        reason = str(error).strip().split("\n")[0][:200]
        raise ConfigError(
            f"format: expected a model that torch exports to ONNX, got {type(error).__name__}: {reason}"
        ) from error
    assert program is not None
    _forget_sources(program.model)
    program.save(str(path))


def _forget_sources(model: Any) -> None:
    """Remove the exporter's notes on nodes, such as paths of source files."""
    for part in (model, model.graph, *model.graph.all_nodes(), *model.graph.initializers.values()):
        part.metadata_props.clear()
        part.doc_string = None
    for node in model.graph.all_nodes():
        for value in node.outputs:
            value.metadata_props.clear()
    for value in model.graph.inputs:
        value.metadata_props.clear()


def _halve(path: Path) -> None:
    """Convert the weights of a graph to fp16; inputs and outputs keep their types."""
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(path), keep_io_types=True), path)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's messages about skipped parts."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = {logger: logger.level for logger in loggers}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


class _Named(nn.Module):
    """Calls a module with inputs by name."""

    def __init__(self, module: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.module, self.names = module, names

    def forward(self, *inputs: Tensor) -> Any:
        return self.module(**dict(zip(self.names, inputs, strict=True)))


def copy_texts(layout: Path, folder: Path) -> None:
    """Copy the tokenizer, the prompt and the description files of a model folder beside its graphs."""
    source = layout
    if has_modules(layout):
        source = read_modules(layout)["document"][0].folder
    for path in (*source.iterdir(), *(layout / name for name in ("ranker.yaml", "prompt.json"))):
        if path.is_file() and (path.suffix in (".json", ".txt", ".model", ".jinja", ".yaml")) and _travels(path.name):
            shutil.copyfile(path, folder / path.name)


def _travels(name: str) -> bool:
    left = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "router_config.json")
    return name not in (*left, "scorer.json", "checksums.json", "lm_reranker.json") and not name.endswith(".index.json")
