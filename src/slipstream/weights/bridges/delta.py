"""Deltas (`weights.delta`): only the changed elements of a version are sent, over `broadcast` or `disk`.

The trainer keeps a copy of the last published version and compares bits: a changed sign of zero or a NaN is a change.
Before a delta it asks the engine for its verified version. The whole version is sent if this is not the copy (the first
version, a new engine process, a failed apply), or if a delta saves too little. The engine refuses a delta against any
other version. A delta is verified like every version: by the fingerprints of the whole model, all in the ticket.

Each stretch of a parameter with changes is one payload of bytes: the gaps from one changed element to the next, then
their values. A gap too long for its one or two bytes is bridged by unchanged elements; these are then sent too. There
are no exceptions: both sides handle all elements at once, on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from slipstream.errors import WeightsError
from slipstream.records import Delta, ParameterSpec, Patch, Ticket, Version
from slipstream.weights.base import Announce, NamedWeights, Publisher
from slipstream.weights.fingerprint_torch import bits_of

STRETCH = 1 << 24
"""Elements compared at once; bounds the temporaries on both sides to 1 GiB."""
LEAST_SAVING = 2
"""A stretch, or a version, is sent whole unless its delta is smaller by this factor."""
_ALIGNMENT = 16
_WIDTHS: dict[Literal["gaps8", "gaps16"], int] = {"gaps8": 1, "gaps16": 2}


def encode(new: Tensor, old: Tensor) -> tuple[Literal["gaps8", "gaps16", "whole"], int, Tensor, int] | None:
    """Encode a stretch `new` against `old` (both as integers): encoding, number of values, payload (for `whole` the
    bytes of `new` itself), and number of changed elements. None: nothing changed."""
    changed = new != old
    num_changed = int(changed.count_nonzero())
    if num_changed == 0:
        return None
    size = new.element_size()
    if LEAST_SAVING * num_changed * (size + 1) > new.numel() * size:
        return "whole", new.numel(), new.view(torch.uint8), num_changed
    places = changed.nonzero().reshape(-1)
    steps = torch.diff(places, prepend=places.new_full((1,), -1))
    # Values for each width, with the unchanged elements to bridge long gaps.
    counts = {name: num_changed + int(((steps - 1) >> 8 * width).sum()) for name, width in _WIDTHS.items()}
    encoding = min(_WIDTHS, key=lambda name: counts[name] * (size + _WIDTHS[name]))
    width, count = _WIDTHS[encoding], counts[encoding]
    if count > num_changed:
        reach = 1 << 8 * width
        extra = (steps - 1) >> 8 * width
        longer = torch.full((count,), reach, dtype=torch.int64, device=new.device)
        longer[(extra + 1).cumsum(0) - 1] = steps - extra * reach
        steps = longer
        places = steps.cumsum(0) - 1
    # int16, shifted: not every device computes with uint16.
    codes = (steps - 1).to(torch.uint8) if width == 1 else (steps - 1 - (1 << 15)).to(torch.int16)
    payload = torch.zeros(_values_from(count, width) + count * size, dtype=torch.uint8, device=new.device)
    payload[: count * width] = codes.view(torch.uint8)
    payload[_values_from(count, width) :] = new[places].view(torch.uint8)
    return encoding, count, payload, num_changed


def decode(patch: Patch, dtype: torch.dtype, payload: Tensor) -> tuple[Tensor, Tensor]:
    """Indices in the flattened parameter, and values, of a payload of `encode`."""
    if patch.encoding == "whole":
        return torch.arange(patch.start, patch.start + patch.length, device=payload.device), payload.view(dtype)
    width = _WIDTHS[patch.encoding]
    codes = payload[: patch.num_values * width]
    steps = codes.to(torch.int64) if width == 1 else codes.view(torch.int16).to(torch.int64) + (1 << 15)
    places = (steps + 1).cumsum(0) + (patch.start - 1)
    return places, payload[_values_from(patch.num_values, width) :].view(dtype)


def _values_from(count: int, width: int) -> int:
    """Offset of the values in a payload, in bytes."""
    return -(-count * width // _ALIGNMENT) * _ALIGNMENT


def travelling(ticket: Ticket) -> Sequence[ParameterSpec]:
    """The tensors sent for a ticket: its parameters, or each patch's payload, named by its number."""
    if ticket.delta is None:
        return ticket.parameters
    sizes = {spec.name: getattr(torch, spec.dtype).itemsize for spec in ticket.parameters}
    specs: list[ParameterSpec] = []
    for number, patch in enumerate(ticket.delta.patches):
        start = 0 if patch.encoding == "whole" else _values_from(patch.num_values, _WIDTHS[patch.encoding])
        specs.append(ParameterSpec(str(number), (start + patch.num_values * sizes[patch.name],), "uint8", ""))
    return specs


