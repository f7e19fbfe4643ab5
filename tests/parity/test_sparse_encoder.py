"""A SparseEncoder folder that this package reads or writes gives the scores of sentence-transformers."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import BertForMaskedLM

from ranker.checkpoint import load_scorer
from ranker.encoders.loading import load_encoder
from ranker.encoders.tiny import tiny_config, tiny_tokenizer
from ranker.errors import CheckpointError
from ranker.models.splade import SPLADE

pytest.importorskip("sentence_transformers")
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

spec = importlib.util.spec_from_file_location("dense", Path(__file__).with_name("test_sentence_transformers.py"))
dense = importlib.util.module_from_spec(spec)
spec.loader.exec_module(dense)
QUERIES, DOCS, vectors = dense.QUERIES, dense.DOCS, dense.vectors


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of two masked language models in transformers' layout."""
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append(tmp_path_factory.mktemp("mlm"))
        model = BertForMaskedLM(tiny_config())
        torch.nn.init.normal_(model.cls.predictions.bias, std=0.3)
        model.save_pretrained(found[-1])
        tiny_tokenizer().save_pretrained(found[-1])
    return found


def side(folder, pooling, activation="relu"):
    return [Transformer(str(folder), transformer_task="fill-mask"), SpladePooling(pooling, activation)]


def theirs(model):
    queries, docs = model.encode_query(QUERIES), model.encode_document(DOCS)
    return (queries.to_dense() @ docs.to_dense().T).cpu().float()


def routed(kind, folders):
    if kind == "separate":
        return Router.for_query_document(side(folders[0], "max"), side(folders[1], "max"))
    weights = torch.rand(len(tiny_tokenizer()), generator=torch.Generator().manual_seed(0))
    static = SparseStaticEmbedding(tiny_tokenizer(), weights, frozen=kind == "idf")
    return Router.for_query_document([static], side(folders[0], "max"))


@pytest.mark.parametrize("kind", ["max", "sum", "log1p_relu", "separate", "idf", "learned"])
def test_a_sparse_encoder_loads_and_is_written_with_the_same_scores(tmp_path, folders, kind):
    if kind in ("max", "sum", "log1p_relu"):
        modules = side(
            folders[0], "max" if kind == "log1p_relu" else kind, "log1p_relu" if kind == "log1p_relu" else "relu"
        )
    else:
        modules = [routed(kind, folders)]
    model = SparseEncoder(modules=modules, device="cpu", similarity_fn_name="dot")
    model.save(str(tmp_path / "theirs"))
    scorer = load_scorer(tmp_path / "theirs")
    assert isinstance(scorer, SPLADE)
    assert scorer.queries == (kind if kind in ("separate", "idf", "learned") else "tied")
    mine, expected = vectors(scorer, QUERIES, DOCS, tmp_path, 510, 510), theirs(model)
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
    scorer.save(tmp_path / "ours", max_tokens=512)
    torch.testing.assert_close(theirs(SparseEncoder(str(tmp_path / "ours"), device="cpu")), mine, rtol=1e-5, atol=1e-5)


def test_the_packaged_model_has_that_library_s_scores(tmp_path):
    if importlib.util.find_spec("cognition") is None:
        pytest.skip("needs the extra demo")
    encoder = load_encoder("model", package="cognition", dropout=0.0)
    source = encoder.source
    scorer = SPLADE(encoder)
    model = SparseEncoder(modules=side(source, "max"), device="cpu", similarity_fn_name="dot")
    mine = vectors(scorer, QUERIES, DOCS, tmp_path, 126, 126)
    model.max_seq_length = 128
    torch.testing.assert_close(mine, theirs(model), rtol=1e-5, atol=1e-5)


def test_prompts_are_read(tmp_path, folders):
    model = SparseEncoder(
        modules=side(folders[0], "max"), device="cpu", prompts={"query": "query: ", "document": "doc: "}
    )
    model.save(str(tmp_path / "theirs"))
    scorer = load_scorer(tmp_path / "theirs")
    assert (scorer.query_prompt, scorer.doc_prompt) == ("query: ", "doc: ")
    torch.testing.assert_close(vectors(scorer, QUERIES, DOCS, tmp_path, 500, 500), theirs(model), rtol=1e-5, atol=1e-5)


def test_what_can_t_be_expressed_is_refused(tmp_path, folders):
    SparseEncoder(modules=[routed("idf", folders)], device="cpu").save(str(tmp_path / "router"))
    config = tmp_path / "router/query_0_SparseStaticEmbedding/config.json"
    config.write_text(json.dumps({"frozen": True, "path": "idf.json"}))
    with pytest.raises(CheckpointError, match=r"expected the weights of query tokens in model.safetensors, got path="):
        load_scorer(tmp_path / "router")
    SparseEncoder(modules=side(folders[0], "max"), device="cpu", similarity_fn_name="cosine").save(
        str(tmp_path / "cosine")
    )
    with pytest.raises(CheckpointError, match="similarity_fn_name: expected dot, got 'cosine'"):
        load_scorer(tmp_path / "cosine")
    module = tmp_path / "cosine/modules.json"
    module.write_text(module.read_text().replace("SpladePooling", "SparseAutoEncoder"))
    with pytest.raises(CheckpointError, match="expected the modules Transformer and SpladePooling"):
        load_scorer(tmp_path / "cosine")
