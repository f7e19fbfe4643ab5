"""Formats: other programs' scores of each, and one line for what a format can't hold."""

import json

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ranker import Reranker
from ranker.assembly.scorer import build_scorer
from ranker.checkpoint import without_adapters
from ranker.data.scorer_inputs import TextLimits
from ranker.encoders.loading import load_encoder
from ranker.errors import ConfigError
from ranker.export import cross_encoder
from ranker.models.colbert import ColBERT
from ranker.models.dpr import DPR
from ranker.models.lm_reranker import LMReranker
from ranker.models.monobert import MonoBERT
from ranker.release.layouts import cast, check_format, is_modular, write_layout
from ranker.release.programs import filled, program_of
from tests.unit.models.test_lm_reranker import PAIRS as LM_PAIRS
from tests.unit.models.test_lm_reranker import folder_of
from tests.unit.models.test_lora import lm_cfg, trained
from tests.unit.release.test_onnx import PAIRS, modernbert

KEYS = {"model": {}, "encoder": {}, "data": {}, "max_query_tokens": 64, "max_doc_tokens": 64, "max_pair_tokens": None}


def settings():
    return OmegaConf.create({**KEYS, "depth": 10})


@pytest.mark.parametrize(
    ("model", "layout", "dtype", "message"),
    [
        ("colbert", "hf", "float32", "format: expected sentence_transformers, since ColBERT has vectors and no"),
        ("dpr", "hf", "float32", "format: expected sentence_transformers, since DPR has vectors and no"),
        (
            "mean",
            "hf",
            "float32",
            "since transformers has no ForSequenceClassification of bert with a linear head on poo",
        ),
        ("mean", "merged", "float32", "format: expected hf or sentence_transformers, since the model has no adapters"),
        ("prompt", "sentence_transformers", "float32", "format: expected hf or onnx, since sentence-transformers puts"),
        ("mean", "onnx_int8", "fp16", "dtype: expected float32 with format=onnx_int8"),
        ("mean", "onnx", "bf16", "dtype: expected float32 or fp16 with format=onnx"),
    ],
)
def test_what_a_format_cannot_hold_is_refused_in_one_line(model, layout, dtype, message):
    encoder = load_encoder("tiny")
    scorer = {
        "colbert": lambda: ColBERT(encoder, query_length=0),
        "dpr": lambda: DPR(encoder),
        "mean": lambda: MonoBERT(encoder, head="own", pooling="mean"),
        "prompt": lambda: MonoBERT(encoder, prompt="{query} is in {doc}"),
    }[model]()
    with pytest.raises(ConfigError) as refused:
        check_format(scorer, layout, dtype)
    assert message in str(refused.value) and "\n" not in str(refused.value)
    check_format(scorer, "sentence_transformers" if model != "prompt" else "hf", "bf16")


def test_modernberts_head_becomes_modules_with_the_same_scores(tmp_path):
    pytest.importorskip("sentence_transformers")
    torch.manual_seed(0)
    scorer = modernbert().eval()
    for key, weight in scorer.named_parameters():
        if not key.startswith("encoder"):
            weight.data += torch.randn_like(weight)
    scorer.save(tmp_path / "whole", 100)
    expected = program_of(tmp_path / "whole")(PAIRS)  # transformers' own classifier
    assert is_modular(scorer)
    write_layout(tmp_path / "modules", scorer, settings(), "sentence_transformers")
    types = [
        module["type"].rpartition(".")[2] for module in json.loads((tmp_path / "modules/modules.json").read_text())
    ]
    assert types == ["Transformer", "Pooling", "Dense", "LayerNorm", "Dense"]
    theirs = program_of(tmp_path / "modules")(PAIRS)  # sentence-transformers
    np.testing.assert_allclose(theirs, expected, rtol=0, atol=1e-5)
    back = MonoBERT.load(tmp_path / "modules")
    state, wanted = back.state_dict(), scorer.state_dict()
    assert state.keys() == wanted.keys() and all(torch.equal(state[key], wanted[key]) for key in wanted)
    weights = load_file(tmp_path / "modules/4_Dense/model.safetensors")
    assert torch.equal(weights["linear.weight"], scorer.head.whole.classifier.weight)
    assert cross_encoder.norm_head(back.classifier()) is not None


