"""ONNX graphs: onnxruntime's scores and vectors are those of transformers and sentence-transformers."""

import logging

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, ModernBertConfig, ModernBertModel

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from ranker import Reranker  # noqa: E402
from ranker.checkpoint import load_scorer  # noqa: E402
from ranker.encoders.encoder import Encoder  # noqa: E402
from ranker.encoders.loading import load_encoder  # noqa: E402
from ranker.encoders.tiny import tiny_tokenizer  # noqa: E402
from ranker.errors import CheckpointError  # noqa: E402
from ranker.models.colbert import ColBERT  # noqa: E402
from ranker.models.dpr import DPR  # noqa: E402
from ranker.models.monobert import MonoBERT  # noqa: E402
from ranker.release import usage  # noqa: E402
from ranker.release.onnx_graph import copy_texts, quantize, write_graphs  # noqa: E402
from ranker.release.onnx_program import write_settings  # noqa: E402

QUERIES = ["the river", "apples in the autumn"]
DOCS = ["a river runs to the sea", "apples", "", "cold nights and short days in autumn " * 4]
PAIRS = [(query, doc) for query in QUERIES for doc in DOCS]


def exported(scorer, folder):
    """Write a scorer as transformers or sentence-transformers reads it, and as an ONNX export."""
    scorer.save(folder / "layout", 100)
    graphs = write_graphs(folder, folder / "layout")
    copy_texts(folder / "layout", folder)
    write_settings(folder, scorer, graphs)
    return graphs


def modernbert():
    """ModernBERT's own head (dense, GELU, norm) with two labels."""
    tokenizer = tiny_tokenizer()
    ids = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
    config = ModernBertConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        local_attention=8, max_position_embeddings=128, **ids,
    )  # fmt: skip
    return MonoBERT(Encoder(ModernBertModel(config), tokenizer), head="native", num_labels=2)


def test_scores_are_those_of_transformers_on_each_pair_alone(tmp_path):
    torch.manual_seed(0)
    scorer = modernbert().eval()
    for key, weight in scorer.named_parameters():
        weight.data += torch.randn_like(weight) * (0.1 if key.startswith("encoder") else 1)
    assert exported(scorer, tmp_path) == ["model.onnx"]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "layout").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "layout")
    with torch.no_grad():
        logits = [model(**tokenizer([q], [d], return_tensors="pt")).logits[0] for q, d in PAIRS]
    expected = np.array([float(row[1] - row[0]) for row in logits])
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    names = [entry.name for entry in session.get_inputs()]
    for rows in (PAIRS, PAIRS[:1], PAIRS[2:5]):  # other numbers of rows and columns than in the export
        inputs = tokenizer([q for q, _ in rows], [d for _, d in rows], padding=True, return_tensors="np")
        (got,) = session.run(None, {key: inputs[key] for key in names})
        wanted = expected[[PAIRS.index(pair) for pair in rows]]
        np.testing.assert_allclose(got[:, 0], wanted, rtol=0, atol=1e-5)
    np.testing.assert_allclose(Reranker.load(tmp_path, accelerator="cpu").score(PAIRS), expected, rtol=0, atol=1e-5)
    content = (tmp_path / "model.onnx").read_bytes()
    assert b"site-packages" not in content and b".py" not in content  # the exporter notes source files
    with pytest.raises(CheckpointError, match="expected weights, got an ONNX export, which only ranks"):
        (tmp_path / "ranker.yaml").write_text("max_query_tokens: 8\n")
        load_scorer(tmp_path)
    whole = len(content)
    quantize(tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").stat().st_size < whole and logging.getLogger().level != logging.ERROR
    rough = Reranker.load(tmp_path, accelerator="cpu").score(PAIRS)
    assert 1e-6 < np.abs(rough - expected).max() < 0.05 * np.abs(expected).max()


def test_vectors_are_those_of_sentence_transformers(tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    torch.manual_seed(0)
    scorer = DPR(
        load_encoder("tiny", layers=1), pooling="mean", projection=8, activation="tanh", query_prompt="search: "
    )
    assert exported(scorer, tmp_path) == ["model.onnx"]
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "layout"), device="cpu")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    inputs = AutoTokenizer.from_pretrained(tmp_path)(DOCS, padding=True, return_tensors="np")
    (vectors,) = session.run(None, {entry.name: inputs[entry.name] for entry in session.get_inputs()})
    np.testing.assert_allclose(vectors, theirs.encode_document(DOCS), rtol=0, atol=1e-5)
    expected = theirs.encode_query(QUERIES) @ theirs.encode_document(DOCS).T / 0.05  # the default temperature
    got = Reranker.load(tmp_path, accelerator="cpu").score(PAIRS)
    np.testing.assert_allclose(got, expected.ravel(), rtol=0, atol=2e-4)


@pytest.mark.parametrize("attended", [False, True])
def test_token_vectors_and_maxsim_are_those_of_sentence_transformers(tmp_path, attended):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    torch.manual_seed(0)
    scorer = ColBERT(load_encoder("tiny", layers=1), projection=8, query_length=12, attend_to_expansion=attended)
    assert exported(scorer, tmp_path) == ["model.onnx"]
    theirs = sentence_transformers.MultiVectorEncoder(str(tmp_path / "layout"), device="cpu")
    docs = [*DOCS, "a river, a sea; (cold)."]  # with tokens that have no vector
    pairs = [(query, doc) for query in QUERIES for doc in docs]
    expected = theirs.similarity(theirs.encode_query(QUERIES), theirs.encode_document(docs)).float().numpy()
    got = Reranker.load(tmp_path, accelerator="cpu").score(pairs)
    np.testing.assert_allclose(got.reshape(expected.shape), expected, rtol=0, atol=1e-5)
    # the lines of the README, as they are
    lines = usage.ONNX_TOKENS.format(graph="model.onnx").replace("FOLDER", str(tmp_path))
    lines = lines.replace("a query", QUERIES[0]).replace("a document", docs[-1])
    names = {}
    exec(lines.removeprefix("```python\n").removesuffix("```\n"), names)
    assert names["score"] == pytest.approx(expected[0, -1], abs=1e-5)
    assert names["mask"].sum() < names["mask"].size


@pytest.mark.parametrize("pooling", ["cls", "mean", "max", "last", "weightedmean"])
def test_padded_pooling_is_that_of_rows_alone(pooling):
    from ranker.interactions.pooling import pool
    from ranker.release.onnx_modules import pooled
    from ranker.types import TokenBatch

    states = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    lengths = [5, 1, 3]
    mask = torch.tensor([[1] * n + [0] * (5 - n) for n in lengths])
    flat = torch.cat([row[:n] for row, n in zip(states, lengths, strict=True)])
    zeros = torch.zeros(len(flat), dtype=torch.long)
    rows = TokenBatch(zeros, zeros, torch.tensor([0, 5, 6, 9], dtype=torch.int32), 5)
    torch.testing.assert_close(pooled(states, mask, pooling), pool(flat, rows, pooling))


def test_a_broken_graph_is_named(tmp_path):
    (tmp_path / "onnx.json").write_text('{"reads": "pairs", "graphs": ["model.onnx"], "max_tokens": 8, "dim": 2}')
    (tmp_path / "ranker.yaml").write_text("max_query_tokens: 8\n")
    (tmp_path / "model.onnx").write_bytes(b"\0" * 20)
    with pytest.raises(CheckpointError, match="expected a whole ONNX export, got"):
        Reranker.load(tmp_path)
