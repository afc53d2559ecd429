"""Where each Hugging Face parameter lies inside the engine's fused and sharded tensors.

vLLM's own loader knows, so we watch it: `record` hands it empty tensors of the right shapes while a dispatch
mode notes every copy into a parameter of the engine *instead of* making it. The result holds for any model
that vLLM can load, needs no table of names, costs no memory traffic and leaves the weights alone.
A loader that computes before it copies (a cast, a transposition made whole) leaves a gap: the parameter is
then listed as unverified, never passed as right.
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
"""vLLM's kernels for experts that read the weights as its loader places them; on a CPU thanks to our patch."""


@dataclass(frozen=True)
class Piece:
    """A slice of one Hugging Face parameter and the engine memory that holds it."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    target: Tensor
    """A view of the engine's tensor, of shape `sizes`."""

    @property
    def numel(self) -> int:
        """Elements in the slice."""
        return self.target.numel()

    def write(self, places: Tensor, values: Tensor, *, is_whole: bool) -> None:
        """Write those of `values` whose `places` in the flattened parameter are in this slice; all are when it
        `is_whole`."""
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
        """(step in the flattened parameter, size, stride in memory), the longest steps first; those that go on into
        one another are one."""
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
    """For each Hugging Face name, its pieces in this worker."""

    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    opaque: set[str] = field(default_factory=set)
    """Names whose values the loader transforms before it copies them."""
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
        """A digest of which elements of `name` this worker holds; asked for once all pieces are known."""
        if name not in self._places:
            held = sorted((piece.offset, piece.sizes, piece.strides) for piece in self.pieces.get(name, []))
            self._places[name] = hashlib.sha256(repr(held).encode()).hexdigest()[:16]
        return self._places[name]

    def write(self, spec: ParameterSpec, places: Tensor, values: Tensor) -> None:
        """Write `values` at `places` of the flattened parameter, where this worker keeps them."""
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
        """The engine's bytes of `spec`, where all of it lies in one piece, bit for bit, and nowhere else."""
        pieces = self.pieces.get(spec.name, [])
        if spec.name in self.opaque or len(pieces) != 1:
            return None
        target = pieces[0].target
        is_same = str(target.dtype) == f"torch.{spec.dtype}" and pieces[0].strides == target.stride()
        return flat_bytes(target) if is_same and target.numel() == math.prod(spec.shape) else None

    def load(self, arrived: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Copy whole parameters to where this worker keeps them; those that only vLLM's loader can place are returned,
        as copies that stay."""
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
        """This worker's memory of `spec` as one tensor, all of it or some rows or columns (one dimension alone is cut);
        raises ValueError, with the reason, when it is not one."""
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
    """A worker's rows or columns of a parameter, or all of it."""

    tensor: Tensor
    dim: int = 0
    """Along which it is cut."""
    start: int = 0
    """Its first row or column in the whole."""


def _index(place: int, strides: Sequence[int]) -> tuple[int, ...]:
    """Which element of a contiguous tensor lies at `place`."""
    found: list[int] = []
    for stride in strides:
        found.append(place // stride)
        place %= stride
    return tuple(found)


class Recorder(TorchDispatchMode):
    """While active, writes into `tensors` are noted in `map` instead of made."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.targets = {t.untyped_storage().data_ptr() for t in tensors if t.numel()}
        self.sources: dict[int, tuple[str, Tensor]] = {}
        self.map = TensorMap()
        self.current = ""

    def feed(self, parameters: tuple[ParameterSpec, ...]) -> Iterator[tuple[str, Tensor]]:
        """Empty tensors to load in the place of real ones."""
        for spec in parameters:
            source = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
            if source.numel():
                self.sources[source.untyped_storage().data_ptr()] = (spec.name, source)
            self.current = spec.name
            yield spec.name, source

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if args else None
        if func.overloadpacket.__name__ == "_pin_memory":
            return target  # a copy in pinned memory would hide where it came from
        if (
            not isinstance(target, Tensor)
            or func.overloadpacket.__name__ not in _WRITES
            or target.untyped_storage().data_ptr() not in self.targets
        ):
            return func(*args, **(kwargs or {}))
        source = args[1] if len(args) > 1 and isinstance(args[1], Tensor) else None
        found = self.sources.get(source.untyped_storage().data_ptr()) if source is not None else None
        if source is None or found is None or func.overloadpacket.__name__ != "copy_":
            if func.overloadpacket.__name__ not in {"fill_", "zero_"} or self._is_scalar():
                self.map.opaque.add(self.current)
            return target
        name, whole = found
        if source.dtype != whole.dtype or source.shape != target.shape:
            self.map.opaque.add(name)
            return target
        # The view is made outside the mode's reach by detach: it keeps the engine's storage.
        piece = Piece(source.storage_offset(), tuple(source.shape), tuple(source.stride()), target.detach())
        self.map.pieces.setdefault(name, []).append(piece)
        return target

    def _is_scalar(self) -> bool:
        return any(name == self.current and whole.numel() == 1 for name, whole in self.sources.values())


def record(model: Any, parameters: tuple[ParameterSpec, ...]) -> TensorMap:
    """Watch `model.load_weights` place `parameters` (shapes and dtypes; values are not read)."""
    recorder = Recorder([*model.parameters(), *model.buffers()])
    with torch.no_grad(), recorder:
        model.load_weights(recorder.feed(parameters))
    rearranged = _rearranged(model)
    for name, pieces in recorder.map.pieces.items():
        if any(piece.target.untyped_storage().data_ptr() in rearranged for piece in pieces):
            recorder.map.opaque.add(name)
    return recorder.map


def _rearranged(model: Any) -> set[int]:
    """Storages of experts' weights that vLLM puts into a kernel's own order after its loader: what the loader writes
    there later would be read in the wrong order."""
    found: set[int] = set()
    for module in model.modules():
        backend = getattr(getattr(module, "quant_method", None), "unquantized_backend", None)
        if backend is not None and backend.name not in _IN_LOADERS_ORDER:
            found |= {parameter.untyped_storage().data_ptr() for parameter in module.parameters(recurse=False)}
    return found


@dataclass(frozen=True)
class Share:
    """One worker's part in the fingerprint of one parameter."""

    fingerprint: int
    count: int
    place: str = ""
    """Which elements of the parameter these are; workers that hold the same say the same."""


def compare(spec: ParameterSpec, shares: list[Share]) -> str:
    """`match`, `differs` or `unverified` for one parameter, from the shares of all workers.

    Shards add up to the whole; what several workers hold (all of it, or heads that are fewer than they) must be the
    same in each.
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
    """The names that differ, and those that cannot be verified, by what each worker says of its shares: fingerprint in
    hexadecimal digits, elements, place."""
    found: dict[str, list[str]] = {"match": [], "differs": [], "unverified": []}
    for spec in parameters:
        parts = [answer[spec.name] for answer in answers]
        found[compare(spec, [Share(int(value, 16), count, place) for value, count, place in parts])].append(spec.name)
    return found["differs"], found["unverified"]
