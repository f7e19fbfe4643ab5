"""Prompts with an instruction in monobert, dpr and colbert."""

import pytest
import torch

from ranker.checkpoint import load_scorer
from ranker.encoders.loading import load_encoder
from ranker.errors import ConfigError
from ranker.models.colbert import ColBERT
from ranker.models.dpr import DPR
from ranker.models.monobert import MonoBERT
from tests.unit.models.test_lm_reranker import batch_of
from tests.unit.models.test_pair_prompt import collator_of, rows_of

PROMPT = "{instruction} query: {query} [SEP] doc: {doc}"
PAIRS = [("how far", "the river runs a hundred miles"), ("a", "b c"), ("what is it?", "an apple, or a pear")]


def texts(instruction):
    return [PROMPT.format(instruction=instruction, query=query, doc=doc) for query, doc in PAIRS]


def test_a_monobert_s_row_is_the_filled_prompt(tmp_path):
    torch.manual_seed(0)
    scorer = MonoBERT(load_encoder("tiny"), prompt=PROMPT, instruction="find apples").eval()
    rows = rows_of(collator_of(scorer.encoder.tokenizer, scorer.prompt, PAIRS, tmp_path))
    assert rows == [scorer.encoder.tokenizer(text)["input_ids"] for text in texts("find apples")]
    layout = scorer.pair_layout()
    assert not layout.affixes[0].prefix and not layout.affixes[1].suffix  # WordPiece: stores hold texts alone
    with torch.no_grad():
        expected = scorer(batch_of([torch.tensor(row) for row in rows]))
    scorer.save(tmp_path / "model", 100)
    loaded = load_scorer(tmp_path / "model").eval()
    assert loaded.pair_layout() == layout
    with torch.no_grad():
        assert torch.equal(loaded(batch_of([torch.tensor(row) for row in rows])), expected)


def test_a_monobert_s_other_prompt_is_said(tmp_path, caplog):
    MonoBERT(load_encoder("tiny"), prompt=PROMPT, instruction="find apples").save(tmp_path, 100)
    assert MonoBERT(load_encoder(str(tmp_path))).prompt == PROMPT.replace("{instruction}", "find apples")
    assert "another prompt" not in caplog.text
    MonoBERT(load_encoder(str(tmp_path)), prompt=PROMPT, instruction="find pears")
    assert "was trained with another prompt, 'find apples query:" in caplog.text


@pytest.mark.parametrize("model", [DPR, ColBERT])
def test_a_bi_encoder_s_template_is_the_text_before(model, tmp_path):
    options = {} if model is DPR else {"query_length": 0}
    torch.manual_seed(0)
    template = "Instruct: {instruction} Query: {query}"
    scorer = model(load_encoder("tiny"), query_prompt=template, doc_prompt="Doc: {doc}", instruction="find", **options)
    assert scorer.query_prompt == "Instruct: find Query: " and scorer.doc_prompt == "Doc: "
    query, doc = scorer.layouts()
    tokenizer = scorer.encoder.tokenizer
    assert [*query.specials[0], *tokenizer("a")["input_ids"][1:]] == tokenizer("Instruct: find Query: a")["input_ids"]
    assert [*doc.specials[0], *tokenizer("a")["input_ids"][1:]] == tokenizer("Doc: a")["input_ids"]
    scorer.save(tmp_path, 100)
    assert load_scorer(tmp_path).layouts() == (query, doc)


@pytest.mark.parametrize("model", [DPR, ColBERT])
def test_faults_in_one_line(model):
    encoder = load_encoder("tiny")
    with pytest.raises(ConfigError, match=r"^model\.query_prompt: expected a template that ends with \{query\}, since"):
        model(encoder, query_prompt="{query} ?")
    with pytest.raises(
        ConfigError, match=r"^model\.doc_prompt: expected a template with \{doc\}, got '\{instruction\}'"
    ):
        model(encoder, doc_prompt="{instruction}", instruction="a")
    with pytest.raises(ConfigError, match=r"^model\.instruction: expected a query_prompt or doc_prompt with"):
        model(encoder, instruction="a")
