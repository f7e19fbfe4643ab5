"""Encoders of all families: states, dropout and gradients against transformers' own model on each row alone."""

import pytest
import torch
from transformers import AutoModel

from ranker.encoders.encoder import Encoder
from ranker.encoders.loading import load_encoder
from ranker.errors import ConfigError
from ranker.models.monobert import MonoBERT
from tests.zoo.families import FAMILIES
from tests.zoo.outcomes import OUTCOMES, TRAINED
from tests.zoo.rows import encode, rank_batch, token_batch


def unpadded(family: str) -> bool:
    """Whether batches of the family have no padding in them."""
    return OUTCOMES[family].path in ("bert", "modernbert", "packed")


def load(folder, **options) -> Encoder:
    """The family's encoder without dropout, unless options ask for it."""
    torch.manual_seed(0)
    return load_encoder(str(folder), **options).eval()


def reference(family, folder):
    """transformers' model, or its text encoder."""
    model = AutoModel.from_pretrained(folder).eval()
    return (
        model.get_encoder() if FAMILIES[family].weights.endswith(("ConditionalGeneration", "EncoderModel")) else model
    )


def close(ours: torch.Tensor, theirs: torch.Tensor, relative: float) -> None:
    assert (ours - theirs).abs().max() <= relative * theirs.abs().max()


@pytest.mark.parametrize("family", TRAINED)
def test_the_path_is_the_one_of_the_table(family, checkpoint):
    assert load(checkpoint(family)).path == OUTCOMES[family].path


@pytest.mark.parametrize("family", TRAINED)
def test_states_of_a_batch_are_those_of_each_row_alone(family, checkpoint):
    folder = checkpoint(family)
    encoder, model = load(folder), reference(family, folder)
    rows = encode(encoder.tokenizer)
    for dtype, relative in ((torch.float32, 1e-5), *([(torch.float64, 1e-9)] if unpadded(family) else [])):
        with torch.no_grad():
            theirs = torch.cat([model.to(dtype)(**row).last_hidden_state[0] for row in rows])
            close(encoder.to(dtype)(token_batch(rows)), theirs, relative)


@pytest.mark.parametrize("family", TRAINED)
def test_layers_are_those_of_transformers(family, checkpoint):
    folder = checkpoint(family)
    encoder, model = load(folder), reference(family, folder)
    rows = encode(encoder.tokenizer)[3:8]
    with torch.no_grad():
        theirs = [model(**row, output_hidden_states=True).hidden_states for row in rows]
        ours = list(encoder.layers(token_batch(rows)))
    assert len(ours) == 1 + encoder.num_layers
    if family != "funnel":  # its middle layers have fewer states than tokens
        for layer, states in enumerate(ours):
            close(
                states, torch.cat([row[layer][0, : len(rows[i]["input_ids"][0])] for i, row in enumerate(theirs)]), 1e-5
            )


@pytest.mark.parametrize("family", TRAINED)
def test_dropout_acts_and_does_not_depend_on_the_layout(family, checkpoint):
    folder = checkpoint(family)
    if not OUTCOMES[family].dropout:
        with pytest.raises(ConfigError, match=r"^encoder\.dropout: "):
            load(folder, dropout=0.2)
        return
    encoder = load(folder, dropout=0.2, attention_dropout=0.0).double()
    rows = encode(encoder.tokenizer)[:9]
    batch = token_batch(rows, range(len(rows)))
    with torch.no_grad():
        without = encoder(batch)
        encoder.train()
        encoder.dropout_seed = 7
        together = encoder(batch)
        apart = torch.cat([encoder(token_batch([row], [i])) for i, row in enumerate(rows)])
        padded = load(folder, dropout=0.2, attention_dropout=0.0, ragged=False).double().train()
        padded.dropout_seed = 7
        close(together, apart, 1e-9)
        if unpadded(family):
            close(padded(batch), together, 1e-9)
    assert (together - without).abs().mean() > 0.01 * without.abs().mean()


@pytest.mark.parametrize("family", TRAINED)
def test_a_gradient_reaches_all_weights(family, checkpoint):
    """A weight without one would stop a training on several devices."""
    scorer = MonoBERT(load(checkpoint(family))).train()
    rows = encode(scorer.encoder.tokenizer)
    scorer(rank_batch(rows)).square().sum().backward()
    assert [name for name, weight in scorer.named_parameters() if weight.requires_grad and weight.grad is None] == []
