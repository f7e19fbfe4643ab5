"""The loss of each objective: by hand where all logits are equal, and computed again by transformers' own models."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import BertConfig, BertForMaskedLM, BertModel

from ranker.encoders.encoder import Encoder
from ranker.encoders.loading import load_encoder
from ranker.errors import CheckpointError, ConfigError
from ranker.pretraining.masking import Masking
from ranker.pretraining.module import MaskedModel
from ranker.pretraining.objectives.electra import ELECTRA, drawn
from ranker.pretraining.objectives.inverse_cloze import InverseCloze
from ranker.pretraining.objectives.mlm import MLM
from ranker.pretraining.objectives.prop import PROP
from ranker.pretraining.steps import PretrainData
from ranker.training.score_matrix import loss_of_matrix
from tests.unit.pretraining.test_draws import DOCS, TOKENIZER, texts_of

WORDS = 1 + max(TOKENIZER.get_vocab().values())


def encoder(**options):
    """A random BERT of 3 layers in float64 without dropout."""
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **options,
    )  # fmt: skip
    return Encoder(BertModel(config, add_pooling_layer=False), TOKENIZER)


def step_of(objective, groups=4, **limits):
    draws = objective.draws(texts_of(**limits))
    return draws.step(0, np.arange(groups))


def padded(batch):
    """The rows of a batch as padded inputs of transformers."""
    lengths = batch.cu_seqlens.diff().tolist()
    pad = lambda values: torch.nn.utils.rnn.pad_sequence(values.split(lengths), batch_first=True)  # noqa: E731
    return {
        "input_ids": pad(batch.tokens),
        "token_type_ids": pad(batch.segments),
        "attention_mask": pad(torch.ones_like(batch.tokens)),
    }


def labels_of(batch, hidden):
    """transformers' labels: the hidden words at their places, -100 elsewhere."""
    labels = torch.full_like(batch.tokens, -100)
    labels[hidden.positions] = hidden.words
    return torch.nn.utils.rnn.pad_sequence(
        labels.split(batch.cu_seqlens.diff().tolist()), batch_first=True, padding_value=-100
    )


def saved(model, folder):
    """The model that transformers loads from the folder that a pretraining leaves."""
    model.save(folder, 512)
    return BertForMaskedLM.from_pretrained(folder, dtype=torch.float64).eval()


@torch.no_grad()
def test_masked_words_equal_transformers_loss(tmp_path):
    model = MLM().model(encoder()).double().eval()
    step = step_of(MLM())
    batch = step.batch(np.arange(4))
    expected = saved(model, tmp_path)(**padded(batch.docs), labels=labels_of(batch.docs, batch.hidden)).loss
    assert model(batch).item() == pytest.approx(expected.item(), rel=1e-12)
    # the parts of a step that is split sum to the whole
    parts = [model(step.batch(np.array(chosen))).item() for chosen in ([2], [0, 1, 3])]
    assert sum(parts) == pytest.approx(expected.item(), rel=1e-12)


def zero(*modules):
    for module in modules:
        for weight in module.parameters():
            weight.data.zero_()


@torch.no_grad()
def test_losses_by_hand_where_a_model_knows_nothing():
    known_nothing = math.log(WORDS)
    for objective, by_hand in (
        (MLM(), known_nothing),
        (ELECTRA(weight=50.0), known_nothing + 50 * math.log(2)),
        (PROP(margin=1.5), 1.5 + known_nothing),
    ):
        model = objective.model(encoder(tie_word_embeddings=False)).double().eval()
        zero(model.head, *(getattr(model, name) for name in ("score", "found") if hasattr(model, name)))
        assert model(step_of(objective).batch(np.arange(4))).item() == pytest.approx(by_hand, rel=1e-9), objective


@torch.no_grad()
def test_representative_words_equal_a_plain_loop(tmp_path):
    model = PROP(margin=0.3).model(encoder()).double().eval()
    model.score.weight.mul_(20)
    step = step_of(PROP(), longest=60)
    batch = step.batch(np.arange(4))
    whole = saved(model, tmp_path)
    inputs = padded(batch.pairs)
    masked = whole(**inputs, labels=labels_of(batch.pairs, batch.hidden)).loss.item()
    scores = (whole.bert(**inputs).last_hidden_state[:, 0] @ model.score.weight[0] + model.score.bias).tolist()
    gaps = []
    for group, better in enumerate(step.better.tolist()):
        if better:
            first, second = scores[2 * group : 2 * group + 2] if better > 0 else scores[2 * group : 2 * group + 2][::-1]
            gaps.append(max(0.0, 0.3 - first + second))
    assert len(gaps) == 3 and len(set(gaps)) == 3  # one block has two sets of the same likelihood
    assert model(batch).item() == pytest.approx(sum(gaps) / 3 + masked, rel=1e-12)
    parts = [model(step.batch(np.array(chosen))).item() for chosen in ([3], [0], [1, 2])]
    assert sum(parts) == pytest.approx(sum(gaps) / 3 + masked, rel=1e-12)


