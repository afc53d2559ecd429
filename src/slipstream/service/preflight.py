"""Plans a run before it is queued: its need of GPUs, and its estimate. The service calls it as a program, because
a plan imports the user's code."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

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
from slipstream.service.records import Need
from slipstream.service.store import RUN_FILE

_ANSWER = f"{SERVICE_FOLDER}/preflight.json"
_LOG = f"{SERVICE_FOLDER}/preflight.log"
_TIMEOUT_S = 600.0
_TRIES = 8


class Preflight(msgspec.Struct, frozen=True):
    """Facts of a run before its start."""

    need: Need
    estimate: Estimate
    steps: int


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


def _planned(loaded: Loaded, gpus: Sequence[Gpu], count: int) -> Preflight:
    from slipstream.commands.planning import plan_run
    from slipstream.plan.derive import make_plan
    from slipstream.plan.memory.cards import with_gpus
    from slipstream.plan.summary import needed_bytes
    from slipstream.plan.times import estimate_run

    cards = None
    if count:
        name, capability = ask_driver()
        cards = Gpus(count, min(gpu.total for gpu in gpus), capability, name)
    prepared = plan_run(loaded, cards)
    config, facts = prepared.config, prepared.facts
    full, _ = needed_bytes(config, facts)
    lengths = prepared.examples.lengths
    mean = sum(lengths) / len(lengths) if lengths else float(config.inference.max_model_len)
    estimate = estimate_run(config, facts, full, mean)
    if cards is None:
        return Preflight(Need(0), estimate, config.training.steps)
    asked = prepared.loaded.config.model_copy(update={"model": config.model})
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
    return Preflight(Need(count, full, high), estimate, config.training.steps)


def ask(folder: Path) -> Preflight:
    """Plan the run in `folder` in another process. Raises ConfigError."""
    child = LOCAL.launch("slipstream.service.preflight", [str(folder)], output=folder / _LOG)
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
    folder = Path(sys.argv[1])
    try:
        answer = _Answer(plan_ahead(load_config(folder / RUN_FILE)))
    except SlipstreamError as error:
        answer = _Answer(error=str(error))
    (folder / _ANSWER).write_bytes(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()
