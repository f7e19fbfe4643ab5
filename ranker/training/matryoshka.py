"""Matryoshka training: the same loss for vectors of several sizes and after several layers of the encoder.

The modules here compute scores for each pair of a layer and a size, and average the losses over all pairs. Sources:
Kusupati et al., 2022, arXiv:2205.13147 (sizes); Li et al., 2024, arXiv:2402.14776 (layers).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ranker.errors import ConfigError
from ranker.hashing import mix
from ranker.interactions.maxsim import TextVectors
from ranker.models.dpr import DPR
from ranker.training.contrastive_module import ContrastiveModule
from ranker.training.contrastive_parts import Gradients, Penalties
from ranker.training.loss_inputs import loss_of
from ranker.training.rerank_module import RerankModule
from ranker.training.set_losses import SetLosses
from ranker.types import RankBatch, TrainStep

SOFTENING = 0.3  # temperature of the divergence between layers, as in sentence-transformers' AdaptiveLayerLoss


@dataclass(frozen=True)
class Sizes:
    """The vector sizes and the encoder layers at which a model is trained.

    Args:
        dims: Sizes of a vector, ascending; size n keeps its first n values. The last one is the full size.
        layers: Layers, counted from 1, ascending; the last one is the encoder's last layer.
        layers_per_step: How many of the lower layers are drawn for each step. The last layer is used in each step.
        alignment: Weight of the divergence between vectors after lower layers and after the last, see `alignment`.
    """

    dims: tuple[int, ...]
    layers: tuple[int, ...]
    layers_per_step: int = 1
    alignment: float = 1.0

    @classmethod
    def of(
        cls, scorer: DPR, dims: list[int] | None, layers: list[int] | None, layers_per_step: int, alignment: float
    ) -> Sizes:
        """Add the full size and the last layer to the given sizes and layers, and check all of them.

        Args:
            scorer: The scorer.
            dims: Sizes of a vector; None: only the full size.
            layers: Layers to draw from; None: all layers.
            layers_per_step: See `Sizes`.
            alignment: See `Sizes`.

        Raises:
            ConfigError: The scorer has no such size or layer, or its encoder does not keep its layers in a single list.
        """
        found = []
        for key, given, largest in (("dims", dims, scorer.dim), ("layers", layers, scorer.encoder.num_layers)):
            if given is not None and (not given or not 1 <= min(given) <= max(given) <= largest):
                raise ConfigError(
                    f"model.matryoshka_{key}: expected numbers from 1 to {largest}, the model's own, got {given}"
                )
            found.append(tuple(sorted({*(given or ()), largest})))
        most = max(1, len(found[1]) - 1)
        if not 1 <= layers_per_step <= most:
            raise ConfigError(
                f"model.matryoshka_layers_per_step: expected 1 to {most}, the number of layers in "
                f"model.matryoshka_layers below the last one, got {layers_per_step}"
            )
        for encoder in (scorer.encoder, scorer.doc_encoder):
            if len(found[1]) > 1 and encoder is not None:
                encoder.lower(found[1][0])
        return cls(found[0], found[1], layers_per_step, alignment)

    def layers_of(self, step: TrainStep, seed: int) -> tuple[int, ...]:
        """Return the layers of a step, ascending: the last layer, and lower ones drawn by (seed, epoch, step)."""
        others = np.array(self.layers[:-1], dtype=np.int64)
        keys = mix(seed, step.epoch, step.index, 4, np.arange(len(others)))
        drawn = others[np.argsort(keys, kind="stable")[: self.layers_per_step]]
        return (*sorted(drawn.tolist()), self.layers[-1])


class MatryoshkaModule(ContrastiveModule):
    """Train with in-batch negatives at several sizes. The loss is the mean over all pairs of a layer and a size.

    Pass 1 of GradCache encodes each text once and concatenates its vectors after all layers of the step. The gradients
    with respect to these vectors are summed over all pairs. So the encoder runs as often as in `ContrastiveModule`.

    Args:
        args: As in ContrastiveModule.
        sizes: The sizes and layers.
        options: As in ContrastiveModule.
    """

    scorer: DPR

    def __init__(self, *args: Any, sizes: Sizes, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sizes = sizes
        self._layers: tuple[int, ...] = sizes.layers[-1:]

    def accumulate(self, step: TrainStep) -> Tensor:
        """Run forward and backward over this device's micro-batches; return their part of the step's loss, float64."""
        self._layers = self.sizes.layers_of(step, self.seed)
        return super().accumulate(step)

    def vector_size(self, step: TrainStep) -> int:
        """Return the size of a text's concatenated vectors after all layers of a step."""
        return self.scorer.dim * len(self.sizes.layers_of(step, self.seed))

    def _encode(self, batch: RankBatch) -> tuple[TextVectors, TextVectors]:
        queries, docs = encode(self.scorer, batch, self._layers)
        return TextVectors(queries.flatten(1)), TextVectors(docs.flatten(1))

    def gradients(self, queries: TextVectors, docs: TextVectors, mine: Tensor, step: TrainStep) -> Gradients:
        """Return this device's part of the mean loss over all sizes, and its gradients; see `ContrastiveModule`."""
        total = queries.values.new_zeros(())
        by_queries, by_docs = torch.zeros_like(queries.values), torch.zeros_like(docs.values)
        parameters: dict[int, tuple[Any, Tensor]] = {}
        views = list(_views(self.scorer.dim, len(self._layers), self.sizes.dims))
        for columns in views:
            some_queries, some_docs = (self.scorer.compared(part.values[:, columns]) for part in (queries, docs))
            found = super().gradients(TextVectors(some_queries), TextVectors(some_docs.clone()), mine, step)
            total += found.total / len(views)
            for sums, part, gradient in (
                (by_queries, queries, found.by_queries),
                (by_docs, docs, found.by_docs),
            ):
                sums[:, columns] += self._before_comparison(part.values[:, columns], gradient) / len(views)
            for parameter, gradient in found.parameters:
                before = parameters[id(parameter)][1] if id(parameter) in parameters else 0
                parameters[id(parameter)] = parameter, before + gradient / len(views)
        return Gradients(total, by_queries, by_docs, list(parameters.values()))

    def _before_comparison(self, vectors: Tensor, gradient: Tensor) -> Tensor:
        """Turn the gradient with respect to `scorer.compared(vectors)` into the gradient with respect to `vectors`."""
        with torch.enable_grad():
            leaf = vectors.detach().requires_grad_(True)
            (before,) = torch.autograd.grad(self.scorer.compared(leaf) * 1, leaf, gradient)
        return before

    def penalties(self, queries: TextVectors, docs: TextVectors, step: TrainStep) -> Penalties | None:
        """Return the divergence between layers, and its gradients."""
        if len(self._layers) == 1 or not self.sizes.alignment:
            return None
        assert step.contrast is not None
        with torch.enable_grad():
            leaves = [part.values.detach().requires_grad_(True) for part in (queries, docs)]
            of_queries, of_docs = (leaf.unflatten(1, (len(self._layers), -1)) for leaf in leaves)
            value = alignment(of_queries, of_docs, step.contrast.owners).mean() * self.sizes.alignment
            by_queries, by_docs = torch.autograd.grad(value, leaves)
        return Penalties(value.detach(), by_queries, by_docs)


