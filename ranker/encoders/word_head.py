"""Compute the logits of a few words from a language model's states, with some rows of the model's output matrix.

Logits of all words, `[tokens, vocabulary]`, are never computed. The rest of the family's own language model runs
unchanged, so transformers applies a bias, a scale or a cap to the logits (Gemma 2).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from ranker.encoders.encoder import Encoder
from ranker.encoders.native_head import GivenStates
from ranker.encoders.text_model import keep_layers, place_of
from ranker.errors import CheckpointError

TOLERANCE = 1e-3  # largest difference of logits divided by the largest logit; a wrong head differs by more than 1e-2


class WordHead(nn.Module):
    """Compute the logits of some words: `ForCausalLM` of the encoder's family with an output matrix of a few rows.

    If the family ties the output matrix to the embeddings, the rows are those of the encoder's embeddings and are
    trained with them. Otherwise they are weights of this module.

    Args:
        encoder: A decoder-only encoder.
        words: Token ids of the words.

    Attributes:
        tied: Whether the rows are rows of the embeddings.

    Raises:
        CheckpointError: The family has no language model, or its language model is more than an output layer.
    """

    def __init__(self, encoder: Encoder, words: Sequence[int]) -> None:
        super().__init__()
        config = copy.deepcopy(encoder.config)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise CheckpointError(
                f"model.head: expected linear, since transformers has no language model of {config.model_type}; "
                "got yes_no"
            )
        whole = one_layer(encoder, config, AutoModelForCausalLM)
        base = getattr(whole, whole.base_model_prefix)
        tokens = torch.tensor([encoder.tokenizer("a b c")["input_ids"]])
        with torch.no_grad():
            expected = whole(input_ids=tokens).logits[:, -1, list(words)]
            states = base(input_ids=tokens).last_hidden_state[:, -1]
        output = whole.get_output_embeddings()
        self.tied = output.weight is base.get_input_embeddings().weight
        self.words, self._name = list(words), next(name for name, part in whole.named_modules() if part is output)
        # the whole output layer as it was loaded stays on the CPU; `output_state` returns it
        self._loaded = {
            name: value.detach() for name, value in output.named_parameters() if not (self.tied and name == "weight")
        }
        rows = TiedRows(base.get_input_embeddings(), words) if self.tied else OutputRows(output.weight, words)
        rows.bias = None if output.bias is None else nn.Parameter(output.bias.detach()[list(words)])
        setattr(*parent_of(whole, output), rows)
        setattr(whole, whole.base_model_prefix, GivenStates(base))
        self.whole = whole.train()
        with torch.no_grad():
            got = self(states)
        if (got - expected).abs().max() > TOLERANCE * expected.abs().max() + 1e-6:
            raise CheckpointError(
                f"model.head: expected linear, since the language model of {config.model_type} is more than an output "
                "layer on the encoder's states; got yes_no"
            )
        if isinstance(rows, TiedRows):
            rows.embeddings = [encoder.model.get_input_embeddings()]

    def forward(self, states: Tensor) -> Tensor:
        """Return logits [rows, words] from states [rows, dim]."""
        given: Any = getattr(self.whole, self.whole.base_model_prefix)
        given.states = states.unsqueeze(1)
        try:
            tokens = torch.zeros(len(states), 1, dtype=torch.long, device=states.device)
            logits: Tensor = self.whole(input_ids=tokens).logits
        finally:
            given.states = None
        return logits[:, -1]

    @property
    def _rows(self) -> OutputRows:
        rows: Any = self.whole.get_submodule(self._name)
        return rows  # type: ignore[no-any-return]

    def difference(self) -> Tensor:
        """Return the first word's row of the output matrix minus the second's, [1, dim]."""
        rows = self._rows.matrix()
        return (rows[0] - rows[1]).unsqueeze(0)

    def output_state(self) -> dict[str, Tensor]:
        """Return all weights of the language model outside of the encoder by their names.

        Rows of other words are not trained and are as they were loaded. A tied output matrix is left out.
        """
        state = {
            name: value
            for name, value in self.whole.state_dict().items()
            if not name.startswith((f"{self._name}.", f"{self.whole.base_model_prefix}."))
        }
        trained = {"weight": self._rows.matrix(), "bias": self._rows.bias}
        for name, loaded in self._loaded.items():
            full = loaded.clone()
            full[self.words] = trained[name].detach().to(full)  # type: ignore[union-attr]
            state[f"{self._name}.{name}"] = full
        return state


class OutputRows(nn.Module):
    """An output layer of a few rows.

    Args:
        weight: The whole matrix [vocabulary, dim].
        words: Indices of the rows to keep.
    """

    def __init__(self, weight: Tensor, words: Sequence[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach()[list(words)].clone())
        self.bias: nn.Parameter | None = None

    def matrix(self) -> Tensor:
        """Return the rows, [words, dim]."""
        return self.weight

    def forward(self, states: Tensor) -> Tensor:
        """Return logits [..., words] from states [..., dim]."""
        rows = self.matrix().to(states.dtype)
        return functional.linear(states, rows, None if self.bias is None else self.bias.to(states.dtype))


class TiedRows(OutputRows):
    """An output layer whose rows are rows of the embeddings.

    Args:
        embeddings: The embeddings.
        words: Indices of the rows.
    """

    def __init__(self, embeddings: Any, words: Sequence[int]) -> None:
        nn.Module.__init__(self)
        self.embeddings = [embeddings]  # a list, since the embeddings are the encoder's parameters, not this module's
        self.words = list(words)
        self.bias = None

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The rows, [words, dim]. Mamba reads their dtype."""
        weight: Tensor = self.embeddings[0].weight
        return weight[self.words]

    def matrix(self) -> Tensor:
        """Return the rows, [words, dim]."""
        return self.weight


