"""Layers as teachers: the loss against a plain computation, the first weights, layer maps, and training."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import kl_div
from transformers import BertModel

from ranker.distillation.layer_map import layer_map
from ranker.distillation.layers import Layers
from ranker.distillation.module import DistillationModule
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.tiny import tiny_config, tiny_tokenizer
from ranker.errors import ConfigError
from ranker.losses.lce import LCE
from ranker.models.monobert import MonoBERT
from ranker.types import RankBatch, TokenBatch

ROWS = [[2, 9, 3, 11, 12, 3], [2, 9, 3, 30, 3], [2, 17, 18, 3, 40, 41, 42, 3]]
MASK = torch.tensor([[True, True], [True, False]])  # two groups: two docs, one doc
LABELS = torch.tensor([[1.0, 0.0], [1.0, 0.0]])


def scorer(layers, dim=16, seed=0, ragged=True):
    torch.manual_seed(seed)
    config = tiny_config(dim=dim)
    config.num_hidden_layers, config.attention_probs_dropout_prob, config.hidden_dropout_prob = layers, 0.0, 0.0
    model = BertModel(config, add_pooling_layer=False)
    made = MonoBERT(Encoder(model, tiny_tokenizer(), Execution(ragged=ragged))).double()
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return made


def batch_of(rows=(0, 1, 2), mask=MASK, labels=LABELS, share=1.0):
    tokens = torch.tensor([token for row in rows for token in ROWS[row]])
    ends = torch.tensor([0, *(len(ROWS[row]) for row in rows)]).cumsum(0).int()
    pairs = TokenBatch(tokens, torch.zeros_like(tokens), ends, max(len(ROWS[row]) for row in rows))
    return RankBatch(labels, mask, torch.arange(len(mask)), share, pairs=pairs)


def module_of(student, teacher, **options):
    made = DistillationModule(student, [], LCE(), teacher=teacher, options=Layers(teacher="", **options))
    return made.double()


def alone(model, row):
    """Output of transformers' own forward on one row, with states and attention."""
    ids = torch.tensor([ROWS[row]])
    model.encoder.model.set_attn_implementation("eager")
    return model.encoder.model(
        ids, token_type_ids=torch.zeros_like(ids), output_hidden_states=True, output_attentions=True
    )


def plain_loss(student, teacher, layers, maps):
    """Labels, scores, states and attention of each group by a loop over rows."""
    groups = []
    for rows, label in (([0, 1], 0), ([2], 0)):
        own, taught = ([alone(model, row) for row in rows] for model in (student, teacher))
        scores = torch.stack([student.head(out.last_hidden_state[0, 0])[0] for out in own])
        target = torch.stack([teacher.head(out.last_hidden_state[0, 0])[0] for out in taught]).detach()
        states, attention = [], []
        for mine, theirs in zip(own, taught, strict=True):
            pairs = [(0, 0), *enumerate(layers, 1)]
            states.append(
                torch.stack(
                    [(maps[i](mine.hidden_states[i]) - theirs.hidden_states[k]).square().mean() for i, k in pairs]
                ).mean()
            )
            attention.append(
                torch.stack(
                    [
                        kl_div(mine.attentions[i - 1].log(), theirs.attentions[k - 1], reduction="none").sum(-1).mean()
                        for i, k in pairs[1:]
                    ]
                ).mean()
            )
        loss = torch.nn.functional.cross_entropy(scores[None], torch.tensor([label]))
        groups.append(
            1.5 * loss
            + 0.7 * (scores - target).square().mean()
            + 0.3 * torch.stack(states).mean()
            + 0.2 * torch.stack(attention).mean()
        )
    return torch.stack(groups).mean()


@pytest.mark.parametrize("dim", [16, 8])
def test_the_loss_is_that_of_a_plain_loop(dim):
    student, teacher = scorer(2, dim, seed=1, ragged=False), scorer(4, ragged=False)
    module = module_of(student, teacher, start=False, labels=1.5, scores=0.7, states=0.3, attention=0.2)
    assert all(isinstance(part, torch.nn.Identity) == (dim == 16) for part in module.maps)
    loss = module.micro_batch_loss(batch_of())
    loss.backward()
    gradient = student.encoder.model.encoder.layer[0].attention.self.query.weight.grad.clone()
    expected = plain_loss(student, teacher, [2, 4], module.maps)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-7)  # scores and attention are float32 or better
    student.zero_grad()
    expected.backward()
    torch.testing.assert_close(
        gradient, student.encoder.model.encoder.layer[0].attention.self.query.weight.grad, rtol=1e-5, atol=1e-8
    )
    assert all(weight.grad is None for weight in teacher.parameters())


