"""Stacked, pooled-first probes against the plain edge probe trained one at a time."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from ranker.errors import ConfigError
from ranker.probing import batches
from ranker.probing.batches import Inputs, make_batches, read_spans
from ranker.probing.optimizer import Adam, Dropout
from ranker.probing.probes import EdgeProbe
from ranker.probing.state_readers import RandomEmbeddings, TensorStates
from ranker.probing.training import Stack, fit, log_probabilities
from ranker.probing.training_options import TrainingOptions

CPU = torch.device("cpu")
CUDA = pytest.param(
    torch.device("cuda"),
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; set CUDA_VISIBLE_DEVICES=0"),
    ],
)
DIM, LAYERS, PAIRS, CLASSES = 12, 4, 70, 3


class PlainProbe(nn.Module):
    """The edge probe as the papers draw it: every token is projected, then weighted and added up."""

    def __init__(self, slots: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.projects = nn.ModuleList(nn.Linear(DIM, hidden) for _ in range(slots))
        self.scores = nn.ModuleList(nn.Linear(hidden, 1, bias=False) for _ in range(slots))
        self.mlp = nn.Sequential(
            nn.Linear(slots * hidden, hidden),
            nn.Tanh(),
            nn.LayerNorm(hidden),
            nn.Dropout(dropout),
            nn.Linear(hidden, CLASSES),
        )

    def load(self, probe: EdgeProbe, flat: Tensor) -> None:
        views = probe.split(flat)
        with torch.no_grad():
            for slot, (project, score) in enumerate(zip(self.projects, self.scores, strict=True)):
                project.weight.copy_(views[f"project{slot}"].T)
                project.bias.copy_(views[f"bias{slot}"])
                score.weight.copy_(views[f"score{slot}"][None])
            self.mlp[0].weight.copy_(views["inner"].T)
            self.mlp[0].bias.copy_(views["inner_bias"])
            self.mlp[2].weight.copy_(views["norm"])
            self.mlp[2].bias.copy_(views["norm_bias"])
            self.mlp[4].weight.copy_(views["out"].T)
            self.mlp[4].bias.copy_(views["out_bias"])

    def forward(self, spans: list[Tensor]) -> Tensor:
        """One target: per slot its tokens' states [tokens, dim]."""
        read = []
        for states, project, score in zip(spans, self.projects, self.scores, strict=True):
            projected = project(states)
            read.append((score(projected).softmax(0) * projected).sum(0))
        return self.mlp(torch.cat(read))


