"""Check before a training that scores depend on the doc, and on nothing but the query-doc pair.

A causal model whose pooling takes the first token gives every doc the same score. A model whose states depend on
padding gives a pair different scores in different batches. Neither fault raises an error in training.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ranker.data.collate import pair_layout
from ranker.data.template import Template
from ranker.errors import ConfigError
from ranker.models.interface import Scorer
from ranker.types import RankBatch, TokenBatch

log = logging.getLogger(__name__)

QUERY = "how far does the river run"
DOCS = (
    "The river runs a hundred miles to the sea.",
    "Apples are picked in autumn, when the days grow short and the nights are cold; they keep in a cool dry room, and "
    "the best of them are eaten in the first months of the new year, long after the last pears are gone.",
)
CONSTANT = 1e-6  # scores with at most this difference count as equal
ROUNDING = 1e-4  # largest relative difference between batches that is due to rounding; padding causes more than 1e-3


def check_scores(scorer: Scorer) -> None:
    """Score two docs alone and together, and check the scores. Warn if a query's filling changes its token vectors.

    Args:
        scorer: A scorer on any device; its mode (training or evaluation) is restored.

    Raises:
        ConfigError: Both docs have the same score for any weights; or the score of a doc depends on the other doc,
            although the model does not read lists.
    """
    module: Any = scorer
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            _warn_of_filling(module)
            together = scorer(_batch(scorer, DOCS))[0]
            alone = torch.stack([scorer(_batch(scorer, [doc]))[0, 0] for doc in DOCS])
        spread = float((together[0] - together[1]).abs())
        if spread <= CONSTANT and _no_gradient(scorer):
            raise ConfigError(
                f"model: expected scores that depend on the doc, got {float(together[0]):.6g} for two docs of one "
                "query, with any weights: the pooled state does not depend on the doc; set model.pooling to last or "
                "mean, or choose another encoder"
            )
        if getattr(scorer, "reads_lists", False):
            return
        change = float((together - alone).abs().max())
        if change > ROUNDING * max(1.0, float(together.abs().max())) and change > 0.01 * spread:
            raise ConfigError(
                f"model: expected scores that depend on the pair alone, got one that changes by {change:.2g} with "
                f"another doc in the batch (two docs differ by {spread:.2g}); padding changes the states of this "
                "encoder, choose another"
            )
    finally:
        module.train(training)


def _warn_of_filling(scorer: Any) -> None:
    """Warn if filling that no token attends to changes the vectors of a query's tokens, such as by a convolution."""
    if scorer.reads == "pairs":
        return
    layout = scorer.layouts()[0]
    if not layout.fill_to or layout.attend_fill:
        return
    device = next(scorer.parameters()).device
    texts = [_Texts(scorer.encoder.tokenizer, (layout.prefix + QUERY,))]
    plain = _rows(scorer, replace(layout, fill_to=0), texts).to(device)
    alone = scorer.encode_queries(plain).values
    filled = scorer.encode_queries(_rows(scorer, layout, texts).to(device)).values[: len(alone)]
    if float((filled - alone).abs().max()) > ROUNDING * max(1.0, float(alone.abs().max())):
        log.warning(
            "model.attend_to_expansion=false: in %s, the filling of a query still changes the vectors of its tokens, "
            "because layers mix positions outside of attention; set model.query_length=0 to leave the filling out",
            scorer.encoder.config.model_type,
        )


def _no_gradient(scorer: Scorer) -> bool:
    """Return whether the difference of the two scores has a gradient of 0 for every weight."""
    with torch.enable_grad():
        scores = scorer(_batch(scorer, DOCS))[0]
        weights = [weight for weight in scorer.parameters() if weight.requires_grad]
        gradients = torch.autograd.grad(scores[0] - scores[1], weights, allow_unused=True)
    return all(gradient is None or float(gradient.abs().max()) <= CONSTANT for gradient in gradients)


@dataclass(frozen=True)
class _Texts:
    """Token ids of texts, with the attributes of a token store that `Template.lay_out` reads."""

    tokenizer: Any
    texts: tuple[str, ...]
    tokens: np.ndarray = field(init=False)
    offsets: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        ids = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in self.texts]
        object.__setattr__(self, "tokens", np.array([token for row in ids for token in row], dtype=np.int64))
        object.__setattr__(self, "offsets", np.cumsum([0, *map(len, ids)]))


def _batch(scorer: Scorer, docs: Any) -> RankBatch:
    module: Any = scorer
    device = next(module.parameters()).device
    tokenizer, num_docs = scorer.encoder.tokenizer, len(docs)
    batch = RankBatch(
        labels=torch.zeros(1, num_docs),
        doc_mask=torch.ones(1, num_docs, dtype=torch.bool),
        group_ids=torch.zeros(1, dtype=torch.int64),
        share=1.0,
    )
    if scorer.reads != "pairs":
        query, doc = module.layouts()
        batch.queries = _rows(scorer, query, [_Texts(tokenizer, (query.prefix + QUERY,))])
        batch.docs = _rows(scorer, doc, [_Texts(tokenizer, tuple(doc.prefix + text for text in docs))])
    else:
        layout = pair_layout(scorer)
        sides = [(QUERY,) * num_docs, tuple(docs)]
        stored = [
            _Texts(tokenizer, tuple(affixes.prefix + text + affixes.suffix for text in texts))
            for affixes, texts in zip(map(layout.affixes_of, range(2)), sides, strict=True)
        ]
        batch.pairs = _rows(scorer, layout, stored)
    return batch.to(device)


def _rows(scorer: Scorer, layout: Template, texts: list[_Texts]) -> TokenBatch:
    """Lay texts out as rows. Each text is cut to an equal share of the encoder's positions."""
    room = max(1, (min(scorer.encoder.max_tokens, 512) - layout.num_special) // len(texts))
    parts: list[Any] = []
    for number, part in enumerate(texts):
        lengths = layout.kept(number, np.diff(part.offsets), room)
        parts.append((part, np.arange(len(lengths)), lengths))
    return layout.lay_out(parts)
