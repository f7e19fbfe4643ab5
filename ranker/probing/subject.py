"""What is probed: a frozen encoder, by itself or out of a trained ranker, and the controls made of its shape."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ranker.data.batching import Template
from ranker.data.token_writer import tokenizer_fingerprint
from ranker.encoders.encoder import Encoder
from ranker.errors import CheckpointError
from ranker.types import TokenBatch

log = logging.getLogger(__name__)


class FrozenEncoder(nn.Module):
    """An encoder that stays in evaluation mode whatever its owner is set to: dropout would perturb the states.

    Args:
        encoder: The encoder; its weights are not trained.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.encoder.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> FrozenEncoder:  # noqa: ARG002 - never trains
        """Stay in evaluation mode."""
        return super().train(False)

    @torch.no_grad()
    def layers(self, batch: TokenBatch) -> Iterator[Tensor]:
        """Yield the states after the embeddings and after each layer, float32 [tokens, dim]."""
        for states in self.encoder.layers(batch):
            yield states.float()


class Subject:
    """A frozen encoder with a name and a hash.

    Args:
        name: Its name in reports.
        encoder: The encoder.
        reads: `pairs` (query and doc in one sequence) or `texts` (apart).
        doc_encoder: The encoder of docs by themselves, where it is another one.
        layouts: The ranker's own layouts of a query and of a doc by themselves; None: the tokenizer's.
    """

    def __init__(
        self,
        name: str,
        encoder: Encoder,
        reads: str = "pairs",
        doc_encoder: Encoder | None = None,
        layouts: tuple[Template, Template] | None = None,
    ) -> None:
        self.name, self.reads, self.layouts = name, reads, layouts
        self.frozen = FrozenEncoder(encoder)
        self.frozen_docs = self.frozen if doc_encoder is None else FrozenEncoder(doc_encoder)
        self.fingerprint = encoder_fingerprint(encoder)
        if doc_encoder is not None:
            self.fingerprint += f"+{encoder_fingerprint(doc_encoder)}"

    @property
    def encoder(self) -> Encoder:
        """The encoder, of queries where docs have another."""
        return self.frozen.encoder

    @property
    def num_states(self) -> int:
        """Layers to probe: the embeddings are layer 0."""
        return self.encoder.num_layers + 1

    @classmethod
    def of_checkpoint(cls, path: Path, weights: str) -> Subject:
        """The encoder of a trained ranker, reading what the ranker reads.

        Raises:
            CheckpointError: There is no trained ranker, or it has no encoder.
        """
        from ranker.checkpoint import (
            load_scorer,
        )  # brings the configuration with it, which an encoder by itself does not need

        scorer: Any = load_scorer(path, weights)
        encoder = getattr(scorer, "encoder", None)
        if not isinstance(encoder, Encoder):
            raise CheckpointError(
                f"{path}: expected a ranker with an encoder to probe, got {type(scorer).__name__}; probe another"
            )
        name = f"{type(scorer).__name__} {path.resolve().name}"
        if scorer.reads == "pairs":
            return cls(name, encoder)
        layouts = tuple(_apart(layout, encoder.tokenizer) for layout in scorer.layouts())
        return cls(name, encoder, "texts", scorer.doc_encoder, layouts)  # type: ignore[arg-type]

    def randomised(self, seed: int) -> Subject:
        """The same architecture with random weights, drawn as BERT's are: N(0, 0.02) or the model's own range, biases 0, norms 1."""
        own_docs = self.frozen_docs is not self.frozen
        docs = _random_weights(self.frozen_docs.encoder, seed) if own_docs else None
        return Subject(
            f"{self.name} (random weights)", _random_weights(self.encoder, seed), self.reads, docs, self.layouts
        )


def _apart(layout: Template, tokenizer: Any) -> Template:
    """The layout with the prompt's tokens, so that a text's tokens are those of its words: spans of examples say where they are."""
    if not layout.prefix:
        return layout
    log.warning(
        "probing: the prompt %r is tokenized by itself, where the ranker reads it together with the text", layout.prefix
    )
    return layout.with_prompt(tokenizer(layout.prefix, add_special_tokens=False)["input_ids"])


def _random_weights(encoder: Encoder, seed: int) -> Encoder:
    made = Encoder(copy.deepcopy(encoder.model), encoder.tokenizer, encoder.execution)
    generator = torch.Generator().manual_seed(seed)
    std = getattr(made.config, "initializer_range", 0.02)
    with torch.no_grad():
        for module in made.model.modules():
            is_norm = "norm" in type(module).__name__.lower()
            for name, parameter in module.named_parameters(recurse=False):
                if name.endswith("bias"):
                    parameter.zero_()
                elif is_norm:
                    parameter.fill_(1.0)
                else:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return made


def encoder_fingerprint(encoder: Encoder) -> str:
    """Hash of weights, sizes and tokenizer."""
    digest = hashlib.blake2b(digest_size=16)
    sizes = {
        key: value for key, value in encoder.config.to_dict().items() if isinstance(value, (int, float, str, bool))
    }
    # where it was loaded from and with which library is not what it computes
    digest.update(
        json.dumps(
            {key: sizes[key] for key in sorted(sizes) if key not in ("_name_or_path", "transformers_version")}
        ).encode()
    )
    digest.update(tokenizer_fingerprint(encoder.tokenizer).encode())
    for name, weight in sorted(encoder.model.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