def make_inputs(
    slots: int = 2, several: bool = True, seed: int = 0, device: torch.device = CPU
) -> tuple[Inputs, np.ndarray]:
    """Random states; pairs of one to three targets with spans of one to nine tokens."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 4, PAIRS) if several else np.ones(PAIRS, dtype=int)
    targets = int(counts.sum())
    lengths = rng.integers(1, 10, (targets, slots))
    starts = (np.cumsum(lengths) - lengths.ravel()).reshape(targets, slots)
    spans = np.stack([starts, starts + lengths], axis=2)
    states = torch.from_numpy(rng.normal(size=(LAYERS, int(lengths.sum()), DIM)).astype(np.float32))
    inputs = Inputs(TensorStates(states.to(device)), spans, np.concatenate([[0], np.cumsum(counts)]), device)
    return inputs, rng.integers(0, CLASSES, (2, targets))


def stack_of(
    labels: np.ndarray, layers: list[int], seeds: list[int], columns: list[int], device: torch.device = CPU
) -> Stack:
    keys = [[[1000 * layer + 10 * seed + column for column in columns] for seed in seeds] for layer in layers]
    return Stack(layers, seeds, keys, torch.from_numpy(labels[columns]).to(device))


def logits_of(probe: EdgeProbe, inputs: Inputs, flat: Tensor, layers: list[int]) -> Tensor:
    """Log-probabilities of all targets in their own order, [layers, seeds, columns, targets, classes]."""
    out = torch.empty(*flat.shape[:3], len(inputs.spans), CLASSES)
    for batch, logs in log_probabilities(probe, flat, inputs, layers, np.arange(PAIRS)[None]):
        out[..., batch.targets[0].cpu(), :] = logs.cpu()
    return out


def test_parameters_of_the_published_probe() -> None:
    assert EdgeProbe(768, 2, 10).num_parameters == 528_650
    assert (
        sum(p.numel() for p in PlainProbe(2, 16, 0.3).parameters())
        == EdgeProbe(DIM, 2, CLASSES, hidden=16).num_parameters
    )


@pytest.mark.parametrize("slots", [1, 2])
def test_pool_then_project_is_the_plain_probe(slots: int) -> None:
    inputs, _ = make_inputs(slots)
    probe, plain = EdgeProbe(DIM, slots, CLASSES, hidden=16), PlainProbe(slots, 16, 0.0)
    flat = torch.randn(probe.num_parameters, generator=torch.Generator().manual_seed(0)) * 0.3
    plain.load(probe, flat)
    made = logits_of(probe, inputs, flat[None, None, None], [2])[0, 0, 0]
    states = inputs.states.gather([2], torch.arange(inputs.states.data.shape[1]))[0]
    with torch.no_grad():
        direct = torch.stack(
            [plain([states[a:b] for a, b in target]).log_softmax(0) for target in inputs.spans.tolist()]
        )
    assert_close(made, direct, rtol=0, atol=5e-6)


@pytest.mark.parametrize(("several", "head"), [(True, "edge"), (False, "edge"), (True, "mlp2"), (True, "linear")])
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_stacked_is_separate_after_20_steps(several: bool, head: str, device: torch.device) -> None:
    """All layers, seeds and label sets in one module, or each by itself: logits within 1e-5, dropout on."""
    inputs, labels = make_inputs(several=several, device=device)
    probe = EdgeProbe(DIM, 2, CLASSES, hidden=16, head=head)
    options = TrainingOptions(lr=1e-3, batch_pairs=16, max_rounds=1, round_steps=20, hidden=16, head=head)
    rng = np.random.default_rng(1)
    train = np.stack([rng.permutation(PAIRS)[:60] for _ in range(2)])  # 4 steps an epoch, 5 epochs
    none = np.empty((1, 0), dtype=np.int64)
    layers, seeds, columns = [0, 3], [5, 6], [0, 1]
    stacked = fit(probe, inputs, stack_of(labels, layers, seeds, columns, device), train, none, options, portion=3)
    assert stacked.epochs.unique().tolist() == [5]
    moved = stacked.parameters - torch.stack([probe.initial(seed) for seed in seeds])[None, :, None].to(device)
    assert moved.abs().amax(-1).min() > 5e-3, "every member was trained"
    for a, layer in enumerate(layers):
        for b, seed in enumerate(seeds):
            for c, column in enumerate(columns):
                alone = fit(
                    probe,
                    inputs,
                    stack_of(labels, [layer], [seed], [column], device),
                    train[b : b + 1],
                    none,
                    options,
                    portion=3,
                )
                own = stacked.parameters[a : a + 1, b : b + 1, c : c + 1]
                assert_close(
                    logits_of(probe, inputs, own, [layer]),
                    logits_of(probe, inputs, alone.parameters, [layer]),
                    rtol=0,
                    atol=1e-5,
                )


def test_training_is_that_of_a_plain_probe_with_torch_adam() -> None:
    """Against nn modules, cross_entropy, clip_grad_norm_ and torch.optim.Adam, 20 steps; a clip that bites."""
    inputs, labels = make_inputs()
    probe = EdgeProbe(DIM, 2, CLASSES, hidden=16, dropout=0.0)
    options = TrainingOptions(lr=1e-3, batch_pairs=16, max_rounds=1, round_steps=20, hidden=16, dropout=0.0, clip=0.5)
    train = np.random.default_rng(1).permutation(PAIRS)[None, :60]
    made = fit(
        probe, inputs, stack_of(labels, [1], [5], [0]), train, np.empty((1, 0), dtype=np.int64), options, portion=3
    )
    plain = PlainProbe(2, 16, 0.0)
    plain.load(probe, probe.initial(5))
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-3)
    states = inputs.states.data[1]
    clipped = 0
    for epoch in range(5):
        order = train[0][np.random.default_rng([5, 3, epoch]).permutation(60)]
        for first in range(0, 60, 16):
            targets = inputs.targets_of(order[first : first + 16])
            logits = torch.stack([plain([states[a:b] for a, b in inputs.spans[target].tolist()]) for target in targets])
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits, torch.from_numpy(labels[0][targets])).backward()
            clipped += bool(nn.utils.clip_grad_norm_(plain.parameters(), 0.5) > 0.5)
            optimizer.step()
    assert 5 <= clipped <= 15, "some gradients are clipped and some are not"
    reference = probe.initial(5)
    plain_again = PlainProbe(2, 16, 0.0)
    plain_again.load(probe, made.parameters[0, 0, 0])
    for own, direct in zip(plain_again.parameters(), plain.parameters(), strict=True):
        assert_close(own, direct, rtol=0, atol=1e-5)
    assert (made.parameters[0, 0, 0] - reference).abs().max() > 5e-3


def test_best_weights_by_validation_and_early_stop_of_each_member() -> None:
    """Label set 0 is learnt from layer 0. Label set 1 is noise: it stops at once and keeps early weights, 0 goes on."""
    inputs, labels = make_inputs(slots=1, several=False)
    first = inputs.spans[:, 0, 0]
    inputs.states.data[0, :, :CLASSES] = 0
    for target, (a, b) in enumerate(inputs.spans[:, 0]):
        inputs.states.data[0, a:b, labels[0][target]] = 3.0
    assert len(first) == PAIRS
    probe = EdgeProbe(DIM, 1, CLASSES, hidden=16)
    options = TrainingOptions(lr=1e-2, batch_pairs=16, max_rounds=30, round_steps=1, patience=3, hidden=16)
    train, val = np.arange(50)[None], np.arange(50, 70)[None]
    made = fit(probe, inputs, stack_of(labels, [0, 1], [0], [0, 1]), train, val, options, portion=0)
    signal, noise = made.epochs[0, 0, 0], made.epochs[1, 0, 1]
    assert noise < 12 < signal
    together = logits_of(probe, inputs, made.parameters, [0, 1])
    hits = (together[0, 0, 0, 50:].argmax(-1).numpy() == labels[0][50:]).mean()
    assert hits == 1
    alone = fit(probe, inputs, stack_of(labels, [0], [0], [0]), train, val, options, portion=0)
    assert alone.epochs[0, 0, 0] == signal, "the others change neither the stop nor the weights"
    assert_close(logits_of(probe, inputs, alone.parameters, [0])[0, 0, 0], together[0, 0, 0], rtol=0, atol=1e-3)
    # the kept weights are the best of all rounds: no longer training makes the validation loss lower
    longer = fit(
        probe,
        inputs,
        stack_of(labels, [1], [0], [1]),
        train,
        val,
        TrainingOptions(lr=1e-2, batch_pairs=16, max_rounds=30, round_steps=1, patience=30, hidden=16),
        0,
    )
    losses = [
        -(logs[0, 0, 0, 50:].gather(1, torch.from_numpy(labels[1][50:, None])).mean())
        for logs in (logits_of(probe, inputs, longer.parameters, [1]), together[1:, :, 1:])
    ]
    assert losses[1] < 1.3, "about the loss of the label prior, ln 3 = 1.1, where the last weights would be far worse"


def test_adam_leaves_members_of_rate_0_alone() -> None:
    parameters = torch.ones(2, 5)
    optimizer = Adam(parameters, lr=0.1, clip=1.0)
    optimizer.rates[1] = 0
    optimizer.gradient.fill_(10.0)
    optimizer.step()
    assert torch.equal(parameters[1], torch.ones(5))
    assert (parameters[0] < 1).all()


def test_adam_on_a_gpu_is_adam_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of a step, on equal gradients, with one clipped member and one of rate 0, against torch.optim.Adam."""
    gradients = (
        torch.randn(12, 3, 50, generator=torch.Generator().manual_seed(0)) * torch.tensor([0.01, 1.0, 1.0])[:, None]
    )
    made = []
    for way in ("_step_each", "_step_all"):
        monkeypatch.setattr(Adam, "_step_each", vars(Adam)[way])
        optimizer = Adam(torch.ones(3, 50), lr=0.1, clip=1.0)
        optimizer.rates[2] = 0
        for gradient in gradients:
            optimizer.gradient.copy_(gradient)
            optimizer.step()
        made.append(optimizer.parameters)
        monkeypatch.undo()
    truth = [torch.ones(50, requires_grad=True) for _ in range(2)]
    for member, parameter in enumerate(truth):
        reference = torch.optim.Adam([parameter], lr=0.1)
        for gradient in gradients:
            parameter.grad = gradient[member].clone()
            nn.utils.clip_grad_norm_([parameter], 1.0)
            reference.step()
    for parameters in made:
        assert_close(parameters, torch.stack([*truth, torch.ones(50)]).detach(), rtol=0, atol=1e-5)


