"""`EngineSettings`: everything that an engine process needs to start; passed to the child as JSON."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from slipstream.inference.plugin.patches.patch_table import Choice
from slipstream.records import ParameterSpec, Ticket, Version

SOCKET = "engine.sock"
"""An engine's Unix socket, in its private temporary folder (TMPDIR)."""
INFERENCE_SOCKET = "inference.sock"
"""The Unix socket for foreign clients, in the same folder."""


class EngineSettings(msgspec.Struct, frozen=True):
    """Settings of one engine process."""

    model: str
    """Folder or hub id that vLLM loads."""
    dtype: str
    max_model_len: int
    max_num_seqs: int
    seed: int = 0
    enforce_eager: bool = True
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.45
    gpus: tuple[str, ...] = ()
    """Its GPUs, as CUDA_VISIBLE_DEVICES names them; empty: all that this process sees."""
    tensor_parallel_size: int = 1
    """Tensor-parallel workers."""
    first_rank: int = 1
    """Rank of its first worker in the process group of the trainer (rank 0) and all engines."""
    own_process: bool = False
    """Give vLLM's engine core a process of its own on a CPU too, as on GPUs."""
    in_flight: Literal["recompute", "keep", "drain"] = "recompute"
    """Running requests during an update of a whole model: their KV cache is recomputed or kept, or the update waits for
    them."""
    can_sleep: bool = False
    """Enable vLLM's sleep mode."""
    fp32_head: bool = False
    """Compute logits in float32; the engine does not start when vLLM cannot for this model."""
    fp32_residual: bool = False
    """Add up what layers compute in float32 (patch `fp32_residual`); the engine does not start without it."""
    shared_kernels: bool = False
    """Compute with what the trainer computes with (patch `shared_kernels`); the engine does not start without it."""
    replay_experts: bool = False
    """Return the experts of each token with every completion; the engine does not start where vLLM cannot."""
    trust_remote_code: bool = False
    threads: int | None = None
    version: Version | None = None
    """The version in `model`, verified against `parameters` before the engine is ready."""
    parameters: tuple[ParameterSpec, ...] = ()
    lora_rank: int | None = None
    """Enable LoRA with adapters of this rank; None: without LoRA."""
    lora_target_modules: tuple[str, ...] = ()
    """Last parts of the names of adapted modules."""
    lora_tower: bool = False
    """Whether adapters have layers of a vision tower."""
    adapter: Ticket | None = None
    """The adapter to load and verify, with its base model, before the engine is ready."""
    deltas: tuple[Ticket, ...] = ()
    """Deltas to apply to `model` in order before the engine is ready."""
    patches: Choice = "auto"
    """Patches of vLLM to apply."""
    tool_parser: str = ""
    """vLLM's parser for the calls of requests with tools; empty: such requests are refused."""
    reasoning_parser: str = ""
    """vLLM's parser for thoughts: answers to foreign clients then have them separate from the text; empty: none."""
    inference_socket: bool = False
    """Answer foreign clients on the socket `INFERENCE_SOCKET` in the temporary folder."""
    inference_host: str = ""
    """Answer foreign clients on this interface too; empty: on none."""
    inference_port: int = 0
    inference_key_variable: str = ""
    """The environment variable with the key that they must show; empty: none."""
    options: dict[str, Any] = {}
    """More of vLLM's engine arguments."""
