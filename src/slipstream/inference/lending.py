"""Messages between an engine server and a run about the loan of the engine. Pure, but for a clock.

One run holds the engine at a time, by a lease, and renews it while it lives. After `SILENT_S` of silence another run
may take its place.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec

SILENT_S = 30.0
RENEW_S = 3.0
"""How often a run renews its lease."""
LEASE_HEADER = "x-slipstream-lease"
"""The header with the id of a run, in each call under the lease."""
AGENTS = "/agents"
"""The beginning of paths of agents' requests."""
TOKEN_VARIABLE = "SLIPSTREAM_ENGINE_TOKEN"
"""The environment variable of `slipstream engine` with the token of its control address."""
KEY_VARIABLE = "SLIPSTREAM_API_KEY"
"""Its environment variable with the key of foreign clients."""
RUNS = "/runs/"
"""The beginning of paths of foreign clients that want a run's weights and no others."""


def place_of(id_: str) -> str:
    """The name of a run in such paths; its id is for control calls alone."""
    return hashlib.sha256(id_.encode()).hexdigest()[:16]


class Terms(msgspec.Struct, frozen=True):
    """A run asks for the engine, with these settings."""

    run: str
    """Its name for people."""
    id: str
    first_rank: int = 1
    """See `EngineSettings`, as for the fields below."""
    in_flight: Literal["recompute", "keep", "drain"] = "recompute"
    tool_parser: str = ""
    reasoning_parser: str = ""
    attempt: str = ""
    """Another one ends the sessions of agents of the one before."""


class Loan(msgspec.Struct, frozen=True):
    """The answer: the run has the engine."""

    instance: str
    """The server's process: another one has lost the run's weights."""
    world_size: int


class Refusal(msgspec.Struct, frozen=True):
    """The answer with status 423: another run has it."""

    run: str
    silent_s: float
    """Seconds since its last call."""


class Sight(msgspec.Struct, frozen=True):
    """Asks whether the server sees a file with this content."""

    path: str
    sha256: str


class ServerFacts(msgspec.Struct, frozen=True):
    """An engine as it was started, for the plan of a run."""

    model: str
    """Its model, as it was named."""
    config: dict[str, Any]
    """The model's `config.json`."""
    dtype: str
    max_model_len: int
    max_num_seqs: int
    kv_cache_bytes: int
    world_size: int
    on_gpu: bool
    gpus: tuple[str, ...] = ()
    """Ids of its GPUs."""
    enforce_eager: bool = True
    fp32_head: bool = False
    fp32_residual: bool = False
    shared_kernels: bool = False
    replay_experts: bool = False
    lora_rank: int = 0
    """0: it has no room for adapters."""
    vllm_version: str = ""
    inference: str = ""
    """`http://host:port` for foreign clients."""
    needs_key: bool = False
    """Whether they need the key."""


class Held(Exception):
    """Another run has the engine."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"the run {refusal.run} holds this engine")
        self.refusal = refusal


class Lease:
    """Knows the run with the engine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.instance = secrets.token_hex(8)
        self._clock = clock
        self._holder: Terms | None = None
        self._heard_at = 0.0
        self._last = ""
        """The name of the run of its weights."""
        self._has_weights = False
        """Whether they are the holder's, of its present attempt."""

    @property
    def holder(self) -> Terms | None:
        """The run with the engine, unless it is silent."""
        return self._holder if self._silent_s <= SILENT_S else None

    @property
    def _silent_s(self) -> float:
        return self._clock() - self._heard_at

    def take(self, terms: Terms) -> bool:
        """Give it to a run, or renew its lease; whether its terms are new. Raises `Held`."""
        holder = self.holder
        if holder is not None and holder.id != terms.id:
            raise Held(Refusal(holder.run, self._silent_s))
        is_new = self._holder != terms
        self._has_weights = self._has_weights and not is_new
        self._holder, self._heard_at = terms, self._clock()
        return is_new

    def check(self, id_: str) -> None:
        """Raises `Held` for a call by anybody but the holder."""
        holder = self.holder
        if self._holder is None or self._holder.id != id_:
            raise Held(Refusal(holder.run if holder is not None else "", self._silent_s if holder is not None else 0.0))
        self._heard_at = self._clock()

    def gave_weights(self) -> None:
        """The engine has proved a version of the holder."""
        if self._holder is not None:
            self._last, self._has_weights = self._holder.run, True

    def serves(self, place: str) -> bool:
        """Whether the weights are those of the run with this `place_of`."""
        holder = self.holder
        return self._has_weights and holder is not None and place_of(holder.id) == place

    def end(self, id_: str) -> None:
        """The run has ended; nothing if it is not the holder."""
        if self._holder is not None and self._holder.id == id_:
            self._holder = None

    def describe(self) -> dict[str, str]:
        """For `/health`: the holder, and the origin of the weights."""
        holder = self.holder
        return {
            "instance": self.instance,
            "run": holder.run if holder is not None else "",
            "weights_of": self._last or "the files of the model",
        }
