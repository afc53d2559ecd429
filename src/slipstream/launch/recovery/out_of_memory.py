"""Reports a run that ran out of memory, with the plan's numbers and what `--resume` will plan instead.

Guarantees: whichever process ran out of memory (trainer, rank, engine, or one that the kernel's OOM killer ended), the
run ends with `OutOfMemory` and its folder has an event `out_of_memory`, from which `--resume` plans smaller
(`shortages.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import re
from collections.abc import Generator
from operator import attrgetter
from typing import Any, Literal

from slipstream.config import RunConfig, SFTConfig, with_values
from slipstream.errors import ConfigError, EngineError, OrchestratorError, OutOfMemory, RankError, SlipstreamError
from slipstream.launch.prepare import Prepared
from slipstream.plan.derive import make_plan
from slipstream.plan.facts import Shortage
from slipstream.plan.machine import count_oom_kills
from slipstream.plan.memory.shortages import run_name, shortage_of
from slipstream.plan.memory.sizes import gib
from slipstream.runlog import RunLog

Who = Literal["trainer", "engine", "teacher"]
_SIGNS = re.compile(
    r"out of memory|OutOfMemoryError|\bMemoryError\b|bad_alloc|ALLOC_FAILED|can(?:'t|not) allocate memory"
    r"|No available memory for the cache blocks|larger than the available KV cache|Free memory on device",
    re.IGNORECASE,
)
"""Error texts of torch, CUDA, the C library and vLLM."""
_REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+ [KMGT]?i?B|\d+ bytes)")
_LOWERED = (
    *("training.micro_batch_tokens", "training.gradient_checkpointing"),
    *("inference.max_num_seqs", "inference.kv_cache_gib"),
)


@contextlib.contextmanager
def reports_out_of_memory(prepared: Prepared, log: RunLog) -> Generator[None]:
    """Turn an error that means out of memory into an event and an `OutOfMemory`."""
    kills = count_oom_kills()
    try:
        yield
    except Exception as error:
        who = who_ran_out(error, oom_killed=count_oom_kills() > kills)
        if not who:
            raise
        failed = shortage_of(prepared.config, run_name(log.folder, log.lineage), "engine" if who != "trainer" else who)
        log.event("out_of_memory", who=who, cause=str(error), **dataclasses.asdict(failed))
        raise OutOfMemory(_sentence(prepared, failed, who, error)) from error


def who_ran_out(error: BaseException, *, oom_killed: bool) -> Who | None:
    """Which side ran out of memory, None where `error` has another cause. `oom_killed`: the kernel's OOM killer has
    ended a process of this machine meanwhile."""
    text = str(error)
    if isinstance(error, EngineError):
        died = oom_killed and ("ended with code" in text or "SIGKILL" in text)
        return ("teacher" if "/logs/teacher/" in text else "engine") if died or _SIGNS.search(text) else None
    if isinstance(error, OrchestratorError):  # what it can be given less for is its engine
        return "engine" if _SIGNS.search(text) or (oom_killed and "ended with code" in text) else None
    if isinstance(error, RankError):
        return "trainer" if _SIGNS.search(text) or (oom_killed and "was killed" in text) else None
    if isinstance(error, SlipstreamError):
        return None
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "trainer"
    return "trainer" if isinstance(error, RuntimeError) and _SIGNS.search(f"{type(error).__name__} {text}") else None


def _sentence(prepared: Prepared, failed: Shortage, who: Who, error: BaseException) -> str:
    config, facts = prepared.config, prepared.facts
    notes = {note.name: f"{note.value:.2f} GiB ({note.how})" for note in prepared.plan.notes if note.unit == "GiB"}
    planned = [f"{notes[f'memory of the {side}']} for the {side}" for side in ("trainer", "engine", "teacher")
               if f"memory of the {side}" in notes]  # fmt: skip
    device = f"the GPU's {gib(facts.gpu_memory_bytes)}" if facts.num_gpus else f"{gib(facts.memory_bytes)} of memory"
    asked = _REQUESTED.search(str(error))
    reason = f"it asked for {asked[1]}" if asked else " ".join(str(error).split()).rstrip(".") or type(error).__name__
    reason = reason if len(reason) <= 400 else f"{reason[:397]}..."
    changes = [] if who == "teacher" else _changes(prepared, failed)
    if changes:
        remedy = f"continue with --resume, which plans {' and '.join(changes)}"
    else:
        remedy = f"{_by_hand(config, failed, who)}, and continue with --resume"
    return f"the {who} ran out of memory ({reason}); planned of {device}: {', '.join(planned)}; {remedy}"


def _changes(prepared: Prepared, failed: Shortage) -> list[str]:
    """The settings that the plan of a resume lowers by itself."""
    config = prepared.config
    asked = prepared.loaded.config.model_copy(update={"model": config.model})
    asked = with_values(asked, {"training.compile": config.training.compile})
    facts = dataclasses.replace(prepared.facts, shortages=(*prepared.facts.shortages, failed))
    try:
        smaller = make_plan(asked, facts).config
    except ConfigError:
        return []
    pairs = [(name, *(attrgetter(name)(each) for each in (config, smaller))) for name in _LOWERED]
    return [f"{name} = {_toml(after)} instead of {_toml(now)}" for name, now, after in pairs if now != after]


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else f"{value:g}"


def _by_hand(config: RunConfig, failed: Shortage, who: Who) -> str:
    """The settings that the user can change."""
    if who == "teacher":
        return "give the teacher a GPU of its own, or use a smaller one"
    if who == "engine":
        return (
            f"lower inference.max_num_seqs = {failed.max_num_seqs}, sampling.max_tokens or inference.kv_cache_gib, or "
            "end what else uses the device"
        )
    found = [f"lower training.micro_batch_tokens = {failed.row_tokens}"]
    found += ["set training.gradient_checkpointing = true"] if failed.checkpointing is not True else []
    found += (
        ["lower sampling.max_tokens"] if not isinstance(config.algorithm, SFTConfig) else ["use shorter conversations"]
    )
    found += ["set [lora]"] if config.lora is None else []
    return ", ".join([*found[:-1], f"or {found[-1]}"])