def test_a_split_into_micro_batches_changes_nothing():
    student, teacher = scorer(2, seed=1), scorer(4)
    module = module_of(student, teacher, start=False)
    whole = module.micro_batch_loss(batch_of())
    parts = [
        module.micro_batch_loss(batch_of((0, 1), MASK[:1], LABELS[:1])),
        module.micro_batch_loss(batch_of((2,), MASK[1:, :1], LABELS[1:, :1])),
    ]
    torch.testing.assert_close(whole, sum(parts) / 2, rtol=0, atol=1e-12)


def test_a_student_starts_as_the_teacher_s_layers():
    student, teacher = scorer(2, seed=1), scorer(4)
    module = module_of(student, teacher, layers="last")
    assert module.layers == [3, 4]
    own, other = student.encoder.model, teacher.encoder.model
    for mine, theirs in ((own.encoder.layer[0], other.encoder.layer[2]), (own.encoder.layer[1], other.encoder.layer[3]),
                         (own.embeddings, other.embeddings), (student.head, teacher.head)):  # fmt: skip
        for one, two in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(one, two)
    assert not any("teacher" in name for name in module.state_dict())


def test_a_copy_of_the_module_shares_the_teacher():
    """Callbacks that average weights copy the module."""
    student, teacher = scorer(2, seed=1), scorer(4)
    module = module_of(student, teacher)
    copied = copy.deepcopy(module)
    assert copied._teacher[0] is teacher and copied.scorer is not student
    assert torch.equal(copied.micro_batch_loss(batch_of()), module.micro_batch_loss(batch_of()))


def test_a_whole_copy_has_no_distance():
    teacher = scorer(3)
    module = module_of(scorer(3, seed=1), teacher, labels=0.0)
    assert float(module.micro_batch_loss(batch_of())) < 1e-12


def test_training_moves_a_student_towards_its_teacher():
    student, teacher = scorer(1, 8, seed=1), scorer(2)
    module = module_of(student, teacher, labels=0.0)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = module.micro_batch_loss(batch_of())
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.3 * losses[0]


def test_layer_maps_by_hand():
    assert layer_map("uniform", 1, 12) == [12]
    assert layer_map("uniform", 6, 12) == [2, 4, 6, 8, 10, 12]
    assert layer_map([1, 3], 2, 4) == [1, 3]
    # all of the change is at layers 2 and 5 of 6
    steps = {"a": {0: 1, 1: 1, 2: 3, 3: 3, 4: 3, 5: 5, 6: 5}, "flat": dict.fromkeys(range(7), 2)}
    assert layer_map("auto", 2, 6, steps) == [2, 6]
    assert layer_map("auto", 3, 6, steps) == [2, 5, 6]
    assert layer_map("auto", 6, 6, steps) == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ConfigError, match="got none of layer 4 for a"):
        layer_map("auto", 2, 4, {"a": {0: 1.0, 1: 2.0, 2: 1.0, 3: 1.0}})
    with pytest.raises(ConfigError, match="expected a student of at most 2 layers"):
        layer_map("last", 3, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": -1.0}, "distill.labels: expected a finite weight"),
        ({"labels": 0.0, "scores": 0.0, "states": 0.0}, "distill: expected a weight above 0"),
        ({"layers": "auto"}, "distill.report: expected a probing run"),
        ({"attention": 1.0}, "distill.attention: expected 0, or a teacher on the padded path"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ConfigError, match=message):
        module_of(scorer(2), scorer(2), **options)


def test_a_model_of_another_kind_is_no_teacher():
    with pytest.raises(ConfigError, match="expected a cross-encoder as teacher"):
        module_of(scorer(2), SimpleNamespace(reads="texts", eval=lambda: None))
