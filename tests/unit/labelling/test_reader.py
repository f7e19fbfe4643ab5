"""A reader's log-likelihoods equal transformers' for each text alone, and a ranker learns from them alone."""

import pytest
import torch
from transformers import LlamaForCausalLM, T5ForConditionalGeneration

from ranker.data.collection import Candidates, Collection, Doc, MemoryDocs
from ranker.encoders.loading import load_encoder
from ranker.encoders.tiny import tiny_lm_config, tiny_lm_tokenizer, tiny_t5_config, tiny_t5_tokenizer
from ranker.errors import ConfigError, DataError
from ranker.evaluation.scoring import Devices
from ranker.labelling.reader import Passage, Reader, read_answers, read_missing
from ranker.labelling.shards import ScoreShards
from ranker.losses.marginal_likelihood import MarginalLikelihood
from ranker.models.monobert import MonoBERT
from tests.unit.models.test_lm_reranker import batch_of

CPU = Devices(torch.device("cpu"))
PROMPT = "{doc} [SEP] {query} ?"
TEXTS = [("how far", "the river runs", "a hundred miles"), ("a", "b c d e f", "g"), ("what", "an apple {query}", "x y")]


def reader_of(path, model_class, config, tokenizer):
    torch.manual_seed(0)
    model = model_class(config)
    for weight in model.parameters():
        weight.data += torch.randn_like(weight) * 0.1
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return Reader.load(str(path), PROMPT, (64, 448)), model.eval()


def test_a_language_model_s_scores_are_those_of_each_text_alone(tmp_path):
    reader, model = reader_of(tmp_path, LlamaForCausalLM, tiny_lm_config(), tiny_lm_tokenizer())
    expected = []
    for query, doc, answer in TEXTS:
        start = len(reader.tokenizer(f"{doc} [SEP] {query} ?")["input_ids"])
        whole = reader.tokenizer(f"{doc} [SEP] {query} ? {answer}")["input_ids"]
        with torch.no_grad():
            log_p = model(input_ids=torch.tensor([whole])).logits[0].log_softmax(1)
        expected.append(sum(log_p[i - 1, whole[i]].item() for i in range(start, len(whole))))
    passages = [reader.passage(*texts) for texts in TEXTS]
    for max_tokens in (1, 1000):  # one by one, and padded together
        assert reader.scores(passages, CPU, max_tokens).tolist() == pytest.approx(expected, abs=1e-4)


def test_a_sequence_to_sequence_model_s_scores_are_its_own_loss(tmp_path):
    reader, model = reader_of(tmp_path, T5ForConditionalGeneration, tiny_t5_config(), tiny_t5_tokenizer())
    expected = []
    for query, doc, answer in TEXTS:
        prompt = reader.tokenizer(f"{doc} [SEP] {query} ?", return_tensors="pt")["input_ids"]
        labels = reader.tokenizer(answer, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            expected.append(-model(input_ids=prompt, labels=labels).loss.item() * labels.shape[1])
    passages = [reader.passage(*texts) for texts in TEXTS]
    for max_tokens in (1, 1000):
        assert reader.scores(passages, CPU, max_tokens).tolist() == pytest.approx(expected, abs=1e-4)


def test_long_texts_are_cut_and_fields_in_texts_are_text(tmp_path):
    tokenizer = tiny_lm_tokenizer()
    reader = Reader(LlamaForCausalLM(tiny_lm_config()), tokenizer, PROMPT, (5, 3))
    ids = tokenizer("a b c [SEP] {doc} d ?")["input_ids"]
    assert reader.passage("{doc} d e f", "a b c d e", "x").prompt == ids


def copying_reader():
    """A language model with weights set by hand: words that it has read are more likely than others.

    Attention is uniform, since queries and keys are 0; the state is the mean of all embeddings; the output matrix is
    that of the embeddings.
    """
    torch.manual_seed(0)
    config = tiny_lm_config()
    config.hidden_size, config.num_key_value_heads, config.num_hidden_layers = 64, 4, 1
    config.head_dim = 16
    model = LlamaForCausalLM(config)
    layer = model.model.layers[0]
    with torch.no_grad():
        for weight in (layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight, layer.mlp.down_proj.weight):
            weight.zero_()
        layer.self_attn.v_proj.weight.copy_(torch.eye(64))
        layer.self_attn.o_proj.weight.copy_(10 * torch.eye(64))
        model.model.embed_tokens.weight.normal_()
        model.lm_head.weight.copy_(model.model.embed_tokens.weight / 4)
    return Reader(model, tiny_lm_tokenizer(), PROMPT, (64, 448))


def test_a_ranker_learns_from_the_reader_alone_which_doc_helps(tmp_path):
    """Queries share no word with docs and have no judgements; only the reader's likelihood of the answer teaches."""
    answers = {f"q{i}": word for i, word in enumerate("abcd")}
    docs = {f"d{i}": text for i, text in enumerate(["a e f", "b g h", "c i j", "d k l"])}
    collection = Collection(
        "planted",
        MemoryDocs(Doc(name, text) for name, text in docs.items()),
        {f"q{i}": f"{i + 5}" for i in range(4)},
        {},
        Candidates.from_lists((f"q{i}", list(docs), [4.0, 3.0, 2.0, 1.0]) for i in range(4)),
    )
    shards = ScoreShards.open(tmp_path, collection.candidates, 3, {}, "reader")
    read_missing(copying_reader(), shards, collection, answers, CPU, 200)
    labels = torch.tensor(shards.read()).view(4, 4)
    assert labels.argmax(1).tolist() == [0, 1, 2, 3] and labels[0, 0] > labels[0, 1:].max() + 2
    torch.manual_seed(0)
    scorer = MonoBERT(load_encoder("tiny", dropout=0.0, attention_dropout=0.0))
    tokenizer = scorer.encoder.tokenizer
    rows = [torch.tensor(tokenizer(q, d)["input_ids"]) for q in collection.queries.values() for d in docs.values()]
    batch, mask, loss = batch_of(rows), torch.ones(4, 4, dtype=torch.bool), MarginalLikelihood()
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=1e-3)
    values = []
    for _ in range(200):
        value = loss(scorer(batch).view(4, 4), labels, mask)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        values.append(value.item())
        if values[-1] < 0.05:
            break
    assert values[0] > 0.5 and values[-1] < 0.1
    with torch.no_grad():
        assert scorer(batch).view(4, 4).argmax(1).tolist() == [0, 1, 2, 3]


def test_faults_in_one_line(tmp_path):
    model, tokenizer = LlamaForCausalLM(tiny_lm_config()), tiny_lm_tokenizer()
    with pytest.raises(ConfigError, match=r"^reader\.prompt: expected a template with \{doc\} once, got '\{query\}'$"):
        Reader(model, tokenizer, "{query}", (1, 1))
    with pytest.raises(ConfigError, match=r"^reader\.name: expected a language model or a sequence-to-sequence model"):
        Reader.load(str(tmp_path), PROMPT, (1, 1))
    (tmp_path / "answers.tsv").write_text("q1\tyes\n")
    with pytest.raises(
        DataError, match=r"answers\.tsv: expected an answer for each of 2 queries, got none for 1, such"
    ):
        read_answers(tmp_path / "answers.tsv", ["q1", "q2"])
    assert len(Passage([1, 2], [3])) == 3
