"""The encoder of a trained ranker, from its folder: its states against transformers' forward on the ranker's input."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification

from ranker.encoders.loading import load_encoder
from ranker.errors import CheckpointError
from ranker.lists.duo import Duo
from ranker.lists.listwise_lm import ListwiseLM
from ranker.lists.set_encoder import SetEncoder
from ranker.models.colbert import ColBERT
from ranker.models.dpr import DPR
from ranker.models.monobert import MonoBERT
from ranker.probing.examples import Span
from ranker.probing.sequences import Sequences
from ranker.probing.state_cache import StateCache
from ranker.probing.subject import Subject

CPU = torch.device("cpu")
PAIRS = [("who sold the violin", "Alice sold it in Paris."), ("a bird", "It sang, and sang again.")]


def encoder(seed: int = 0):
    torch.manual_seed(seed)
    return load_encoder("tiny")


def read(folder: Path, scorer, tmp_path: Path, **lengths: int) -> tuple[Subject, Sequences, Tensor]:
    """Save a ranker, take its encoder out of the folder, and cache the states of what it reads."""
    scorer.save(folder, max_tokens=64, **lengths)
    target = f"{type(scorer).__module__}.{type(scorer).__name__}"
    (folder / "ranker.yaml").write_text(f"model: {{_target_: {target}}}\n")
    subject = Subject.of_checkpoint(folder, "best")
    made = Sequences.of(
        PAIRS, subject.encoder.tokenizer, subject.reads, subject.encoder.max_tokens, 20, 40, subject.layouts
    )
    return subject, made, StateCache(tmp_path / "cache", dtype="float32").states(subject, made, [0, 1, 2], CPU).data


def span_states(made: Sequences, states: Tensor, pair: int, side: str) -> Tensor:
    found = made.tokens_of(pair, Span(side))
    assert found is not None
    return states[:, found[0] : found[1]]


def test_cross_encoder_reads_the_pair(tmp_path: Path) -> None:
    subject, made, states = read(tmp_path / "cross", MonoBERT(encoder()), tmp_path)
    assert (subject.name, subject.reads, subject.num_states) == ("MonoBERT cross", "pairs", 3)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "cross").eval()
    for number, (query, doc) in enumerate(PAIRS):
        inputs = subject.encoder.tokenizer(query, doc, return_tensors="pt")
        with torch.no_grad():
            hidden = torch.stack(model(**inputs, output_hidden_states=True).hidden_states)[:, 0]
        length = len(subject.encoder.tokenizer(query, add_special_tokens=False)["input_ids"])
        assert_close(span_states(made, states, number, "query"), hidden[:, 1 : 1 + length], rtol=0, atol=2e-6)
        assert_close(span_states(made, states, number, "doc"), hidden[:, 2 + length : -1], rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("make", "name"), [(SetEncoder, "tiny"), (ListwiseLM, "tiny_lm"), (Duo, "tiny"), (Duo, "tiny_t5")]
)
def test_a_model_of_lists_reads_a_pair(make: Any, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    scorer = make(load_encoder(name))
    subject, made, states = read(tmp_path / "list", scorer, tmp_path)
    assert subject.reads == "pairs" and "without the other docs of a list" in caplog.text
    for number in range(len(PAIRS)):
        for side in ("query", "doc"):
            found = span_states(made, states, number, side)
            assert found.shape[1] and torch.isfinite(found).all() and (found[0] != found[-1]).any()


def test_bi_encoder_reads_each_text_with_its_own_prompt_and_encoder(tmp_path: Path) -> None:
    scorer = DPR(encoder(), tied=False, query_prompt="ask: ")
    with torch.no_grad():
        scorer.doc_encoder.model.encoder.layer[0].output.LayerNorm.weight.fill_(1.5)
    subject, made, states = read(tmp_path / "bi", scorer, tmp_path, max_query_tokens=32)
    assert (subject.name, subject.reads) == ("DPR bi", "texts")
    for number, pair in enumerate(PAIRS):
        for side, text, own in (("query", f"ask: {pair[0]}", scorer.encoder), ("doc", pair[1], scorer.doc_encoder)):
            inputs = subject.encoder.tokenizer(text, return_tensors="pt")
            with torch.no_grad():
                hidden = torch.stack(own.model.eval()(**inputs, output_hidden_states=True).hidden_states)[:, 0]
            first = (
                1
                if side == "doc"
                else 1 + len(subject.encoder.tokenizer("ask: ", add_special_tokens=False)["input_ids"])
            )
            assert_close(span_states(made, states, number, side), hidden[:, first:-1], rtol=0, atol=2e-6)
    assert subject.fingerprint.count("+") == 1, "both encoders count"
    controls = subject.randomised(0)
    assert controls.frozen_docs is not controls.frozen
    assert controls.layouts == subject.layouts


def test_late_interaction_query_is_read_beside_its_filling(tmp_path: Path) -> None:
    scorer = ColBERT(encoder(), projection=8, query_prompt="", doc_prompt="", query_length=24)
    subject, made, states = read(tmp_path / "late", scorer, tmp_path, max_query_tokens=32)
    tokenizer = subject.encoder.tokenizer
    for number, (query, _) in enumerate(PAIRS):
        ids = tokenizer(query)["input_ids"]
        filled = torch.tensor([ids + [tokenizer.mask_token_id] * (24 - len(ids))])
        mask = torch.tensor([[1] * len(ids) + [0] * (24 - len(ids))])
        with torch.no_grad():
            hidden = torch.stack(
                scorer.encoder.model.eval()(
                    input_ids=filled, attention_mask=mask, output_hidden_states=True
                ).hidden_states
            )
        own = span_states(made, states, number, "query")
        assert own.shape[1] == len(ids) - 2, "the filling is no part of the query's span"
        assert_close(own, hidden[:, 0, 1 : len(ids) - 1], rtol=0, atol=2e-6)


def test_a_folder_without_a_ranker_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a run folder or a model folder"):
        Subject.of_checkpoint(tmp_path, "best")
