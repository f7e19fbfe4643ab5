"""The models of ONNX graphs: a stored model from padded rows of token ids to scores, or to vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from ranker.encoders import text_model
from ranker.export._module_weights import read_dense, read_weights
from ranker.export._modules import StoredModule
from ranker.export._pooling import read_pooling


class Scores(nn.Module):
    """A sequence classification model whose only output is the score; for two labels, the score is the log-odds.

    Args:
        folder: The model's folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            folder, attn_implementation="eager", trust_remote_code=False
        )
        self.model = model.float()

    def forward(self, **inputs: Tensor) -> Tensor:
        logits: Tensor = self.model(**inputs).logits
        return logits if logits.shape[1] == 1 else logits[:, 1:] - logits[:, :1]


class PooledModules(nn.Module):
    """The modules of a folder in sentence-transformers' layout: Transformer, Pooling, and further modules.

    Args:
        chain: The modules.

    Attributes:
        scores: Whether the last module gives scores.
    """

    def __init__(self, chain: list[StoredModule]) -> None:
        super().__init__()
        self.model = _read_model(chain[0].folder)
        self.pooling = read_pooling(chain[1])
        self.layers = nn.Sequential()
        for module in chain[2:]:
            self.layers.extend(_layers(module))
        self.scores = chain[-1].name == "Dense" and chain[-1].config.get("module_output_name") == "scores"

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **inputs: Tensor) -> Tensor:
        states = self.model(input_ids=input_ids, attention_mask=attention_mask, **inputs).last_hidden_state
        values: Tensor = self.layers(pooled(states, attention_mask, self.pooling))
        return values[:, 1:] - values[:, :1] if self.scores and values.shape[1] == 2 else values


class TokenVectors(nn.Module):
    """The modules of a folder with a vector per token: Transformer, Dense, MultiVectorMask and Normalize.

    Args:
        chain: The modules.
    """

    skipped: Tensor

    def __init__(self, chain: list[StoredModule]) -> None:
        super().__init__()
        self.model = _read_model(chain[0].folder)
        self.layers = nn.Sequential()
        words: list[str] = []
        for module in chain[1:]:
            if module.name == "MultiVectorMask":
                words = module.config.get("skiplist_words") or []
            else:
                self.layers.extend(_layers(module))
        tokenizer = AutoTokenizer.from_pretrained(chain[0].folder, trust_remote_code=False)
        vocabulary = tokenizer.get_vocab()
        skipped = torch.zeros(1 + max(vocabulary.values()), dtype=torch.int64)
        skipped[[vocabulary[word] for word in words if word in vocabulary]] = 1
        self.register_buffer("skipped", skipped)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **inputs: Tensor) -> tuple[Tensor, Tensor]:
        states = self.model(input_ids=input_ids, attention_mask=attention_mask, **inputs).last_hidden_state
        return self.layers(states), attention_mask * (1 - self.skipped[input_ids])


def _read_model(folder: Path) -> Any:
    """Return the transformer of a folder in float32, with an attention that torch's exporter supports."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config._attn_implementation = "eager"
    model: Any = text_model.read(folder, config)[0]
    return model.float()


def _layers(module: StoredModule) -> list[nn.Module]:
    if module.name == "Dense":
        return list(read_dense(module))
    if module.name == "LayerNorm":
        weights = read_weights(module.folder)
        norm = nn.LayerNorm(len(weights["norm.weight"]))
        norm.load_state_dict({name.removeprefix("norm."): value for name, value in weights.items()})
        return [norm]
    assert module.name == "Normalize"
    return [_Normalize()]


class _Normalize(nn.Module):
    def forward(self, vectors: Tensor) -> Tensor:
        return functional.normalize(vectors, dim=-1)


def pooled(states: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """Pool padded states [rows, columns, dim] to [rows, dim]; `ranker.interactions.pooling` is for ragged states."""
    if pooling == "cls":
        return states[:, 0]
    real = mask.unsqueeze(-1).to(states.dtype)
    if pooling == "max":
        return states.masked_fill(real == 0, torch.finfo(states.dtype).min).amax(1)
    if pooling == "last":
        ends = mask.sum(1) - 1
        return states.gather(1, ends.view(-1, 1, 1).expand(-1, 1, states.shape[2]))[:, 0]
    if pooling == "weightedmean":
        real = real * torch.arange(1, mask.shape[1] + 1, dtype=states.dtype).view(1, -1, 1)
    return (states * real).sum(1) / real.sum(1)
