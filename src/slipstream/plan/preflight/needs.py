"""Checks a run's needs besides model and data: packages, a server, the engine's plugin, the user's functions."""

from __future__ import annotations

import importlib.util

from slipstream.config import RunConfig, SFTConfig
from slipstream.config.recipes import resolved
from slipstream.config.traits import BY_BITSANDBYTES, uses_engine
from slipstream.data.chat_template import ChatTokenizer
from slipstream.errors import ConfigError
from slipstream.inference.preimport import check_plugin
from slipstream.sinks import require_sinks
from slipstream.transport import check_redis


def check_needs(config: RunConfig) -> None:
    """Raise `ConfigError` for the first missing one."""
    require_sinks(config.run.sinks)
    if config.run.streams == "redis" and config.redis is not None:
        check_redis(config.redis.url, config.redis.password_variable)
    _check_launcher(config)
    _check_optimizer(config)
    if uses_engine(config):
        check_plugin()


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    # A plain folder of this name in the current one is found too: it has no origin.
    return spec is not None and spec.origin is not None


def _check_launcher(config: RunConfig) -> None:
    cluster = config.cluster
    if cluster.nodes > 1 and cluster.launcher == "ray" and not _is_installed("ray"):
        raise ConfigError(
            "cluster.launcher = \"ray\" needs Ray, which is not installed: pip install 'slipstream[ray]', or use "
            '"manual" and start agents by slipstream node'
        )


def _check_optimizer(config: RunConfig) -> None:
    name = config.training.optimizer
    if name in BY_BITSANDBYTES and not _is_installed("bitsandbytes"):
        raise ConfigError(
            f'training.optimizer = "{name}" needs bitsandbytes, which is not installed: '
            "pip install 'slipstream[8bit]', or use another optimizer"
        )


def check_functions(config: RunConfig, tokenizer: ChatTokenizer) -> None:
    """Try the user's own functions and hooks of the algorithm, if any."""
    if not isinstance(config.algorithm, SFTConfig):
        from slipstream.algo.trial import check_algorithm

        check_algorithm(resolved(config.algorithm), tokenizer)
