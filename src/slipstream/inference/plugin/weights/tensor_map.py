"""Maps each Hugging Face parameter to its place in the engine's fused and sharded tensors.

vLLM's own loader knows it, so `record` hands the loader empty tensors of the right shapes. A dispatch mode notes
every copy into an engine parameter *instead of* making it. The result holds for any model vLLM can load, needs no
table of names, costs no memory traffic and leaves the weights alone. A loader's computation before the copy (a cast, a
materialized transposition) leaves a gap: such a parameter is listed as unverified, never as verified.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.records import ParameterSpec
from slipstream.weights.bridges.broadcast import copy_all, flat_bytes
from slipstream.weights.fingerprint import as_hex, fingerprints
from slipstream.weights.fingerprint_torch import Slice

_WRITES = {"copy_", "fill_", "zero_", "index_copy_", "index_put_", "masked_fill_", "scatter_", "set_"}
_IN_LOADERS_ORDER = {"TRITON", "BATCHED_TRITON", "CPU"}
"""MoE backends with the weights as vLLM's loader places them (CPU: by the patch `live_cpu_experts`)."""


@dataclass(frozen=True)
class Piece:
    """A slice of one Hugging Face parameter and its engine memory."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    target: Tensor
    """A view of the engine's tensor, of shape `sizes`."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.target.numel()

    def write(self, places: Tensor, values: Tensor, *, is_whole: bool) -> None:
        """Write those of `values` with `places` (in the flattened parameter) in this slice; `is_whole`: all are."""
        inside = None if is_whole else places >= self.offset
        rest = places - self.offset
        lies = torch.zeros_like(rest)
        for step, size, stride in self._dimensions():
            index = rest if step == 1 else rest.div(step, rounding_mode="floor")
            rest = rest - index * step
            lies += index * stride
            inside = None if inside is None else inside & (index >= 0) & (index < size)
        if inside is not None:
            inside &= rest == 0
            lies, values = lies[inside], values[inside]
        extent = 1 + sum((size - 1) * stride for size, stride in zip(self.sizes, self.target.stride(), strict=True))
        flat = self.target.as_strided((extent,), (1,), self.target.storage_offset())
        flat[lies] = values.to(flat.dtype)

    def _dimensions(self) -> list[tuple[int, int, int]]:
        """(stride in the flattened parameter, size, stride in memory) by falling stride; contiguous dimensions are
        merged."""
        found: list[tuple[int, int, int]] = []
        for step, size, stride in sorted(
            zip(self.strides, self.sizes, self.target.stride(), strict=True), reverse=True
        ):
            if size == 1:
                continue
            if found and found[-1][0] == step * size and found[-1][2] == stride * size:
                size *= found.pop()[1]
            found.append((step, size, stride))
        return found


