"""Heads at early layers: their scores, what their training changes, and which pairs exit early."""

import lightning.pytorch as pl
import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.data import DataLoader
from transformers import BertModel

from ranker import Reranker
from ranker.assembly.inference import prepare
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.tiny import tiny_config, tiny_tokenizer
from ranker.errors import ConfigError
from ranker.exits.check import early_layer, faults_of, fill_in
from ranker.exits.early_exit import EarlyExit
from ranker.exits.module import EarlyExitModule, ExitTraining
from ranker.losses.lce import LCE
from ranker.models.monobert import MonoBERT
from ranker.training.options import Optimization
from ranker.training.rerank_module import RerankModule
from ranker.types import RankBatch, TokenBatch, TrainStep

MASK = torch.tensor([[True, True, True], [True, True, False]])
LABELS = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])


def encoder(layers=3, ragged=True, dropout=0.0):
    torch.manual_seed(0)
    config = tiny_config(dim=16)
    config.num_hidden_layers, config.attention_probs_dropout_prob, config.hidden_dropout_prob = layers, 0.0, dropout
    model = BertModel(config, add_pooling_layer=False)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return Encoder(model, tiny_tokenizer(), Execution(ragged=ragged))


def rows(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, 60, (4 + i,), generator=generator) for i in range(5)]


def batch_of(texts, mask=MASK, labels=LABELS):
    tokens, ends = torch.cat(texts), torch.tensor([0, *map(len, texts)]).cumsum(0).int()
    pairs = TokenBatch(tokens, torch.zeros_like(tokens), ends, max(map(len, texts)), row_ids=torch.arange(len(texts)))
    return RankBatch(labels, mask, torch.arange(len(mask)), 1.0, pairs=pairs)


def fit(kind, scorer, **options):
    module = kind(
        scorer,
        [],
        loss=LCE(),
        optimization=Optimization(
            lambda groups: torch.optim.AdamW(groups, lr=1e-2), lambda step, total: 1.0, 3, max_norm=0.5
        ),
        **options,
    ).double()
    steps = [TrainStep(0, index, (batch_of(rows(index)),), 2, 5) for index in range(3)]
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, precision="64-true", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(steps, batch_size=None))
    return scorer.state_dict()


@pytest.mark.parametrize("trunk", [False, True])
def test_early_heads_change_the_last_layer_s_scores_only_if_they_train_the_trunk(trunk):
    plain = fit(RerankModule, MonoBERT(encoder(dropout=0.1), dropout=0.1))
    torch.manual_seed(0)
    scorer = EarlyExit(encoder(dropout=0.1), dropout=0.1, exits=[1, 2])
    first = {name: value.clone() for name, value in scorer.state_dict().items()}
    scorer.head.load_state_dict(MonoBERT(encoder(dropout=0.1), dropout=0.1).head.state_dict())
    both = fit(EarlyExitModule, scorer, options=ExitTraining(trunk=trunk, weight=5.0))
    # LCE does not depend on the last bias: its gradient is rounding, which AdamW divides by its eps of 1e-8
    compared = [name for name in plain if name != "head.bias"]
    furthest = max(float((plain[name] - both[name].double()).abs().max()) for name in compared)
    assert furthest > 1e-4 if trunk else furthest < 1e-12
    assert (both["exit_heads.0.weight"] - first["exit_heads.0.weight"]).abs().max() > 1e-3


