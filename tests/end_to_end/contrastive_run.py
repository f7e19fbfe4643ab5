"""A small contrastive training under one hardware layout; writes losses and final weights. Run by test_contrastive.py, one process tree a layout."""

import argparse
import importlib.util
import json
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from transformers import BertModel

from ranker.data.collection import Splits
from ranker.data.datamodule import BatchOptions, RankData, TextLimits
from ranker.layers.encoder import Encoder
from ranker.layers.tiny import tiny_config, tiny_tokenizer
from ranker.losses.lce import LCE
from ranker.losses.ranknet import RankNet
from ranker.models.colbert import ColBERT
from ranker.models.dpr import DPR
from ranker.training import contrastive_module
from ranker.training.contrastive_module import ContrastiveModule
from ranker.training.schedules import linear

spec = importlib.util.spec_from_file_location("invariance_run", Path(__file__).with_name("invariance_run.py"))
invariance_run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(invariance_run)


class Losses(pl.Callback):
    """Each step's loss in full precision."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.values.append(module.last_loss)


class Recorded(ContrastiveModule):
    """Keeps the step's loss in full precision."""

    last_loss = float("nan")

    def _refuse_nonfinite(self, total, step) -> None:
        self.last_loss = total.item()
        super()._refuse_nonfinite(total, step)


class OnePass(Recorded):
    """The reference: one micro-batch, one forward with its graph, one loss, one backward; no cache, no second pass."""

    def accumulate(self, step):
        (batch,) = step.micro_batches
        self._seed_dropout(step, 0)
        queries, docs = self._encode(batch)
        loss = self._on_matrix(self.scorer.score_block(queries, docs), step.contrast)
        self.manual_backward(loss)
        return loss.detach().double()


def faulty(fault: str) -> type[ContrastiveModule]:
    """The module, with a fault that the tests must see."""

    class Faulty(Recorded):
        def _seed_dropout(self, step, micro_batch):
            if fault != "replay":
                super()._seed_dropout(step, micro_batch)

        def _through_scores(self, queries, docs, mine, on_scores):
            on_queries, on_docs, on_parameters = super()._through_scores(queries, docs, mine, on_scores)
            if fault == "detached docs":  # only the query side learns from other groups
                on_docs = torch.zeros_like(on_docs)
            if fault == "temperature":
                on_parameters = [(p, g * 2) for p, g in on_parameters]
            return on_queries, on_docs, on_parameters

        def _gradient_sync(self, only_if):
            return super()._gradient_sync(only_if=only_if)

    if fault == "gather":
        contrastive_module._sum_over_devices = lambda values: None
    return Faulty if fault else Recorded


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=100_000)
    parser.add_argument("--min-micro-batches", type=int, default=1)
    parser.add_argument("--double", action="store_true")
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw")
    parser.add_argument("--model", choices=["dpr", "separate", "colbert"], default="dpr")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--one-pass", action="store_true")
    parser.add_argument("--small-blocks", action="store_true")
    parser.add_argument("--fault", default="")
    parser.add_argument("--precision", default=None)
    parser.add_argument("--cache", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    train = invariance_run.collection(9)  # steps of 4, 4 and 1 groups: with two processes one of them has nothing to do in the third
    config = tiny_config(dim=16)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = args.dropout
    encoder = Encoder(BertModel(config, add_pooling_layer=False), tiny_tokenizer())
    if args.model == "colbert":
        scorer, loss = ColBERT(encoder, projection=8, query_length=12, in_batch_negatives=True), RankNet()
    else:
        options = {"tied": False, "projection": 8, "similarity": "dot", "temperature": 3.0} if args.model == "separate" else {}
        scorer, loss = DPR(encoder, learn_temperature=True, symmetric=True, **options), LCE()
    if args.small_blocks:
        contrastive_module.BLOCK_QUERIES, contrastive_module.BLOCK_DOCS = 24, 64
    data = RankData(
        Splits(train, train, {}), scorer.encoder.tokenizer, scorer.reads, scorer.encoder.max_tokens,
        BatchOptions(queries=4, docs=5, positives=2, max_tokens=args.max_tokens, min_micro_batches=args.min_micro_batches),
        TextLimits(16, 64), seed=3, cache_dir=args.cache, layouts=scorer.layouts(), in_batch=True,
    )  # fmt: skip
    optimizer = torch.optim.AdamW if args.optimizer == "adamw" else torch.optim.SGD
    module = (OnePass if args.one_pass else faulty(args.fault))(
        scorer, ["nDCG@10", "RR"], symmetric=scorer.symmetric, loss=loss,
        optimizer=lambda groups: optimizer(groups, lr=3e-3 if args.optimizer == "adamw" else 0.3),
        schedule=lambda step, total: linear(step, total, warmup=2), max_norm=1.0,
    )  # fmt: skip
    if args.double:
        module = module.double()
    losses = Losses()
    trainer = pl.Trainer(
        accelerator="cpu", devices=args.devices, max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, num_sanity_val_steps=0, callbacks=[losses],
        precision=args.precision or ("64-true" if args.double else "32-true"),
        strategy=DDPStrategy(process_group_backend="gloo", broadcast_buffers=False, gradient_as_bucket_view=True) if args.devices > 1 else "auto",
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    if trainer.is_global_zero:
        torch.save(module.scorer.state_dict(), f"{args.out}.pt")
        measured = {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("val/")}
        Path(f"{args.out}.json").write_text(json.dumps({"losses": losses.values, "val": measured}))


if __name__ == "__main__":
    main()
