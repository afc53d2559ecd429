"""The two generations of `verifiers`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import legacy, v1

if TYPE_CHECKING:
    from slipstream.envs.hosted.inside.host import Hosted, Refused
else:
    from slipstream_environment_process.host import Refused


def load(setup: dict[str, Any]) -> Hosted:
    """The environment that the setup names, of either generation."""
    found = v1.load(setup) or legacy.load(setup)
    if found is None:
        raise Refused(
            f"{setup['id']} is neither a taskset of verifiers.v1 (a module whose __all__ names a Taskset) nor a module "
            "with load_environment: check the name"
        )
    return found
