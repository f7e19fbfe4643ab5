"""The check before training: constant scores and scores that depend on the batch are refused."""

import pytest
import torch
from transformers import GPT2Config, GPT2Model

from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.loading import load_encoder
from ranker.encoders.tiny import tiny_tokenizer
from ranker.errors import ConfigError
from ranker.models.colbert import ColBERT
from ranker.models.dpr import DPR
from ranker.models.monobert import MonoBERT
from ranker.training.soundness import check_scores

SIZES = {"n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}


def causal() -> Encoder:
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    return Encoder(GPT2Model(GPT2Config(vocab_size=len(tokenizer), **SIZES)), tokenizer)


class Own(GPT2Model):
    """A model whose states are changed by `change`, a function of the states [rows, columns, dim]."""

    def forward(self, *args, **options):
        output = super().forward(*args, **options)
        output.last_hidden_state = self.change(output.last_hidden_state)
        if output.hidden_states is not None:
            output.hidden_states = (*output.hidden_states[:-1], output.last_hidden_state)
        return output


def own(change) -> MonoBERT:
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    Own.change = lambda self, states: change(states)
    model = Own(GPT2Config(vocab_size=len(tokenizer), **SIZES, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    return MonoBERT(Encoder(model, tokenizer, Execution(ragged=False)), head="own", pooling="mean")


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


def positions(states):
    """States that depend on the position of a token, and on no token."""
    return torch.arange(1.0, 1 + states.shape[1])[None, :, None].expand_as(states)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda states: states + 0.5 * states.mean((0, 1)), "scores that depend on the pair alone"),
        (lambda states: states + 0.5 * states.mean(0), "scores that depend on the pair alone"),
        (lambda states: states * (1 + 0.3 * len(states)), "scores that depend on the pair alone"),
        (positions, "scores that depend on the doc"),
        (lambda states: states + 0.5 * torch.randn_like(states), "the same score from each pass"),
    ],
    ids=["mean of the batch", "mean of a column", "rows of the batch", "position alone", "random numbers"],
)
def test_families_that_nobody_has_listed_are_refused(change, message):
    """Padding changes their states too, so rows of equal length run together, and only these show the fault."""
    check_scores(own(lambda states: states))
    with pytest.raises(ConfigError, match=rf"^model: expected {message}, got "):
        check_scores(own(change))


def test_statistics_over_a_batch_are_refused():
    scorer = own(lambda states: states)
    scorer.encoder.model.norm = torch.nn.BatchNorm1d(16)
    with pytest.raises(ConfigError, match=r"got 1 layers, such as encoder.model.norm, that in training normalize"):
        check_scores(scorer)
