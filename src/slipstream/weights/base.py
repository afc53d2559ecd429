"""The bridge seam."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from torch import Tensor

from slipstream.errors import WeightsError
from slipstream.records import ApplyReport, ParameterSpec, Ticket, Version

NamedWeights = Iterable[tuple[str, Tensor]]
Announce = Callable[[Ticket], Callable[[], bool] | None]
"""Tells the receiver of a version; what it returns, if anything, says whether the receiver's part has ended."""


Fence = Callable[[float], Awaitable[None]]
"""Has the engine stand still until the next apply, within so many seconds."""


class Engine(Protocol):
    """What a receiver needs of an engine; `inference` provides it."""

    async def apply(self, ticket: Ticket, timeout_s: float) -> ApplyReport:
        """Load the ticket's files in place and verify them."""
        ...

    async def fence(self, timeout_s: float) -> None:
        """Stop computing with the weights, which are about to be written in place, until the next `apply`."""
        ...

    async def go_on(self, version: Version, timeout_s: float) -> None:
        """Compute with what was written since the fence, as `version`; what is made of it is given out when `apply` has
        proved it."""
        ...

    async def verify(self, ticket: Ticket, timeout_s: float) -> ApplyReport:
        """Compare the live weights with the ticket."""
        ...

    async def held(self) -> Version | None:
        """The version that it has verified and is serving; None when there is none."""
        ...

    async def restart(self, model: str, version: Version, parameters: tuple[ParameterSpec, ...]) -> None:
        """Start anew on a model folder; returns once the loaded weights are verified."""
        ...


class Publisher(Protocol):
    """The trainer's half."""

    def publish(self, named_weights: NamedWeights, step: int, lineage: int, announce: Announce) -> Ticket:
        """Make the weights of `step` available; `announce` is called as soon as the receiver may begin."""
        ...

    def close(self) -> None:
        """Give up what the bridge holds outside the run folder."""
        ...


class Receiver(Protocol):
    """The engine's half."""

    async def apply(self, ticket: Ticket, timeout_s: float) -> ApplyReport:
        """Have the engine take the version; the caller checks the report."""
        ...


class Bridge(Protocol):
    """Both halves, and what they need of the run."""

    @property
    def name(self) -> str:
        """What `weights.bridge` calls it."""
        ...

    @property
    def publisher(self) -> Publisher:
        """The trainer's half."""
        ...

    @property
    def receiver(self) -> Receiver:
        """The engine's half."""
        ...

    @property
    def fence(self) -> Fence | None:
        """To be called before the optimizer writes the live weights; None where the engine has its own."""
        ...


def check_report(report: ApplyReport, ticket: Ticket) -> None:
    """Raise `WeightsError` unless the engine proved that it holds exactly the ticket's version."""
    name = ticket.version.name
    if report.mismatched:
        shown = ", ".join(report.mismatched[:5]) + (" ..." if len(report.mismatched) > 5 else "")
        raise WeightsError(
            f"{len(report.mismatched)} of {len(ticket.parameters)} parameters in the engine differ from published "
            f"version {name} ({shown}): the engine is out of service, so restart the run with --resume"
        )
    if report.unverified:
        shown = ", ".join(report.unverified[:5]) + (" ..." if len(report.unverified) > 5 else "")
        raise WeightsError(
            f"{len(report.unverified)} parameters of version {name} cannot be verified inside the engine ({shown}): "
            "its loader transforms them before it stores them; report this model's architecture to us"
        )
    if report.version != ticket.version:
        raise WeightsError(
            f"the engine reports version {report.version.name} ({report.version.digest}) after {name} "
            f"({ticket.version.digest}) was published: another process may be updating it"
        )