class OwnDocsMatryoshkaModule(RerankModule):
    """Train at several sizes on each query's own docs, without in-batch negatives.

    Args:
        args: As in RerankModule.
        sizes: The sizes and layers.
        options: As in RerankModule.

    Raises:
        ConfigError: The loss needs the scores of a frozen reference model (dpo).
    """

    scorer: DPR

    def __init__(self, *args: Any, sizes: Sizes, **options: Any) -> None:
        super().__init__(*args, **options)
        if self._has_reference:
            raise ConfigError("loss: expected one without a reference with model.matryoshka_dims or _layers, got dpo")
        self.sizes = sizes
        self._layers: tuple[int, ...] = sizes.layers[-1:]

    def accumulate(self, step: TrainStep) -> Tensor:
        """Run forward and backward over this device's micro-batches; return their part of the step's loss, float64."""
        self._layers = self.sizes.layers_of(step, self.seed)
        return super().accumulate(step)

    def micro_batch_loss(self, batch: RankBatch) -> Tensor:
        """Return the mean loss over all pairs of a layer and a size and over the micro-batch's groups, a scalar."""
        assert self.loss is not None
        queries, docs = encode(self.scorer, batch, self._layers)
        total: Tensor | float = 0.0
        views = list(_views(self.scorer.dim, len(self._layers), self.sizes.dims))
        for columns in views:
            parts = [TextVectors(self.scorer.compared(part.flatten(1)[:, columns])) for part in (queries, docs)]
            scores = self.scorer.score_grid(parts[0], parts[1], batch.doc_mask)
            if isinstance(self.loss, SetLosses):
                of_view = replace(batch, share=batch.share / len(views))  # the loss is a mean over pairs
                loss = self.loss.of_batch(scores, of_view, None, self._step_seed)
            else:
                loss = loss_of(self.loss, scores, batch, None, self._step_seed)
            total = total + loss / len(views)
        if len(self._layers) > 1 and self.sizes.alignment:
            owners = batch.doc_mask.nonzero_static(size=docs.shape[0])[:, 0]
            total = total + alignment(queries, docs, owners).mean() * self.sizes.alignment
        assert isinstance(total, Tensor)
        return total


def encode(scorer: DPR, batch: RankBatch, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the vectors of a batch's queries, and of its docs, after some layers, both [texts, layers, dim]."""
    assert batch.queries is not None and batch.docs is not None
    docs = scorer.vectors_after(batch.docs, layers, True)  # docs first, as in `ContrastiveModule`
    return scorer.vectors_after(batch.queries, layers, False), docs


def alignment(queries: Tensor, docs: Tensor, owners: Tensor) -> Tensor:
    r"""Return the divergence of each group's vectors after lower layers from those after the last layer, [groups].

    .. math:: T^2 \, \mathrm{KL}(\mathrm{softmax}(v_L / T) \,\|\, \mathrm{softmax}(v_l / T))

    where v_l is the vector after layer l, and v_L the vector after the last layer, which gets no gradient. T is 0.3.
    The divergence is averaged over the lower layers l and over the texts of the group.

    Args:
        queries: Vectors of the groups' queries after each layer, [groups, layers, dim].
        docs: Vectors of the docs, [docs, layers, dim].
        owners: Group of each doc, int64 [docs].
    """
    of_queries, of_docs = _divergences(queries), _divergences(docs)
    sums = of_queries.index_add(0, owners, of_docs)
    counts = torch.ones_like(of_queries).index_add(0, owners, torch.ones_like(of_docs))
    return sums / counts


def _divergences(vectors: Tensor) -> Tensor:
    """Return the divergence of each text, averaged over lower layers, [texts]; `vectors` is [texts, layers, dim]."""
    logs = functional.log_softmax(vectors / SOFTENING, dim=2)
    last = logs[:, -1:].detach()
    return (last.exp() * (last - logs[:, :-1])).sum(2).mean(1) * SOFTENING**2


def _views(dim: int, layers: int, dims: tuple[int, ...]) -> Iterator[slice]:
    """Yield for each pair of a layer and a size its columns in the concatenated vectors of all layers."""
    for layer in range(layers):
        for size in dims:
            yield slice(layer * dim, layer * dim + size)
