"""The command `slipstream engine`."""

from __future__ import annotations

from typing import Annotated, Literal, NoReturn

from cyclopts import Parameter

from slipstream.cli.commands import TrustRemoteCode
from slipstream.config.addresses import check_port
from slipstream.errors import ConfigError


def engine(
    model: Annotated[str, Parameter(help="A model folder, a hub id, a run or a checkpoint.")],
    /,
    *,
    host: Annotated[str, Parameter(help="Address for clients; beyond 127.0.0.1 it needs SLIPSTREAM_API_KEY.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, Parameter(help="Port for clients; if taken, the next free one.")] = 8000,
    control: Annotated[
        str, Parameter(help="HOST:PORT or unix:/path for runs; HOST is this host's address towards them.")
    ] = "",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], Parameter(help="Type of the weights.")
    ] = "auto",
    max_length: Annotated[int | None, Parameter(help="Longest prompt plus completion, in tokens.")] = None,
    memory: Annotated[
        float | None, Parameter(help="GiB for the KV cache, on each GPU or in each process of a CPU.")
    ] = None,
    tensor_parallel: Annotated[int, Parameter(help="GPUs with a part of the weights each.")] = 1,
    data_parallel: Annotated[int, Parameter(help="Copies of the weights, on further GPUs each.")] = 1,
    tls_cert: Annotated[str, Parameter(help="PEM certificate of the control address.")] = "",
    tls_key: Annotated[str, Parameter(help="PEM key of the certificate.")] = "",
    trust_remote_code: TrustRemoteCode = False,
) -> NoReturn:
    """Be an engine server for runs: it starts before them and outlives them.

    Prints its lines for a run file. Standard error gets vLLM's log. Others get completions at the port
    meanwhile. A control address of TCP needs a token in SLIPSTREAM_ENGINE_TOKEN, but on 127.0.0.1. Ends at SIGTERM or
    Ctrl-C.
    """
    from slipstream.commands.engine import EngineOptions, become_engine
    from slipstream.plan.deployable import find_deployable

    for name, number in (("tensor-parallel", tensor_parallel), ("data-parallel", data_parallel)):
        if number < 1:
            raise ConfigError(f"--{name} {number} is no number of copies: use 1 or more")
    check_port(port)
    if memory is not None and memory <= 0:
        raise ConfigError(f"--memory {memory:g} holds no KV cache: use more than 0")
    where = control.rpartition(":")
    if control and not control.startswith("unix:/") and not (where[0] and where[2].isdigit()):
        raise ConfigError(f"--control {control} is no address: write HOST:PORT or unix:/path")
    options = EngineOptions(
        host=host,
        port=port,
        control=control.replace("[", "").replace("]", ""),
        dtype=dtype,
        max_length=max_length,
        memory_gib=memory,
        tensor_parallel=tensor_parallel,
        data_parallel=data_parallel,
        certificate=tls_cert,
        private_key=tls_key,
        trust_remote_code=trust_remote_code,
    )
    become_engine(find_deployable(model, None, trust_remote_code=trust_remote_code), options)
