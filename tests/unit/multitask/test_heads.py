"""Multitask: what heads read, how deep the encoder runs, where gradients go, and the folder beside monoBERT's."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from ranker.data.collate import Collator
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.data.step_plan import StepPlan
from ranker.data.token_store import build_token_store
from ranker.encoders.encoder import Encoder
from ranker.encoders.loading import load_encoder
from ranker.errors import CheckpointError, ConfigError
from ranker.models.monobert import MonoBERT
from ranker.multitask.multitask import Multitask, make_task
from ranker.multitask.options import Head
from ranker.multitask.rows import AuxiliaryTask, TaskRows, to_rows
from ranker.multitask.steps import TaskSteps
from ranker.probing.examples import ProbeExample, Span, Target

QUERIES = ["red apple", "blue sky over a lake", "g"]
DOCS = ["an apple is red", "the sky", "green grass and more of it, and more", "x y z"]
WORDS = {"task": "jsonl", "name": "words", "classes": ["A", "B"]}


def scorer_of(*heads, **options) -> Multitask:
    torch.manual_seed(0)
    return Multitask(load_encoder("tiny"), heads=list(heads), head_hidden=8, **options).eval()


def examples() -> list[ProbeExample]:
    """Two pairs; the second has two targets, of one and of two spans."""
    return [
        ProbeExample("0", "0", QUERIES[0], DOCS[0], (Target((Span("query"), Span("doc")), "A"),)),
        ProbeExample(
            "1",
            "1",
            QUERIES[1],
            DOCS[1],
            (Target((Span("doc", 4, 7),), "B"), Target((Span("query", 5, 8), Span("doc", 4, 7)), "A")),
        ),
    ]


class Fixed:
    """A sampler of two groups, and a plan of one step: chosen groups, chosen rows."""

    def __init__(self, groups, rows):
        self.chosen, self.drawn, self.query_rows = np.array(groups, dtype=np.int64), rows, np.array([0, 1])

    def draw(self, epoch, groups):
        return np.array([[0, 1, 2], [1, 3, -1]])[groups], np.array([[1.0, 0, 0], [1.0, 0, 0]])[groups]

    def groups(self, epoch, step):
        return self.chosen

    def rows(self, epoch, step):
        return [np.array(own, dtype=np.int64) for own in self.drawn]

    ranking = StepPlan(2, 2, 10_000)


@pytest.fixture
def step(tmp_path):
    """A step of one micro-batch over the heads of a scorer."""

    def make(scorer, groups, rows, own=None):
        tokenizer = scorer.encoder.tokenizer
        stores = [
            build_token_store(
                ((str(i), text) for i, text in enumerate(texts)),
                tmp_path / f"{name}{len(list(tmp_path.iterdir()))}",
                tokenizer,
                32,
                fingerprint=name,
            )
            for name, texts in (("queries", QUERIES), ("docs", DOCS))
        ]
        collator = Collator.of(ScorerInputs(tokenizer, "pairs", 512), *stores, TextLimits(32, 32))
        tasks = [replace(own, task=make_task(Head(**WORDS))) for own in scorer.auxiliary_tasks()]
        sequences, made = to_rows(tasks, [own or examples()] * len(tasks), tokenizer, TextLimits(32, 32, 512))
        plan = Fixed(groups, rows)
        (micro_batch,) = TaskSteps(plan, plan, collator, sequences, made, 0, 1)[0, 0].micro_batches
        return micro_batch, made

    return make


def by_hand(scorer: Multitask, example: ProbeExample) -> list[torch.Tensor]:
    """States of an example at every layer, by transformers' own forward, padded to 40 tokens."""
    encoded = scorer.encoder.tokenizer(
        example.query, example.doc, return_tensors="pt", padding="max_length", max_length=40
    )
    return scorer.encoder.model(**encoded, output_hidden_states=True).hidden_states, encoded