@torch.no_grad()
def test_replaced_tokens_equal_transformers_models():
    model = ELECTRA(weight=7.0).model(encoder()).double().eval()
    assert model.generator.num_layers == 1
    assert model.generator.model.get_input_embeddings() is model.encoder.model.get_input_embeddings()
    model.head.whole.cls.predictions.bias.normal_(std=3)  # so that some drawn words are right and most are not
    step = step_of(ELECTRA(), longest=60)
    batch = step.batch(np.arange(4))
    rows, hidden = batch.docs, batch.hidden
    assert rows.tokens[hidden.positions].eq(TOKENIZER.mask_token_id).all()
    states = model.generator.model(**padded(rows)).last_hidden_state
    flat = states[padded(rows)["attention_mask"].bool()]
    head = model.head.whole.cls.predictions
    embeddings = model.encoder.model.get_input_embeddings().weight
    logits = head.transform(flat[hidden.positions]) @ embeddings.T + head.bias
    expected = functional.cross_entropy(logits, hidden.words).item()
    tokens = rows.tokens.clone()
    for i, place in enumerate(hidden.positions.tolist()):  # the first word at which the distribution passes the number
        passed, word = 0.0, -1
        shares = torch.softmax(logits[i], 0).tolist()
        while passed <= hidden.draws[i].item():
            word += 1
            passed += shares[word]
        tokens[place] = word
    originals = rows.tokens.clone()
    originals[hidden.positions] = hidden.words
    replaced = tokens.ne(originals)
    assert 0 < replaced.sum() <= len(hidden.words)
    rows.tokens = tokens
    found = model.found(model.encoder.model(**padded(rows)).last_hidden_state)[padded(rows)["attention_mask"].bool()]
    p = torch.sigmoid(found[:, 0])
    cost = -torch.where(replaced, p, 1 - p).log().mean().item()
    assert model(step.batch(np.arange(4))).item() == pytest.approx(expected + 7 * cost, rel=1e-9)


def test_the_generator_gets_no_gradient_from_the_encoders_loss():
    model = ELECTRA(weight=1e6).model(encoder()).double()
    batch = step_of(ELECTRA()).batch(np.arange(4))
    model(batch).backward()
    layer = model.generator.model.encoder.layer[0].output.dense.weight
    large = layer.grad.clone()
    model.zero_grad()
    model.weight = 1.0
    model(batch).backward()
    assert torch.equal(large, layer.grad)


def test_drawn_words_follow_the_distribution():
    logits = torch.tensor([0.1, 0.2, 0.7]).log().repeat(3000, 1)
    words = drawn(logits, torch.rand(3000, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    assert words.bincount().div(3000).tolist() == pytest.approx([0.1, 0.2, 0.7], abs=0.03)


@torch.no_grad()
def test_inverse_cloze_equals_a_plain_loop():
    objective = InverseCloze(pooling="mean", temperature=0.5)
    model = objective.model(encoder()).double().eval()
    step = step_of(objective, groups=4, docs=[*DOCS, "Sun rose. Wind blew hard. Stars came out."], longest=60)
    batch = step.batch(np.arange(4))
    vectors = []
    for part in (batch.queries, batch.docs):
        inputs = padded(part)
        weights = inputs["attention_mask"].unsqueeze(2)
        states = model.encoder.model(**inputs).last_hidden_state
        vectors.append(functional.normalize((states * weights).sum(1) / weights.sum(1), dim=1))
    costs = []
    for i in range(4):
        scores = [(vectors[0][i] @ vectors[1][j]).item() / 0.5 for j in range(4) if step.contrast.mask[i, j]]
        own = (vectors[0][i] @ vectors[1][i]).item() / 0.5
        costs.append(math.log(sum(map(math.exp, scores))) - own)
    module = objective.module(model)
    scores = model.score_block(model.encode_queries(batch.queries), model.encode_docs(batch.docs))
    loss, *_ = loss_of_matrix(module.loss, scores, step.contrast, symmetric=module.symmetric)
    assert loss.item() == pytest.approx(sum(costs) / 4, rel=1e-12)


def test_what_the_pretraining_leaves_is_an_encoder_with_the_same_states(tmp_path):
    batch = step_of(MLM()).batch(np.arange(2)).docs
    for objective in (MLM(), PROP(), ELECTRA()):
        model = objective.model(encoder()).eval()
        torch.nn.init.normal_(model.head.whole.cls.predictions.bias)
        folder = tmp_path / type(objective).__name__
        model.save(folder, 512)
        loaded = load_encoder(str(folder)).eval()
        with torch.no_grad():
            assert torch.allclose(loaded(batch), model.encoder(batch), atol=1e-6)
    again = MaskedModel(load_encoder(str(tmp_path / "PROP")))  # with the head that was trained
    stored = load_file(tmp_path / "PROP/model.safetensors")["cls.predictions.bias"]
    assert stored.abs().sum() > 0
    assert torch.equal(again.head.whole.cls.predictions.bias, stored)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"objective\.share: expected a share above 0"):
        Masking(share=0.0)
    with pytest.raises(ConfigError, match="sum to at most 1"):
        MLM(masked=0.9, random=0.2)
    with pytest.raises(ConfigError, match="generator_layers: expected 1 to 3"):
        ELECTRA(generator_layers=4).model(encoder())
    with pytest.raises(CheckpointError, match="masked language model"):
        MLM().model(load_encoder("tiny_lm"))
    with pytest.raises(ConfigError, match=r"batch.max_tokens: expected at least \d+"):
        PretrainData(MLM().draws(texts_of()), 4, max_tokens=10)
    with pytest.raises(ConfigError, match="long enough for this objective"):
        PretrainData(InverseCloze().draws(texts_of(["one sentence"])), 4)
    with pytest.raises(ConfigError, match="max_query_tokens: expected at most"):
        texts_of(query=508).fitting(512, pairs=True)
