"""Matryoshka training: loss and gradients against a plain loop over layers and sizes, draws, smaller models."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax, normalize

from ranker.encoders.loading import load_encoder
from ranker.errors import ConfigError
from ranker.interactions.pooling import pool
from ranker.losses.lce import LCE
from ranker.models.dpr import DPR
from ranker.training.matryoshka import MatryoshkaModule, OwnDocsMatryoshkaModule, Sizes, alignment
from ranker.types import Contrast, RankBatch, TokenBatch, TrainStep

GROUPS, DOCS = 4, 2


def scorer_of(**options) -> DPR:
    torch.manual_seed(0)
    encoder = load_encoder("tiny", dropout=0.0, attention_dropout=0.0)
    return DPR(encoder, learn_temperature=True, temperature=0.3, **options).double()


def rows(*lengths):
    """Rows of different tokens."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    tokens = 5 + (torch.arange(int(ends[-1])) * 7) % 60
    return TokenBatch(tokens, torch.zeros_like(tokens), ends.int(), max(lengths))


def part(texts, chosen):
    pieces = [texts.tokens[texts.cu_seqlens[i] : texts.cu_seqlens[i + 1]] for i in chosen]
    ends = torch.tensor([0, *map(len, pieces)]).cumsum(0)
    return TokenBatch(
        torch.cat(pieces), torch.zeros(int(ends[-1]), dtype=torch.int64), ends.int(), max(map(len, pieces))
    )


QUERIES, TEXTS = rows(3, 5, 4, 6), rows(7, 5, 9, 6, 8, 4, 5, 7)


def step_of(size: int) -> TrainStep:
    """Groups of two docs, the first relevant, in micro-batches of `size` groups."""
    batches = []
    for start in range(0, GROUPS, size):
        groups = torch.arange(start, min(start + size, GROUPS))
        docs = range(start * DOCS, (int(groups[-1]) + 1) * DOCS)
        labels = torch.tensor([[1.0, 0.0]]).expand(len(groups), -1)
        mask = torch.ones(len(groups), DOCS, dtype=torch.bool)
        share = len(groups) / GROUPS
        batch = RankBatch(labels, mask, groups, share, queries=part(QUERIES, groups), docs=part(TEXTS, docs))
        batches.append(batch)
    positive = torch.arange(GROUPS * DOCS) % DOCS == 0
    owners = torch.arange(GROUPS).repeat_interleave(DOCS)
    mask = torch.ones(GROUPS, GROUPS * DOCS, dtype=torch.bool)
    contrast = Contrast(positive.float(), owners, mask, positive)
    return TrainStep(0, 3, tuple(batches), GROUPS, GROUPS * DOCS, contrast)


def alone(kind, scorer, sizes, **options):
    """A module without a Trainer."""
    module = kind(scorer, [], loss=LCE(), sizes=sizes, **options)
    module.__class__ = type("Alone", (kind,), {
        "trainer": SimpleNamespace(world_size=1, is_global_zero=True, strategy=object()),
        "global_rank": 0, "device": torch.device("cpu"),
        "manual_backward": lambda self, loss: loss.backward(),
    })  # fmt: skip
    return module


def vectors(scorer, texts, layer):
    """Pooled states after a layer, from transformers' own forward, one text at a time."""
    out = []
    for i in range(texts.num_rows):
        row = part(texts, [i])
        states = scorer.encoder.model(row.tokens.unsqueeze(0), output_hidden_states=True).hidden_states[layer][0]
        out.append(pool(states, row, "mean")[0])
    return torch.stack(out)


def by_a_plain_loop(scorer, layers, dims, weight, in_batch=True, symmetric=False):
    """The loss, written out."""
    temperature, losses, apart = scorer.log_temperature.exp(), [], []
    queries, docs = ({layer: vectors(scorer, texts, layer) for layer in layers} for texts in (QUERIES, TEXTS))
    for layer in layers:
        for dim in dims:
            short = (normalize(part[layer][:, :dim], dim=1) for part in (queries, docs))
            scores = (next(short) @ next(short).T) / temperature
            if not in_batch:
                own = scores[torch.arange(GROUPS)[:, None], torch.arange(GROUPS * DOCS).view(GROUPS, DOCS)]
                losses.append(cross_entropy(own, torch.zeros(GROUPS, dtype=torch.int64)))
                continue
            relevant = torch.arange(GROUPS) * DOCS
            loss = cross_entropy(scores, relevant)
            if symmetric:
                loss = (loss + cross_entropy(scores[:, relevant].T, torch.arange(GROUPS))) / 2
            losses.append(loss)
        if layer != layers[-1]:
            for group in range(GROUPS):
                texts = [(queries, group), *((docs, group * DOCS + i) for i in range(DOCS))]
                apart += [
                    kl_div(
                        log_softmax(part[layer][i] / 0.3, 0),
                        log_softmax(part[layers[-1]][i].detach() / 0.3, 0),
                        reduction="sum",
                        log_target=True,
                    )
                    * 0.3**2
                    for part, i in texts
                ]
    return sum(losses) / len(losses) + (weight * sum(apart) / len(apart) if apart else 0.0)