def check_base(ticket: Ticket, held: Version | None, why_none: str) -> None:
    """Raise `WeightsError` when the ticket is a delta against any version but `held`, the engine's verified one
    (None: none, for the reason `why_none`)."""
    if ticket.delta is None or ticket.delta.base == held:
        return
    base = ticket.delta.base
    found = f"version {held.name} ({held.digest})" if held else f"no verified version ({why_none or 'none came yet'})"
    raise WeightsError(
        f"version {ticket.version.name} came as a delta against {base.name} ({base.digest}), and the engine holds "
        f"{found}: nothing was changed; publish it whole"
    )


def patched(
    ticket: Ticket, payloads: Iterable[tuple[str, Tensor]], device: torch.device
) -> Iterable[tuple[ParameterSpec, Tensor, Tensor]]:
    """Parameter, indices and values of every patch of a delta, as payloads arrive."""
    assert ticket.delta is not None
    specs = {spec.name: spec for spec in ticket.parameters}
    for number, payload in payloads:
        patch = ticket.delta.patches[int(number)]
        spec = specs[patch.name]
        yield spec, *decode(patch, getattr(torch, spec.dtype), payload.to(device))


@dataclass(frozen=True)
class Changes:
    """How one version differs from the one before it."""

    delta: Delta
    payloads: dict[str, Tensor]
    """Payload of each patch, by its number; valid until the weights change."""
    num_changed: int
    num_elements: int
    whole_bytes: int
    """Bytes sent without a delta."""

    @property
    def num_bytes(self) -> int:
        """Bytes sent with the delta."""
        return sum(payload.numel() for payload in self.payloads.values())

    @property
    def pays(self) -> bool:
        """Whether the delta is smaller by `LEAST_SAVING`."""
        return self.num_bytes * LEAST_SAVING <= self.whole_bytes

    @property
    def fraction(self) -> float:
        """Fraction of changed elements."""
        return self.num_changed / max(1, self.num_elements)


@torch.no_grad()
def compare(weights: Sequence[tuple[str, Tensor]], copy: dict[str, Tensor], base: Version) -> Changes:
    """The changes of `weights` against the bits in `copy`, version `base`."""
    patches: list[Patch] = []
    payloads: dict[str, Tensor] = {}
    num_changed = 0
    for name, tensor in weights:
        bits = bits_of(tensor)
        for start in range(0, bits.numel(), STRETCH):
            new = bits[start : start + STRETCH]
            found = encode(new, copy[name][start : start + STRETCH])
            if found is not None:
                encoding, num_values, payload, count = found
                payloads[str(len(patches))] = payload
                patches.append(Patch(name, start, new.numel(), encoding, num_values))
                num_changed += count
    num_elements = sum(tensor.numel() for _, tensor in weights)
    whole_bytes = sum(tensor.nbytes for _, tensor in weights)
    return Changes(Delta(base, tuple(patches)), payloads, num_changed, num_elements, whole_bytes)


class Carrier(Publisher, Protocol):
    """A publisher with the choice to send a version as its changes."""

    def publish(
        self, named_weights: NamedWeights, step: int, lineage: int, announce: Announce, changes: Changes | None = None
    ) -> Ticket:
        """See `Publisher`."""
        ...


class DeltaPublisher:
    """Publishes over `carrier`, as changes wherever the engine holds the version published last.

    `held` asks the engine for its verified and served version; None when there is none. A copy of the weights is
    kept on their own device between versions.
    """

    def __init__(self, carrier: Carrier, held: Callable[[], Version | None]) -> None:
        self._carrier = carrier
        self._held = held
        self._copy: dict[str, Tensor] = {}
        self._version: Version | None = None
        """The version in `_copy`; None while it is unknown."""

    def publish(self, named_weights: NamedWeights, step: int, lineage: int, announce: Announce) -> Ticket:
        """See `Publisher`."""
        weights = list(named_weights)
        base, self._version = self._version, None
        changes: Changes | None = None
        # A version published again replaces the one of its name: this cannot be its base.
        is_new = base is not None and base.name != Version(lineage, step).name
        if base is not None and is_new and self._is_alike(weights) and self._held() == base:
            changes = compare(weights, self._copy, base)
        ticket = self._carrier.publish(weights, step, lineage, announce, changes)
        self._keep(weights)
        self._version = ticket.version
        return ticket

    def hold(self, step: int | None) -> None:
        """See `Publisher`."""
        self._carrier.hold(step)

    def close(self) -> None:
        """See `Publisher`."""
        self._copy = {}
        self._carrier.close()

    def _is_alike(self, weights: list[tuple[str, Tensor]]) -> bool:
        return self._copy.keys() == {name for name, _ in weights} and all(
            self._copy[name].nbytes == tensor.nbytes for name, tensor in weights
        )

    @torch.no_grad()
    def _keep(self, weights: list[tuple[str, Tensor]]) -> None:
        if not self._is_alike(weights):
            self._copy = {name: bits_of(tensor).clone() for name, tensor in weights}
            return
        for name, tensor in weights:
            self._copy[name].copy_(bits_of(tensor))
