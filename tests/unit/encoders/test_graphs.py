"""Which passes are captured, which memory they share and which gradients autograd gets; CUDA's part is in test_gpu.py.

Graphs need a GPU, so here a pass computes again what a graph would replay. It has a graph's restrictions: all gradients
share one buffer, and a pool holds the activations of the last replayed pass only.
"""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

from ranker.encoders import graphs
from ranker.encoders.graphs import Graphs
from ranker.types import TokenBatch


class Again(graphs._Pass):
    """A pass that runs its body each time."""

    def __init__(self, body, batch, model, flat, pool, side) -> None:
        self.module, self.model, self.flat, self.pool = graphs._Body(body, model), model, flat, pool
        self.shapes = [weight.shape for weight in model.parameters() if weight.requires_grad]
        self._allocate(batch)

    def replay(self) -> torch.Tensor:
        weights = {
            f"model.{name}": nn.Parameter(own.detach(), own.requires_grad)
            for name, own in self.model.named_parameters()
        }
        with torch.enable_grad():
            states = functional_call(self.module, weights, (self.batch, self.seed))
        self.pool[:] = [states, [own for own in weights.values() if own.requires_grad]]
        return states.detach().clone()

    def gradients(self, grad_out) -> list[torch.Tensor | None]:
        grads = torch.autograd.grad(*self.pool, grad_out, allow_unused=True)
        self.has_gradient = [grad is not None for grad in grads]
        for own, grad in zip(self._with_gradient(self.flat), [grad for grad in grads if grad is not None], strict=True):
            own.copy_(grad)
        return [
            part if has else None for part, has in zip(self._views(self.flat.clone()), self.has_gradient, strict=True)
        ]


@pytest.fixture(autouse=True)
def card(monkeypatch):
    monkeypatch.setattr(graphs, "_Pass", Again)
    monkeypatch.setattr(graphs, "_has_room", lambda extra: True)
    monkeypatch.setattr(graphs, "_is_current", lambda device: True)
    for name in ("current_stream", "Stream", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", list)


class Scorer(nn.Module):
    def __init__(self, passes: Graphs | None, kind: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.model = nn.Sequential(nn.Embedding(50, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        self.model[1].bias.requires_grad_(False)
        self.passes, self.replayed = passes, 0

    def forward(self, batch: TokenBatch) -> torch.Tensor:
        def body(own: TokenBatch, seed: torch.Tensor) -> torch.Tensor:
            return self.model(own.tokens) * (1 + seed % 7)

        states = self.passes(body, batch, 5, self.model, self.kind) if self.passes else None
        self.replayed += states is not None
        return body(batch, torch.tensor(5)) if states is None else states


def batch_of(tokens: int) -> TokenBatch:
    ids = torch.randint(50, (tokens,))
    return TokenBatch(ids, ids, torch.tensor([0, tokens], dtype=torch.int32), tokens)


def same_gradients(plain: nn.Module, replayed: nn.Module) -> None:
    for own, expected in zip(replayed.parameters(), plain.parameters(), strict=True):
        assert (own.grad is None) == (expected.grad is None)
        if own.grad is not None:
            torch.testing.assert_close(own.grad, expected.grad, rtol=0, atol=0)


def test_gradients_sum_over_micro_batches_and_follow_the_weights():
    plain, replayed = Scorer(None), Scorer(Graphs())
    optimizers = [
        torch.optim.AdamW([p for p in scorer.parameters() if p.requires_grad], lr=0.1) for scorer in (plain, replayed)
    ]
    for _ in range(5):
        batches = [batch_of(8), batch_of(8), batch_of(16)]
        for scorer, optimizer in zip((plain, replayed), optimizers, strict=True):
            optimizer.zero_grad()
            for batch in batches:
                scorer(batch).sin().sum().backward()
            optimizer.step()
        same_gradients(plain, replayed)
    assert replayed.replayed == 15 - 4, "the third time that a size comes up is the first by a graph"


def test_passes_that_wait_for_one_backward_pass_have_a_pool_each():
    plain, replayed = Scorer(None), Scorer(Graphs())
    for _ in range(6):
        first, second = batch_of(8), batch_of(8)
        for scorer in (plain, replayed):
            scorer.zero_grad()
            scorer(first)  # nothing comes of it, so its pool is free again
            (scorer(first).exp().sum() * scorer(second).sin().sum()).backward()
        same_gradients(plain, replayed)
    assert {key[0] for key in replayed.passes._captured} == {0, 1}
    assert len(replayed.passes._pools) == 2


def test_a_second_backward_pass_is_refused():
    scorer = Scorer(Graphs(sightings=1))
    loss = scorer(batch_of(8)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="its backward pass has already run"):
        loss.backward()


def test_passes_without_a_gradient_are_plain():
    scorer = Scorer(Graphs(sightings=1))
    scorer(batch_of(8))
    with torch.no_grad():
        scorer(batch_of(8))
    assert scorer.replayed == 1


def test_each_kind_and_each_size_has_a_graph_of_its_own_up_to_a_number(monkeypatch):
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 4)
    scorer = Scorer(Graphs(sightings=1))
    for kind, tokens in (("a", 8), ("b", 8), ("a", 16), ("a", 8), ("c", 8), ("c", 16), ("c", 16), ("b", 8)):
        scorer.kind = kind
        scorer(batch_of(tokens)).sum().backward()
    assert [key[1::3] for key in scorer.passes._captured] == [(8, "a"), (8, "b"), (16, "a"), (8, "c")]
    assert scorer.replayed == 6


def test_weights_that_lie_elsewhere_or_are_trained_otherwise_are_captured_anew():
    scorer = Scorer(Graphs(sightings=1))
    scorer(batch_of(8)).sum().backward()
    for change in (lambda: scorer.double(), lambda: scorer.model[3].weight.requires_grad_(False)):
        change()
        before = list(scorer.passes._captured.values())
        scorer.zero_grad()
        found = scorer(batch_of(8))
        found.sum().backward()
        assert not set(before) & set(scorer.passes._captured.values())
    assert (
        found.dtype == torch.float64 and scorer.model[3].weight.grad is None and scorer.model[1].weight.grad is not None
    )


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("x"), "no memory for them"),
        (RuntimeError("no such stream\nmore"), "failed (no such stream)"),
    ],
)
def test_where_a_capture_fails_the_plain_pass_goes_on(monkeypatch, error, reason):
    scorer, batch = Scorer(Graphs(sightings=1)), batch_of(8)
    scorer(batch).sum().backward()

    def fail(*arguments):
        raise error

    monkeypatch.setattr(graphs, "_Pass", fail)
    scorer(batch_of(16)).sum().backward()
    scorer(batch).sum().backward()
    assert scorer.replayed == 1 and reason in scorer.passes.why_off and not scorer.passes._captured


def test_where_memory_ends_there_are_no_more_graphs_than_there_are(monkeypatch):
    scorer = Scorer(Graphs(sightings=1))
    scorer(batch_of(8)).sum().backward()
    monkeypatch.setattr(graphs, "_has_room", lambda extra: False)
    for tokens in (16, 8):
        scorer(batch_of(tokens)).sum().backward()
    assert scorer.replayed == 2 and "fit beside the largest pass" in scorer.passes.why_off


def test_a_copy_has_captured_nothing():
    scorer = Scorer(Graphs(sightings=1))
    scorer(batch_of(8)).sum().backward()
    assert scorer.passes._captured and not copy.deepcopy(scorer).passes._captured
