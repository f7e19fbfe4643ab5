"""A multitask step on CUDA, of which each task's gradient is taken apart from the others'."""

import pytest
import torch
from transformers import BertConfig, BertModel

from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.tiny import tiny_tokenizer
from ranker.losses.ranknet import RankNet
from ranker.multitask.gradients import Gradients
from ranker.multitask.module import MultitaskModule
from ranker.multitask.multitask import Multitask
from ranker.multitask.options import TaskWeighting
from ranker.multitask.steps import HeadBatch, TaskBatch, TaskStep
from ranker.types import TokenBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; set CUDA_VISIBLE_DEVICES=0"),
]


@pytest.mark.parametrize("path", [{"fused": True}, {"fused": False, "compile": True}])
def test_a_plain_step_and_then_one_that_compares_gradients(path):
    torch.manual_seed(0)
    config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_hidden_layers=2, vocab_size=1500)
    encoder = Encoder(BertModel(config, add_pooling_layer=False), tiny_tokenizer(), Execution(**path))
    scorer = Multitask(encoder, heads=[{"task": "bm25", "layer": 1, "regression": True}])
    module = MultitaskModule(scorer, [], weighting=TaskWeighting(mode="static"), loss=RankNet()).cuda()
    pairs = TokenBatch(torch.randint(5, 1000, (120,)), torch.zeros(120).long(), torch.arange(0, 121, 40).int(), 40)
    read = HeadBatch(0, torch.arange(80, 120), torch.zeros(40).long(), torch.tensor([40]), torch.tensor([0.5]), 1)
    labels, mask = torch.tensor([[1.0, 0.0]]), torch.ones(1, 2, dtype=torch.bool)
    batch = TaskBatch(labels, mask, torch.tensor([0]), 1.0, pairs, heads=(read,), num_rank_rows=2, num_rank_tokens=80)
    (batch,) = TaskStep(0, 0, (batch,), 1, 3, rows=(2, 1)).to("cuda").micro_batches
    with torch.autocast("cuda", torch.bfloat16):
        together, apart = Gradients(module, 1), Gradients(module, 2)
        together.add(sum(module.task_losses(batch).values()), 0)
        parts = module.task_losses(batch)
        apart.add(parts[0], 0, keep_graph=True)
        apart.add(parts[1], 1)
    assert all(part.norm() > 0 for part in apart.values)
    assert (apart.values.sum(0) - together.values[0]).norm() < 1e-2 * together.values.norm()
