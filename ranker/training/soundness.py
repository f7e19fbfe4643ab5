"""Check before a training that scores depend on the doc, and on nothing but the query-doc pair.

A causal model whose pooling takes the first token gives every doc the same score. A model whose states depend on
padding, or on other rows, gives a pair different scores in different batches. Neither fault raises an error in
training.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ranker.data.scorer_inputs import pair_layout
from ranker.data.template import Affixes, Template
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
# the docs of the check by number: 0 and 1 are those of `DOCS`; 2 is doc 1 cut to the number of tokens of doc 0, because
# some paths pad rows of different lengths or run them apart, and a score may depend on the length of a doc alone
NUMBERS = (0, 1, 2)
CONSTANT = 1e-6  # scores with at most this difference count as equal
ROUNDING = 1e-4  # largest relative difference between batches that is due to rounding; padding causes more than 1e-3
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def check_scores(scorer: Scorer) -> None:
    """Score three docs alone and together, and check the scores. Warn if a query's filling changes its token vectors.

    Args:
        scorer: A scorer on any device; its mode (training or evaluation) is restored.

    Raises:
        ConfigError: There are four possible faults. Two docs have the same score for any weights. The score of a doc
            depends on the other docs, although the model does not read lists. Scores of one batch differ from pass to
            pass. Or layers compute statistics over a batch in training.
    """
    module: Any = scorer
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            _warn_of_filling(module)
            together = scorer(_batch(scorer, NUMBERS))[0]
            alone = torch.stack([scorer(_batch(scorer, [number]))[0, 0] for number in NUMBERS])
        spread = float((together[0] - together[2]).abs())
        if spread <= CONSTANT and _no_gradient(scorer):
            raise ConfigError(
                f"model: expected scores that depend on the doc, got {float(together[0]):.6g} for two docs of one "
                "query, with any weights: the pooled state does not depend on the doc; set model.pooling to last or "
                "mean, or choose another encoder"
            )
        if getattr(scorer, "reads_lists", False):
            return
        _check_apart(scorer, together, alone)
    finally:
        module.train(training)
    norms = [name for name, part in module.named_modules() if isinstance(part, BATCH_NORMS)]
    if norms:
        raise ConfigError(
            f"model: expected scores that depend on the pair alone, got {len(norms)} layers, such as {norms[0]}, that "
            "in training normalize by the mean over a batch; choose another encoder"
        )


def _check_apart(scorer: Scorer, together: Tensor, alone: Tensor) -> None:
    """Refuse scores [docs] of a batch that differ from the scores [docs] of the same docs alone by more than rounding.

    Raises:
        ConfigError: A score differs.
    """
    change = float((together - alone).abs().max())
    spread = float((together[0] - together[1]).abs())
    if change <= ROUNDING * max(1.0, float(together.abs().max())) or change <= 0.01 * spread:
        return
    with torch.no_grad():
        again = float((scorer(_batch(scorer, NUMBERS))[0] - together).abs().max())
    if again > 0.5 * change:
        raise ConfigError(
            f"model: expected the same score from each pass, got one that changes by {again:.2g} (two docs differ "
            f"by {spread:.2g}); this encoder draws random numbers, or keeps a state between two passes; choose another"
        )
    raise ConfigError(
        f"model: expected scores that depend on the pair alone, got one that changes by {change:.2g} with other docs "
        f"in the batch (two docs differ by {spread:.2g}); padding or other rows change the states of this encoder, "
        "choose another"
    )


def _warn_of_filling(scorer: Any) -> None:
    """Warn if filling that no token attends to changes the vectors of a query's tokens, such as by a convolution."""
    if scorer.reads == "pairs":
        return
    layout = scorer.layouts()[0]
    if not layout.fill_to or layout.attend_fill:
        return
    device = next(scorer.parameters()).device
    texts = [_Texts([_ids(scorer, layout.prefix + QUERY)])]
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
    """Return whether the difference of two docs' scores has a gradient of 0 for every weight."""
    with torch.enable_grad():
        scores = scorer(_batch(scorer, NUMBERS))[0]
        weights = [weight for weight in scorer.parameters() if weight.requires_grad]
        gradients = torch.autograd.grad(scores[0] - scores[2], weights, allow_unused=True)
    return all(gradient is None or float(gradient.abs().max()) <= CONSTANT for gradient in gradients)


@dataclass(frozen=True)
class _Texts:
    """Token ids of texts, with the attributes of a token store that `Template.lay_out` reads."""

    ids: list[list[int]]
    tokens: np.ndarray = field(init=False)
    offsets: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", np.array([token for row in self.ids for token in row], dtype=np.int64))
        object.__setattr__(self, "offsets", np.cumsum([0, *map(len, self.ids)]))


def _ids(scorer: Scorer, text: str) -> list[int]:
    """Return the token ids of a text without special tokens around it."""
    ids: list[int] = scorer.encoder.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _docs(scorer: Scorer, affixes: Affixes, numbers: Sequence[int]) -> _Texts:
    """Return docs by their numbers, see `NUMBERS`."""
    first, second = (_ids(scorer, affixes.around(text)) for text in DOCS)
    docs = (first, second, second[: len(first)])
    return _Texts([docs[number] for number in numbers])


def _batch(scorer: Scorer, numbers: Sequence[int]) -> RankBatch:
    """Return a batch of one query with docs by their numbers, see `NUMBERS`."""
    module: Any = scorer
    device = next(module.parameters()).device
    num_docs = len(numbers)
    batch = RankBatch(
        labels=torch.zeros(1, num_docs),
        doc_mask=torch.ones(1, num_docs, dtype=torch.bool),
        group_ids=torch.zeros(1, dtype=torch.int64),
        share=1.0,
    )
    if scorer.reads != "pairs":
        query, doc = module.layouts()
        batch.queries = _rows(scorer, query, [_Texts([_ids(scorer, query.prefix + QUERY)])])
        batch.docs = _rows(scorer, doc, [_docs(scorer, doc.affixes_of(0), numbers)])
    else:
        layout = pair_layout(scorer)
        queries = _Texts([_ids(scorer, layout.affixes_of(0).around(QUERY))] * num_docs)
        batch.pairs = _rows(scorer, layout, [queries, _docs(scorer, layout.affixes_of(1), numbers)])
    return batch.to(device)


def _rows(scorer: Scorer, layout: Template, texts: list[_Texts]) -> TokenBatch:
    """Lay texts out as rows. Each text is cut to an equal share of the encoder's positions."""
    room = max(1, (min(scorer.encoder.max_tokens, 512) - layout.num_special) // len(texts))
    parts: list[Any] = []
    for number, part in enumerate(texts):
        lengths = layout.kept(number, np.diff(part.offsets), room)
        parts.append((part, np.arange(len(lengths)), lengths))
    return layout.lay_out(parts)
