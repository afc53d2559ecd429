"""A small model's decoder as CUDA graphs: one call in place of the launches of its kernels.

The GPU waits while a CPU launches a small model's kernels: both passes of SmolLM2-135M over 3,552 tokens take 78 ms,
and 25 ms as graphs (H200). A graph has fixed shapes and addresses. So segments of padding complete a row to its
`RowShape`. No other token attends to padding, and its gradients are exactly zero. The shape depends on the row alone:
a resumed run computes the same bits.

All graphs share memory for activations. While one row waits for its backward pass, others are computed without a graph.
So are all rows of a model with a pass that needs a value on the CPU, and all rows if memory is short.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from slipstream.algo.logprobs import HeadLogits
from slipstream.errors import TrainingError, one_line
from slipstream.trainer.attention.row_layout import Gather, Ragged, SegmentLayout, segment_layout, to_device
from slipstream.trainer.model.fused_weight_gradients import holder_of
from slipstream.trainer.model.layers import LayerOptions, decoder_layers
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.model.vision_towers import text_config
from slipstream.trainer.packing import MicroBatch

_MOST_WORK = 5e10
"""Parameters of a layer times tokens. Beyond it the GPU needs longer than the launches: both passes of a layer take 2.6
ms of launches, and 6 operations a parameter and token 3 ms (SmolLM2-135M, H200: 100 TFLOP/s)."""
_MOST_PARAMETERS = 6e8
"""Of the decoder. The sums of its gradients, 4 bytes each, keep their memory between steps."""
_LEAST_TOKENS, _LEAST_QUERIES, _LEAST_KEYS = 1024, 256, 512
_LEAST_SEGMENTS, _KEYS = 256, 8
"""Slots of keys for each token, unless a row needs more. Each segment takes memory in the backward pass, also an empty
one."""
_log = logging.getLogger(__name__)


class RowShape(NamedTuple):
    """The room of a graph: powers of two, for few graphs to serve all rows."""

    tokens: int
    keys: int
    """Slots of keys. 0: the keys are the row unchanged."""
    segments: int
    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, layout: SegmentLayout, window: int = 0) -> RowShape:
        """The least shape for a row, with its padding. `window`: the model's sliding window; 0: none."""
        host, num_tokens = layout.host_ragged, sum(layout.lengths)
        tokens, longest_query = _room(num_tokens, _LEAST_TOKENS), _room(host.longest_query, _LEAST_QUERIES)
        padding = tokens - num_tokens
        keys = 0 if host.keys is None else _room(len(host.keys.index_K) + padding, _KEYS * tokens)
        segments = _room(len(layout.lengths) + -(-padding // longest_query), _LEAST_SEGMENTS)
        longest_key = _room(host.longest_key, _LEAST_KEYS)
        # A row within the window stays within it.
        longest_key = min(longest_key, window) if host.longest_key <= window else longest_key
        return cls(tokens, keys, segments, longest_query, longest_key)


def _room(number: int, least: int) -> int:
    return max(least, 1 << (number - 1).bit_length())


class Filled(NamedTuple):
    """A row's layout in a graph's shape."""

    places: np.ndarray[Any, np.dtype[np.int64]]
    """The three arrays of `Slots`, one after the other; empty without slots."""
    ends: np.ndarray[Any, np.dtype[np.int32]]
    """Cumulative lengths of queries, then of keys."""


def fill(layout: SegmentLayout, shape: RowShape) -> Filled:
    """Pad a row's layout with segments of at most `longest_query` tokens, then with empty ones. Unused slots have
    position 0, and are not in the inverse index."""
    host, num_tokens = layout.host_ragged, sum(layout.lengths)
    padding = shape.tokens - num_tokens
    # Cumulative lengths of the padding's segments, then of the empty ones.
    further = np.minimum(np.arange(1, shape.segments - len(layout.lengths) + 1) * shape.longest_query, padding)
    ends = np.concatenate([host.query_ends, num_tokens + further, host.key_ends, host.key_ends[-1] + further])
    if host.keys is None:
        return Filled(np.empty(0, np.int64), ends.astype(np.int32))
    index_K, order, starts = host.keys
    num_slots = len(index_K)
    own = np.arange(padding)
    places = np.zeros(2 * shape.keys + shape.tokens + 1, np.int64)
    places[: num_slots + padding] = np.concatenate([index_K, num_tokens + own])
    places[shape.keys :][: len(order) + padding] = np.concatenate([order, num_slots + own])
    places[2 * shape.keys :] = np.concatenate([starts, len(order) + 1 + own])
    return Filled(places, ends.astype(np.int32))


class _Graph:
    """The two passes of one shape; the forward pass alone without gradients."""

    def __init__(self, shape: RowShape, device: torch.device) -> None:
        self.shape = shape
        self.token_ids_T, self.position_ids_T = torch.zeros(2, shape.tokens, dtype=torch.int64, device=device)
        num_places = 2 * shape.keys + shape.tokens + 1 if shape.keys else 0
        self.places = torch.zeros(num_places, dtype=torch.int64, device=device)
        self.ends = torch.zeros(2 * (shape.segments + 1), dtype=torch.int32, device=device)
        self.layout = segment_layout([shape.tokens], device)
        parts = self.places.split([shape.keys, shape.keys, shape.tokens + 1]) if shape.keys else ()
        query_ends, key_ends = self.ends.view(2, -1)
        keys = Gather(*parts) if shape.keys else None
        longest = shape.longest_query, shape.longest_key
        self.layout.ragged = Ragged(keys, query_ends, key_ends, *longest, has_room=True)
        self.hidden_TD = torch.empty(0)
        self.gradient_TD = torch.empty(0)
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()

    def load(self, row: MicroBatch) -> None:
        """Copy a row to the graph's inputs."""
        filled = fill(row.layout, self.shape)
        for inputs, values in ((self.places, filled.places), (self.ends, filled.ends)):
            inputs.copy_(to_device(torch.from_numpy(values), inputs.device))
        num_tokens = len(row.token_ids_T)
        for inputs, values in ((self.token_ids_T, row.token_ids_T), (self.position_ids_T, row.position_ids_T)):
            inputs[:num_tokens].copy_(values)
            inputs[num_tokens:].zero_()


class _Pending:
    """A forward pass before its backward pass: the activations are needed."""


class DecoderGraphs:
    """The graphs of a model's decoder, captured when a row first has their shape. Gradients go to the holders of the
    parameters (`Optimizer`), as they do without a graph."""

    def __init__(self, decoder: nn.Module, layer_size: int, window: int) -> None:
        self._decoder = decoder
        self._layer_size, self._window = layer_size, window
        self._weights = [*decoder.parameters(), *decoder.buffers()]
        self._addresses: list[int] = []
        trained = [parameter for parameter in decoder.parameters() if parameter.requires_grad]
        self._holders = [holder_of(parameter) for parameter in trained]
        self._sums: list[Tensor] = []
        """The holders' gradients while graphs add to them."""
        self._anchor = torch.zeros(0, requires_grad=True)
        """Makes autograd record a call: its other inputs have no gradients."""
        self._graphs: dict[tuple[RowShape, bool], _Graph] = {}
        self._pools: dict[bool, Any] = {}
        """The memory of graphs with a backward pass, and of those without."""
        self._pending: weakref.ref[_Pending] | None = None
        self.problem = ""
        """See `GraphedDecoder`."""

    @classmethod
    def of(cls, model: PolicyModel, micro_batch_tokens: int) -> DecoderGraphs | None:
        """The graphs of a small model with an optimizer, in 16 bits on one GPU, with layers as they are, and rows of
        `micro_batch_tokens` at most. None: graphs do not serve it."""
        is_plain = type(model) is PolicyModel and model.layers == LayerOptions() and model.packing
        others = (model.adapter, model.images, model.replay, model.context)
        is_exact = torch.are_deterministic_algorithms_enabled()
        if model.device.type != "cuda" or model.dtype == torch.float32 or not is_plain or is_exact or any(others):
            return None
        layers, decoder = decoder_layers(model.network), cast("Any", model.network).get_decoder()
        size = sum(parameter.numel() for layer in layers for parameter in layer.parameters()) // len(layers)
        work = size * _room(micro_batch_tokens, _LEAST_TOKENS)
        num_parameters = sum(parameter.numel() for parameter in decoder.parameters())
        if work > _MOST_WORK or num_parameters > _MOST_PARAMETERS or not makes_logits(model, decoder):
            return None
        return cls(decoder, size, getattr(text_config(model.config), "sliding_window", None) or 0)

    def hidden(self, row: MicroBatch) -> Tensor | None:
        """The decoder's last hidden states `[T, D]`, valid until the next call; differentiable once. None: no graph
        serves this row now."""
        is_pending = self._pending is not None and self._pending() is not None
        if self.problem or is_pending or row.shard is not None or row.layout.has_blocks:
            return None
        if self._layer_size * _room(len(row.token_ids_T), _LEAST_TOKENS) > _MOST_WORK:  # one sequence, longer than rows
            return None
        shape, trains = RowShape.of(row.layout, self._window), torch.is_grad_enabled()
        graph = self._loaded(row, shape, trains)
        if graph is None:
            return None
        num_tokens = len(row.token_ids_T)
        if trains:
            pending = _Pending()
            self._pending = weakref.ref(pending)
            return cast("Any", _Replay).apply(self._anchor, self, graph, num_tokens, pending)
        graph.forward.replay()
        return graph.hidden_TD[:num_tokens]

    def _loaded(self, row: MicroBatch, shape: RowShape, trains: bool) -> _Graph | None:
        addresses = [each.data_ptr() for each in self._weights]
        if addresses != self._addresses:  # the weights have moved
            self._graphs, self._addresses, self._pools = {}, addresses, {}
        graph = self._graphs.get((shape, True)) or self._graphs.get((shape, trains))
        if graph is not None:
            graph.load(row)
            return graph
        self._make_room(shape, trains)
        graph = _Graph(shape, self._weights[0].device)
        graph.load(row)
        try:
            self._capture(graph, trains)
        except Exception as error:  # noqa: BLE001 - of a model's code, a compiler or the driver
            self.problem = one_line(error.__context__ or error)  # a capture that ends early hides the reason
            self._graphs, self._sums = {}, []
            _log.warning("the decoder computes without CUDA graphs (%s)", self.problem)
            return None
        self._graphs[shape, trains] = graph
        return graph

    def _make_room(self, shape: RowShape, trains: bool) -> None:
        """Forget smaller graphs before a larger one. Its activations do not fit the pieces of theirs, which later ones
        find in its memory."""
        known = [other.tokens for other, with_gradients in self._graphs if with_gradients == trains]
        if max(known, default=0) < shape.tokens:
            self._graphs = {key: graph for key, graph in self._graphs.items() if key[1] != trains}
            self._pools[trains] = torch.cuda.graph_pool_handle()

    def _capture(self, graph: _Graph, trains: bool) -> None:
        if trains and not self._sums:
            self._sums = [torch.zeros(each.shape, device=each.device) for each in self._holders]
        with self._into_sums() if trains else torch.no_grad():
            with _without_waiting():
                hidden = self._decode(graph)
                if trains:
                    hidden.backward(torch.zeros_like(hidden))
                del hidden
            # Each capture empties the allocator's cache first: the plan counts activations once.
            options: dict[str, Any] = {"pool": self._pools[trains], "capture_error_mode": "thread_local"}
            with torch.cuda.graph(graph.forward, **options):
                hidden = self._decode(graph)
            graph.hidden_TD = hidden.detach()
            if trains:
                graph.gradient_TD = torch.zeros_like(graph.hidden_TD)
                with torch.cuda.graph(graph.backward, **options):
                    hidden.backward(graph.gradient_TD)

    def _decode(self, graph: _Graph) -> Tensor:
        return _decoded(self._decoder, graph.token_ids_T, graph.position_ids_T, graph.layout)

    @contextmanager
    def _into_sums(self) -> Generator[None]:
        """Have gradients added to the sums; the holders' own stay as they are."""
        before = [holder.grad for holder in self._holders]
        for holder, total in zip(self._holders, self._sums, strict=True):
            holder.grad = total
        try:
            yield
        finally:
            for holder, own in zip(self._holders, before, strict=True):
                holder.grad = own

    def add_gradients(self, graph: _Graph, gradient_TD: Tensor) -> None:
        """Run the backward pass from the gradient of a row's hidden states."""
        num_tokens, fresh = len(gradient_TD), list[Tensor]()
        graph.gradient_TD[:num_tokens].copy_(gradient_TD)
        graph.gradient_TD[num_tokens:].zero_()
        for holder, total in zip(self._holders, self._sums, strict=True):
            if holder.grad is None:
                fresh.append(total)
            elif holder.grad is not total:
                total.copy_(holder.grad)
            holder.grad = total
        if fresh:
            torch._foreach_zero_(fresh)
        graph.backward.replay()


def _decoded(decoder: nn.Module, token_ids_T: Tensor, position_ids_T: Tensor, layout: SegmentLayout) -> Tensor:
    ids, positions = token_ids_T[None], position_ids_T[None]
    return decoder(input_ids=ids, position_ids=positions, use_cache=False, segments=layout).last_hidden_state.squeeze(0)


@torch.no_grad()
def makes_logits(model: PolicyModel, decoder: nn.Module) -> bool:
    """Whether the model's logits are its head's outputs for the decoder's hidden states."""
    row = model.small_row()
    hidden_TD = _decoded(decoder, row.token_ids_T, row.position_ids_T, row.layout)
    whole, apart = model.logits(row), model.head(hidden_TD, row.predict_index_N)
    if isinstance(whole, HeadLogits) and isinstance(apart, HeadLogits):
        return torch.equal(whole.hidden_ND, apart.hidden_ND)
    return isinstance(whole, Tensor) and isinstance(apart, Tensor) and torch.equal(whole, apart)


class _Replay(torch.autograd.Function):
    """A row's two passes."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, anchor: Tensor, graphs: DecoderGraphs, graph: _Graph, num_tokens: int, pending: _Pending
    ) -> Tensor:
        ctx.graphs, ctx.graph, ctx.pending = graphs, graph, pending
        graph.forward.replay()
        return graph.hidden_TD[:num_tokens].detach()

    @staticmethod
    def backward(ctx: Any, gradient_TD: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride] # noqa: ANN205
        if ctx.pending is None:
            raise TrainingError("the backward pass of a row ran twice, and its activations are gone: run it once")
        ctx.pending = None
        ctx.graphs.add_gradients(ctx.graph, gradient_TD)
        return None, None, None, None, None


@contextmanager
def _without_waiting() -> Generator[None]:
    """Have operations raise if they make the CPU wait: in a capture they would invalidate it."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
