"""Contrastive training: the negatives of a query are its own and those of the whole optimizer step, on any devices and memory."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from ranker.layers.interaction import TextVectors, blocks
from ranker.training.rerank_module import RerankModule
from ranker.types import Contrast, RankBatch, TrainStep

log = logging.getLogger(__name__)

# Vectors (padded) of queries and of docs that are compared at a time: their similarities are BLOCK_QUERIES x BLOCK_DOCS floats, 16 MiB
BLOCK_QUERIES, BLOCK_DOCS = 1024, 4096


class ContrastiveModule(RerankModule):
    """Train a bi-encoder on the score matrix of a whole step: every query against its own docs and the other queries'.

    GradCache (Gao et al., 2021, arXiv:2101.06983) over micro-batches and devices. Pass 1 encodes every micro-batch without a graph. The
    vectors are gathered, each at its place in the step; each device scores its own queries against all docs, and the loss is computed
    once, on the step's whole matrix. Its gradient reaches the vectors block by block. Pass 2 encodes again, with the same dropout, and
    carries on from there. Memory is a micro-batch's plus the step's vectors and score matrix.

    Steps must have `contrast`. The scorer must have `encode_queries`, `encode_docs`, `score_block` and `scoring_parameters`.

    Args:
        symmetric: Take the mean of the loss and of the same loss over each positive doc's scores with all queries.
        options: As RerankModule.
    """

    def __init__(self, *options: Any, symmetric: bool = False, **named: Any) -> None:
        super().__init__(*options, **named)
        self.symmetric = symmetric

    def accumulate(self, step: TrainStep) -> Tensor:
        """Backward over this device's micro-batches; returns the step's loss on the first device and 0 on the others, float64."""
        assert step.contrast is not None
        world = self.trainer.world_size
        with torch.no_grad():
            encoded = []
            for i, batch in enumerate(step.micro_batches):
                self._seed_dropout(step, i)
                encoded.append(self._encode(batch))
        # autocast keeps the weights that it converted; those of a pass without a graph would cut the second pass off from its weights
        torch.clear_autocast_cache()
        parts = [_places(batch, step.contrast) for batch in step.micro_batches]
        queries = self._gather([vectors for vectors, _ in encoded], [part[0] for part in parts], step.num_groups)
        docs = self._gather([vectors for _, vectors in encoded], [part[1] for part in parts], step.num_docs)
        del encoded  # the step's vectors are held once
        mine = torch.cat([part[0] for part in parts]).sort().values if parts else step.contrast.owners[:0]
        total, on_scores, on_loss = self._loss_of_step(queries, docs, mine, step)
        on_queries, on_docs, on_scoring = self._through_scores(queries, docs, mine, on_scores)
        # every device has the whole gradient of the loss's own parameters, and of the scorer's what its own queries give
        own = [*zip(self._loss_parameters(), on_loss, strict=True), *((p, g * world) for p, g in on_scoring)]
        direct = sum(((p * g).sum() for p, g in own), start=torch.zeros((), device=self.device))
        if not step.micro_batches:  # every device must take part in the reduction
            self.manual_backward(self._nothing() + direct)
        for i, (batch, part) in enumerate(zip(step.micro_batches, parts, strict=True)):
            last = i == len(step.micro_batches) - 1
            self._seed_dropout(step, i)
            with self._gradient_sync(only_if=last):
                of_queries, of_docs = self._encode(batch)
                carried = (of_queries.values * on_queries.index_select(0, queries.places(part[0]))).sum()
                carried = carried + (of_docs.values * on_docs.index_select(0, docs.places(part[1]))).sum()
                self.manual_backward(carried * world + direct if last else carried * world)  # DDP divides by the number of devices
        return total.double() if self.trainer.is_global_zero else torch.zeros((), dtype=torch.float64, device=self.device)

    def _encode(self, batch: RankBatch) -> tuple[TextVectors, TextVectors]:
        scorer: Any = self.scorer
        return scorer.encode_queries(batch.queries), scorer.encode_docs(batch.docs)

    def _loss_parameters(self) -> list[nn.Parameter]:
        return [p for p in self.loss.parameters() if p.requires_grad] if isinstance(self.loss, nn.Module) else []

    def _gather(self, parts: list[TextVectors], rows: list[Tensor], num_texts: int) -> TextVectors:
        """The vectors of the step's texts, in the step's order, on every device: zeros elsewhere, then a sum over devices."""
        scorer: Any = self.scorer
        dtype = torch.float64 if next(scorer.parameters()).dtype == torch.float64 else torch.float32
        if getattr(scorer, "doc_vectors", None) is None:  # one vector a text: nothing to ask the devices
            whole = TextVectors(torch.zeros(num_texts, scorer.dim, dtype=dtype, device=self.device))
        else:
            counts = torch.zeros(num_texts, dtype=torch.int64, device=self.device)
            for vectors, texts in zip(parts, rows, strict=True):
                assert vectors.counts is not None
                counts[texts] = vectors.counts
            _sum_over_devices(counts)
            whole = TextVectors(torch.zeros(int(counts.sum()), scorer.dim, dtype=dtype, device=self.device), counts)
        for vectors, texts in zip(parts, rows, strict=True):
            whole.values[whole.places(texts)] = vectors.values
        _sum_over_devices(whole.values)
        return whole

    def _loss_of_step(self, queries: TextVectors, docs: TextVectors, mine: Tensor, step: TrainStep) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The step's loss, its gradient by the scores [groups, docs], and by the loss's own parameters."""
        assert step.contrast is not None and self.loss is not None
        scorer: Any = self.scorer
        scores = queries.values.new_zeros(step.num_groups, step.num_docs)
        with torch.no_grad():
            for query_rows, doc_rows in self._blocks(queries, docs, mine):
                scores[query_rows.unsqueeze(1), doc_rows] = scorer.score_block(queries.take(query_rows), docs.take(doc_rows))
        _sum_over_devices(scores)
        scores.requires_grad_(True)
        with torch.enable_grad():
            loss = self._on_matrix(scores, step.contrast)
            on_scores, *on_loss = torch.autograd.grad(loss, [scores, *self._loss_parameters()])
        return loss.detach(), on_scores, on_loss

    def _on_matrix(self, scores: Tensor, contrast: Contrast) -> Tensor:
        """The loss of scores [groups, docs]: a query's own docs have their labels, the others' 0."""
        assert self.loss is not None
        if contrast.mask.shape[1] == 1:
            log.warning("in-batch negatives: a step with one doc has none and teaches nothing; raise batch.queries or batch.docs")
        everyone = torch.arange(scores.shape[1], device=scores.device)
        labels = scores.new_zeros(scores.shape)
        labels[contrast.owners, everyone] = contrast.labels.to(scores.dtype)
        loss = self.loss(scores, labels, contrast.mask)
        if not self.symmetric:
            return loss
        positive = (contrast.labels > 0).nonzero().squeeze(1)
        if not len(positive):
            return loss
        one_hot = scores.new_zeros(len(positive), len(scores))
        one_hot[torch.arange(len(positive), device=scores.device), contrast.owners[positive]] = 1.0
        return (loss + self.loss(scores[:, positive].T, one_hot, contrast.mask[:, positive].T)) / 2

    def _through_scores(
        self, queries: TextVectors, docs: TextVectors, mine: Tensor, on_scores: Tensor
    ) -> tuple[Tensor, Tensor, list[tuple[nn.Parameter, Tensor]]]:
        """The loss's gradient by this device's query vectors, by all doc vectors, and by the parameters that scoring reads."""
        scorer: Any = self.scorer
        parameters = [p for p in scorer.scoring_parameters() if p.requires_grad]
        on_queries, on_docs = torch.zeros_like(queries.values), torch.zeros_like(docs.values)
        on_parameters = [torch.zeros_like(p) for p in parameters]
        for query_rows, doc_rows in self._blocks(queries, docs, mine):
            some_queries, some_docs = queries.take(query_rows), docs.take(doc_rows)
            inputs = [some_queries.values.requires_grad_(True), some_docs.values.requires_grad_(True), *parameters]
            with torch.enable_grad():
                scores = scorer.score_block(some_queries, some_docs)
            by_queries, by_docs, *by_parameters = torch.autograd.grad(scores, inputs, on_scores[query_rows.unsqueeze(1), doc_rows])
            on_queries.index_add_(0, queries.places(query_rows), by_queries)
            on_docs.index_add_(0, docs.places(doc_rows), by_docs)
            for whole, part in zip(on_parameters, by_parameters, strict=True):
                whole += part
        _sum_over_devices(on_docs)
        return on_queries, on_docs, list(zip(parameters, on_parameters, strict=True))

    def _blocks(self, queries: TextVectors, docs: TextVectors, mine: Tensor) -> list[tuple[Tensor, Tensor]]:
        """This device's queries against all docs, cut so that a block's similarities fit into little memory."""
        everyone = torch.arange(docs.num_texts, device=mine.device)
        return [(q, d) for q in blocks(mine, queries, BLOCK_QUERIES) for d in blocks(everyone, docs, BLOCK_DOCS)] if len(mine) else []


def _places(batch: RankBatch, contrast: Contrast) -> tuple[Tensor, Tensor]:
    """Which of the step's queries and docs are the rows of a micro-batch."""
    counts = batch.doc_mask.sum(1)
    starts = pad(torch.bincount(contrast.owners, minlength=contrast.mask.shape[0]).cumsum(0), (1, 0))[batch.places]
    assert batch.docs is not None
    num_docs = batch.docs.num_rows
    within = torch.arange(num_docs, device=counts.device) - (counts.cumsum(0) - counts).repeat_interleave(counts, output_size=num_docs)
    return batch.places, starts.repeat_interleave(counts, output_size=num_docs) + within


def _sum_over_devices(values: Tensor) -> None:
    if dist.is_initialized():
        dist.all_reduce(values)
