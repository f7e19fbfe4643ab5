"""DPO's reference is the model without its adapters; draws get the step's seed and the groups' ids."""

from math import exp, log

import pytest
import torch

from ranker.encoders.loading import load_encoder
from ranker.encoders.lora import LoRA
from ranker.errors import ConfigError
from ranker.losses.dpo import DPO
from ranker.losses.reinforce import Reinforce
from ranker.models.lm_reranker import LMReranker
from ranker.training.loss_inputs import reference_scores
from ranker.training.rerank_module import RerankModule
from ranker.training.set_losses import SetLosses
from ranker.types import RankBatch, TokenBatch, TrainStep

pytest.importorskip("peft")


def batch_of():
    rng = torch.Generator().manual_seed(0)
    lengths = torch.tensor([0, 5, 7, 4, 6, 8]).cumsum(0)
    tokens = torch.randint(5, 60, (int(lengths[-1]),), generator=rng)
    pairs = TokenBatch(tokens, torch.zeros_like(tokens), lengths.int(), 8)
    labels, mask = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), torch.tensor([[True] * 3, [True, True, False]])
    return RankBatch(labels, mask, torch.tensor([4, 9]), 1.0, pairs, set_sizes=(1, 1))


@pytest.fixture
def scorer():
    torch.manual_seed(0)
    adapted = LMReranker(load_encoder("tiny_lm", lora=LoRA(rank=2, dropout=0.2)))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:  # trained for a while
            weight.data.normal_(0, 0.5)
    return adapted


def without_adapters(scorer):
    torch.manual_seed(0)
    base = LMReranker(load_encoder("tiny_lm"))
    state = {name.replace(".base_layer.", "."): value for name, value in scorer.state_dict().items()}
    base.load_state_dict({name: value for name, value in state.items() if ".lora_" not in name})
    return base.eval()


def test_the_reference_is_the_model_without_adapters_and_dropout(scorer):
    batch = batch_of()
    base = without_adapters(scorer)
    with torch.no_grad():
        expected = base(batch)
    got = reference_scores(scorer, batch)
    assert torch.equal(got, expected) and not got.requires_grad
    assert scorer.training and all(
        weight.requires_grad for name, weight in scorer.named_parameters() if "lora_" in name
    )
    assert (scorer.eval()(batch) - got).abs().max() > 1e-2


@pytest.mark.parametrize("in_a_mix", [False, True])
def test_the_loss_of_a_micro_batch_is_the_formula_on_both_scores(scorer, in_a_mix):
    batch = batch_of()
    loss = SetLosses({"a": DPO(beta=0.5), "b": DPO(beta=0.5)}) if in_a_mix else DPO(beta=0.5)
    module = RerankModule(scorer, ["RR"], loss).eval()
    if in_a_mix:
        loss.begin(TrainStep(0, 0, (), 2, 0, set_groups=(1, 1)))
    with torch.no_grad():
        model, reference = scorer(batch), without_adapters(scorer)(batch)
    gaps = (model - reference).tolist()
    pairs = [[gaps[0][0] - gaps[0][1], gaps[0][0] - gaps[0][2]], [gaps[1][1] - gaps[1][0]]]
    expected = sum(sum(log(1 + exp(-0.5 * gap)) for gap in group) / len(group) for group in pairs) / 2
    value = module.micro_batch_loss(batch)
    assert value.item() == pytest.approx(expected, abs=1e-6) and expected != pytest.approx(log(2), abs=1e-3)
    value.backward()
    assert all(weight.grad is None for name, weight in scorer.named_parameters() if "lora_" not in name)
    assert any(weight.grad is not None and weight.grad.any() for weight in scorer.parameters())


def test_draws_get_the_step_s_seed_and_the_groups_ids(scorer):
    batch, loss = batch_of(), Reinforce()
    module = RerankModule(scorer.eval(), ["RR"], loss)
    values = []
    for index in (0, 1):
        module._seed_dropout(TrainStep(0, index, (batch,), 2, 5, seeds=(0,)), 0)
        with torch.no_grad():
            scores = scorer(batch)
            expected = loss(scores, batch.labels, batch.doc_mask, module.scorer.encoder.dropout_seed, batch.group_ids)
            values.append(module.micro_batch_loss(batch).item())
        assert values[-1] == pytest.approx(expected.item(), abs=1e-6)
    assert values[0] != values[1]


def test_a_model_that_trains_more_than_adapters_is_refused():
    message = r"^loss: expected a model that trains adapters alone for loss=dpo, .*; got head\.weight$"
    linear = LMReranker(load_encoder("tiny_lm", lora=LoRA(rank=2)), head="linear")
    with pytest.raises(ConfigError, match=message):
        RerankModule(linear, ["RR"], DPO())
    with pytest.raises(ConfigError, match=r"^loss: expected a model that trains adapters alone"):
        RerankModule(LMReranker(load_encoder("tiny_lm")), ["RR"], DPO())
