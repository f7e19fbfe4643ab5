"""Trained heads of other programs' cross-encoders are kept; heads that do not fit are dropped with a warning."""

import copy
import json
import logging
import shutil

import huggingface_hub
import pytest
import torch
import transformers

from ranker.checkpoint import load_scorer
from ranker.encoders.loading import load_encoder
from ranker.errors import CheckpointError, ConfigError
from ranker.models.monobert import MonoBERT
from tests.zoo.rows import SAME_QUERY, encode, rank_batch

pytest.importorskip("sentence_transformers")
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling


def trained(folder, out, num_labels=1):
    """A cross-encoder of sentence-transformers with a head far from its start, and its logits of some pairs."""
    torch.manual_seed(1)
    model = CrossEncoder(str(folder), num_labels=num_labels, device="cpu", activation_fn=torch.nn.Identity())
    base = model[0].model.base_model
    inside = {id(weight) for weight in base.parameters()}
    with torch.no_grad():
        for weight in model[0].model.parameters():
            if id(weight) not in inside:
                weight.normal_(0, 0.3)
    model.save_pretrained(str(out))
    return torch.as_tensor(model.predict(SAME_QUERY, batch_size=1, show_progress_bar=False)).float()


def scores_of(scorer, pairs=SAME_QUERY):
    with torch.no_grad():
        return scorer.eval()(rank_batch(encode(scorer.encoder.tokenizer, pairs)))[0]


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "electra", "deberta-v3", "modernbert", "gte"])
@pytest.mark.parametrize("modules", [True, False])
def test_a_trained_head_continues_by_either_key(family, modules, checkpoint, tmp_path):
    expected = trained(checkpoint(family), tmp_path / "theirs")
    if not modules:  # as sentence-transformers 5 and the hub have it
        (tmp_path / "theirs/modules.json").unlink()
        (tmp_path / "theirs/config_sentence_transformers.json").unlink()
    for scorer in (MonoBERT(load_encoder(str(tmp_path / "theirs"))), load_scorer(tmp_path / "theirs")):
        torch.testing.assert_close(scores_of(scorer), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_two_labels_continue_as_log_odds(family, checkpoint, tmp_path):
    logits = trained(checkpoint(family), tmp_path / "theirs", num_labels=2)
    scorer = MonoBERT(load_encoder(str(tmp_path / "theirs")))
    torch.testing.assert_close(scores_of(scorer), logits[:, 1] - logits[:, 0], rtol=0, atol=1e-5)


def test_a_head_of_three_labels_is_dropped_with_a_warning(checkpoint, tmp_path, caplog):
    trained(checkpoint("modernbert"), tmp_path / "theirs", num_labels=3)
    with caplog.at_level(logging.WARNING):
        scorer = MonoBERT(load_encoder(str(tmp_path / "theirs")))
    assert "its head of 3 labels is dropped" in caplog.text and scorer.head.whole.num_labels == 1
    with pytest.raises(CheckpointError, match="expected a head of 1 or 2 labels, got 3"):
        load_scorer(tmp_path / "theirs")


@pytest.mark.parametrize("no", [None, 12])
def test_the_logit_of_a_word_continues(no, checkpoint, tmp_path):
    folder = checkpoint("qwen2")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    modules = [Transformer(str(folder), transformer_task="text-generation"), LogitScore(11, no)]
    CrossEncoder(modules=modules, device="cpu").save_pretrained(str(tmp_path / "theirs"))
    scorer = MonoBERT(load_encoder(str(tmp_path / "theirs")))
    rows = encode(scorer.encoder.tokenizer, SAME_QUERY)
    with torch.no_grad():
        logits = torch.stack([model(input_ids=row["input_ids"]).logits[0, -1] for row in rows])
    expected = logits[:, 11] - (0 if no is None else logits[:, no])
    torch.testing.assert_close(scores_of(scorer), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(scores_of(load_scorer(tmp_path / "theirs")), expected, rtol=0, atol=1e-4)
    theirs = CrossEncoder(str(tmp_path / "theirs"), device="cpu", activation_fn=torch.nn.Identity())
    predicted = torch.from_numpy(theirs.predict(SAME_QUERY))
    assert not scorer.pair_layout().specials[1], "the tokenizer puts nothing between query and doc"
    for one in (scorer, load_scorer(tmp_path / "theirs")):
        torch.testing.assert_close(scores_of(one), predicted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("labels", [1, 2])
def test_dense_norm_and_dense_with_and_without_biases_continue(labels, biased, checkpoint, tmp_path):
    """A training in sentence-transformers gives its LayerNorm a bias, which ModernBERT's own norm does not have."""
    torch.manual_seed(2)
    encoder = Transformer(str(checkpoint("modernbert")))
    size = encoder.get_embedding_dimension()
    head = [
        Dense(size, size, bias=biased, activation_function=torch.nn.GELU()),
        LayerNorm(size),
        Dense(size, labels, biased, torch.nn.Identity(), module_output_name="scores"),
    ]
    for weight in (weight for module in head for weight in module.parameters()):
        torch.nn.init.normal_(weight, std=0.3)
    theirs = CrossEncoder(modules=[encoder, Pooling(size, "mean"), *head], device="cpu")
    theirs.save_pretrained(str(tmp_path / "theirs"))
    theirs.activation_fn = torch.nn.Identity()
    expected = torch.as_tensor(theirs.predict(SAME_QUERY, batch_size=1, show_progress_bar=False))
    expected = expected[:, 1] - expected[:, 0] if labels == 2 else expected
    loaded = load_scorer(tmp_path / "theirs")
    for scorer in (MonoBERT(load_encoder(str(tmp_path / "theirs"))), loaded):
        torch.testing.assert_close(scores_of(scorer), expected, rtol=0, atol=1e-5)
    loaded.save(tmp_path / "ours", max_tokens=160)
    torch.testing.assert_close(scores_of(load_scorer(tmp_path / "ours")), expected, rtol=0, atol=1e-5)


def test_modules_of_another_kind_are_named(checkpoint, tmp_path):
    encoder = Transformer(str(checkpoint("modernbert")))
    size = encoder.get_embedding_dimension()
    scores = Dense(size, 1, activation_function=torch.nn.Identity(), module_output_name="scores")
    modules = [encoder, Pooling(size, "cls"), Dense(size, size), LayerNorm(size), scores]
    CrossEncoder(modules=modules, device="cpu").save_pretrained(str(tmp_path / "theirs"))
    for load in (load_scorer, lambda folder: MonoBERT(load_encoder(str(folder)))):
        with pytest.raises(
            CheckpointError, match="got Transformer, Pooling, Dense, LayerNorm, Dense, activations Tanh"
        ):
            load(tmp_path / "theirs")


def test_a_default_prompt_is_kept_or_its_loss_is_said(checkpoint, tmp_path, caplog):
    for family in ("modernbert", "roberta", "bert"):
        trained(checkpoint(family), tmp_path / "plain" / family)
        prompts = {"prompts": {"query": "find this: "}, "default_prompt_name": "query"}
        theirs = CrossEncoder(str(tmp_path / "plain" / family), device="cpu", **prompts)
        theirs.save_pretrained(str(tmp_path / family))
        theirs.activation_fn = torch.nn.Identity()
        expected = torch.as_tensor(theirs.predict(SAME_QUERY, batch_size=1, show_progress_bar=False))
        caplog.clear()
        loaded = load_scorer(tmp_path / family), MonoBERT(load_encoder(str(tmp_path / family)))
        if family == "bert":  # the query has another segment than the doc, a template has one
            assert "its default prompt, 'find this: ', is left out" in caplog.text
            continue
        assert "left out" not in caplog.text
        for scorer in loaded:
            texts = [scorer.prompt.replace("{query}", query).replace("{doc}", doc) for query, doc in SAME_QUERY]
            rows = [
                scorer.encoder.tokenizer(text, truncation=True, max_length=160, return_tensors="pt") for text in texts
            ]
            with torch.no_grad():
                got = scorer.eval()(rank_batch(rows))[0]
            torch.testing.assert_close(got[:-1], expected[:-1], rtol=0, atol=1e-5)  # the last doc is cut


@pytest.mark.parametrize("cap", [0.1, 30.0])  # 30: Gemma 2's default, of which logits near 1 are hardly changed
def test_logits_that_the_model_caps_are_refused(cap, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("gemma2"), tmp_path / "capped")
    config = json.loads((folder / "config.json").read_text()) | {"final_logit_softcapping": cap}
    (folder / "config.json").write_text(json.dumps(config))
    modules = [Transformer(str(folder), transformer_task="text-generation"), LogitScore(11, 12)]
    CrossEncoder(modules=modules, device="cpu").save_pretrained(str(tmp_path / "theirs"))
    for load in (load_scorer, lambda folder: MonoBERT(load_encoder(str(folder)))):
        with pytest.raises(CheckpointError, match="got those of gemma2, which scales or caps them; model=lm_reranker"):
            load(tmp_path / "theirs")


def test_bart_keeps_two_labels(checkpoint, tmp_path):
    scorer = MonoBERT(load_encoder(str(checkpoint("bart"))), num_labels=2)
    scorer.save(tmp_path, max_tokens=100)
    torch.testing.assert_close(scores_of(load_scorer(tmp_path)), scores_of(scorer), rtol=0, atol=1e-6)


def test_a_doc_may_contain_the_token_that_mbarts_head_reads(checkpoint):
    scorer = MonoBERT(load_encoder(str(checkpoint("mbart"))))
    pairs = [("a river", "runs </s> far </s> and wide"), ("a river", "runs")]
    alone = [scores_of(scorer, [pair]) for pair in pairs]
    torch.testing.assert_close(scores_of(scorer, pairs), torch.cat(alone), rtol=0, atol=1e-5)


def test_weights_of_a_head_that_no_score_depends_on_are_frozen(checkpoint):
    scorer = MonoBERT(load_encoder(str(checkpoint("big_bird"))))
    scores_of(scorer)
    scorer.train()(rank_batch(encode(scorer.encoder.tokenizer, SAME_QUERY))).sum().backward()
    assert not [name for name, weight in scorer.named_parameters() if weight.requires_grad and weight.grad is None]


@pytest.mark.parametrize("family", ["t5", "t5gemma", "longt5", "mamba2", "longformer", "gemma3"])
def test_the_lower_layers_of_any_family_give_the_states_of_the_whole(family, checkpoint):
    whole = load_encoder(str(checkpoint(family))).eval()
    lower = load_encoder(str(checkpoint(family)), layers=1).eval()
    pairs = rank_batch(encode(whole.tokenizer, SAME_QUERY)).pairs
    assert (whole.num_layers, lower.num_layers) == (2, 1)
    with torch.no_grad():
        torch.testing.assert_close(next(lower.layers(pairs)), next(whole.layers(pairs)), rtol=0, atol=1e-6)
        states = list(lower.layers(pairs))[-1]
    assert states.shape == (pairs.num_tokens, whole.dim)


def test_layers_that_share_weights_are_not_computed_again(checkpoint):
    with pytest.raises(ConfigError, match=r"^encoder.checkpointing: expected false for albert"):
        load_encoder(str(checkpoint("albert")), checkpointing=True)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("family", ["modernbert", "qwen3", "t5-encoder", "deberta-v3", "gte"])
def test_activations_that_are_computed_again_give_the_same_gradients(family, copied, checkpoint):
    gradients = []
    for checkpointing in (False, True):
        encoder = load_encoder(str(checkpoint(family)), attention_dropout=0.0, checkpointing=checkpointing)
        encoder = (copy.deepcopy(encoder) if copied else encoder).double().train()  # as DPR's second encoder
        encoder.dropout_seed = 5
        states = [encoder(rank_batch(encode(encoder.tokenizer, pairs)).pairs) for pairs in (SAME_QUERY[:3], SAME_QUERY)]
        sum(part.square().sum() for part in states).backward()  # the first pass is recomputed after the second has run
        gradients.append([weight.grad for weight in encoder.parameters() if weight.grad is not None])
    for again, stored in zip(*gradients, strict=True):
        torch.testing.assert_close(again, stored, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("known", [False, True])
def test_a_cache_that_does_not_tell_of_a_head_is_named(known, checkpoint, tmp_path, monkeypatch, caplog):
    """As after transformers' own loading, which reads config.json, the weights and the tokenizer."""
    commit = "0123456789012345678901234567890123456789"
    repository = tmp_path / "models--someone--ranker"
    shutil.copytree(checkpoint("distilbert"), repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    if known:
        (repository / ".no_exist" / commit).mkdir(parents=True)
        (repository / ".no_exist" / commit / "modules.json").touch()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with caplog.at_level(logging.WARNING):
        load_encoder("someone/ranker")
    assert ("does not tell whether it has modules.json" in caplog.text) != known


def test_a_head_of_pooled_states_continues_from_the_cache_of_the_hub(checkpoint, tmp_path, monkeypatch):
    torch.manual_seed(0)
    theirs = MonoBERT(load_encoder(str(checkpoint("distilbert"))), pooling="mean", head="own")
    torch.nn.init.normal_(theirs.head.weight)
    repository = tmp_path / "models--someone--ranker"
    theirs.save(repository / "snapshots/0123456789012345678901234567890123456789", max_tokens=100)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("0123456789012345678901234567890123456789")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    ours = MonoBERT(load_encoder("someone/ranker"))
    assert ours.pooling == "mean"
    torch.testing.assert_close(scores_of(ours), scores_of(theirs), rtol=0, atol=0)


@pytest.mark.parametrize("family", ["bart", "distilbert", "t5", "deberta-v3"])
def test_weights_of_a_loaded_ranker_begin_where_those_of_a_trained_one_do(family, checkpoint, tmp_path):
    """At a multiple of 64 bytes, as torch's own; some processors add up in another order elsewhere."""
    scorer = MonoBERT(load_encoder(str(checkpoint(family))))
    scorer.save(tmp_path, max_tokens=100)
    for loaded in (scorer, load_scorer(tmp_path)):
        assert [name for name, weight in loaded.named_parameters() if weight.data_ptr() % 64] == []