@pytest.mark.parametrize("head", ["bert", "modernbert"])
def test_a_prompt_becomes_one_of_sentence_transformers(head, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    torch.manual_seed(0)
    prompt, encoder = "find the river: {query} [SEP] {doc}", load_encoder("tiny")
    if head == "bert":  # whose rows have segments; those of a prompt are all 0
        scorer = MonoBERT(encoder, head="own", pooling="cls", prompt=prompt)
    else:
        scorer = MonoBERT(modernbert().encoder, head="native", num_labels=2, prompt=prompt)
    for weight in scorer.parameters():
        weight.data += torch.randn_like(weight) * 0.1
    check_format(scorer, "sentence_transformers", "float32")
    write_layout(tmp_path / "model", scorer, settings(), "sentence_transformers")
    ours = Reranker(scorer.eval(), TextLimits(64, 64), accelerator="cpu", precision="32-true").score(PAIRS)
    np.testing.assert_allclose(program_of(tmp_path / "model")(PAIRS), ours, rtol=0, atol=1e-5)
    theirs = sentence_transformers.CrossEncoder(str(tmp_path / "model"), device="cpu")
    assert theirs.prompts[theirs.default_prompt_name] == "find the river: "
    assert np.abs(theirs.predict(PAIRS, prompt="").ravel()[: len(ours)] - ours[: len(PAIRS)]).max() > 1e-3
    back = Reranker.load(tmp_path / "model", accelerator="cpu", precision="32-true").score(PAIRS)
    np.testing.assert_allclose(back, ours, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_is_read_by_both_programs(dtype, tmp_path):
    pytest.importorskip("sentence_transformers")
    torch.manual_seed(0)
    scorer = MonoBERT(load_encoder("tiny"))
    torch.nn.init.normal_(scorer.head.weight)
    scorer.save(tmp_path / "whole", 100)
    expected = program_of(tmp_path / "whole")(PAIRS)
    for layout in ("hf", "sentence_transformers"):
        write_layout(tmp_path / layout, scorer, settings(), layout)
        cast(tmp_path / layout, dtype)
        weights = load_file(tmp_path / layout / "model.safetensors")
        assert {weight.dtype for weight in weights.values()} == {torch.bfloat16 if dtype == "bf16" else torch.float16}
        gap = np.abs(program_of(tmp_path / layout)(PAIRS) - expected).max()
        assert 0 < gap < (0.5 if dtype == "bf16" else 0.05)


def test_a_language_model_becomes_a_classifier_with_the_same_scores(tmp_path):
    scorer = LMReranker(load_encoder(str(folder_of(tmp_path / "base")))).eval()
    write_layout(tmp_path / "hf", scorer, settings(), "hf")
    write_layout(tmp_path / "words", scorer, settings(), "merged")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "words").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "words")
    expected = []
    for query, doc in LM_PAIRS:
        text = scorer.prompt.replace("{query}", query).replace("{doc}", doc)
        with torch.no_grad():
            logits = model(**tokenizer(text, return_tensors="pt")).logits[0, -1]
        expected.append(float(logits[scorer.word_ids[0]] - logits[scorer.word_ids[1]]))
    for name in ("hf", "words"):
        np.testing.assert_allclose(program_of(tmp_path / name)(LM_PAIRS), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["dpr", "two temperatures", "colbert"])
def test_bi_encoders_score_as_in_sentence_transformers(name, tmp_path):
    pytest.importorskip("sentence_transformers")
    torch.manual_seed(0)
    encoder = load_encoder("tiny")
    scorer = {
        "dpr": lambda: DPR(encoder, query_prompt="query: "),
        "two temperatures": lambda: DPR(encoder, tied=False, similarity="dot", temperature=2.0, learn_temperature=True),
        "colbert": lambda: ColBERT(encoder, projection=8, query_length=0),
    }[name]()
    write_layout(tmp_path / "model", scorer, settings(), "sentence_transformers")
    ours = Reranker(scorer, TextLimits(64, 64), accelerator="cpu").score(PAIRS)
    np.testing.assert_allclose(program_of(tmp_path / "model")(PAIRS), ours, rtol=1e-4, atol=1e-4)


def test_adapters_are_merged(tmp_path):
    cfg = lm_cfg(folder_of(tmp_path / "base"))
    scorer = trained(build_scorer(cfg)).eval()
    check_format(scorer, "merged", "float32")
    write_layout(tmp_path / "merged", *without_adapters(scorer, cfg), "merged")
    ours = Reranker(scorer, TextLimits(64, 64), accelerator="cpu", precision="32-true").score(LM_PAIRS)
    np.testing.assert_allclose(program_of(tmp_path / "merged")(LM_PAIRS), ours, rtol=0, atol=1e-4)


def test_a_text_with_braces_does_not_open_a_field():
    assert filled("{doc} | {query}!", "{doc}", "{query}") == "{query} | {doc}!"