def test_dropout_masks_of_a_member_do_not_depend_on_its_company() -> None:
    alone = Dropout([7], 0.3, (4, 8), CPU)
    together = Dropout([3, 7, 9], 0.3, (4, 8), CPU)
    for step in range(150):
        if step == 70:
            together.keep(torch.tensor([1, 2]))
        own, shared = alone(3), together(3)
        assert torch.equal(own[0], shared[1 if step < 70 else 0])
        assert own.shape == (1, 3, 8)
    assert not torch.equal(shared[0], shared[1])
    assert together(4).unique().tolist() == pytest.approx([0, 1 / 0.7])
    assert (Dropout([7], 0.3, (100, 100), CPU)(100) > 0).float().mean() == pytest.approx(0.7, abs=0.02)
    assert Dropout([7], 0.0, (4, 8), CPU)(3) is None


def test_batches_hold_each_target_once_and_pad_between_seeds() -> None:
    inputs, _ = make_inputs()
    pairs = np.stack([np.arange(PAIRS), np.arange(PAIRS)[::-1]])
    seen = [[], []]
    for batch in make_batches(inputs, pairs, 16):
        for seed in range(2):
            seen[seed] += batch.targets[seed][batch.real[seed]].tolist()
        for slot, (spans,) in enumerate(read_spans(inputs, [1], batch)):
            lengths = inputs.spans[batch.host_targets, slot, 1] - inputs.spans[batch.host_targets, slot, 0]
            assert spans.mask.sum(-1).tolist() == lengths.tolist()
    assert [sorted(own) for own in seen] == [list(range(len(inputs.spans)))] * 2


