"""Train sentence-transformers' SparseEncoder on exactly the steps of a finished training of SPLADE.

    python benchmarks/sparse_peer.py RUN START OUT     # needs the package datasets

START is the folder of the untrained model. The steps have the same queries, positives and negatives in the same order,
texts cut at the same tokens, and the same loss, penalties, optimizer, schedule, clipping and precision as the training
RUN. Only the mask differs: this program never uses a known positive of a query as its negative. The trained model is
written to OUT/model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from one_line import one_line  # noqa: E402

from ranker.assembly.data import build_data, load_splits  # noqa: E402
from ranker.checkpoint import load_scorer  # noqa: E402
from ranker.config.stored import load_stored  # noqa: E402


def cut(tokenizer: Any, texts: list[str], limit: int) -> list[str]:
    """Return texts that are cut after `limit` tokens."""
    found = tokenizer(texts, add_special_tokens=False, truncation=True, max_length=limit, return_offsets_mapping=True)
    return [text[: spans[-1][1]] if spans else text for text, spans in zip(texts, found["offset_mapping"], strict=True)]


def steps_of(config: Any, start: Path) -> tuple[list[list[int]], dict[str, list[str]]]:
    """Return the indices of each optimizer step's rows, and the columns of all rows: query, positive, negative."""
    splits = load_splits(config)
    scorer = load_scorer(start)
    data = build_data(config, splits, scorer)
    steps, train = data.train_steps(), splits.train
    doc_ids = [doc_id.decode() for doc_id in steps.collator.docs.ids()]
    texts = {doc.doc_id: doc.full_text for doc in train.docs}
    rows: list[tuple[str, str, str]] = []
    batches = []
    for epoch in range(config.trainer.max_epochs):
        for number in range(len(steps.plan)):
            groups = steps.plan.groups(epoch, number)
            docs, labels = steps.sampler.draw(epoch, groups)
            if (docs < 0).any() or (labels[:, 0] <= 0).any() or labels[:, 1:].any():
                sys.exit("a group without a positive or a negative: the other program has no such rows")
            batches.append(list(range(len(rows), len(rows) + len(groups))))
            queries = (train.queries[query_id] for query_id in steps.ids_of(groups))
            rows += [
                (query, *(texts[doc_ids[doc]] for doc in own))
                for query, own in zip(queries, docs.tolist(), strict=True)
            ]
    limits = (config.max_query_tokens, config.max_doc_tokens, config.max_doc_tokens)
    columns = zip(("query", "positive", "negative"), zip(*rows, strict=True), limits, strict=True)
    tokenizer = scorer.encoder.tokenizer
    return batches, {name: cut(tokenizer, list(column), limit) for name, column, limit in columns}


class InOrder:
    """A batch sampler that yields the given batches."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches, self.batch_size, self.drop_last = batches, len(batches[0]), False

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing, because the given batches already contain all epochs."""


def train(config: Any, start: Path, out: Path, steps: int) -> None:
    """Train the other program's model for the first `steps` steps, and save it."""
    import pyarrow
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from sentence_transformers import SparseEncoder, SparseEncoderTrainer, SparseEncoderTrainingArguments
    from sentence_transformers.sparse_encoder.callbacks import SpladeRegularizerWeightSchedulerCallback
    from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss

    batches, columns = steps_of(config, start)
    batches = batches[:steps]
    torch.manual_seed(config.seed)
    gpu = torch.cuda.is_available()
    model = SparseEncoder(str(start), device="cuda" if gpu else "cpu")
    model.max_seq_length = config.max_doc_tokens + 2
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    loss = SpladeLoss(
        model,
        SparseMultipleNegativesRankingLoss(model),
        document_regularizer_weight=config.model.doc_penalty,
        query_regularizer_weight=config.model.query_penalty,
    )
    options = SparseEncoderTrainingArguments(
        output_dir=str(out / "trainer"),
        num_train_epochs=1,  # the given batches already contain all epochs
        per_device_train_batch_size=config.batch.queries,
        learning_rate=config.optim.lr,
        weight_decay=config.optim.weight_decay,
        max_grad_norm=config.trainer.gradient_clip_val,
        warmup_steps=int(config.schedule.warmup * len(batches)),
        lr_scheduler_type="linear",
        bf16=config.trainer.precision == "bf16-mixed",
        batch_sampler=lambda *_, **__: InOrder(batches),
        save_strategy="no",
        logging_steps=20,
        report_to="none",
        disable_tqdm=True,
        seed=config.seed,
        use_cpu=not gpu,
    )
    warmup = SpladeRegularizerWeightSchedulerCallback(loss, warmup_ratio=config.model.penalty_warmup)
    # the fingerprint is given, because not every version of pyarrow's tables can be hashed
    rows = Dataset(InMemoryTable(pyarrow.table(columns)), fingerprint="steps")
    trainer = SparseEncoderTrainer(model=model, args=options, train_dataset=rows, loss=loss, callbacks=[warmup])
    trainer.train()
    if trainer.state.global_step != len(batches):
        sys.exit(f"expected {len(batches)} steps, got {trainer.state.global_step}")
    model.save_pretrained(str(out / "model"), create_model_card=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("start", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    with contextlib.chdir(args.run.parent):
        steps = json.loads((args.run / "result.json").read_text())["steps"]
        train(load_stored(args.run / "config.yaml"), args.start.absolute(), args.out.absolute(), steps)


if __name__ == "__main__":
    one_line(main)