@pytest.mark.parametrize("pooling", ["cls", "mean", "span"])
@pytest.mark.parametrize("layer", [0, 1, [1, 2]])
def test_a_head_reads_the_tokens_and_layers_that_it_should(step, pooling, layer):
    scorer = scorer_of({**WORDS, "layer": layer, "pooling": pooling})
    (head,) = scorer.task_heads()
    if head.mix is not None:
        with torch.no_grad():
            head.mix.copy_(torch.tensor([0.0, 1.0]))
    batch, _ = step(scorer, [1], [[1, 0]])
    with torch.no_grad():
        _, (outputs,) = scorer.outputs(batch)
    expected = []
    for example in (examples()[1], examples()[0]):
        states, encoded = by_hand(scorer, example)
        chosen = layer if isinstance(layer, list) else [layer]
        weights = torch.tensor([0.0, 1.0]).softmax(0) if len(chosen) > 1 else torch.ones(1)
        mixed = sum(weight * states[number][0] for weight, number in zip(weights, chosen, strict=True))
        length = int(encoded["attention_mask"].sum())
        for target in example.targets:
            if pooling == "cls":
                pooled = mixed[0]
            elif pooling == "mean":
                pooled = mixed[:length].mean(0)  # padding is not averaged
            else:
                parts = []
                for span in target.spans:
                    side = 0 if span.side == "query" else 1
                    inside = [
                        place
                        for place, owner in enumerate(encoded.sequence_ids())
                        if owner == side
                        and (
                            span.start is None
                            or (
                                encoded.token_to_chars(place).start < span.end
                                and encoded.token_to_chars(place).end > span.start
                            )
                        )
                    ]
                    parts.append(mixed[inside].mean(0))
                pooled = torch.cat([*parts, *[torch.zeros(32)] * 2][:2])
            expected.append(head.out(functional.relu(head.inner(pooled))))
    torch.testing.assert_close(outputs, torch.stack(expected), rtol=0, atol=1e-5)
    labels = batch.heads[0].labels.tolist()
    assert labels == [1, 0, 0]
    loss = head.loss(outputs, batch.heads[0])
    torch.testing.assert_close(
        loss, functional.cross_entropy(torch.stack(expected), torch.tensor(labels)), rtol=1e-5, atol=1e-6
    )


def test_ranking_scores_are_monoberts_whatever_rows_are_beside(step):
    scorer = scorer_of({**WORDS, "layer": 1}, pooling="mean")
    plain = MonoBERT(scorer.encoder, pooling="mean").eval()
    plain.load_state_dict(scorer.state_dict(), strict=False)
    alone, _ = step(scorer, [0, 1], [[]])
    beside, _ = step(scorer, [0, 1], [[0, 1]])
    assert beside.pairs.num_rows == alone.pairs.num_rows + 2
    with torch.no_grad():
        scores, (outputs,) = scorer.outputs(beside)
        torch.testing.assert_close(scores, plain(alone), rtol=0, atol=1e-6)
        torch.testing.assert_close(scorer.outputs(alone)[0], scores, rtol=0, atol=1e-6)
    assert outputs.shape == (3, 2)
    assert alone.heads == ()


def test_the_encoder_runs_once_and_no_deeper_than_any_row_needs(step, monkeypatch):
    scorer = scorer_of({**WORDS, "layer": 1}, {**WORDS, "name": "low", "layer": 0})
    ran = []
    whole = Encoder.layers

    def counting(self, batch):
        for number, states in enumerate(whole(self, batch)):
            ran.append(number)
            yield states

    monkeypatch.setattr(Encoder, "layers", counting)
    for groups, rows, expected in (([0], [[0], [1]], [0, 1, 2]), ([], [[0], [1]], [0, 1]), ([], [[], [1]], [0])):
        ran.clear()
        scorer.outputs(step(scorer, groups, rows)[0])
        assert ran == expected


@pytest.mark.parametrize(("layer", "reached"), [(0, 0), (1, 1), ([0, 1], 1), (2, 2)])
def test_a_head_leaves_gradients_above_its_layer_exactly_zero(step, layer, reached):
    scorer = scorer_of({**WORDS, "layer": layer}).train()
    batch, _ = step(scorer, [], [[0, 1]])
    _, (outputs,) = scorer.outputs(batch)
    scorer.task_heads()[0].loss(outputs, batch.heads[0]).backward()
    layers = scorer.encoder.model.encoder.layer
    for number in range(2):
        norms = [0.0 if p.grad is None else float(p.grad.norm()) for p in layers[number].parameters()]
        assert (max(norms) > 0) == (number < reached), number
        assert number < reached or norms == [0.0] * len(norms)
    assert scorer.encoder.model.embeddings.word_embeddings.weight.grad.norm() > 0
    assert scorer.head.weight.grad is None


def test_regression_learns_the_number_scaled_by_two_standard_deviations(step):
    scorer = scorer_of({"task": "jsonl", "name": "words", "layer": 1, "regression": True})
    values = [
        ProbeExample(e.query_id, e.doc_id, e.query, e.doc, (Target((Span("query"),), value=v),))
        for e, v in zip(examples(), (1.0, 3.0), strict=True)
    ]
    batch, _ = step(scorer, [], [[0, 1]], values)
    assert batch.heads[0].labels.tolist() == pytest.approx([0.25, 0.75])  # one standard deviation from the mean
    outputs = torch.tensor([[0.25], [0.25]])
    assert scorer.task_heads()[0].loss(outputs, batch.heads[0]).item() == pytest.approx(0.125)


