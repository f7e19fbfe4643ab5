"""Contrastive training: each query is scored with its own docs and with the docs of all other queries of the step.

The docs of other queries are additional negatives. The loss depends neither on the number of devices nor on the memory
budget.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from ranker.data.ragged import tensor_ranges
from ranker.interactions.maxsim import TextVectors, blocks, has_kernel
from ranker.models.interface import BiEncoder
from ranker.training.contrastive_parts import Gradients, Penalties
from ranker.training.options import NonFiniteOptions, Optimization
from ranker.training.rerank_module import RerankModule
from ranker.training.score_matrix import loss_of_matrix, trained_parameters
from ranker.types import Contrast, Loss, RankBatch, TrainStep

# Query and doc vectors, padding included, that are compared at a time: BLOCK_QUERIES x BLOCK_DOCS values take 16 MiB.
# The kernel of MaxSim stores no similarities, only 2 bytes for each query vector and doc.
BLOCK_QUERIES, BLOCK_DOCS = 1024, 4096
KERNEL_QUERIES, KERNEL_DOCS = 32768, 262144


class ContrastiveModule(RerankModule):
    """Train a bi-encoder on the score matrix of a step: each query with its own docs and with other queries' docs.

    The method is GradCache (Gao et al., 2021, arXiv:2101.06983), over all micro-batches and devices:

    1. Pass 1 encodes every micro-batch; only the last one keeps its autograd graph. Then all devices get the vectors of
       all texts, in the order of the step.
    2. Each device scores its own queries with all docs. Block by block, it computes its part of the loss, and the
       gradient of this part with respect to the vectors. The gradients with respect to doc vectors are summed over the
       devices.
    3. Pass 2 propagates these gradients through the graph of the last micro-batch. It encodes each other micro-batch
       again, with the same dropout and with a graph, and propagates the gradients of this micro-batch as well.

    Peak memory is the sum of the activations of one micro-batch, the vectors of the step, the gradient of the query
    vectors, and the score matrix with its gradient. The gradient of the doc vectors overwrites the doc vectors.

    Each `TrainStep` must have `contrast`. The scorer must have `encode_queries`, `encode_docs`, `score_block` and
    `scoring_parameters`.

    Args:
        scorer: As in RerankModule.
        measures: As in RerankModule.
        loss: As in RerankModule.
        optimization: As in RerankModule.
        nonfinite: As in RerankModule.
        symmetric: Whether to average two losses: that of queries that rank docs, and that of positive docs that rank
            all queries of the step.
    """

    scorer: BiEncoder

    def __init__(
        self,
        scorer: BiEncoder,
        measures: list[str],
        loss: Loss | None = None,
        optimization: Optimization | None = None,
        nonfinite: NonFiniteOptions | None = None,
        symmetric: bool = False,
    ) -> None:
        super().__init__(scorer, measures, loss, optimization, nonfinite)
        self.symmetric = symmetric

    def accumulate(self, step: TrainStep) -> Tensor:
        """Run forward and backward over this device's micro-batches; return their part of the step's loss, float64."""
        assert step.contrast is not None
        world = self.trainer.world_size
        text_rows = [_rows_in_step(batch, step.contrast) for batch in step.micro_batches]
        queries, docs, kept = self._encode_step(step, text_rows)
        vector_rows = [(queries.vector_indices(rows[0]), docs.vector_indices(rows[1])) for rows in text_rows]
        mine = torch.cat([rows[0] for rows in text_rows]).sort().values if text_rows else step.contrast.owners[:0]
        penalties = self.penalties(queries, docs, step)
        total, grad_queries, grad_docs, parameters = self.gradients(queries, docs, mine, step)
        _sum_over_devices(grad_docs)
        if self.symmetric:  # positive docs of other devices also rank this device's queries
            _sum_over_devices(grad_queries)
        if penalties is not None:
            if self.trainer.is_global_zero:
                total = total + penalties.value
            grad_queries, grad_docs = grad_queries + penalties.by_queries, grad_docs + penalties.by_docs
        # all gradients are this device's part of the step's gradients; DDP divides their sum by the number of devices
        direct = sum(((p * g * world).sum() for p, g in parameters), start=torch.zeros((), device=self.device))
        if not step.micro_batches:  # every device must take part in the all-reduce
            self.manual_backward(self.zero_loss() + direct)
        # start with the micro-batch whose graph is in memory, so that there are never two graphs
        order = [len(step.micro_batches) - 1, *range(len(step.micro_batches) - 1)] if step.micro_batches else []
        for i in order:
            query_rows, doc_rows = vector_rows[i]
            with self._gradient_sync(only_if=i == order[-1]):
                if kept is None:
                    self._seed_dropout(step, i)
                    kept = self._encode(step.micro_batches[i])
                (of_queries, of_docs), kept = kept, None
                carried = (of_queries.values * grad_queries.index_select(0, query_rows)).sum()
                carried = carried + (of_docs.values * grad_docs.index_select(0, doc_rows)).sum()
                self.manual_backward(carried * world + direct if i == order[-1] else carried * world)
        return total.double()

    def penalties(self, queries: TextVectors, docs: TextVectors, step: TrainStep) -> Penalties | None:
        """Return a part of the loss that depends on all vectors of the step, or None. Subclasses override this method.

        Args:
            queries: Vectors of the step's queries, the same on every device.
            docs: Vectors of the step's docs.
            step: The step.
        """

    def _encode(self, batch: RankBatch) -> tuple[TextVectors, TextVectors]:
        assert batch.queries is not None and batch.docs is not None
        # The backward pass visits the texts in reverse order. If docs are encoded first, it ends with the docs, which
        # have most of the tokens. The gradients of shared weights are then complete layer by layer, and DDP can sum
        # them over the devices while the backward pass continues.
        docs = self.scorer.encode_docs(batch.docs)
        return self.scorer.encode_queries(batch.queries), docs

    def _encode_step(
        self, step: TrainStep, text_rows: list[tuple[Tensor, Tensor]]
    ) -> tuple[TextVectors, TextVectors, tuple[TextVectors, TextVectors] | None]:
        """Return the vectors of the step's queries and docs, and the last micro-batch's vectors with their graph.

        The vectors are in the order of the step and equal on every device: each device fills in the vectors of its own
        texts, the others are zeros, and the devices sum these tensors. The last micro-batch needs no second forward
        pass, because its graph is kept.
        """
        query_counts = doc_counts = None
        # models with several vectors per text know the number of vectors before they encode
        if self.scorer.vectors == "tokens":
            query_counts = torch.zeros(step.num_groups, dtype=torch.int64, device=self.device)
            for batch, (query_rows, _) in zip(step.micro_batches, text_rows, strict=True):
                assert batch.queries is not None
                query_counts[query_rows] = batch.queries.cu_seqlens.diff().long()
            _sum_over_devices(query_counts)
        if self.scorer.vectors != "one":
            doc_counts = torch.zeros(step.num_docs, dtype=torch.int64, device=self.device)
            for batch, (_, doc_rows) in zip(step.micro_batches, text_rows, strict=True):
                assert batch.docs is not None
                doc_counts[doc_rows] = self.scorer.doc_vector_counts(batch.docs)
            _sum_over_devices(doc_counts)
        num_queries = step.num_groups if query_counts is None else int(query_counts.sum())
        num_docs = step.num_docs if doc_counts is None else int(doc_counts.sum())
        dtype = torch.float64 if next(self.scorer.parameters()).dtype == torch.float64 else torch.float32
        both = torch.zeros(num_queries + num_docs, self.vector_size(step), dtype=dtype, device=self.device)
        queries, docs = TextVectors(both[:num_queries], query_counts), TextVectors(both[num_queries:], doc_counts)
        kept = None
        for i, (batch, (query_rows, doc_rows)) in enumerate(zip(step.micro_batches, text_rows, strict=True)):
            last = i == len(step.micro_batches) - 1
            if last:
                # Autocast caches weights in half precision. Cached copies of earlier passes have no graph, so with them
                # the weights would get no gradient in this pass.
                torch.clear_autocast_cache()
            self._seed_dropout(step, i)
            with torch.set_grad_enabled(last):
                of_queries, of_docs = self._encode(batch)
            queries.values[queries.vector_indices(query_rows)] = of_queries.values.detach()
            docs.values[docs.vector_indices(doc_rows)] = of_docs.values.detach()
            kept = (of_queries, of_docs) if last else None
        _sum_over_devices(both)
        return queries, docs, kept

    def vector_size(self, step: TrainStep) -> int:
        """Return the size of the vectors of a step's texts."""
        return self.scorer.dim

    def gradients(self, queries: TextVectors, docs: TextVectors, mine: Tensor, step: TrainStep) -> Gradients:
        """Return this device's part of the step's loss, and the gradients of this part.

        Args:
            queries: Vectors of the step's queries, the same on every device.
            docs: Vectors of the step's docs. This method may overwrite them with gradients.
            mine: Indices of this device's queries in the step, ascending, int64 [queries of this device].
            step: The step.
        """
        assert step.contrast is not None and self.loss is not None
        scores = queries.values.new_zeros(step.num_groups, step.num_docs)
        with torch.no_grad():
            for _, pairs in self._blocks(queries, docs, mine, step.contrast):
                for query_rows, doc_rows, _ in pairs:
                    scores[query_rows.unsqueeze(1), doc_rows] = self.scorer.score_block(
                        queries.take(query_rows), docs.take(doc_rows)
                    )
        total, grad_scores, by_loss_parameters = loss_of_matrix(self.loss, scores, step.contrast, mine, self.symmetric)
        by_queries, by_docs, by_scoring_parameters = self._backward_through_scores(
            queries, docs, mine, grad_scores, step.contrast
        )
        of_loss = list(zip(trained_parameters(self.loss), by_loss_parameters, strict=True))
        return Gradients(total, by_queries, by_docs, [*of_loss, *by_scoring_parameters])

    def _backward_through_scores(
        self, queries: TextVectors, docs: TextVectors, mine: Tensor, grad_scores: Tensor, contrast: Contrast
    ) -> tuple[Tensor, Tensor, list[tuple[nn.Parameter, Tensor]]]:
        """Return this device's part of the gradients for query vectors, doc vectors and scoring parameters.

        To save memory, each block of `docs.values` is overwritten by its gradient once it has been scored.
        """
        parameters = [p for p in self.scorer.scoring_parameters() if p.requires_grad]
        grad_queries, grad_scoring_parameters = (
            torch.zeros_like(queries.values),
            [torch.zeros_like(p) for p in parameters],
        )
        for block, pairs in self._blocks(queries, docs, mine, contrast):
            in_block = docs.take(block)
            grad_docs = torch.zeros_like(in_block.values)
            for query_rows, doc_rows, places in pairs:
                some_queries, some_docs = queries.take(query_rows), in_block.take(places)
                inputs = [some_queries.values.requires_grad_(True), some_docs.values.requires_grad_(True), *parameters]
                with torch.enable_grad():
                    scores = self.scorer.score_block(some_queries, some_docs)
                by_queries, by_docs, *by_parameters = torch.autograd.grad(
                    scores, inputs, grad_scores[query_rows.unsqueeze(1), doc_rows]
                )
                grad_docs.index_add_(0, in_block.vector_indices(places), by_docs)
                grad_queries.index_add_(0, queries.vector_indices(query_rows), by_queries)
                for total, gradient in zip(grad_scoring_parameters, by_parameters, strict=True):
                    total += gradient
            docs.values[docs.vector_indices(block)] = grad_docs
        return grad_queries, docs.values, list(zip(parameters, grad_scoring_parameters, strict=True))

    def _blocks(
        self, queries: TextVectors, docs: TextVectors, mine: Tensor, contrast: Contrast
    ) -> Iterator[tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]]]]:
        """Yield blocks of docs. Each comes with the parts of the score matrix that this device computes for it.

        The similarities of a part fit into the memory limit.

        Yields:
            The docs of a block; for each part: its queries, its docs, and the positions of these docs in the block. All
            are int64.
        """
        max_queries, max_docs = BLOCK_QUERIES, BLOCK_DOCS
        if has_kernel(queries, docs):
            max_queries, max_docs = KERNEL_QUERIES, KERNEL_DOCS
        of_queries = blocks(mine, queries, max_queries) if len(mine) else []
        others, anchors = mine[:0], mine[:0]
        if self.symmetric and len(mine) < contrast.mask.shape[0]:
            is_mine = torch.zeros_like(contrast.mask[:, 0]).index_fill_(0, mine, True)
            others = (~is_mine).nonzero().squeeze(1)
            anchors = (contrast.positive & is_mine[contrast.owners]).nonzero().squeeze(1)
        of_others = blocks(others, queries, max_queries) if len(others) else []
        every = torch.arange(docs.num_texts, device=docs.values.device)
        for block in blocks(every, docs, max_docs):
            parts = [(query_rows, block, block - block[0]) for query_rows in of_queries]
            if of_others:
                some = block[torch.isin(block, anchors)]
                parts += [(query_rows, some, some - block[0]) for query_rows in of_others if len(some)]
            yield block, parts


def _rows_in_step(batch: RankBatch, contrast: Contrast) -> tuple[Tensor, Tensor]:
    """Return the indices within the step of a micro-batch's queries, int64 [batch], and of its docs, int64 [docs]."""
    counts = batch.doc_mask.sum(1)
    starts = pad(torch.bincount(contrast.owners, minlength=contrast.mask.shape[0]).cumsum(0), (1, 0))[batch.group_ids]
    assert batch.docs is not None
    return batch.group_ids, tensor_ranges(starts, counts, batch.docs.num_texts)


def _sum_over_devices(values: Tensor) -> None:
    if dist.is_initialized():
        dist.all_reduce(values)