@pytest.mark.parametrize("size", [4, 1])
@pytest.mark.parametrize(("layers", "dims"), [([1], [4, 16]), (None, [8])])
def test_loss_and_gradients_are_those_of_a_plain_loop(size, layers, dims):
    scorer, expected = scorer_of(), scorer_of()
    sizes = Sizes.of(scorer, dims, layers, 1, 0.7)
    assert sizes.dims == (*dims, scorer.dim) and sizes.layers == (*(layers or ()), 2)
    loss = alone(MatryoshkaModule, scorer, sizes, symmetric=True).accumulate(step_of(size))
    truth = by_a_plain_loop(expected, sizes.layers, sizes.dims, 0.7, symmetric=True)
    truth.backward()
    assert loss.item() == pytest.approx(truth.item(), abs=1e-12)
    compare_gradients(scorer, expected)


@pytest.mark.parametrize("size", [4, 3])
def test_without_in_batch_negatives_each_query_has_its_own_docs(size):
    scorer, expected = scorer_of(), scorer_of()
    sizes = Sizes.of(scorer, [4], [1], 1, 0.7)
    loss = alone(OwnDocsMatryoshkaModule, scorer, sizes).accumulate(step_of(size))
    truth = by_a_plain_loop(expected, sizes.layers, sizes.dims, 0.7, in_batch=False)
    truth.backward()
    assert loss.item() == pytest.approx(truth.item(), abs=1e-12)
    compare_gradients(scorer, expected)


def compare_gradients(scorer, expected):
    for (name, got), (_, wanted) in zip(scorer.named_parameters(), expected.named_parameters(), strict=True):
        if wanted.grad is not None:
            torch.testing.assert_close(got.grad, wanted.grad, rtol=0, atol=1e-12, msg=name)
    assert scorer.log_temperature.grad.abs() > 1e-3


def test_the_divergence_of_a_worked_example():
    # softmax of (T ln 3, 0) / T is (3/4, 1/4), of (0, 0) it is (1/2, 1/2)
    last, other = [0.3 * math.log(3), 0.0], [0.0, 0.0]
    apart = 0.09 * (0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    queries = torch.tensor([[other, last], [last, last]])
    docs = torch.tensor([[last, last], [last, last], [other, last]])
    # the first group has its query and two docs, of which the query differs; the second a query and a doc
    found = alignment(queries, docs, torch.tensor([0, 0, 1]))
    torch.testing.assert_close(found, torch.tensor([apart / 3, apart / 2]))


def test_each_step_draws_layers_by_its_place_alone():
    sizes = Sizes((8,), (1, 2, 3, 4, 6), layers_per_step=2)
    steps = [replace(step_of(4), index=i) for i in range(40)]
    drawn = [sizes.layers_of(step, seed=5) for step in steps]
    assert drawn == [sizes.layers_of(step, seed=5) for step in steps]
    assert all(len(layers) == 3 and layers[-1] == 6 and sorted(layers) == list(layers) for layers in drawn)
    assert {layer for layers in drawn for layer in layers} == {1, 2, 3, 4, 6}
    assert drawn != [sizes.layers_of(step, seed=6) for step in steps]


@pytest.mark.parametrize("options", [{}, {"tied": False, "projection": 12, "activation": "tanh", "similarity": "dot"}])
def test_a_smaller_model_has_the_lower_layers_and_the_first_numbers(options, tmp_path):
    scorer = scorer_of(**options).float().eval()
    small = scorer.smaller(1, 5)
    assert (small.dim, small.encoder.num_layers, scorer.dim) == (5, 1, options.get("projection", 32))
    with torch.no_grad():
        for docs, texts in ((False, QUERIES), (True, TEXTS)):
            encode = small.encode_docs if docs else small.encode_queries
            expected = scorer.compared(scorer.vectors_after(texts, [1, 2], docs)[:, 0, :5])
            torch.testing.assert_close(encode(texts).values, expected, rtol=0, atol=1e-6)
            if not options:
                pooled = vectors(scorer, texts, 1)
                torch.testing.assert_close(expected, normalize(pooled[:, :5], dim=1), rtol=0, atol=1e-5)
        small.save(tmp_path / "small", 64)
        again = DPR.load(tmp_path / "small").eval()
        torch.testing.assert_close(again.encode_docs(TEXTS).values, small.encode_docs(TEXTS).values, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (([0], None, 1), "model.matryoshka_dims: expected numbers from 1 to 32, the model's own, got [0]"),
        (([], None, 1), "model.matryoshka_dims: expected numbers from 1 to 32, the model's own, got []"),
        ((None, [1, 3], 1), "model.matryoshka_layers: expected numbers from 1 to 2, the model's own, got [1, 3]"),
        ((None, [1], 2), "model.matryoshka_layers_per_step: expected 1 to 1, the number of layers in"),
    ],
)
def test_sizes_that_the_model_does_not_have_are_refused(options, message):
    with pytest.raises(ConfigError) as refused:
        Sizes.of(scorer_of(), *options, 1.0)
    assert str(refused.value).startswith(message)
