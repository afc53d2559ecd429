"""Records of deployments and their servers. Pure.

deploying -> ready -> undeploying (and removed)
deploying | ready -> failed; a server's restart leads from ready back to deploying
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

State = Literal["deploying", "ready", "failed", "undeploying"]
DEFAULT_ROOM = 8
MAX_NAME = 120


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a server; None: as they are, or the default."""

    room: int | None = None
    """Adapters in memory at a time; others are loaded on request."""
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None


class ServerSpec(msgspec.Struct, frozen=True):
    """A vLLM server: of one base and its adapters, or of one whole model."""

    key: str
    model: str
    """The folder that vLLM loads."""
    base: str
    """The base as its adapters name it: a folder or a hub id."""
    arguments: tuple[str, ...]
    options: Options
    """With all defaults filled in."""
    max_rank: int = 0
    """The largest rank of an adapter; 0: a whole model."""
    with_tower: bool = False
    context: int = 0
    """Most tokens of a conversation."""
    gpus: tuple[str, ...] = ()


class Deployment(msgspec.Struct, frozen=True):
    """A deployed checkpoint. Times are Unix times."""

    name: str
    """The model's name for clients."""
    owner: str
    run: str
    step: int
    kind: Literal["adapter", "model"]
    source: str
    """The folder of its weights."""
    digest: str
    base: str
    rank: int
    server: str
    """Key of its server."""
    created: float
    state: State = "deploying"
    reason: str = ""
    changed: float = 0.0
    request: dict[str, Any] = {}
    """Fields of each chat request, unless the client sends them: the run's template settings and end tokens."""
    system_prompt: str = ""
    """The run's."""
    context: int = 0
    """Most tokens of a conversation."""

    @property
    def served(self) -> str:
        """The model's name for vLLM: other weights never share its caches."""
        return f"{self.name}@{self.digest}"


def stated(record: Deployment, state: State, reason: str, now: float) -> Deployment:
    """The record in a state. `undeploying` stays."""
    if record.state == "undeploying" or (record.state, record.reason) == (state, reason):
        return record
    return msgspec.structs.replace(record, state=state, reason=reason, changed=now)
