"""A weight bridge: the protocols `Publisher` (trainer) and `Receiver` (engine)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from torch import Tensor

from slipstream.errors import WeightsError
from slipstream.records import ApplyReport, Ticket

NamedWeights = Iterable[tuple[str, Tensor]]
Announce = Callable[[Ticket], Callable[[], bool] | None]
"""Tells the receiver of an available version. Its result, if any, tells whether the receiver has ended."""
Fence = Callable[[float], Awaitable[None]]
"""Pauses the engine until the next `apply`; the argument is a timeout in seconds."""


class Publisher(Protocol):
    """The trainer's half of a bridge."""

    def publish(self, named_weights: NamedWeights, step: int, lineage: int, announce: Announce) -> Ticket:
        """Make the weights of `step` available; calls `announce` as soon as the receiver may begin."""
        ...

    def hold(self, step: int | None) -> None:
        """An engine stays on version `step`, the one published last, for a while: leave the files for its restart on
        this version, until the next call; None ends this. Nothing if the bridge keeps no versions."""
        ...

    def close(self) -> None:
        """Free the bridge's resources outside the run folder."""
        ...


class Receiver(Protocol):
    """The engine's half of a bridge: the engine itself (`TakesWeights`), except for `restart`."""

    async def apply(self, ticket: Ticket, timeout_s: float) -> ApplyReport:
        """Have the engine take the version; the caller checks the report."""
        ...


def check_report(report: ApplyReport, ticket: Ticket) -> None:
    """Raise `WeightsError` unless the engine proved to hold exactly the ticket's version."""
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
