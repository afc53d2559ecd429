"""A plan with engine servers: their type, lengths and number, and the bridges to them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from slipstream.config.addresses import is_loopback
from slipstream.config.atropos import atropos_settings
from slipstream.errors import ConfigError
from slipstream.inference.lending import KEY_VARIABLE, ServerFacts
from slipstream.plan.builder import PlanBuilder
from slipstream.plan.memory.split import sequences_wanted

_VOLATILE = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})
"""Keys of a model's configuration without a meaning for its weights."""


def plan_servers(builder: PlanBuilder) -> None:
    """Derive `model.dtype`, and refuse servers of another model; before anything else."""
    servers = builder.facts.servers
    if not servers:
        return
    urls = [server.url for server in builder.original.inference.servers]
    dtype = _same(builder, lambda server: server.dtype, "--dtype")
    builder.derive_auto("model.dtype", dtype, "the type of the servers")
    if (asked := builder["model.dtype"]) != dtype:
        raise ConfigError(
            f'model.dtype = "{asked}", and the server at {urls[0]} was started with --dtype {dtype}: make them equal'
        )
    for url, server in zip(urls, servers, strict=True):
        if key := _other_model(builder.facts.model_config, server.config):
            raise ConfigError(
                f"the server at {url} has another model, {server.model}, by {key} of its config.json: start it on "
                f"{builder.original.model.path}"
            )
    _check_ways_of_environments(builder)
    builder.derive("inference.replicas", len(servers), "one for each of inference.servers")
    builder.derive("run.placement", "separate", "servers have memory of their own")
    builder.derive("inference.sleep", False, "servers have memory of their own")
    for name, has in (
        ("fp32_head", lambda server: server.fp32_head),
        ("fp32_residual", lambda server: server.fp32_residual),
        ("shared_kernels", lambda server: server.shared_kernels),
        ("replay_experts", lambda server: server.replay_experts),
    ):
        given = all(map(has, servers))
        if builder[f"model.{name}"] is True and not given:
            raise ConfigError(f"model.{name} = true, and the server at {urls[0]} computes otherwise: leave it out")
        if not given:
            builder.derive_auto(f"model.{name}", False, "the servers do not")


def check_server_bridge(builder: PlanBuilder) -> None:
    """Raise ConfigError for a bridge that cannot reach the servers."""
    if not builder.facts.servers:
        return
    bridge, lora = builder["weights.bridge"], builder.original.lora
    if builder.facts.blind_servers:
        raise ConfigError(
            f'weights.bridge = "{bridge}" brings weights by files, and the server at {builder.facts.blind_servers[0]} '
            'does not see the run folder: put it on a disk of both (run.folder), or use "broadcast"'
        )
    least = min(server.lora_rank for server in builder.facts.servers)
    if bridge == "lora" and lora is not None and least < lora.rank:
        raise ConfigError(
            f'weights.bridge = "lora" needs engines with room for adapters of rank {lora.rank}, and servers have none: '
            'use "broadcast", with merged adapters'
        )
    if bridge == "broadcast" and lora is not None and builder.original.training.ranks > 1:
        raise ConfigError(
            f"training.ranks = {builder.original.training.ranks} under [lora] cannot publish merged weights to "
            "inference.servers: use one rank, or engines of the run"
        )


def plan_server_sizes(builder: PlanBuilder) -> None:
    """Derive `inference.max_num_seqs`."""
    wanted, reason = sequences_wanted(builder)
    most = min(server.max_num_seqs for server in builder.facts.servers)
    if wanted > most:
        reason = "as many as the servers take"
    builder.derive_auto("inference.max_num_seqs", min(wanted, most), reason)


def _check_ways_of_environments(builder: PlanBuilder) -> None:
    """Raise ConfigError for servers out of reach for environments of Atropos."""
    atropos = atropos_settings(builder.original.environment)
    if atropos is None:
        return
    if atropos.model_port:
        raise ConfigError(
            f"environment.settings.model_port = {atropos.model_port} is of engines that a run starts, and "
            "inference.servers have ports of their own: leave it out"
        )
    for server, entry in zip(builder.facts.servers, builder.original.inference.servers, strict=True):
        host = urlsplit(entry.url).hostname
        if host and not is_loopback(host) and is_loopback(urlsplit(server.inference).hostname or ""):
            raise ConfigError(
                f"the server at {entry.url} answers clients at {server.inference}, out of reach for environments of "
                f"Atropos on this host: start it with --host {host}, and with a key in {KEY_VARIABLE}"
            )


def _same(builder: PlanBuilder, value: Callable[[ServerFacts], str], option: str) -> str:
    named = zip(builder.facts.servers, builder.original.inference.servers, strict=True)
    found = {value(server): entry.url for server, entry in named}
    if len(found) > 1:
        each = " and ".join(f"{value} at {url}" for value, url in found.items())
        raise ConfigError(f"inference.servers were started with different values of {option} ({each}): use one")
    return next(iter(found))


def _other_model(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The first key with different values; empty for one model."""
    both = sorted(own.keys() & theirs.keys() - _VOLATILE)
    return next((key for key in both if own[key] != theirs[key]), "")
