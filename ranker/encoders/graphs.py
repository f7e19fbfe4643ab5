"""CUDA graphs of the encoder's training pass, for small micro-batches.

A pass through BERT-base is hundreds of launches, which a processor needs longer for than a card needs for the work of a
hundred pairs. A graph holds all launches of a forward or a backward pass and costs one. It is bound to its sizes and to
the memory that it reads and writes: micro-batches are rounded up to few sizes (`rounding`), a graph is captured when
its sizes have come up some times, and what goes in and comes out is copied.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ranker.encoders.attention import TAIL
from ranker.types import TokenBatch

MOST = 64  # graphs
ROWS = 16  # rows are a multiple of this
# tokens times weights of a pass that `auto` takes: beyond, a card has more to do than a processor needs to say so (see
# docs/performance.md)
SMALL = 2e12

Body = Callable[[TokenBatch, Tensor], Tensor]  # states of a batch by a seed, int64 []


def rounding(tokens: int) -> int:
    """What the number of tokens is rounded up to a multiple of: sixteen sizes between powers of two.

    >>> rounding(3), rounding(500), rounding(5_000), rounding(11_000)
    (64, 64, 256, 512)
    """
    return max(TAIL, 1 << max(tokens.bit_length() - 5, 0))


class Graphs:
    """The captured passes of one encoder.

    Graphs share one pool of memory, since only one is between its forward and its backward pass; where a second one
    begins before the first has ended, as where queries and docs meet in one loss, it has a pool of its own.

    Args:
        sightings: How often sizes have to come up to be worth a graph.
    """

    def __init__(self, sightings: int = 3) -> None:
        self._sightings = sightings
        self.why_off = ""  # why no more are captured, in words
        self._seen: Counter[Hashable] = Counter()
        self._weights: tuple[Any, ...] = ()  # where they lie, and which are trained
        self._forget()

    def _forget(self) -> None:
        self._captured: dict[Hashable, _Pass] = {}
        self._flat: Tensor | None = None  # all weights' gradients, which every backward pass writes
        self._stream: Any = None  # of all captures: memory of a pool is for one stream
        self._pools: list[Any] = []
        self._busy: list[weakref.ref[_Lease]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has captured nothing."""
        return Graphs, (self._sightings,)

    def __call__(
        self, body: Body, batch: TokenBatch, seed: Callable[[], int], model: nn.Module, kind: Hashable
    ) -> Tensor | None:
        """Return the body's states of a batch, with their gradients by the model's parameters; None where there is no graph (yet).

        Without gradients there is none either: a plain pass may run other kernels then, and would not give the same
        numbers bit by bit.

        Args:
            body: What is captured; it waits for nothing, reads nothing that lies elsewhere the next time, but for its
                arguments, and does the same whatever the batch's maximum length.
            batch: Its arguments, of sizes that come up again.
            seed: Gives the seed, where there is a graph.
            model: What the body takes its weights from.
            kind: All that the launches hang on beside the batch's sizes and the model's weights.
        """
        weights = list(model.parameters())
        trained = [weight for weight in weights if weight.requires_grad]
        if not trained or not torch.is_grad_enabled() or len({weight.dtype for weight in trained}) > 1:
            return None
        here = tuple((weight.data_ptr(), weight.requires_grad) for weight in weights)
        if here != self._weights:
            self._weights = here
            self._forget()
        lane = next((i for i, lease in enumerate(self._busy) if _free(lease)), len(self._busy))
        key = (lane, batch.num_tokens, batch.num_rows, batch.names is None, kind)
        found = self._captured.get(key) or self._capture(key, body, batch, model, trained)
        if found is None:
            return None
        found.fill(batch, seed())
        lease = _Lease()
        self._busy[lane : lane + 1] = [weakref.ref(lease)]
        states: Any = _Replay.apply(found, lease, *trained)
        return states

    def _capture(
        self, key: tuple[Any, ...], body: Body, batch: TokenBatch, model: nn.Module, trained: Sequence[Tensor]
    ) -> _Pass | None:
        """Capture sizes that came up often enough."""
        self._seen[key] += 1
        if (
            self.why_off
            or self._seen[key] < self._sightings
            or len(self._captured) >= MOST
            or not _current(batch.tokens.device)
        ):
            return None
        if not _room((2 if self._flat is None else 1) * sum(weight.nbytes for weight in trained)):
            self.why_off = "no more of them fit beside the largest pass so far"
            return None
        stream = torch.cuda.current_stream()
        try:
            if self._flat is None:
                self._flat = torch.empty(
                    sum(weight.numel() for weight in trained), dtype=trained[0].dtype, device=trained[0].device
                )
                self._stream = torch.cuda.Stream()
            if key[0] == len(self._pools):
                self._pools.append(torch.cuda.graph_pool_handle())
            self._captured[key] = _Pass(body, batch, model, self._flat, self._pools[key[0]], self._stream)
        except RuntimeError as error:  # whatever a driver or a library has against it, the training can do without
            torch.cuda.set_stream(stream)
            short = isinstance(error, torch.OutOfMemoryError)
            self.why_off = (
                "there is no memory for them" if short else f"capturing one failed ({str(error).splitlines()[0]})"
            )
            self._forget()
        return self._captured.get(key)


