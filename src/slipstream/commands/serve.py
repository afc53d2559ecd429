"""Serves a model through vLLM's own OpenAI-compatible server, with the arguments that the model needs.

Guarantees: what cannot be served is refused before anything starts; without an API key the server listens on this
machine only. This process becomes the server.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from slipstream.config.addresses import check_port
from slipstream.data.chat_template import ChatTokenizer
from slipstream.errors import ConfigError
from slipstream.inference.openai_server import become_server
from slipstream.plan.deployable import Deployable, ServeOptions, adapter_config_of, deployed_engine
from slipstream.plan.machine import measure_gpus
from slipstream.weights.usage import GENERATION_CONFIG

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `--max-lora-rank`."""
KEY_SOURCE = "SLIPSTREAM_API_KEY"
"""The environment variable that holds the API key."""


@dataclass(frozen=True)
class Address:
    """Where clients reach the model."""

    url: str
    """The base URL for clients, with `/v1`."""
    model: str
    needs_key: bool


def serve(
    deployable: Deployable, tokenizer: ChatTokenizer, options: ServeOptions, announce: Callable[[Address], None]
) -> NoReturn:
    """Become vLLM's server, after `announce` was called with its address."""
    api_key = os.environ.get(KEY_SOURCE, "")
    _check_host(options.host, api_key)
    arguments = vllm_arguments(deployable, tokenizer.template_kwargs, options)
    port = free_port(options.host, options.port)
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host)
    shown = f"[{reachable}]" if ":" in reachable else reachable
    announce(Address(f"http://{shown}:{port}/v1", options.name or deployable.name, bool(api_key)))
    become_server(arguments, options.host, port, api_key)


def vllm_arguments(deployable: Deployable, template_kwargs: Mapping[str, Any], options: ServeOptions) -> list[str]:
    """The arguments of `vllm serve`, except host, port and key. `template_kwargs`: by default, of a request."""
    on_cpu = measure_gpus()[0] == 0
    settings = deployed_engine(deployable, options)
    name = options.name or deployable.name
    adapter = adapter_config_of(deployable, trust_remote_code=options.trust_remote_code)
    values: dict[str, Any] = {
        "model": deployable.model,
        "served-model-name": f"{name}-base" if deployable.adapter else name,
        "dtype": settings.dtype,
        "max-model-len": settings.max_model_len,
        "max-num-seqs": settings.max_num_seqs,
        # By default older versions answer requests from any web site that the user visits.
        "allowed-origins": "[]",
    }
    if on_cpu:
        values["kv-cache-memory-bytes"] = settings.kv_cache_bytes
    else:
        values["gpu-memory-utilization"] = settings.gpu_memory_utilization
    if adapter is not None and deployable.adapter is not None:
        values["max-lora-rank"] = max_rank_for(adapter.rank)
        if (deployable.adapter / GENERATION_CONFIG).is_file():
            # The base may name another end token; vLLM reads those of --override-generation-config for nothing.
            values["generation-config"] = str(deployable.adapter)
        values["lora-modules"] = json.dumps({"name": name, "path": str(deployable.adapter)})
    if template_kwargs:
        values["default-chat-template-kwargs"] = json.dumps(dict(template_kwargs))
    flags = {
        "enforce-eager": settings.enforce_eager,
        "enable-lora": adapter is not None,
        "enable-tower-connector-lora": adapter is not None and adapter.with_tower,
        "trust-remote-code": options.trust_remote_code,
        "disable-log-stats": True,
    }
    given = [part for key, value in values.items() for part in (f"--{key}", str(value))]
    return given + [f"--{key}" for key, is_set in flags.items() if is_set]


def max_rank_for(rank: int) -> int:
    """vLLM's `--max-lora-rank` for adapters of this rank. Raises ConfigError above all of them."""
    if rank > _LORA_RANKS[-1]:
        raise ConfigError(f"the adapter has rank {rank}, and vLLM takes {_LORA_RANKS[-1]} at most: merge it by export")
    return min(size for size in _LORA_RANKS if size >= rank)


def _check_host(host: str, api_key: str) -> None:
    if not is_loopback(host) and not api_key:
        raise ConfigError(
            f"--host {host} can be reached from other machines, and there is no API key: put one into the environment "
            f"variable {KEY_SOURCE}, or listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether all addresses that `host` resolves to are loopback addresses."""
    found = {address for _, address in _resolved(host)}
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)


def _resolved(host: str) -> list[tuple[int, str]]:
    """Families and addresses of `host`."""
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--host {host} is no address of this machine ({error}): use 127.0.0.1") from error
    return [(entry[0], str(entry[4][0])) for entry in found]


def free_port(host: str, port: int = 0) -> int:
    """`port`, or any free one for 0. Raises ConfigError when nothing can listen there."""
    check_port(port)
    family, _ = _resolved(host)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"nothing can listen on port {port} of {host} ({error.strerror}): use --port 0 for a free one"
            ) from error
        return probe.getsockname()[1]
