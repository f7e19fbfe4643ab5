"""Scores of a language model as a reranker, its two heads, and its folder in transformers."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaForCausalLM,
)

from ranker.checkpoint import load_scorer
from ranker.data.collection import Collection, Doc, MemoryDocs, Splits
from ranker.data.datamodule import BatchOptions, RankData
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.encoders.loading import load_encoder
from ranker.encoders.shared_prefix import SharedPrefixes
from ranker.encoders.tiny import tiny_lm_config, tiny_lm_tokenizer
from ranker.errors import CheckpointError, ConfigError
from ranker.models.lm_reranker import DEFAULT_INSTRUCTION, DEFAULT_PROMPT, LMReranker
from ranker.training.soundness import check_scores
from ranker.types import RankBatch, TokenBatch

PAIRS = [("how far", "the river runs a hundred miles"), ("a", "b"), ("what is it", "an apple, or a pear")]


def folder_of(path, config=None, model_class=LlamaForCausalLM):
    """A folder of a random language model whose weights matter."""
    torch.manual_seed(0)
    model = model_class(config or tiny_lm_config())
    for weight in model.parameters():
        weight.data += torch.randn_like(weight) * 0.2
    model.save_pretrained(path)
    tiny_lm_tokenizer().save_pretrained(path)
    return path


def filled_rows(scorer):
    """The ids of each filled prompt."""
    texts = [scorer.prompt.replace("{query}", query).replace("{doc}", doc) for query, doc in PAIRS]
    return [torch.tensor(scorer.encoder.tokenizer(text)["input_ids"]) for text in texts]


def batch_of(rows):
    lengths = torch.tensor([0, *map(len, rows)])
    tokens = torch.cat(rows)
    pairs = TokenBatch(tokens, torch.zeros_like(tokens), lengths.cumsum(0).int(), int(lengths.max()))
    mask = torch.ones(len(rows), 1, dtype=torch.bool)
    return RankBatch(torch.zeros(len(rows), 1), mask, torch.arange(len(rows)), 1.0, pairs)


def scores(scorer):
    with torch.no_grad():
        return scorer.eval()(batch_of(filled_rows(scorer)))[:, 0]


@pytest.mark.parametrize("tied", [False, True])
def test_the_saved_folder_is_a_language_model_of_transformers(tied, tmp_path):
    config = tiny_lm_config()
    config.tie_word_embeddings = tied
    scorer = LMReranker(load_encoder(str(folder_of(tmp_path / "base", config))))
    assert scorer.head.tied is tied
    # some steps, so that the rows of both words differ from the loaded ones
    optimizer = torch.optim.SGD(scorer.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        scorer(batch_of(filled_rows(scorer)))[0, 0].backward()
        optimizer.step()
    expected = scores(scorer)
    scorer.save(tmp_path / "model", 200)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    stored = json.loads((tmp_path / "model/lm_reranker.json").read_text())
    prompt = json.loads((tmp_path / "model/prompt.json").read_text())["prompt"]
    yes, no = (tokenizer(stored[key], add_special_tokens=False)["input_ids"][0] for key in ("yes_word", "no_word"))
    for (query, doc), score in zip(PAIRS, expected, strict=True):
        text = prompt.replace("{query}", query).replace("{doc}", doc)
        with torch.no_grad():
            logits = whole(**tokenizer(text, return_tensors="pt")).logits[0, -1]
        assert float(logits[yes] - logits[no] - score) == pytest.approx(0, abs=1e-5 * max(1, abs(float(score))))
    before = LlamaForCausalLM.from_pretrained(tmp_path / "base").lm_head.weight
    others = [i for i in range(len(tokenizer)) if i not in (yes, no)]
    assert torch.equal(whole.lm_head.weight[others], before[others]) is not tied
    loaded = load_scorer(tmp_path / "model")
    assert isinstance(loaded, LMReranker) and torch.equal(scores(loaded), expected)


def test_a_linear_head_is_a_sequence_classification_model(tmp_path):
    scorer = LMReranker(
        load_encoder(str(folder_of(tmp_path / "base"))), head="linear", prompt="query: {query} doc: {doc}"
    )
    expected = scores(scorer)
    scorer.save(tmp_path / "model", 200)
    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        theirs = torch.stack([whole(input_ids=row.unsqueeze(0)).logits[0, 0] for row in filled_rows(scorer)])
    torch.testing.assert_close(expected, theirs, rtol=0, atol=1e-6)
    assert torch.equal(scores(load_scorer(tmp_path / "model")), expected)


def test_gemma_2_caps_the_logits(tmp_path):
    sizes = tiny_lm_config().to_dict()
    config = Gemma2Config(
        **{key: sizes[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "intermediate_size", "max_position_embeddings")}, head_dim=8,
        final_logit_softcapping=0.5,
        pad_token_id=0, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    scorer = LMReranker(load_encoder(str(folder_of(tmp_path, config, Gemma2ForCausalLM))))
    whole = Gemma2ForCausalLM.from_pretrained(tmp_path).eval()
    yes, no = scorer.word_ids
    with torch.no_grad():
        logits = torch.stack([whole(input_ids=row.unsqueeze(0)).logits[0, -1] for row in filled_rows(scorer)])
    assert logits.abs().max() <= 0.5 and logits[:, [yes, no]].abs().max() > 0.3
    torch.testing.assert_close(scores(scorer), logits[:, yes] - logits[:, no], rtol=0, atol=1e-6)


def test_attention_in_both_directions(tmp_path):
    """`encoder.causal=false`: states are those of transformers with a mask of ones, packed and padded."""
    folder = folder_of(tmp_path / "base")
    scorer = LMReranker(load_encoder(str(folder), causal=False), head="linear").eval()
    rows = filled_rows(scorer)
    model = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager").model.eval()
    with torch.no_grad():
        states = []
        for row in rows:
            mask = torch.zeros(1, 1, len(row), len(row))  # added to the logits
            states.append(model(input_ids=row.unsqueeze(0), attention_mask=mask).last_hidden_state[0])
        ours = scorer.encoder(batch_of(rows).pairs)
    torch.testing.assert_close(ours, torch.cat(states), rtol=0, atol=1e-5)
    padded = load_encoder(str(folder), causal=False, ragged=False).eval()
    with torch.no_grad():
        torch.testing.assert_close(padded(batch_of(rows).pairs), torch.cat(states), rtol=0, atol=1e-5)
    expected = scores(scorer)
    scorer.save(tmp_path / "model", 200)
    assert torch.equal(scores(load_scorer(tmp_path / "model")), expected)


def test_the_prompt_of_the_training_is_used_and_another_is_said(tmp_path, caplog):
    scorer = LMReranker(load_encoder("tiny_lm"), prompt="{query} is {doc} ?")
    scorer.save(tmp_path, 200)
    again = LMReranker(load_encoder(str(tmp_path)))
    assert again.prompt == "{query} is {doc} ?" and "another prompt" not in caplog.text
    other = LMReranker(load_encoder(str(tmp_path)), prompt="{doc} of {query} ?")
    assert other.prompt == "{doc} of {query} ?"
    assert "was trained with another prompt, '{query} is {doc} ?'; it gets '{doc} of {query} ?'" in caplog.text
    assert LMReranker(load_encoder("tiny_lm")).prompt == DEFAULT_PROMPT.replace("{instruction}", DEFAULT_INSTRUCTION)


def test_the_doc_may_come_first_and_scores_depend_on_it():
    torch.manual_seed(0)
    for prompt in ("Doc: {doc} query: {query} is it ?", "{query} {doc} :"):
        check_scores(LMReranker(load_encoder("tiny_lm"), prompt=prompt))


def test_faults_in_one_line(tmp_path):
    encoder = load_encoder("tiny_lm")
    with pytest.raises(ConfigError, match=r"^model\.yes_word: expected a word that is one token after the prompt, got"):
        LMReranker(encoder, yes_word="relevant")
    with pytest.raises(ConfigError, match=r"^model\.no_word: expected another word than model\.yes_word, got 'Yes'$"):
        LMReranker(encoder, no_word="Yes")
    with pytest.raises(ConfigError, match=r"^model\.head: expected yes_no or linear; got 'native'$"):
        LMReranker(encoder, head="native")
    with pytest.raises(ConfigError, match=r"^model\.prompt: expected a template with \{doc\} once, got it 0 times"):
        LMReranker(encoder, prompt="{query}")
    with pytest.raises(
        CheckpointError, match=r"^model\.head: expected linear, since transformers has no language model"
    ):
        LMReranker(load_encoder(str(_without_language_model(tmp_path))), yes_word="no", no_word="a")


def _without_language_model(path):
    from transformers import DistilBertConfig, DistilBertModel

    tokenizer = tiny_lm_tokenizer()
    DistilBertModel(
        DistilBertConfig(vocab_size=len(tokenizer), n_layers=1, dim=32, n_heads=2, hidden_dim=32)
    ).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_head_reads_one_state_per_row():
    """No tensor [tokens, vocabulary] exists: the output layer has two rows, and sees one state of each row."""
    scorer = LMReranker(load_encoder("tiny_lm"))
    seen = []
    part = scorer.head.whole.get_submodule("lm_head")
    part.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0].shape, output.shape)))
    scores(scorer)
    assert [(tuple(a), tuple(b)) for a, b in seen] == [((3, 1, 32), (3, 1, 2))]


def test_a_group_s_size_counts_what_its_docs_share_once(tmp_path):
    scorer = LMReranker(load_encoder("tiny_lm", share_prefix=True), yes_word="a", no_word="b")
    docs = MemoryDocs([Doc(f"d{i}", text) for i, text in enumerate(("river", "apple pear", "miles", "pear"))])
    collection = Collection("own", docs, {"q0": "how far", "q1": "what is it, an apple"}, {})
    made = {}
    for by_query in (True, False):
        inputs = replace(ScorerInputs.of(scorer), by_query=by_query)
        data = RankData(Splits(None, None, {}), inputs, BatchOptions(), TextLimits(8, 20), cache_dir=tmp_path)
        made[by_query] = data.collator(collection)
    queries, rows = np.array([0, 1]), np.array([[0, 1, 2], [3, 2, -1]])
    batch = made[True].collate(queries, rows, np.zeros((2, 3)), queries, 1.0)
    whole, shared = (made[by_query].group_sizes(queries, rows) for by_query in (False, True))
    assert whole.sum() == batch.pairs.num_tokens
    computed = SharedPrefixes.of(batch.pairs, [3, 2]).batch.num_tokens
    assert computed <= shared.sum() < whole.sum()
    between = len(scorer.encoder.tokenizer("\nDocument: ")["input_ids"])  # shared, too, and not counted on
    assert shared.sum() - computed <= 3 * (between + 2)
