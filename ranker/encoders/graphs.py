"""CUDA graphs of the encoder's training pass, for small micro-batches.

A pass through BERT-base launches hundreds of kernels. For a hundred pairs, the CPU needs longer to launch them than the
GPU to run them. A graph replays all launches of a forward or a backward pass as one. A graph works only for the sizes
and the memory addresses with which it was captured. So micro-batches are rounded up to few sizes (`rounding`), a graph
is captured after its sizes have occurred several times, and inputs and outputs are copied.
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

from ranker.encoders.ragged import TILE
from ranker.types import TokenBatch

MAX_GRAPHS = 64
ROW_MULTIPLE = 16  # the number of rows is rounded up to a multiple of this
# `graphs=auto` replays only passes for which tokens times weights is at most this number. In larger passes, the GPU's
# work takes longer than the kernel launches (docs/performance.md).
MAX_SMALL_PASS = 2e12

Body = Callable[[TokenBatch, Tensor], Tensor]  # (batch, seed: int64 scalar) -> states


def rounding(tokens: int) -> int:
    """Return the multiple to which a number of tokens is rounded up: there are sixteen sizes between powers of two.

    >>> rounding(3), rounding(500), rounding(5_000), rounding(11_000)
    (64, 64, 256, 512)
    """
    return max(TILE, 1 << max(tokens.bit_length() - 5, 0))


class Graphs:
    """The captured passes of one encoder.

    Usually a forward pass is followed by its backward pass before the next forward pass begins, so all graphs share one
    memory pool. If a second pass begins earlier, as when one loss compares queries and docs, it uses another pool.

    Args:
        sightings: How often sizes must occur before a pass of these sizes is captured.
    """

    def __init__(self, sightings: int = 3) -> None:
        self._sightings = sightings
        self.why_off = ""  # why no more graphs are captured; empty while graphs are captured
        self._seen: Counter[Hashable] = Counter()
        self._weights: tuple[Any, ...] = ()  # memory address and requires_grad of each weight
        self._forget()

    def _forget(self) -> None:
        self._captured: dict[Hashable, _Pass] = {}
        self._flat: Tensor | None = None  # gradients of all weights, overwritten by every backward pass
        self._stream: Any = None  # stream of all captures, because the memory of a pool belongs to one stream
        self._pools: list[Any] = []
        self._busy: list[weakref.ref[_Lease]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy only the settings, because a copy has captured nothing."""
        return Graphs, (self._sightings,)

    def __call__(self, body: Body, batch: TokenBatch, seed: int, model: nn.Module, kind: Hashable) -> Tensor | None:
        """Return the body's states, differentiable by the model's parameters; None if there is no graph (yet).

        Passes without gradients get no graph. They may run other kernels than training does, so a graph of a training
        pass would change the last bits of their results.

        Args:
            body: The function to capture. It must not synchronise with the host, must read only its arguments and the
                model's weights, and must not depend on the batch's maximum length.
            batch: Argument of the body. Its sizes should occur again.
            seed: Argument of the body.
            model: Module whose weights the body uses.
            kind: Everything else on which the launches depend, apart from the batch's sizes and the model's weights.
        """
        weights = list(model.parameters())
        trained = [weight for weight in weights if weight.requires_grad]
        if not trained or not torch.is_grad_enabled() or len({weight.dtype for weight in trained}) > 1:
            return None
        addresses = tuple((weight.data_ptr(), weight.requires_grad) for weight in weights)
        if addresses != self._weights:
            self._weights = addresses
            self._forget()
        pool = next((i for i, lease in enumerate(self._busy) if _free(lease)), len(self._busy))
        key = (pool, batch.num_tokens, batch.num_rows, batch.row_ids is None, kind)
        captured = self._captured.get(key) or self._capture(key, body, batch, model, trained)
        if captured is None:
            return None
        captured.fill(batch, seed)
        lease = _Lease()
        self._busy[pool : pool + 1] = [weakref.ref(lease)]
        states: Any = _Replay.apply(captured, lease, *trained)
        return states

    def _capture(
        self, key: tuple[Any, ...], body: Body, batch: TokenBatch, model: nn.Module, trained: Sequence[Tensor]
    ) -> _Pass | None:
        """Capture a pass if its sizes have occurred often enough."""
        self._seen[key] += 1
        if (
            self.why_off
            or self._seen[key] < self._sightings
            or len(self._captured) >= MAX_GRAPHS
            or not _is_current(batch.tokens.device)
        ):
            return None
        if not _has_room((2 if self._flat is None else 1) * sum(weight.nbytes for weight in trained)):
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
        except RuntimeError as error:  # the training can go on without graphs, whatever the driver reports
            torch.cuda.set_stream(stream)
            no_memory = isinstance(error, torch.OutOfMemoryError)
            self.why_off = (
                "there is no memory for them" if no_memory else f"capturing one failed ({str(error).splitlines()[0]})"
            )
            self._forget()
        return self._captured.get(key)


def _is_current(device: torch.device) -> bool:
    """Return whether streams and captures are created on this device."""
    return device.index == torch.cuda.current_device()


