"""How an engine process is to be started: one record, passed to the child as JSON."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from slipstream.inference.plugin.patches.patch_table import Choice
from slipstream.records import ParameterSpec, Ticket, Version


class EngineSettings(msgspec.Struct, frozen=True):
    """Everything that the engine's process needs to know."""

    model: str
    """Folder or hub id that vLLM loads."""
    socket: str
    """Path of the Unix socket to answer on; its folder is private to the user."""
    dtype: str
    max_model_len: int
    max_num_seqs: int
    seed: int = 0
    enforce_eager: bool = True
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.45
    gpus: tuple[str, ...] = ()
    """The GPUs that it may see, as CUDA_VISIBLE_DEVICES names them; empty: all of this process."""
    tensor_parallel_size: int = 1
    """Workers that share the weights."""
    first_rank: int = 1
    """Of its workers in a group with the trainer, which is rank 0, and other engines."""
    own_process: bool = False
    """vLLM's engine core has a process to itself, as it has on GPUs, also on a CPU."""
    in_flight: Literal["recompute", "keep", "drain"] = "recompute"
    """What becomes of requests that run while a whole model is updated."""
    can_sleep: bool = False
    """Start so that `sleep` can free its memory."""
    fp32_head: bool = False
    """Compute logits in float32; an engine that cannot does not start."""
    trust_remote_code: bool = False
    threads: int | None = None
    version: Version | None = None
    """The version that `model` holds, verified against `parameters` before the engine says it is ready."""
    parameters: tuple[ParameterSpec, ...] = ()
    lora_rank: int | None = None
    """Start with room for one LoRA adapter of this rank; None: without."""
    lora_target_modules: tuple[str, ...] = ()
    """Last parts of the names of the layers that it adapts."""
    adapter: Ticket | None = None
    """The adapter to load and verify, with the base, before the engine says it is ready."""
    deltas: tuple[Ticket, ...] = ()
    """What to apply to `model`, one after the other, before the engine says it is ready."""
    patches: Choice = "auto"
    """Which changes are made to vLLM."""
    options: dict[str, Any] = {}
    """More of vLLM's engine arguments."""
