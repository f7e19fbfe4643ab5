"""Encoders of all families: states, dropout and gradients against transformers' own model on each row alone."""

import pytest
import torch
import transformers
from transformers import AutoModel

from ranker.encoders.encoder import Encoder
from ranker.encoders.loading import load_encoder
from ranker.errors import ConfigError
from tests.zoo.families import FAMILIES
from tests.zoo.outcomes import EXPERTS, OUTCOMES, TRAINED
from tests.zoo.rows import encode, largest_difference, token_batch

# families on the other paths take float32 on a CPU by default
HALF = [name for name in TRAINED if OUTCOMES[name].path not in ("padded", "by_length") and name != "xmod"]


def load(folder, **options) -> Encoder:
    """The family's encoder without dropout, unless options ask for it."""
    torch.manual_seed(0)
    return load_encoder(str(folder), **options).eval()


def reference(family, folder):
    """transformers' model, or its text encoder where transformers has one as a class."""
    model = AutoModel.from_pretrained(folder).eval()
    return model.get_encoder() if has_text_encoder(family) else model


def has_text_encoder(family: str) -> bool:
    """Whether the family is an encoder-decoder whose encoder is a model by itself; BART's texts run through both."""
    return hasattr(transformers, FAMILIES[family].config.replace("Config", "EncoderModel"))


@pytest.mark.parametrize("family", TRAINED)
def test_the_path_is_the_one_of_the_table(family, encoder):
    assert encoder(family).path == OUTCOMES[family].path


@pytest.mark.parametrize("family", TRAINED)
@pytest.mark.usefixtures("float64_stays")
def test_states_of_a_batch_are_those_of_each_row_alone(family, checkpoint, encoder, record_property):
    encoder, model = encoder(family).eval(), reference(family, checkpoint(family))
    rows = encode(encoder.tokenizer)
    with torch.no_grad():
        for dtype, relative in ((torch.float32, OUTCOMES[family].single), (torch.float64, 1e-12)):
            if family in EXPERTS and dtype == torch.float64:
                model.set_experts_implementation("eager"), encoder.model.set_experts_implementation("eager")
            theirs = torch.cat([model.to(dtype)(**row).last_hidden_state[0] for row in rows])
            worst = largest_difference(encoder.to(dtype)(token_batch(rows)), theirs)
            record_property("worst", worst)
            assert worst <= relative


@pytest.mark.parametrize("family", TRAINED)
def test_layers_are_those_of_transformers(family, checkpoint, encoder):
    encoder, model = encoder(family).eval(), reference(family, checkpoint(family))
    rows = encode(encoder.tokenizer)[3:8]
    with torch.no_grad():
        outputs = [model(**row, output_hidden_states=True) for row in rows]
        ours = list(encoder.layers(token_batch(rows)))
    theirs = [getattr(output, "decoder_hidden_states", None) or output.hidden_states for output in outputs]
    assert len(ours) == 1 + encoder.num_layers
    for layer, states in enumerate(ours):
        alone = [row[layer][0, : rows[i]["input_ids"].shape[1]] for i, row in enumerate(theirs)]
        assert largest_difference(states, torch.cat(alone)) <= 1e-5


@pytest.mark.parametrize("family", TRAINED)
@pytest.mark.usefixtures("float64_stays")
def test_dropout_acts_and_does_not_depend_on_the_layout(family, checkpoint):
    folder = checkpoint(family)
    if OUTCOMES[family].dropout == "refused":
        with pytest.raises(ConfigError, match=r"^encoder\.dropout: "):
            load(folder, dropout=0.2)
        return
    layouts = [load(folder, dropout=0.2, attention_dropout=0.0, ragged=ragged).double() for ragged in (True, False)]
    rows = encode(layouts[0].tokenizer)[:9]
    batch = token_batch(rows, range(len(rows)))
    with torch.no_grad():
        without = layouts[0](batch)
        for encoder in layouts:
            encoder.train()
            encoder.dropout_seed = 7
        together, padded = (encoder(batch) for encoder in layouts)
        assert (together - without).abs().mean() > 0.01 * without.abs().mean()
        if OUTCOMES[family].dropout == "hashed":
            apart = torch.cat([layouts[0](token_batch([row], [i])) for i, row in enumerate(rows)])
            assert largest_difference(apart, together) <= 1e-12
            assert largest_difference(padded, together) <= 1e-12


@pytest.mark.parametrize("family", TRAINED)
def test_a_gradient_reaches_all_weights(family, encoder):
    """A weight without one would stop a training on several devices."""
    encoder = encoder(family).train()
    encoder(token_batch(encode(encoder.tokenizer))).square().sum().backward()
    assert [name for name, weight in encoder.named_parameters() if weight.requires_grad and weight.grad is None] == []


@pytest.mark.parametrize("family", HALF)
def test_bfloat16_on_a_cpu_is_near_float32(family, encoder):
    """Autocast returns some parts in float32, such as rotated queries, and others in bfloat16."""
    encoder = encoder(family).eval()
    batch = token_batch(encode(encoder.tokenizer))
    with torch.no_grad():
        exact = encoder(batch)
        with torch.autocast("cpu", torch.bfloat16):
            evaluated = encoder(batch)
    with torch.autocast("cpu", torch.bfloat16):
        trained = encoder(batch)
    trained.float().square().sum().backward()
    for states in (evaluated, trained):
        # T5 does not scale its logits, so their rounding errors are larger
        assert (states.float() - exact).norm() <= (0.1 if "t5" in family else 0.05) * exact.norm()