def _has_room(extra: int) -> bool:
    """Return whether the GPU has room for `extra` bytes, and twice for the activations of the largest pass so far.

    The activations count twice: once for a plain pass, and once for the graph's.
    """
    # reserved memory that is still unused after this belongs to the graphs' pools; a capture also empties the cache
    torch.cuda.empty_cache()
    allocated = torch.cuda.memory_allocated()
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - allocated
    return free >= 2 * (torch.cuda.max_memory_allocated() - allocated) + extra


class _Lease:
    """Shows whether the activations of a forward pass are still needed: everything that needs them refers to this."""

    ended = False


def _free(lease: weakref.ref[_Lease]) -> bool:
    held = lease()
    return held is None or held.ended


class _Body(nn.Module):
    """A function to capture and its model as one module, so that a call can use other parameters."""

    def __init__(self, body: Body, model: nn.Module) -> None:
        super().__init__()
        self.body, self.model = body, model

    def forward(self, batch: TokenBatch, seed: Tensor) -> Tensor:
        return self.body(batch, seed)


class _Pass:
    """A forward and a backward pass of one size, as graphs."""

    def __init__(self, body: Body, batch: TokenBatch, model: nn.Module, flat: Tensor, pool: Any, side: Any) -> None:
        self._allocate(batch)
        self.flat = flat
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # New parameters that share the model's memory. Autograd binds a parameter to the stream of the first pass that
        # used it, and the model's own parameters may already be bound to another stream.
        weights: dict[str, Any] = {
            f"model.{name}": nn.Parameter(weight.detach(), weight.requires_grad)
            for name, weight in model.named_parameters()
        }
        trained = [weight for weight in weights.values() if weight.requires_grad]
        self.shapes = [weight.shape for weight in trained]
        module, inputs = _Body(body, model), (self.batch, self.seed)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries are initialized and code is compiled here, outside of the capture
            states = functional_call(module, weights, inputs)
            self.grad_out = torch.zeros_like(states)
            torch.autograd.grad(states, trained, self.grad_out, allow_unused=True)
        torch.cuda.current_stream().wait_stream(side)
        del states
        torch.clear_autocast_cache()  # otherwise the graph would not convert the weights that autocast has cached
        # other threads, such as those of NCCL and of data loaders, may continue during the capture
        capture: Any = {"pool": pool, "stream": side, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(self.forward, **capture):
            states = functional_call(module, weights, inputs)
        with torch.cuda.graph(self.backward, **capture):
            grads = torch.autograd.grad(states, trained, self.grad_out, allow_unused=True)
            self.has_gradient = [grad is not None for grad in grads]
            # copied out of the pool, so that the next graph can use the pool's memory
            torch._foreach_copy_(self._with_gradient(flat), [grad for grad in grads if grad is not None])
        torch.clear_autocast_cache()
        self.states = states.detach()

    def _allocate(self, batch: TokenBatch) -> None:
        """Copy the inputs into static buffers.

        The body must not use `batch.max_length`, because the capture would freeze the value of the first batch.
        """
        self.batch = replace(
            batch,
            tokens=batch.tokens.clone(),
            segments=batch.segments.clone(),
            cu_seqlens=batch.cu_seqlens.clone(),
            row_ids=None if batch.row_ids is None else batch.row_ids.clone(),
        )
        self.seed = torch.zeros((), dtype=torch.int64, device=batch.tokens.device)

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Return the part of each trained weight in a flat tensor, as a view with the weight's shape."""
        return [
            part.view(shape)
            for part, shape in zip(flat.split([shape.numel() for shape in self.shapes]), self.shapes, strict=True)
        ]

    def _with_gradient(self, flat: Tensor) -> list[Tensor]:
        """Return the parts of those weights that get a gradient."""
        return [part for part, has in zip(self._views(flat), self.has_gradient, strict=True) if has]

    def fill(self, batch: TokenBatch, seed: int) -> None:
        """Copy a batch and its seed into the static buffers."""
        self.seed.fill_((seed + 2**63) % 2**64 - 2**63)
        pairs = [
            (self.batch.tokens, batch.tokens),
            (self.batch.segments, batch.segments),
            (self.batch.cu_seqlens, batch.cu_seqlens),
        ]
        if self.batch.row_ids is not None and batch.row_ids is not None:
            pairs.append((self.batch.row_ids, batch.row_ids))
        for buffer, values in pairs:
            buffer.copy_(values)

    def replay(self) -> Tensor:
        """Replay the forward pass, and return a copy of its states, since the next replay overwrites the original."""
        self.forward.replay()
        return self.states.clone()

    def gradients(self, grad_out: Tensor) -> list[Tensor | None]:
        """Replay the backward pass, and return copies of the gradients, since the next replay overwrites them."""
        self.grad_out.copy_(grad_out)
        self.backward.replay()
        return [
            part if has else None for part, has in zip(self._views(self.flat.clone()), self.has_gradient, strict=True)
        ]


class _Replay(torch.autograd.Function):
    """A forward pass that replays one graph, and whose backward pass replays the other."""

    @staticmethod
    def forward(ctx: Any, captured: _Pass, lease: _Lease, *weights: Tensor) -> Tensor:  # noqa: ARG004 - for autograd
        ctx.captured, ctx.lease = captured, lease
        return captured.replay()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        if ctx.lease.ended:
            raise RuntimeError("the activations of this pass are freed: its backward pass has already run")
        grads = ctx.captured.gradients(grad_out)
        ctx.lease.ended = True
        return None, None, *grads