def _current(device: torch.device) -> bool:
    """Whether this is the device on which streams and captures are made."""
    return device.index == torch.cuda.current_device()


def _room(more: int) -> bool:
    """Whether the card has room for the activations of the largest pass so far twice, for a plain one and for a graph's, and `more` bytes."""
    torch.cuda.empty_cache()  # what stays is in graphs' pools; a capture does this, too
    allocated = torch.cuda.memory_allocated()
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - allocated
    return free >= 2 * (torch.cuda.max_memory_allocated() - allocated) + more


class _Lease:
    """Held by what still needs the activations of a forward pass."""

    ended = False


def _free(lease: weakref.ref[_Lease]) -> bool:
    held = lease()
    return held is None or held.ended


class _Body(nn.Module):
    """A body and its model as one module, so that the model's parameters can be replaced for a call."""

    def __init__(self, body: Body, model: nn.Module) -> None:
        super().__init__()
        self.body, self.model = body, model

    def forward(self, batch: TokenBatch, seed: Tensor) -> Tensor:
        return self.body(batch, seed)


class _Pass:
    """A forward and a backward pass of one size, as graphs."""

    def __init__(self, body: Body, batch: TokenBatch, model: nn.Module, flat: Tensor, pool: Any, side: Any) -> None:
        self._hold(batch)
        self.flat = flat
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # parameters of its own over the same memory: where those of the model take part in another pass, autograd ties
        # them to its stream
        weights: dict[str, Any] = {
            f"model.{name}": nn.Parameter(weight.detach(), weight.requires_grad)
            for name, weight in model.named_parameters()
        }
        trained = [weight for weight in weights.values() if weight.requires_grad]
        self.shapes = [weight.shape for weight in trained]
        whole, inputs = _Body(body, model), (self.batch, self.seed)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries set themselves up and code is compiled, none of which can be captured
            states = functional_call(whole, weights, inputs)
            self.above = torch.zeros_like(states)
            torch.autograd.grad(states, trained, self.above, allow_unused=True)
        torch.cuda.current_stream().wait_stream(side)
        del states
        torch.clear_autocast_cache()  # weights that were converted before would not be converted again in the graph
        # other threads, such as those of NCCL and of loaders, may go on meanwhile
        capture: Any = {"pool": pool, "stream": side, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(self.forward, **capture):
            states = functional_call(whole, weights, inputs)
        with torch.cuda.graph(self.backward, **capture):
            found = torch.autograd.grad(states, trained, self.above, allow_unused=True)
            self.reached = [grad is not None for grad in found]
            # out of the pool, so that the next graph may take the memory
            torch._foreach_copy_(self._reached(flat), [grad for grad in found if grad is not None])
        torch.clear_autocast_cache()
        self.states = states.detach()

    def _hold(self, batch: TokenBatch) -> None:
        """Make what goes in; of the batch's maximum length nothing may hang on it, which is that of the first batch for ever."""
        names = None if batch.names is None else batch.names.clone()
        self.batch = replace(
            batch,
            tokens=batch.tokens.clone(),
            segments=batch.segments.clone(),
            cu_seqlens=batch.cu_seqlens.clone(),
            names=names,
        )
        self.seed = torch.zeros((), dtype=torch.int64, device=batch.tokens.device)

    def _parts(self, flat: Tensor) -> list[Tensor]:
        """Of each weight, in its shape."""
        return [
            part.view(shape)
            for part, shape in zip(flat.split([shape.numel() for shape in self.shapes]), self.shapes, strict=True)
        ]

    def _reached(self, flat: Tensor) -> list[Tensor]:
        return [part for part, reached in zip(self._parts(flat), self.reached, strict=True) if reached]

    def fill(self, batch: TokenBatch, seed: int) -> None:
        """Copy what goes in."""
        self.seed.fill_((seed + 2**63) % 2**64 - 2**63)
        pairs = [
            (self.batch.tokens, batch.tokens),
            (self.batch.segments, batch.segments),
            (self.batch.cu_seqlens, batch.cu_seqlens),
        ]
        if self.batch.names is not None and batch.names is not None:
            pairs.append((self.batch.names, batch.names))
        for own, given in pairs:
            own.copy_(given)

    def replay(self) -> Tensor:
        """Replay the forward pass; what comes out is copied, as gradients are."""
        self.forward.replay()
        return self.states.clone()

    def gradients(self, above: Tensor) -> list[Tensor | None]:
        """Replay the backward pass; what comes out is copied, since the next replay writes over it."""
        self.above.copy_(above)
        self.backward.replay()
        return [
            part if reached else None
            for part, reached in zip(self._parts(self.flat.clone()), self.reached, strict=True)
        ]


class _Replay(torch.autograd.Function):
    """A forward pass by its graph, whose backward pass is the other graph."""

    @staticmethod
    def forward(ctx: Any, found: _Pass, lease: _Lease, *weights: Tensor) -> Tensor:  # noqa: ARG004 - autograd wants to see them
        ctx.found, ctx.lease = found, lease
        return found.replay()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Any, ...]:
        if ctx.lease.ended:
            raise RuntimeError("the activations of this pass are gone: it was gone through backward before")
        grads = ctx.found.gradients(above)
        ctx.lease.ended = True
        return None, None, *grads