def test_targets_that_truncation_cuts_are_left_out():
    scorer = scorer_of({**WORDS, "layer": 1})
    (head,) = scorer.task_heads()
    far = ProbeExample(
        "2", "2", "red", "sky " * 20, (Target((Span("doc", 60, 63),), "A"), Target((Span("doc", 0, 3),), "B"))
    )
    _, (rows,) = to_rows(
        [AuxiliaryTask(head.spec, make_task(head.spec), "span")],
        [[far]],
        scorer.encoder.tokenizer,
        TextLimits(32, 8, 512),
    )
    assert isinstance(rows, TaskRows)
    assert rows.labels.tolist() == [1]


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ({**WORDS, "layer": 3}, "model.heads.words.layer: expected 0 (the embeddings) to 2 for this encoder, got 3"),
        (
            {"task": "jsonl", "name": "open", "options": {"path": "spans.jsonl"}},
            "model.heads.open.classes: expected the labels of jsonl",
        ),
        ({**WORDS, "layer": "auto"}, "model.heads.words.layer: expected a layer, got auto"),
    ],
)
def test_heads_that_do_not_fit(tmp_path, monkeypatch, head, said):
    monkeypatch.chdir(tmp_path)
    record = {
        "info": {"qid": "1", "pid": "1"},
        "input": {"query": "a", "passage": "b"},
        "targets": [{"span1": {"side": "doc"}, "label": "A"}],
    }
    (tmp_path / "spans.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(ConfigError, match=re.escape(said)):
        scorer_of(head)


def test_folder_loads_in_sentence_transformers_and_the_heads_come_back(step, tmp_path):
    from sentence_transformers import CrossEncoder

    scorer = scorer_of(
        {**WORDS, "layer": [0, 2]}, {**WORDS, "name": "other", "layer": "middle", "classes": ["A", "B", "C"]}
    )
    batch, _ = step(scorer, [0, 1], [[1], []])
    with torch.no_grad():
        scores, (outputs,) = scorer.outputs(batch)
    scorer.save(tmp_path / "model", max_tokens=512)
    assert {"heads.json", "heads.safetensors", "model.safetensors", "config.json"} <= {
        path.name for path in (tmp_path / "model").iterdir()
    }
    pairs = [(QUERIES[0], DOCS[0]), (QUERIES[0], DOCS[1]), (QUERIES[0], DOCS[2])]
    assert CrossEncoder(str(tmp_path / "model"), device="cpu").predict(pairs).tolist() == pytest.approx(
        scores[0].tolist(), abs=1e-5
    )
    loaded = Multitask.load(tmp_path / "model").eval()
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in scorer.state_dict().items())
    assert [(h.spec, h.layers, h.pooling, h.num_outputs) for h in loaded.task_heads()] == [
        (h.spec, h.layers, h.pooling, h.num_outputs) for h in scorer.task_heads()
    ]
    with torch.no_grad():
        torch.testing.assert_close(loaded.outputs(batch)[1][0], outputs, rtol=0, atol=0)
    (tmp_path / "model/heads.json").write_text("{")
    with pytest.raises(
        CheckpointError, match=r"expected the heads of a multitask model in heads.json and heads.safetensors"
    ):
        Multitask.load(tmp_path / "model")


def test_a_pair_without_a_query_is_a_row_of_its_own_layout(step):
    scorer = scorer_of({**WORDS, "layer": 1})
    own = [examples()[0], ProbeExample("2", "2", "", DOCS[1], (Target((Span("doc", 4, 7),), "B"),))]
    batch, _ = step(scorer, [], [[0, 1]], own)
    with torch.no_grad():
        _, (outputs,) = scorer.outputs(batch)
        encoded = scorer.encoder.tokenizer(DOCS[1], return_tensors="pt")
        state = scorer.encoder.model(**encoded, output_hidden_states=True).hidden_states[1][0]
        inside = [
            i
            for i in range(len(state))
            if encoded.token_to_chars(i) is not None and encoded.token_to_chars(i).start >= 4
        ]
        (head,) = scorer.task_heads()
        expected = head.out(functional.relu(head.inner(torch.cat([state[inside].mean(0), torch.zeros(32)]))))
    place = batch.heads[0].labels.tolist().index(1)
    torch.testing.assert_close(outputs[place], expected, rtol=0, atol=1e-5)
