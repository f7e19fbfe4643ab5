"""The head of a family's masked language model, without its last matrix product, applied to the encoder's states.

The head turns states into inputs of the output layer (BERT: a linear layer, an activation and a norm). The caller
computes the logits of all words, `[tokens, vocabulary]`, block by block.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoModelForMaskedLM, PreTrainedModel

from ranker.encoders.encoder import Encoder
from ranker.encoders.native_head import GivenStates
from ranker.encoders.word_head import one_layer, parent_of
from ranker.errors import CheckpointError

TOLERANCE = 1e-3  # largest difference of logits divided by the largest logit; a wrong head differs by more than 1e-2


class MaskedLMHead(nn.Module):
    """`ForMaskedLM` of the encoder's family, without its encoder and without the product with the output matrix.

    If the family ties the output matrix to the embeddings, `weight` is the encoder's embedding matrix.

    Args:
        encoder: The encoder. The head's weights come from the encoder's folder; they are random if the encoder's are.
        new: Whether the head may have random weights at the start if the encoder's folder has no weights of a head.

    Raises:
        CheckpointError: The family has no masked language model, the folder has no weights of its head, or the logits
            are not just the product of the head's output with a matrix.
    """

    def __init__(self, encoder: Encoder, new: bool = False) -> None:
        super().__init__()
        config = copy.deepcopy(encoder.config)
        if type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
            raise CheckpointError(
                f"model: expected an encoder with a masked language model (BERT, ModernBERT, ...), "
                f"got {config.model_type}"
            )
        whole = one_layer(encoder, config, AutoModelForMaskedLM, whole_head=not new)
        base = getattr(whole, whole.base_model_prefix)
        tokens = torch.tensor([encoder.tokenizer("a b c")["input_ids"]])
        with torch.no_grad():
            expected = whole(input_ids=tokens).logits[0]
            states = base(input_ids=tokens).last_hidden_state[0]
        output = whole.get_output_embeddings()
        tied = output.weight is base.get_input_embeddings().weight
        self._name = next(name for name, part in whole.named_modules() if part is output)
        setattr(*parent_of(whole, output), _Output(output, base.get_input_embeddings() if tied else None))
        setattr(whole, whole.base_model_prefix, GivenStates(base))
        for module in whole.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        self.whole = whole.train()
        self._freeze_unused(states)
        with torch.no_grad():
            got = functional.linear(self(states), self.weight, self.bias)
        if (got - expected).abs().max() > TOLERANCE * expected.abs().max() + 1e-6:
            raise CheckpointError(
                f"model: expected a masked language model whose logits are a product with its output matrix, got that "
                f"of {config.model_type}; use another encoder"
            )
        if tied:
            self._output.embeddings = [encoder.model.get_input_embeddings()]

    def _freeze_unused(self, states: Tensor) -> None:
        """Freeze weights on which no logit depends, such as BERT's second bias; DDP expects a gradient for each weight.

        Args:
            states: Some states, [tokens, dim].
        """
        weights = list(self.parameters())
        with torch.enable_grad():
            logits = functional.linear(self(states), self.weight.detach(), self.bias)
            logits = logits + 0 * self.weight.sum()  # the matrix counts as used, whether it is the encoder's or not
            gradients = torch.autograd.grad(logits.sum(), weights, allow_unused=True)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.requires_grad_(gradient is not None)

    def forward(self, states: Tensor) -> Tensor:
        """Return the inputs of the output layer, [tokens, dim], from states [tokens, dim]."""
        given: Any = getattr(self.whole, self.whole.base_model_prefix)
        given.states = states.unsqueeze(0)
        try:
            tokens = torch.zeros(1, len(states), dtype=torch.long, device=states.device)
            inputs: Tensor = self.whole(input_ids=tokens).logits
        finally:
            given.states = None
        return inputs[0]

    @property
    def _output(self) -> _Output:
        output: Any = self.whole.get_submodule(self._name)
        return output  # type: ignore[no-any-return]

    @property
    def weight(self) -> Tensor:
        """The output matrix, [words, dim]."""
        return self._output.matrix()

    @property
    def bias(self) -> Tensor | None:
        """The biases of the words, [words]; None: no biases."""
        return self._output.bias

    def save(self, folder: Path, model: PreTrainedModel) -> None:
        """Write the whole masked language model.

        Args:
            folder: The folder to write to.
            model: The encoder's transformers model.
        """
        whole: Any = self.whole
        prefix, config, given = whole.base_model_prefix, whole.config, getattr(whole, whole.base_model_prefix)
        whole.config = copy.deepcopy(model.config)
        setattr(whole, prefix, model)
        try:
            whole.save_pretrained(folder)
        finally:
            setattr(whole, prefix, given)
            whole.config = config


class _Output(nn.Module):
    """A replacement of the output layer: it holds the layer's weights under the same names, and returns its inputs.

    Args:
        output: The output layer.
        embeddings: The embeddings that share their matrix with the output layer; None: the layer has its own matrix.
    """

    def __init__(self, output: Any, embeddings: Any) -> None:
        super().__init__()
        # in a list, because the embeddings are parameters of the encoder and not of this module
        self.embeddings = [embeddings]
        if embeddings is None:
            self.weight = output.weight
        self.bias = output.bias

    def matrix(self) -> Tensor:
        """Return the output matrix, [words, dim]."""
        matrix: Tensor = self.weight if self.embeddings[0] is None else self.embeddings[0].weight
        return matrix

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs
