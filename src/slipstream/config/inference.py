"""The section [inference]: the engines for generation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from slipstream.config import bounds
from slipstream.config.bounds import Auto, Section


class InferenceServer(Section):
    """An engine server, started by `slipstream engine`."""

    url: str
    """Its control address, as it prints it: `http://host:port`, `https://host:port` or `unix:/path`."""
    token_variable: str = ""
    """The environment variable with its token. A Unix socket needs none, nor does 127.0.0.1."""


class InferenceConfig(Section):
    """The engine, or several of them."""

    servers: Annotated[tuple[InferenceServer, ...], Field(strict=False)] = ()
    """Engine servers (docs/servers.md): a table `[[inference.servers]]` for each, with `url` and
    `token_variable`. The run starts no engines, and holds each of these until it ends."""

    replicas: bounds.Processes | Auto = "auto"
    """Engines generating side by side, each with a whole copy of the weights; a version is used when all of them
    have proved it. `auto`: on GPUs with `run.placement = "separate"` as many as the cards left by the trainer hold, but
    at most the number of prompts in a batch; otherwise 1."""
    tensor_parallel_size: bounds.Processes = 1
    """GPUs (on a CPU: processes) sharing each engine's weights."""
    max_model_len: bounds.Tokens | Auto = "auto"
    """Longest prompt plus completion. `auto`: the tasks' need, within the model's context. For a model with two sets
    of rotary factors (longrope), a value above its original context chooses the long ones."""
    max_num_seqs: bounds.Items | Auto = "auto"
    """Sequences generated at once, by each engine."""
    kv_cache_gib: bounds.Gibibytes | Auto = "auto"
    """Memory for the KV cache, on each GPU of an engine or in each of its processes. `auto`: the need of `max_num_seqs`
    sequences, if there is room for it."""
    gpu_memory_utilization: bounds.Fraction | Auto = "auto"
    """At most this part of its card's memory is the engine's, on a GPU. `auto`: the need of its weights and its KV
    cache."""
    sleep: bool | Auto = "auto"
    """During training on a batch, the engine moves its weights to CPU memory and frees its KV cache: the
    trainer has the GPU to itself. `auto`: on a shared GPU if both do not fit otherwise."""
    enforce_eager: bool | Auto = "auto"
    """No compilation. `auto`: on a CPU yes, on a GPU no."""
    start_timeout_s: bounds.Seconds | Auto = "auto"
    """How long the engine may take to start, to its first answer. `auto`: by the size of its weights, and of the
    teacher's, on a slow disk; at least 300."""
    request_timeout_s: bounds.Seconds | Auto = "auto"
    """How long one completion may take. `auto`: several times the time of `sampling.max_tokens` on a slow machine; at
    least 300. A dead or frozen engine is found long before."""
    request_retries: Annotated[int, Field(ge=0, le=100)] = 5
    """How often a rollout's request is tried again, with the same seed, if the engine aborted it, refused it for the
    moment or did not finish it in time: after 1 s, 2 s, ... up to 30 s, and within twice `request_timeout_s`. Requests
    refused for good, such as a prompt longer than the context, are not tried again."""
    max_restarts: bounds.UpToThousand = 1
    """How often each engine, once dead, is started again on the last published version before the run fails; how often
    a server may be lost. The run waits `start_timeout_s` for its return."""
    patches: Literal["auto", "checked", "required", "all"] = "auto"
    """Changes to vLLM in the engine's processes. `required`: only those needed for correct updates, scores
    and seeds. `checked`: fast paths too, each only if it was checked against the source of the installed vLLM.
    `all`: all fast paths, whatever vLLM's source is, for work on them. `auto`: `checked`
    if there is a fast path for the installed vLLM, otherwise `required`."""
    tool_parser: str = "auto"
    """vLLM's tool parser for the calls of an environment with tools: the one of the model's own format, such
    as `hermes` (Qwen 2.5 and 3), `qwen3_coder`, `llama3_json`, `mistral` or `pythonic`. `auto`: by the model's chat
    template. `none`: no calls are read."""
    options: dict[str, Any] = {}
    """Passed on to vLLM's engine arguments; names unknown to vLLM, or set by Slipstream itself, are refused."""