def one_layer(encoder: Encoder, config: Any, auto_class: Any, whole_head: bool = False) -> Any:
    """Return an encoder's model with a head and only the lowest layer; callers use the head.

    Args:
        encoder: The encoder.
        config: The encoder's configuration, which is changed.
        auto_class: A class of transformers, such as `AutoModelForCausalLM`.
        whole_head: Whether the encoder's folder must have all weights of the head.

    Raises:
        CheckpointError: `whole_head` is True, and weights of the head are missing.
    """
    config._attn_implementation = None
    keep_layers(config, 1, config.name_or_path)
    options: dict[str, Any] = {"trust_remote_code": encoder.execution.trust_remote_code}
    with torch.device("meta"):
        whole: Any = auto_class.from_config(config, **options)
    outside = [name for name, _ in whole.named_parameters() if not name.startswith(f"{whole.base_model_prefix}.")]
    if encoder.source is None or not outside:  # if the output layer is tied, all its weights are the encoder's
        whole = auto_class.from_config(config, **options)
        whole.base_model.load_state_dict(encoder.model.state_dict(), strict=False)
    else:
        folder, file = place_of(encoder.source)
        whole, info = auto_class.from_pretrained(
            folder, config=config, dtype=torch.float32, local_files_only=True, output_loading_info=True, **file,
            **options,
        )  # fmt: skip
        missing = sorted(set(outside) & set(info["missing_keys"]))
        if whole_head and missing:
            kind = auto_class.__name__.removeprefix("AutoModel")
            raise CheckpointError(
                f"{encoder.source}: expected weights with the head of a {kind} model, {', '.join(missing)} are "
                "missing; use a checkpoint that has them"
            )
    return whole.eval()


def parent_of(model: nn.Module, part: nn.Module) -> tuple[nn.Module, str]:
    """Return the module that holds a part, and the part's name in this module."""
    name = next(name for name, module in model.named_modules() if module is part)
    parent, _, child = name.rpartition(".")
    return model.get_submodule(parent), child
