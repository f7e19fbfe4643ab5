"""Contrastive training: each query is scored with its own docs and with the docs of all other queries of the step.

The docs of other queries are additional negatives. The loss depends neither on the number of devices nor on the memory
budget.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from ranker.data.ragged import tensor_ranges
from ranker.interactions.maxsim import TextVectors, blocks, has_kernel
from ranker.models.interface import BiEncoder
from ranker.training.contrastive_parts import Block, Gradients, Part, Penalties, Texts, vector_totals
from ranker.training.options import NonFiniteOptions, Optimization
from ranker.training.rerank_module import RerankModule
from ranker.training.score_matrix import loss_of_matrix, trained_parameters
from ranker.types import Contrast, Loss, RankBatch, TrainStep

# Query and doc vectors, padding included, that are compared at a time: BLOCK_QUERIES x BLOCK_DOCS values take 16 MiB.
# The kernel of MaxSim stores no similarities, but 2 bytes for each pair of a query vector and a doc: with the largest
# block 64 MiB for docs of 256 vectors, and 512 MiB for docs of 32.
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
    vectors, the score matrix with its gradient, and three copies of the vectors of a block of docs. The gradient of the
    doc vectors overwrites the doc vectors.

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
        queries, docs, vector_rows, kept = self._encode_step(step, text_rows)
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
    ) -> tuple[TextVectors, TextVectors, list[tuple[Tensor, Tensor]], tuple[TextVectors, TextVectors] | None]:
        """Return the vectors of the step's queries and docs, and those of the last micro-batch with their graph.

        The vectors are in the order of the step and equal on every device: each device fills in the vectors of its own
        texts, the others are zeros, and the devices sum these tensors. The last micro-batch needs no second forward
        pass, because its graph is kept. The third result has, for each micro-batch, the indices of its query vectors
        and of its doc vectors.
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
        (num_queries, longest_query), (num_docs, longest_doc) = vector_totals(
            (query_counts, step.num_groups), (doc_counts, step.num_docs)
        )
        dtype = torch.float64 if next(self.scorer.parameters()).dtype == torch.float64 else torch.float32
        both = torch.zeros(num_queries + num_docs, self.vector_size(step), dtype=dtype, device=self.device)
        queries = TextVectors(both[:num_queries], query_counts, longest_query)
        docs = TextVectors(both[num_queries:], doc_counts, longest_doc)
        kept, vector_rows = None, []
        for i, (batch, (query_rows, doc_rows)) in enumerate(zip(step.micro_batches, text_rows, strict=True)):
            last = i == len(step.micro_batches) - 1
            if last:
                # Autocast caches weights in half precision. Cached copies of earlier passes have no graph, so with them
                # the weights would get no gradient in this pass.
                torch.clear_autocast_cache()
            self._seed_dropout(step, i)
            with torch.set_grad_enabled(last):
                of_queries, of_docs = self._encode(batch)
            in_queries = queries.vector_indices(query_rows, len(of_queries.values))
            in_docs = docs.vector_indices(doc_rows, len(of_docs.values))
            queries.values.index_copy_(0, in_queries, of_queries.values.detach())
            docs.values.index_copy_(0, in_docs, of_docs.values.detach())
            vector_rows.append((in_queries, in_docs))
            kept = (of_queries, of_docs) if last else None
        _sum_over_devices(both)
        return queries, docs, vector_rows, kept

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
        matrix = self._blocks(queries, docs, mine, step.contrast)
        with torch.no_grad():
            for block in matrix:
                in_block = docs.take(*block.docs)
                for part in block.parts:
                    some_docs = in_block if part.in_block is None else in_block.take(*part.in_block)
                    found = self.scorer.score_block(queries.take(*part.queries), some_docs)
                    scores[part.queries.rows.unsqueeze(1), part.docs] = found
        total, grad_scores, by_loss_parameters = loss_of_matrix(self.loss, scores, step.contrast, mine, self.symmetric)
        by_queries, by_docs, by_scoring_parameters = self._backward_through_scores(queries, docs, matrix, grad_scores)
        of_loss = list(zip(trained_parameters(self.loss), by_loss_parameters, strict=True))
        return Gradients(total, by_queries, by_docs, [*of_loss, *by_scoring_parameters])

    @torch.no_grad()
    def _backward_through_scores(
        self, queries: TextVectors, docs: TextVectors, matrix: list[Block], grad_scores: Tensor
    ) -> tuple[Tensor, Tensor, list[tuple[nn.Parameter, Tensor]]]:
        """Return this device's part of the gradients for query vectors, doc vectors and scoring parameters.

        To save memory, each block of `docs.values` is overwritten by its gradient once it has been scored.
        """
        parameters = [p for p in self.scorer.scoring_parameters() if p.requires_grad]
        grad_queries, grad_scoring_parameters = (
            torch.zeros_like(queries.values),
            [torch.zeros_like(p) for p in parameters],
        )
        for block in matrix:
            in_block = docs.take(*block.docs)
            grad_docs = torch.zeros_like(in_block.values)
            for part in block.parts:
                some_queries = queries.take(*part.queries)
                some_docs = in_block if part.in_block is None else in_block.take(*part.in_block)
                inputs = [some_queries.values.requires_grad_(True), some_docs.values.requires_grad_(True), *parameters]
                with torch.enable_grad():
                    scores = self.scorer.score_block(some_queries, some_docs)
                by_queries, by_docs, *by_parameters = torch.autograd.grad(
                    scores, inputs, grad_scores[part.queries.rows.unsqueeze(1), part.docs]
                )
                grad_docs[slice(None) if part.in_block is None else part.in_block.vectors] += by_docs
                grad_queries.index_add_(0, part.queries.vectors, by_queries)
                for total, gradient in zip(grad_scoring_parameters, by_parameters, strict=True):
                    total += gradient
            docs.values.index_copy_(0, block.docs.vectors, grad_docs)
        return grad_queries, docs.values, list(zip(parameters, grad_scoring_parameters, strict=True))

    def _blocks(self, queries: TextVectors, docs: TextVectors, mine: Tensor, contrast: Contrast) -> list[Block]:
        """Return the parts of the score matrix that this device computes.

        A part has at most BLOCK_QUERIES and BLOCK_DOCS vectors, with the kernel KERNEL_QUERIES and KERNEL_DOCS.
        """

        def texts_of(rows: Tensor, vectors: TextVectors) -> Texts:
            total = len(vectors.values) if len(rows) == vectors.num_texts else None
            return Texts(rows, vectors.vector_indices(rows, total))

        max_queries, max_docs = BLOCK_QUERIES, BLOCK_DOCS
        if has_kernel(queries, docs):
            max_queries, max_docs = KERNEL_QUERIES, KERNEL_DOCS
        others, anchors = mine[:0], mine[:0]
        if self.symmetric and len(mine) < contrast.mask.shape[0]:
            is_mine = torch.zeros_like(contrast.mask[:, 0]).index_fill_(0, mine, True)
            others = (~is_mine).nonzero().squeeze(1)
            anchors = (contrast.positive & is_mine[contrast.owners]).nonzero().squeeze(1)
        of_queries, of_others = (
            [texts_of(some, queries) for some in blocks(rows, queries, max_queries) if len(some)]
            for rows in (mine, others)
        )
        matrix = []
        for rows in blocks(torch.arange(docs.num_texts, device=docs.values.device), docs, max_docs):
            parts = [Part(of_query, rows, None) for of_query in of_queries]
            if of_others and len(ranking := rows[torch.isin(rows, anchors)]):
                in_block = Texts(ranking - rows[0], docs.vector_indices(ranking) - docs.starts[rows[0]])
                parts += [Part(of_query, ranking, in_block) for of_query in of_others]
            matrix.append(Block(texts_of(rows, docs), parts))
        return matrix


def _rows_in_step(batch: RankBatch, contrast: Contrast) -> tuple[Tensor, Tensor]:
    """Return the indices within the step of a micro-batch's queries, int64 [batch], and of its docs, int64 [docs]."""
    counts = batch.doc_mask.sum(1)
    starts = pad(torch.bincount(contrast.owners, minlength=contrast.mask.shape[0]).cumsum(0), (1, 0))[batch.group_ids]
    assert batch.docs is not None
    return batch.group_ids, tensor_ranges(starts, counts, batch.docs.num_texts)


def _sum_over_devices(values: Tensor) -> None:
    if dist.is_initialized():
        dist.all_reduce(values)