@dataclass
class TensorMap:
    """The pieces of each Hugging Face parameter in this worker."""

    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    opaque: set[str] = field(default_factory=set)
    """Names of values transformed by the loader before the copy."""
    _places: dict[str, str] = field(default_factory=dict[str, str])

    def shares(self, names: Sequence[str]) -> list[tuple[int, int]]:
        """This worker's share of the fingerprint of each name, and how many of its elements it covers."""
        owned = [(number, piece) for number, name in enumerate(names) for piece in self.pieces.get(name, [])]
        values = fingerprints([Slice(piece.target, piece.offset, piece.strides, piece.sizes) for _, piece in owned])
        totals, counts = [0] * len(names), [0] * len(names)
        for (number, piece), value in zip(owned, values, strict=True):
            totals[number] += value
            counts[number] += piece.numel
        return [(total & ((1 << 64) - 1), count) for total, count in zip(totals, counts, strict=True)]

    def place(self, name: str) -> str:
        """A digest of the elements of `name` in this worker; call it after recording."""
        if name not in self._places:
            held = sorted((piece.offset, piece.sizes, piece.strides) for piece in self.pieces.get(name, []))
            self._places[name] = hashlib.sha256(repr(held).encode()).hexdigest()[:16]
        return self._places[name]

    def write(self, spec: ParameterSpec, places: Tensor, values: Tensor) -> None:
        """Write `values` at `places` of the flattened parameter, as far as this worker holds them. Raises ValueError
        if the loader transforms the parameter."""
        if spec.name in self.opaque:
            raise ValueError(
                f"vLLM's loader transforms {spec.name}, so a part of it cannot be written: publish it whole"
            )
        memory = self.memory(spec)
        if memory is not None:
            memory.view(values.dtype)[places] = values
            return
        for piece in self.pieces.get(spec.name, []):
            piece.write(places, values, is_whole=piece.numel == math.prod(spec.shape))

    def memory(self, spec: ParameterSpec) -> Tensor | None:
        """The engine's memory of `spec` as bytes, if it holds all of it in one contiguous piece of the same dtype;
        else None."""
        pieces = self.pieces.get(spec.name, [])
        if spec.name in self.opaque or len(pieces) != 1:
            return None
        target = pieces[0].target
        is_same = str(target.dtype) == f"torch.{spec.dtype}" and pieces[0].strides == target.stride()
        return flat_bytes(target) if is_same and target.numel() == math.prod(spec.shape) else None

    def load(self, arrived: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Copy whole parameters into this worker's memory; returns copies of those only vLLM's loader can
        place."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        left: list[tuple[str, Tensor]] = []
        for name, tensor in arrived:
            pieces = self.pieces.get(name, [])
            if name in self.opaque or not pieces:
                left.append((name, tensor.clone()))
                continue
            for piece in pieces:
                targets.append(piece.target)
                sources.append(tensor.as_strided(piece.sizes, piece.strides, tensor.storage_offset() + piece.offset))
        copy_all(targets, sources)
        return left

    def part(self, spec: ParameterSpec) -> Part:
        """This worker's memory of `spec` as one strided tensor: all of it, or a range of one dimension. Raises
        ValueError with the reason when it is not one."""
        pieces = sorted(self.pieces.get(spec.name, []), key=lambda piece: piece.offset)
        if spec.name in self.opaque:
            raise ValueError("vLLM's loader transforms it")
        if not pieces:
            raise ValueError("vLLM keeps no copy of it")
        first = pieces[0].target
        if str(first.dtype) != f"torch.{spec.dtype}":
            raise ValueError(f"vLLM keeps it in {str(first.dtype).removeprefix('torch.')}, not {spec.dtype}")
        strides = torch.empty(spec.shape, device="meta").stride()
        corner = _index(pieces[0].offset, strides)
        ends = list(corner)
        for piece in pieces:
            place = _index(piece.offset, strides)
            beyond = [own - start for own, start in zip(place, corner, strict=True)]
            steps = zip(beyond, first.stride(), strict=False)
            expected = first.storage_offset() + sum(number * step for number, step in steps)
            is_in_line = (
                min(beyond, default=0) >= 0
                and piece.target.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
                and piece.target.stride() == first.stride()
                and piece.strides == strides
                and piece.target.storage_offset() == expected
            )
            if not is_in_line:
                raise ValueError("vLLM keeps its parts apart")
            ends = [max(end, own + size) for end, own, size in zip(ends, place, piece.sizes, strict=True)]
        shape = tuple(end - start for end, start in zip(ends, corner, strict=True))
        cut = [dim for dim, (own, all_of_it) in enumerate(zip(shape, spec.shape, strict=True)) if own != all_of_it]
        if sum(piece.numel for piece in pieces) != math.prod(shape) or len(cut) > 1:
            raise ValueError("vLLM keeps only a part of it")
        dim = cut[0] if cut else 0
        tensor = first.as_strided(shape, first.stride(), first.storage_offset())
        return Part(tensor, dim, corner[dim] if cut else 0)


@dataclass(frozen=True)
class Part:
    """A worker's range of one dimension of a parameter, or all of it."""

    tensor: Tensor
    dim: int = 0
    """The sharded dimension."""
    start: int = 0
    """Its first index in the whole parameter."""


def _index(place: int, strides: Sequence[int]) -> tuple[int, ...]:
    """The multi-dimensional index of the element at flat index `place` of a contiguous tensor."""
    found: list[int] = []
    for stride in strides:
        found.append(place // stride)
        place %= stride
    return tuple(found)


class Recorder(TorchDispatchMode):
    """While active, notes writes into `tensors` in `map` instead of making them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.targets = {t.untyped_storage().data_ptr() for t in tensors if t.numel()}
        self.sources: dict[int, tuple[str, Tensor]] = {}
        self.map = TensorMap()
        self.current = ""

    def feed(self, parameters: tuple[ParameterSpec, ...]) -> Iterator[tuple[str, Tensor]]:
        """Empty tensors for vLLM's loader in place of real ones."""
        for spec in parameters:
            source = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
            if source.numel():
                self.sources[source.untyped_storage().data_ptr()] = (spec.name, source)
            self.current = spec.name
            yield spec.name, source

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if args else None
        if func.overloadpacket.__name__ == "_pin_memory":
            return target  # a copy in pinned memory would hide its source
        if (
            not isinstance(target, Tensor)
            or func.overloadpacket.__name__ not in _WRITES
            or target.untyped_storage().data_ptr() not in self.targets
        ):
            return func(*args, **(kwargs or {}))
        source = args[1] if len(args) > 1 and isinstance(args[1], Tensor) else None
        found = self.sources.get(source.untyped_storage().data_ptr()) if source is not None else None
        if source is None or found is None or func.overloadpacket.__name__ != "copy_":
            is_scalar = any(name == self.current and whole.numel() == 1 for name, whole in self.sources.values())
            if func.overloadpacket.__name__ not in {"fill_", "zero_"} or is_scalar:
                self.map.opaque.add(self.current)
            return target
        name, whole = found
        if source.dtype != whole.dtype or source.shape != target.shape:
            self.map.opaque.add(name)
            return target
        # `detach` keeps the engine's storage.
        piece = Piece(source.storage_offset(), tuple(source.shape), tuple(source.stride()), target.detach())
        self.map.pieces.setdefault(name, []).append(piece)
        return target


def record(model: Any, parameters: tuple[ParameterSpec, ...]) -> TensorMap:
    """Record the places of `parameters` in `model.load_weights` (shapes and dtypes; values are not read)."""
    recorder = Recorder([*model.parameters(), *model.buffers()])
    with torch.no_grad(), recorder:
        model.load_weights(recorder.feed(parameters))
    rearranged = _rearranged(model)
    for name, pieces in recorder.map.pieces.items():
        if any(piece.target.untyped_storage().data_ptr() in rearranged for piece in pieces):
            recorder.map.opaque.add(name)
    return recorder.map


def _rearranged(model: Any) -> set[int]:
    """Storages of MoE weights permuted by vLLM for a kernel after loading: a later load would write them
    unpermuted."""
    found: set[int] = set()
    for module in model.modules():
        backend = getattr(getattr(module, "quant_method", None), "unquantized_backend", None)
        if backend is not None and backend.name not in _IN_LOADERS_ORDER:
            found |= {parameter.untyped_storage().data_ptr() for parameter in module.parameters(recurse=False)}
    return found


@dataclass(frozen=True)
class Share:
    """One worker's share of the fingerprint of one parameter."""

    fingerprint: int
    count: int
    place: str = ""
    """Digest of these elements (`TensorMap.place`): equal for workers with the same ones."""


def compare(spec: ParameterSpec, shares: list[Share]) -> str:
    """`match`, `differs` or `unverified` for one parameter, from the shares of all workers.

    The shares of shards add up; replicated parts (all of it, or KV heads fewer than workers) must be equal.
    """
    by_place = {share.place: share for share in shares}
    if sum(share.count for share in by_place.values()) != math.prod(spec.shape):
        return "unverified"
    if any(share != by_place[share.place] for share in shares):
        return "differs"
    return "match" if as_hex(sum(share.fingerprint for share in by_place.values())) == spec.fingerprint else "differs"


def judge(
    parameters: Sequence[ParameterSpec], answers: Sequence[Mapping[str, tuple[str, int, str]]]
) -> tuple[list[str], list[str]]:
    """Names of differing and of unverifiable parameters. `answers`: for each worker, its share of
    each parameter (fingerprint in hexadecimal digits, number of elements, place)."""
    found: dict[str, list[str]] = {"match": [], "differs": [], "unverified": []}
    for spec in parameters:
        parts = [answer[spec.name] for answer in answers]
        found[compare(spec, [Share(int(value, 16), count, place) for value, count, place in parts])].append(spec.name)
    return found["differs"], found["unverified"]
