"""Gradients through DDP on two processes, with micro-batches and bucket views, equal the plain mean.

CUDA_VISIBLE_DEVICES=0 pytest -m gpu tests/unit/encoders. Through gloo both processes share one GPU. NCCL needs a GPU
for each: CUDA_VISIBLE_DEVICES=0,1.
"""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertModel

from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.graphs import Graphs
from ranker.encoders.tiny import tiny_tokenizer
from ranker.types import TokenBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; set CUDA_VISIBLE_DEVICES=0"),
]
STEPS = 5


class Scores(nn.Module):
    """A loss computed from an encoder's first tokens."""

    def __init__(self, graphs: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = BertConfig(
            hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.0, num_hidden_layers=4, vocab_size=1500
        )
        self.encoder = Encoder(BertModel(config, add_pooling_layer=False), tiny_tokenizer(), Execution(graphs=graphs))
        self.out = nn.Linear(768, 1)

    def forward(self, batch: TokenBatch) -> torch.Tensor:
        return self.out(self.encoder.pooled(batch, "cls").float()).sin().sum()


def batch_of(step: int, micro: int, rank: int) -> TokenBatch:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    rows = (12, 16)[micro]
    lengths = [80 + (i + step) % 5 for i in range(rows)]
    tokens = torch.randint(5, 1500, (sum(lengths),), generator=generator)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return TokenBatch(tokens, tokens % 2, ends, max(lengths), row_ids=torch.arange(rows) + 40 * rank + 20 * micro).to(
        "cuda"
    )


def gradients(module: nn.Module, encoder: Encoder, step: int, ranks: list[int], share: float) -> list[torch.Tensor]:
    """Gradients of a step with two micro-batches for each of the ranks."""
    encoder.dropout_seed = step
    module.zero_grad()
    for micro in range(2):
        for rank in ranks:
            with module.no_sync() if micro == 0 and hasattr(module, "no_sync") else contextlib.nullcontext():
                with torch.autocast("cuda", torch.bfloat16):
                    loss = module(batch_of(step, micro, rank))
                (loss * share).backward()
    return [weight.grad.clone() for weight in module.parameters()]


def main(rank: int, graphs: bool, rendezvous: str, backend: str) -> None:
    """Print the largest relative gap of a parameter's gradient at each step, and the number of graphs."""
    device = rank if backend == "nccl" else 0
    torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    own, alone = Scores(graphs).cuda(), Scores(graphs).cuda()
    alone.encoder._ragged_forward.graphs = Graphs(sightings=10**9)  # sizes are rounded as those of the other
    wrapped = DistributedDataParallel(own, device_ids=[device], gradient_as_bucket_view=True)
    gaps = []
    for step in range(STEPS):
        got = gradients(wrapped, own.encoder, step, [rank], 1.0)
        right = gradients(alone, alone.encoder, step, [0, 1], 0.5)
        gaps.append(max(float((one - other).norm() / other.norm()) for one, other in zip(got, right, strict=True)))
    dist.destroy_process_group()
    print(json.dumps({"gaps": gaps, "graphs": len(own.encoder._ragged_forward.graphs._captured)}))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("graphs", [False, True])
def test_gradients_are_the_mean_of_both_processes(graphs, backend, tmp_path):
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs two GPUs; set CUDA_VISIBLE_DEVICES=0,1")
    command = [sys.executable, __file__, str(int(graphs)), str(tmp_path / "meet"), backend]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]),
    }
    both = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, env=environment) for rank in range(2)
    ]
    try:
        for process in both:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0
            report = json.loads(output.splitlines()[-1])
            assert max(report["gaps"]) < 1e-6, "float32 sums in another order"
            assert len(report["gaps"]) == STEPS
            assert report["graphs"] == (2 if graphs else 0)
    finally:
        for process in both:
            process.kill()


if __name__ == "__main__":
    main(int(sys.argv[4]), sys.argv[1] == "1", sys.argv[2], sys.argv[3])
