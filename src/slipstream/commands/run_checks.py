"""Checks of one run for `slipstream doctor`: all that `slipstream plan` reads and computes, its ports, its rewards."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from slipstream.commands.environment_check import check_rewards
from slipstream.commands.planning import plan_run
from slipstream.config import RunConfig, load_config
from slipstream.doctor.findings import Finding
from slipstream.errors import SlipstreamError
from slipstream.plan.derive import DoesNotFit
from slipstream.sinks.prometheus import HOST

_REWARDED_TASKS = 16
"""Training tasks, of each part of a mixture."""


def check_run(run_file: Path, overrides: Sequence[str] = ()) -> Iterator[Finding]:
    """The run file, model, template, data, options, ports and rewards fit together and fit the machine."""
    name = f"run {run_file.name}"
    try:
        loaded = load_config(run_file, overrides)
    except SlipstreamError as error:
        yield from _refused(name, error)
        return
    yield from _ports(loaded.config)
    try:
        prepared = plan_run(loaded)
    except DoesNotFit as error:
        yield from _refused(name, error)
    except SlipstreamError as error:
        yield from _refused(name, error)
        return
    else:
        yield from (Finding(name, "warning", sentence) for sentence in prepared.plan.warnings)
        if not prepared.plan.warnings:
            yield Finding(name, "ok", "model, template, data and options fit together, and the plan fits this machine")
    if loaded.config.environment is not None:
        yield from _rewards(loaded.config)


def _refused(name: str, error: SlipstreamError) -> Iterator[Finding]:
    yield from (Finding(name, "fault", sentence) for sentence in str(error).splitlines())


def _rewards(config: RunConfig) -> Iterator[Finding]:
    """Rewards of gold answers and of junk, by real workers."""
    try:
        checked = check_rewards(config, _REWARDED_TASKS)
    except SlipstreamError as error:
        yield Finding("rewards", "fault", str(error), "slipstream env test shows all of it")
        return
    result = checked.result
    for text in checked.failures:
        yield Finding("rewards", "fault", text, "correct the reward: slipstream env test shows all kinds of answers")
    if not checked.failures:
        number = sum(each.num_scored for each in result.results)
        said = "tell gold answers from junk" if result.num_gold else "take no empty answer for right"
        reason = f"the rewards of {result.environment} {said} ({number} answers, {checked.rewards_per_s:.3g} a second)"
        yield Finding("rewards", "ok", reason if number else result.without_gold)


def _ports(config: RunConfig) -> Iterator[Finding]:
    """Ports of the run are free."""
    ports = {"run.metrics_port": (HOST, config.run.metrics_port or 0)}
    if config.cluster.nodes > 1 and config.cluster.address:
        ports["cluster.address"] = config.cluster.host_and_port
    for setting, (host, port) in ports.items():
        try:
            socket.create_server((host, port)).close()
        except OSError as error:
            reason = f"{setting}: nothing can listen at {host}:{port} ({error.strerror or error})"
            remedy = f"end the other program (ss -ltnp 'sport = :{port}'), or name another port or address of this host"
            yield Finding("ports", "fault", reason, remedy)
