"""Plans a run before it is queued: its need of GPUs, and its estimate. The service calls it as a program, because
a plan imports the user's code."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from slipstream.config import Loaded, load_config
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.plan.memory.cards import Gpus
from slipstream.plan.times import Estimate
from slipstream.processes.exits import last_error
from slipstream.processes.launchers import LOCAL
from slipstream.runlog.files import SERVICE_FOLDER, read_record
from slipstream.service.allocation import Gpu
from slipstream.service.gpus import ask_driver, read_gpus
from slipstream.service.records import NO_OPTIONS, Asked, Need
from slipstream.service.store import RUN_FILE

if TYPE_CHECKING:
    from slipstream.launch.prepare import Prepared

_ANSWER = f"{SERVICE_FOLDER}/preflight.json"
_LOG = f"{SERVICE_FOLDER}/preflight.log"
_TIMEOUT_S = 600.0
_TRIES = 8


class Preflight(msgspec.Struct, frozen=True):
    """Facts of a run before its start."""

    need: Need
    estimate: Estimate
    steps: int
    asked: Asked = NO_OPTIONS
    """Options for a cluster, with their defaults filled in."""


class _Question(msgspec.Struct, frozen=True):
    """A run to be planned; `to` other than `local`: for a cluster with these GPUs."""

    to: str = "local"
    cards: Gpus | None = None


def implied_by(to: str) -> dict[str, object]:
    """Settings of a cluster, which only it knows when the job starts; the user's win."""
    return {"cluster.address": "slurm:1", "cluster.run_id": "slurm"} if to == "slurm" else {}


def launched_by(to: str, nodes: int | None) -> dict[str, object]:
    """Settings that `--to` and `--nodes` imply, and that the run keeps; the user's win."""
    launcher: dict[str, object] = {"cluster.launcher": "ray"} if to == "ray" and nodes not in (None, 1) else {}
    return launcher | ({} if nodes is None else {"cluster.nodes": nodes})


class _Answer(msgspec.Struct, frozen=True):
    found: Preflight | None = None
    error: str = ""


def plan_ahead(loaded: Loaded) -> Preflight:
    """Plan the run for the smallest sufficient number of this machine's GPUs. Raises ConfigError for an impossible run,
    and DataError."""
    gpus = read_gpus()
    for count in range(min(1, len(gpus)), len(gpus) + 1):
        try:
            return _planned(loaded, gpus, count)
        except ConfigError:  # more GPUs may do; the last refusal is the user's
            if count == len(gpus):
                raise
    raise AssertionError


def plan_for(loaded: Loaded, cards: Gpus | None) -> Preflight:
    """Plan the run for a node of a cluster, with these GPUs or without any. Raises ConfigError and DataError. Memory of
    nodes without GPUs is unknown here, so such a plan refuses none for it."""
    from slipstream.commands.planning import plan_run
    from slipstream.plan.derive import DoesNotFit

    nodes = loaded.config.cluster.nodes
    try:
        found = _estimated(plan_run(loaded, cards))
    except DoesNotFit as error:
        if cards is not None:
            raise
        return unplanned(loaded, f"it does not fit this machine: {error}")
    need = Need(cards.count * nodes, found.need.full_bytes, found.need.full_bytes) if cards is not None else Need(0)
    return msgspec.structs.replace(found, need=need)


def unplanned(loaded: Loaded, why: str, gpus: int = 0) -> Preflight:
    """Facts of a run without a plan."""
    steps = loaded.config.training.steps or 0
    return Preflight(Need(gpus), Estimate("", steps, 0.0, gpus, how=f"unknown: {why}"), steps)


def _planned(loaded: Loaded, gpus: Sequence[Gpu], count: int) -> Preflight:
    from slipstream.commands.planning import plan_run
    from slipstream.plan.derive import make_plan
    from slipstream.plan.memory.cards import with_gpus

    cards = None
    if count:
        name, capability = ask_driver()
        cards = Gpus(count, min(gpu.total for gpu in gpus), capability, name)
    prepared = plan_run(loaded, cards)
    found, facts = _estimated(prepared), prepared.facts
    if cards is None:
        return found
    full = found.need.full_bytes
    asked = prepared.loaded.config.model_copy(update={"model": prepared.config.model})
    low, high = 0, min(full, cards.memory_bytes)
    with contextlib.suppress(ConfigError):  # the plan of a fuller card may differ in other ways: keep the full need
        make_plan(asked, with_gpus(facts, replace(cards, memory_bytes=high)))
        for _ in range(_TRIES):
            middle = (low + high) // 2
            try:
                make_plan(asked, with_gpus(facts, replace(cards, memory_bytes=middle)))
                high = middle
            except ConfigError:
                low = middle
    return msgspec.structs.replace(found, need=Need(count, full, high))


def _estimated(prepared: Prepared) -> Preflight:
    from slipstream.plan.summary import needed_bytes
    from slipstream.plan.times import estimate_run

    config, facts = prepared.config, prepared.facts
    full, _ = needed_bytes(config, facts)
    lengths = prepared.examples.lengths
    mean = sum(lengths) / len(lengths) if lengths else float(config.inference.max_model_len)
    need = Need(0, full if facts.num_gpus else 0)
    return Preflight(need, estimate_run(config, facts, full, mean), config.training.steps)


def ask(folder: Path, to: str = "local", cards: Gpus | None = None) -> Preflight:
    """Plan the run in `folder` in another process: for this machine, or for a cluster with these GPUs. Raises
    ConfigError."""
    question = msgspec.json.encode(_Question(to, cards)).decode()
    child = LOCAL.launch("slipstream.service.preflight", [str(folder), question], output=folder / _LOG)
    try:
        code = child.wait(_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"the plan was not made within {_TIMEOUT_S:g} s: look at slipstream plan") from None
    finally:
        child.end(0.0)
    answer = read_record(folder / _ANSWER, _Answer)
    if answer is None:
        raise ConfigError(f"the plan failed ({last_error(folder / _LOG) or f'exit code {code}'}): see slipstream plan")
    if answer.found is None:
        raise ConfigError(answer.error)
    return answer.found


def main() -> None:
    """Answer for the run folder of the argument, in a file."""
    from slipstream.processes import lifeline

    lifeline.Parent()
    folder, question = Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=_Question)
    try:
        loaded = load_config(folder / RUN_FILE, implied=implied_by(question.to))
        answer = _Answer(plan_ahead(loaded) if question.to == "local" else plan_for(loaded, question.cards))
    except SlipstreamError as error:
        answer = _Answer(error=str(error))
    (folder / _ANSWER).write_bytes(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()
