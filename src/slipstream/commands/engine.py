"""Becomes an engine server (`inference/plugin/serving.py`)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

from slipstream.config.bounds import GIB
from slipstream.errors import ConfigError
from slipstream.inference.plugin.serving import ServerSettings
from slipstream.inference.preimport import MODULE, check_plugin, engine_environment
from slipstream.inference.settings import EngineSettings
from slipstream.plan.deployable import Deployable, ServeOptions, deployed_engine
from slipstream.plan.derive import CLOSER
from slipstream.plan.machine import measure_gpus
from slipstream.plan.measure import read_model
from slipstream.processes.exits import become_module
from slipstream.processes.launchers import Resources
from slipstream.processes.temporary import cache_root, private_folder

_GPU_PART, _LEAST_PART = 0.9, 0.05


@dataclass(frozen=True)
class EngineOptions:
    """Addresses, and options of vLLM."""

    host: str = "127.0.0.1"
    port: int = 8000
    control: str = ""
    """`unix:/path` or `HOST:PORT`; empty: a Unix socket by the port's name, kept over restarts."""
    dtype: str = "auto"
    max_length: int | None = None
    memory_gib: float | None = None
    """For the KV cache, on each GPU or in each process."""
    tensor_parallel: int = 1
    data_parallel: int = 1
    certificate: str = ""
    private_key: str = ""
    trust_remote_code: bool = False


def become_engine(deployable: Deployable, options: EngineOptions) -> NoReturn:
    """Replace this process with the server. Raises `ConfigError`."""
    check_plugin()
    if deployable.adapter is not None:
        raise ConfigError(
            f"{deployable.name} is an adapter, and an engine begins with a whole model: name its base, or make a whole "
            "model of it with slipstream export --merged"
        )
    settings = engine_settings(deployable, options)
    server = ServerSettings(
        engine=settings,
        control=options.control or f"unix:{_socket_folder()}/",
        host=options.host,
        port=options.port,
        name=deployable.name,
        data_parallel_size=options.data_parallel,
        certificate=options.certificate,
        private_key=options.private_key,
    )
    environment = Resources(threads=settings.threads).environment(engine_environment(os.environ))
    if settings.threads is not None and options.tensor_parallel > 1:
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    become_module(MODULE, ["--serve", msgspec.json.encode(server).decode()], environment)


def engine_settings(deployable: Deployable, options: EngineOptions) -> EngineSettings:
    """Settings of the engine, without any `auto`."""
    asked = ServeOptions(max_model_len=options.max_length, trust_remote_code=options.trust_remote_code)
    settings = deployed_engine(deployable, asked)
    num_gpus = measure_gpus()[0]
    if num_gpus and (needed := options.tensor_parallel * options.data_parallel) > num_gpus:
        raise ConfigError(
            f"--tensor-parallel {options.tensor_parallel} and --data-parallel {options.data_parallel} need {needed} "
            f"GPUs, and there are {num_gpus}: lower one of them"
        )
    dtype = settings.dtype if options.dtype == "auto" else options.dtype
    facts = read_model(deployable.model, trust_remote_code=options.trust_remote_code)
    closer = bool(num_gpus) and dtype != "float32" and facts.architecture in CLOSER
    memory = None if num_gpus else settings.kv_cache_bytes
    return msgspec.structs.replace(
        settings,
        dtype=dtype,
        kv_cache_bytes=int(options.memory_gib * GIB) if options.memory_gib is not None else memory,
        gpu_memory_utilization=_GPU_PART if options.memory_gib is None else _LEAST_PART,
        tensor_parallel_size=options.tensor_parallel,
        fp32_head=closer,
        fp32_residual=closer and not settings.enforce_eager,
        threads=None
        if num_gpus
        else max(1, (settings.threads or 1) // (options.tensor_parallel * options.data_parallel)),
        options={"data_parallel_size": options.data_parallel} if options.data_parallel > 1 else {},
    )


def _socket_folder() -> Path:
    """Private to this user."""
    try:
        return private_folder(cache_root(os.environ) / "servers")
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"there is no folder for the control socket ({error}): give --control unix:/path") from error
