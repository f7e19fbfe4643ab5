"""The subject of a study: a frozen encoder, which may come from a trained ranker or have random weights."""

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

from ranker.data.template import Template
from ranker.data.text_encoder import tokenizer_fingerprint
from ranker.encoders.encoder import Encoder
from ranker.errors import CheckpointError
from ranker.models.interface import is_bi_encoder
from ranker.types import TokenBatch

log = logging.getLogger(__name__)


class FrozenEncoder(nn.Module):
    """An encoder that stays in evaluation mode, because dropout would change the states.

    Args:
        encoder: The encoder; `requires_grad` of its weights is set to False.
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
        """Yield the states [tokens, dim], float32, after the embeddings and after each layer."""
        for states in self.encoder.layers(batch):
            yield states.float()


class Subject:
    """A frozen encoder with a name and a hash.

    Args:
        name: Name in reports.
        encoder: The encoder.
        reads: `pairs` (query and doc in one sequence) or `texts` (one text per sequence).
        doc_encoder: The encoder of docs, if it differs from the encoder of queries.
        layouts: The ranker's layouts of a query row and of a doc row; None: the tokenizer's.
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
        """The encoder; if docs have their own encoder, this is the encoder of queries."""
        return self.frozen.encoder

    @property
    def num_states(self) -> int:
        """Number of layers that can be probed, with the embeddings as layer 0."""
        return self.encoder.num_layers + 1

    @classmethod
    def of_checkpoint(cls, path: Path, weights: str) -> Subject:
        """Return the encoder of a trained ranker, with the ranker's `reads` and layouts.

        Args:
            path: The ranker's folder.
            weights: Weights to load, see `load_scorer`.

        Raises:
            CheckpointError: The folder holds no trained ranker, or the ranker has no encoder.
        """
        from ranker.checkpoint import load_scorer  # imported here, because it also imports the configuration code
        from ranker.passages.windowed import scorer_of_windows

        # probing does not use windows: the encoder reads a whole pair, truncated to the study's token limits
        scorer = scorer_of_windows(load_scorer(path, weights))
        encoder = getattr(scorer, "encoder", None)
        if not isinstance(encoder, Encoder):
            raise CheckpointError(
                f"{path}: expected a ranker with an encoder to probe, got {type(scorer).__name__}; probe another ranker"
            )
        name = f"{type(scorer).__name__} {path.resolve().name}"
        if not is_bi_encoder(scorer):
            if getattr(scorer, "reads_lists", False):
                log.warning("probing: each doc is read alone, without the other docs of a list that %s reads", path)
            elif getattr(scorer, "prompt", None) is not None:
                log.warning("probing: query and doc are two texts, without the prompt of %s", path)
            return cls(name, encoder)
        layouts = tuple(_separate_prompt(layout, encoder.tokenizer) for layout in scorer.layouts())
        return cls(name, encoder, "texts", scorer.doc_encoder, layouts)  # type: ignore[arg-type]

    def randomised(self, seed: int) -> Subject:
        """Return a subject of the same architecture with random weights, which are drawn as for BERT.

        Weights are drawn from N(0, std), where std is the model's `initializer_range`, or 0.02 if the model has none.
        Biases are 0, and norm weights are 1.
        """
        separate_docs = self.frozen_docs is not self.frozen
        docs = _random_weights(self.frozen_docs.encoder, seed) if separate_docs else None
        return Subject(
            f"{self.name} (random weights)", _random_weights(self.encoder, seed), self.reads, docs, self.layouts
        )


def _separate_prompt(layout: Template, tokenizer: Any) -> Template:
    """Return the layout with the prompt's tokens as special tokens.

    The text is tokenized without the prompt, so that character offsets count from the start of the text.
    """
    if not layout.prefix:
        return layout
    log.warning(
        "probing: the prompt %r is tokenized separately, while the ranker tokenizes it with the text", layout.prefix
    )
    return layout.with_prompt(tokenizer(layout.prefix, add_special_tokens=False)["input_ids"])


def _random_weights(encoder: Encoder, seed: int) -> Encoder:
    randomised = Encoder(copy.deepcopy(encoder.model), encoder.tokenizer, encoder.execution)
    generator = torch.Generator().manual_seed(seed)
    std = getattr(randomised.config, "initializer_range", 0.02)
    with torch.no_grad():
        for module in randomised.model.modules():
            is_norm = "norm" in type(module).__name__.lower()
            for name, parameter in module.named_parameters(recurse=False):
                if name.endswith("bias"):
                    parameter.zero_()
                elif is_norm:
                    parameter.fill_(1.0)
                else:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return randomised


def encoder_fingerprint(encoder: Encoder) -> str:
    """Return a hash of weights, sizes and tokenizer."""
    digest = hashlib.blake2b(digest_size=16)
    # two keys do not change the states: the origin of the model, and the version of the library
    ignored = ("_name_or_path", "transformers_version")
    sizes = {
        key: value
        for key, value in sorted(encoder.config.to_dict().items())
        if isinstance(value, (int, float, str, bool)) and key not in ignored
    }
    digest.update(json.dumps(sizes).encode())
    digest.update(tokenizer_fingerprint(encoder.tokenizer).encode())
    for name, weight in sorted(encoder.model.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
