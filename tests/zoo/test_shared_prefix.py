"""Rows with a shared prefix have the scores and gradients of whole rows, in every family that shares them."""

import pytest
import torch
from torch.testing import assert_close

from ranker.encoders.loading import load_encoder
from ranker.errors import ConfigError
from ranker.models.lm_reranker import LMReranker
from ranker.types import RankBatch
from tests.zoo.rows import largest_difference
from tests.zoo.test_language_models import FAMILIES, PROMPT, batch_of, words
from tests.zoo.texts import DOCS, LONG_DOC, QUERIES

PAIRS = [(QUERIES[0], doc) for doc in (*DOCS[:3], LONG_DOC)] + [(QUERIES[1], doc) for doc in DOCS[:2]]
REFUSED = {"mamba": "whose rows are not packed"}


def grouped(batch):
    """The first four pairs and the last two as groups."""
    mask = torch.tensor([[True] * 4, [True] * 2 + [False] * 2])
    return RankBatch(torch.zeros(2, 4), mask, torch.arange(2), 1.0, batch.pairs)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in REFUSED])
@pytest.mark.usefixtures("float64_stays")
def test_scores_and_gradients_are_those_of_whole_rows(family, checkpoint, tmp_path):
    scorers = []
    for shared in (False, True):
        encoder = load_encoder(str(checkpoint(family)), dropout=0.0, attention_dropout=0.0, share_prefix=shared)
        yes, no = words(encoder.tokenizer)
        scorers.append(LMReranker(encoder, prompt=PROMPT, yes_word=yes, no_word=no).double())
    batch = grouped(batch_of(scorers[0], tmp_path, PAIRS))
    weights = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)
    got = []
    for scorer in scorers:
        scores = scorer(batch)
        (scores * weights).sum().backward()
        got.append(scores.detach())
    computed = [scorer.encoder.token_counts.computed_tokens for scorer in scorers]
    assert computed[1] < 0.8 * computed[0]
    assert largest_difference(got[1], got[0]) <= 1e-12
    gradients = [{name: weight.grad for name, weight in scorer.named_parameters()} for scorer in scorers]
    largest = max(float(gradient.abs().max()) for gradient in gradients[0].values() if gradient is not None)
    for name, gradient in gradients[0].items():
        if gradient is not None:
            assert_close(gradients[1][name], gradient, rtol=0, atol=1e-12 * largest, msg=name)


def test_adjacent_candidates_of_an_evaluation_share_a_prefix(checkpoint, tmp_path):
    """In an evaluation each candidate is a group; rows with the same beginning share it."""
    encoder = load_encoder(str(checkpoint("llama")), share_prefix=True)
    yes, no = words(encoder.tokenizer)
    scorer = LMReranker(encoder, prompt=PROMPT, yes_word=yes, no_word=no).eval()
    batch = batch_of(scorer, tmp_path, PAIRS)
    seen = []
    encoder.model.register_forward_pre_hook(
        lambda _, __, options: seen.append(options["input_ids"].shape[1]), with_kwargs=True
    )
    with torch.no_grad():
        apart = torch.cat([scorer(_only(batch, row)) for row in range(len(PAIRS))])
        whole = sum(seen)
        together = scorer(batch)
    assert seen[-1] < 0.8 * whole
    assert_close(together, apart, rtol=0, atol=1e-5)


def _only(batch, row):
    start, end = batch.pairs.cu_seqlens[row : row + 2].tolist()
    tokens = batch.pairs.tokens[start:end]
    pairs = type(batch.pairs)(tokens, torch.zeros_like(tokens), torch.tensor([0, end - start]).int(), end - start)
    return RankBatch(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), torch.zeros(1), 1.0, pairs)


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("mamba", {}, "whose rows are not packed"),
        ("llama", {"causal": False}, "whose tokens attend in both directions"),
        ("bert", {}, "whose rows are not packed"),
    ],
)
def test_a_family_that_cannot_is_refused_in_one_line(family, options, reason, checkpoint):
    with pytest.raises(
        ConfigError, match=rf"^encoder\.share_prefix: expected false for {family} models, {reason}; got"
    ):
        LMReranker(load_encoder(str(checkpoint(family)), share_prefix=True, **options), prompt=PROMPT)


def test_a_prompt_with_the_doc_first_is_refused(checkpoint):
    encoder = load_encoder(str(checkpoint("llama")), share_prefix=True)
    with pytest.raises(
        ConfigError, match=r"^encoder\.share_prefix: expected false, since the prompt has the doc before"
    ):
        LMReranker(encoder, prompt="{doc} {query}", yes_word="a", no_word="b")