@pytest.mark.parametrize("chunk", [1, 10, 10**6])
def test_the_gradient_written_out_is_autograds(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """For all layers, seeds and label sets, and any chunk size, against autograd through masked softmax and sums."""
    monkeypatch.setattr(batches, "CHUNK_TOKENS", chunk)
    inputs, _ = make_inputs()
    half = Inputs(TensorStates(inputs.states.data.half()), inputs.spans, inputs.pair_starts, CPU)
    probe, layers = EdgeProbe(DIM, 2, CLASSES, hidden=16), [3, 1]
    batch = next(make_batches(half, np.stack([np.arange(9), np.arange(20, 29)]), 9))
    flat = torch.randn(2, 2, 3, probe.num_parameters, generator=torch.Generator().manual_seed(0)) * 0.3
    made, truth = flat.clone().requires_grad_(), flat.clone().requires_grad_()
    spans = read_spans(half, layers, batch)
    assert all((len(chunks) > 1) == (chunk < 10**6) for chunks in spans)
    logits = probe.logits(probe.split(made), spans)
    sums = []
    for slot, own in enumerate(probe.split(truth)[name] for name in ("project0", "project1")):
        rows = []
        for layer, seed, target in np.ndindex(2, 2, batch.host_targets.shape[1]):
            first, last = half.spans[batch.host_targets[seed, target], slot]
            states = half.states.data[layers[layer], first:last].float()
            projected = states @ own[layer, seed] + probe.split(truth)[f"bias{slot}"][layer, seed].unsqueeze(
                1
            )  # [columns, tokens, hidden]
            scores = projected @ probe.split(truth)[f"score{slot}"][layer, seed].unsqueeze(2)
            rows.append((scores.softmax(1) * projected).sum(1))
        sums.append(torch.stack(rows).unflatten(0, (2, 2, -1)).transpose(2, 3))
    views = probe.split(truth)
    inner = torch.tanh(torch.cat(sums, dim=-1) @ views["inner"] + views["inner_bias"].unsqueeze(-2))
    inner = nn.functional.layer_norm(inner, (16,)) * views["norm"].unsqueeze(-2) + views["norm_bias"].unsqueeze(-2)
    direct = inner @ views["out"] + views["out_bias"].unsqueeze(-2)
    assert_close(logits, direct, rtol=0, atol=1e-5)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    for some in (logits, direct):
        (some * weights).sum().backward()
    assert made.grad is not None and made.grad.abs().max() > 1
    assert_close(made.grad, truth.grad, rtol=1e-4, atol=1e-4)


def test_random_embeddings_are_one_vector_a_word() -> None:
    states = RandomEmbeddings.of(np.array([3, 1, 3]), 5, 4, seed=0, device=CPU)
    read = states.gather([0], torch.tensor([[0, 1, 2]]))
    assert read.shape == (1, 1, 3, 4)
    assert torch.equal(read[0, 0, 0], read[0, 0, 2])
    assert not torch.equal(read[0, 0, 0], read[0, 0, 1])


def test_options_are_checked() -> None:
    for wrong in ({"patience": 0}, {"dropout": 1.0}, {"lr": 0.0}, {"batch_pairs": 0}):
        with pytest.raises(ConfigError, match="training"):
            TrainingOptions(**wrong)
    with pytest.raises(ConfigError, match="head: expected one of edge, mlp2, linear"):
        EdgeProbe(4, 1, 2, head="deep")
