"""The check before training: constant scores and scores that depend on the batch are refused."""

import pytest
import torch
from transformers import GPT2Config, GPT2Model

from ranker.encoders.encoder import Encoder
from ranker.encoders.loading import load_encoder
from ranker.encoders.tiny import tiny_tokenizer
from ranker.errors import ConfigError
from ranker.models.colbert import ColBERT
from ranker.models.dpr import DPR
from ranker.models.monobert import MonoBERT
from ranker.training.soundness import check_scores


def causal() -> Encoder:
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    return Encoder(
        GPT2Model(GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=16, n_layer=2, n_head=2)), tokenizer
    )


def test_a_causal_model_read_at_its_first_token_is_refused():
    scorer = MonoBERT(causal(), head="own", pooling="cls").train()
    with pytest.raises(ConfigError, match=r"expected scores that depend on the doc, got .* set model.pooling to last"):
        check_scores(scorer)
    assert scorer.training
    check_scores(MonoBERT(causal(), head="own", pooling="last"))


def test_scores_that_change_beside_another_doc_are_refused():
    class Mixed(MonoBERT):
        def logits(self, batch):
            logits = super().logits(batch)
            return logits + 0.1 * logits.mean()

    torch.manual_seed(0)
    scorer = Mixed(load_encoder("tiny"))
    with torch.no_grad():
        scorer.head.weight.mul_(100)
    with pytest.raises(ConfigError, match="expected scores that depend on the pair alone, got one that changes by"):
        check_scores(scorer)


@pytest.mark.parametrize("make", [MonoBERT, DPR, ColBERT])
def test_sound_models_pass_without_drawing_random_numbers(make):
    torch.manual_seed(0)
    scorer = make(load_encoder("tiny"))
    state = torch.get_rng_state()
    check_scores(scorer)
    assert torch.get_rng_state().equal(state)


def test_a_head_that_starts_at_zero_can_learn():
    scorer = MonoBERT(load_encoder("tiny"))
    torch.nn.init.zeros_(scorer.head.weight)
    check_scores(scorer)