def test_the_loss_is_that_of_a_plain_computation():
    torch.manual_seed(0)
    scorer = EarlyExit(encoder(), exits=[1, 2]).double()
    module = EarlyExitModule(scorer, [], LCE(), options=ExitTraining(True, weight=0.7, distilled=0.25)).double()
    texts, heads = rows(), [*scorer.exit_heads, scorer.head]
    states = [scorer.encoder.model(text[None], output_hidden_states=True).hidden_states for text in texts]
    scores = [torch.stack([head(state[layer][0, 0])[0] for state in states]) for layer, head in enumerate(heads, 1)]
    labels = [torch.nn.functional.cross_entropy(part[None], torch.tensor([place]))
              for score in scores for part, place in ((score[:3], 0), (score[3:], 1))]  # fmt: skip
    own = torch.stack(labels).view(3, 2).mean(1)
    errors = [(score - scores[2]).square() for score in scores[:2]]
    taught = torch.stack([(error[:3].mean() + error[3:].mean()) / 2 for error in errors])
    expected = own[2] + 0.7 * (0.75 * own[:2] + 0.25 * taught).mean()
    torch.testing.assert_close(module.micro_batch_loss(batch_of(texts)), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("ragged", [True, False])
def test_a_pair_leaves_at_the_first_head_that_is_sure(ragged):
    torch.manual_seed(0)
    scorer = EarlyExit(encoder(4, ragged), exits=[1, 3]).double().eval()
    for head in (*scorer.exit_heads, scorer.head):
        torch.nn.init.normal_(head.weight, std=0.5)
    texts, mask = rows(), torch.ones(1, 5, dtype=torch.bool)
    assert scorer.encoder.resumes == ragged
    with torch.no_grad():
        states = [scorer.encoder.model(text[None], output_hidden_states=True).hidden_states for text in texts]
        logits = torch.stack(
            [
                torch.stack([head(state[layer][0, 0])[0] for state in states])
                for head, layer in zip((*scorer.exit_heads, scorer.head), (1, 3, 4), strict=True)
            ]
        )
        taken = set()
        distances = sorted((logits - 0.1).abs().flatten().tolist())
        for margin in (0.0, *(distance + 1e-6 for distance in distances[::2]), 99.0):
            scorer.leave(margin=margin, center=0.1)
            expected = []
            for pair in range(5):
                head = next((i for i in range(2) if abs(logits[i, pair] - 0.1) >= margin), 2)
                taken.add(head)
                expected.append(float(logits[head, pair]))
            got = scorer(batch_of(texts, mask, mask.float()))[0].tolist()
            assert got == pytest.approx(expected, rel=0, abs=1e-9)
            apart = [float(scorer(batch_of([text], mask[:, :1], mask[:, :1].float()))) for text in texts]
            assert apart == pytest.approx(expected, rel=0, abs=1e-9)  # whatever else is in the batch
        assert taken == {0, 1, 2}
        for place, layer in enumerate((1, 3, 4)):
            scorer.leave(exit=layer)
            assert scorer(batch_of(texts, mask, mask.float()))[0].tolist() == pytest.approx(logits[place].tolist())


@torch.no_grad()
def test_layers_that_are_not_read_are_not_computed():
    scorer = EarlyExit(encoder(4), exits=[2], exit=2).eval()
    scorer.encoder.model.encoder.layer[2] = None  # an error if it is read
    assert scorer(batch_of(rows())).isfinite().all()
    scorer.leave(margin=0.0)
    assert scorer(batch_of(rows())).isfinite().all()


def test_the_layer_of_a_report_by_hand():
    assert early_layer({"a": {0: 1, 1: 2, 2: 4}, "b": {0: 1, 1: 3.9, 2: 4}}) == 1  # only the last layer is near enough
    assert early_layer({"a": {0: 4, 1: 1, 2: 3, 3: 4, 4: 4}, "b": {0: 1, 1: 1, 2: 4, 3: 4, 4: 4}}) == 3
    with pytest.raises(ConfigError, match="at least two layers"):
        early_layer({})


@pytest.mark.parametrize(
    ("exits", "message"),
    [
        ([2, 1], "ascending layers"),
        ([], "ascending layers"),
        ("last", "ascending layers"),
        ([0], "ascending layers"),
        ([True], "ascending layers"),
        ([2], "below the last, 2, got 2"),
        ("auto", "with model.exits=auto, got null"),
    ],
)
def test_exits_that_can_not_be(exits, message):
    (fault,) = faults_of({"exits": exits}, {"layers": 2})
    assert fault.startswith("model.") and message in fault


def test_a_report_on_another_encoder_is_refused_and_layers_that_are_cut_off_are_not_chosen(tmp_path):
    rows = [f"own,bm25,{layer},0,none,{value}" for layer, value in enumerate((1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 4.0))]
    table = "\n".join(["model,task,layer,seed,control,compression", *rows])
    (tmp_path / "probe_results.csv").write_text(table)
    (tmp_path / "config.yaml").write_text(
        "checkpoint: null\nencoder: {package: null, name: google-bert/bert-base-cased}\n"
    )
    model = {"exits": "auto", "report": str(tmp_path)}
    (fault,) = faults_of(model, {"package": None, "name": "google-bert/bert-large-cased"})
    assert fault.startswith(
        "model.report: expected a report on google-bert/bert-large-cased, got a report on google-bert/bert-base"
    )
    assert faults_of(model, {"package": None, "name": "google-bert/bert-base-cased"}) == []
    for layers, expected in ((None, 5), (4, 2)):  # of 4 layers no layer below the last is near: the middle
        cfg = OmegaConf.create({"model": model, "encoder": {"layers": layers}})
        fill_in(cfg)
        assert cfg.model.exits == [expected]


def test_a_rule_that_can_not_be():
    scorer = EarlyExit(encoder(), exits=[1])
    with pytest.raises(ConfigError, match=r"expected a layer with a head \(1, 3\), got 2"):
        scorer.leave(exit=2)
    with pytest.raises(ConfigError, match="expected a layer or a margin, not both"):
        scorer.leave(exit=1, margin=1.0)
    with pytest.raises(ConfigError, match="below the last, 3; got"):
        EarlyExit(encoder(), exits=[3])


def test_a_reranker_leaves_where_it_is_told(tmp_path):
    torch.manual_seed(0)
    scorer = EarlyExit(encoder(3), exits=[1])
    for head in (*scorer.exit_heads, scorer.head):
        torch.nn.init.normal_(head.weight, std=0.5)
    scorer.save(tmp_path / "model", max_tokens=64)
    OmegaConf.save({"model": {"_target_": "ranker.exits.early_exit.EarlyExit"}}, tmp_path / "model/ranker.yaml")
    pairs = [("the river", "a river runs to the sea"), ("cold", "nights")]
    last, first, sure = (
        Reranker.load(tmp_path / "model", accelerator="cpu", precision="32-true", inference=rule).score(pairs)
        for rule in ({}, {"exit": 1}, {"margin": 0.0})
    )
    assert first.tolist() == pytest.approx(sure.tolist()) and abs(first - last).min() > 1e-3
    with pytest.raises(ConfigError, match=r"inference.exit: expected null, or a model with early heads"):
        prepare(MonoBERT(encoder()), {"exit": 1})
