"""Find out whether a model is causal, and which pooling suits it.

In a causal model, only the last token attends to all tokens.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from ranker.data.template import Template

# Model types whose tokens see the whole text although transformers has a causal language model for them. XLNet
# predicts tokens in a permuted order; models of the other types are causal only if `is_decoder` is set.
TWO_SIDED = {"xlnet", *MODEL_FOR_MASKED_LM_MAPPING_NAMES}


def is_causal(model: nn.Module) -> bool:
    """Return whether a token's state depends on no later token.

    The attribute `is_causal` of the modules decides. If no module has it (BLOOM, Mamba), a model is causal if its
    configuration sets `is_decoder`, or if transformers has its type only as a causal language model.

    Args:
        model: A transformers model; for an encoder-decoder, the encoder.
    """
    config: Any = getattr(model, "config", None)
    flags = [module.is_causal for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)]
    if flags:
        return any(flags)
    model_type = getattr(config, "model_type", None)
    causal_type = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and model_type not in TWO_SIDED
    return bool(getattr(config, "is_decoder", False)) or (
        causal_type and not getattr(config, "is_encoder_decoder", False)
    )


def attend_both_ways(model: nn.Module) -> None:
    """Let the tokens of a language model attend in both directions, on all paths.

    transformers' masks read `is_causal` from the configuration, and its attention functions read it from the modules.
    A family that reads neither of them stays causal, and `is_causal` still returns True.

    Args:
        model: A transformers model whose configuration has `is_causal` False.
    """
    for module in model.modules():
        if getattr(module, "is_causal", None) is True:
            module.is_causal = False  # type: ignore[assignment]


def auto_pooling(encoder: Any) -> str:
    """Return the pooling that suits an encoder, as a name in `ranker.interactions.pooling.POOLINGS`.

    It is `last` for a causal model. For another model it is `cls` if the tokenizer puts its cls token before the text,
    and otherwise `mean`.

    Args:
        encoder: An `Encoder`.
    """
    if is_causal(encoder.model):
        return "last"
    cls = encoder.tokenizer.cls_token_id
    first = Template.of(encoder.tokenizer, 1).specials[0]
    return "cls" if cls is not None and first[:1] == (cls,) else "mean"
