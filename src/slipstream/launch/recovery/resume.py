"""Checks before a run is resumed: steps left, changed settings, and the same tasks and frozen weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from slipstream.config import Loaded, PlannedConfig, RunConfig, with_values
from slipstream.config.schema import ArgumentsConfig
from slipstream.config.traits import uses_critic
from slipstream.errors import ConfigError, DataError
from slipstream.records import Message, Task
from slipstream.runlog import RunLog, read_events, read_exit, read_settings
from slipstream.runlog.evaluations import content_of
from slipstream.runlog.ledger import end_whole
from slipstream.trainer.checkpoints.manifest import critic_of

if TYPE_CHECKING:
    from slipstream.trainer.evaluations import EarlyStop


def refuse_to_resume(folder: Path, config: PlannedConfig) -> int:
    """Return the step after which the run in `folder` continues. Raises `ConfigError`, before anything is changed, for
    a run that cannot continue or has nothing left to do."""
    found = _last(folder, config)
    if found is not None and (watch := found.watch).reason and found.is_evaluated:
        text = f"run {folder} has ended at step {found.step}, as {watch.reason}: change that setting to go on"
        raise ConfigError(text)
    if found is not None and found.has_all:
        raise ConfigError(f"run {folder} has already made its {found.step} steps: raise training.steps to go on")
    if found is not None:
        _refuse_other_adapter(found.checkpoint, config)
        if uses_critic(config):
            critic_of(found.checkpoint)
    return found.step if found is not None else 0


def _refuse_other_adapter(checkpoint: Path, config: PlannedConfig) -> None:
    """Raise `ConfigError` where the checkpoint has an adapter of another form than [lora] makes."""
    from slipstream.weights.adapter_folder import is_adapter_folder, read_adapter_config

    lora, weights = config.lora, checkpoint / "weights"
    if not is_adapter_folder(weights):
        return
    try:
        found = read_adapter_config(weights)
    except ConfigError:  # the checkpoint is damaged, and one before it may be used
        return
    if lora is None:
        raise ConfigError(
            f"checkpoint {checkpoint} is an adapter, and there is no [lora]: set lora.rank = {found.rank}, or start a "
            "new run"
        )
    for name, wanted, there in (("rank", lora.rank, found.rank), ("dora", lora.dora, found.dora)):
        if wanted != there:
            wanted, there = str(wanted).lower(), str(there).lower()
            raise ConfigError(
                f"lora.{name} = {wanted}, and the adapter of checkpoint {checkpoint} has {there}: set lora.{name} = "
                f"{there}, or start a new run"
            )


def end_unsaid(folder: Path, config: PlannedConfig, *, with_time_limit: bool) -> bool:
    """Write `exit.json` of a run that was killed after its last checkpoint, which has everything `config` asks for.
    Returns whether the run in `folder` is such a run. `with_time_limit`: a passed `training.max_seconds` is an end,
    too. Raises `ConfigError` if another process uses the folder."""
    from slipstream.trainer.checkpoints.checkpoint import CheckpointStore

    said = read_exit(folder)
    found = _last(folder, config) if said is None or said.status != "finished" else None
    if found is None or not found.is_evaluated:
        return False
    is_late = with_time_limit and found.is_late
    if not found.has_all and not found.watch.reason and not is_late:
        return False
    with RunLog.create(folder, resume=True, is_over=True) as log:
        if found.watch.keeps_best and found.watch.best_step is not None:
            store = CheckpointStore(folder / "checkpoints")
            if store.holds(found.watch.best_step):
                store.link_best(found.watch.best_step)
        try:
            end_whole(folder, found.step)
        except DataError as error:
            log.warning(str(error))
        log.exit(step=found.step)
    return True


@dataclass(frozen=True)
class _Last:
    """A run as its newest checkpoint that can be resumed from has it."""

    checkpoint: Path
    step: int
    has_all: bool
    """Whether no step and no evaluation is left to be made."""
    is_evaluated: bool
    """Whether an evaluation that is due at the run's end is made."""
    is_late: bool
    """Whether the present time limit ended the run at this step."""
    watch: EarlyStop


def _last(folder: Path, config: PlannedConfig) -> _Last | None:
    """None where the run begins again, as it has no checkpoint. Raises ConfigError where none can be resumed from."""
    from slipstream.trainer.checkpoints.checkpoint import CheckpointStore
    from slipstream.trainer.evaluations import EarlyStop

    store = CheckpointStore(folder / "checkpoints")
    latest = store.latest()
    if latest is None:
        if problem := store.why_none():
            raise ConfigError(
                f"none of the checkpoints of run {folder} can be resumed from ({problem}): start a new run from the "
                "weights of a whole one, or remove them to begin this one again"
            )
        return None
    CheckpointStore.check_format(latest)
    extra = CheckpointStore.read_loop_state(latest)
    step, watch = int(extra["step"]), EarlyStop(config.evaluation)
    watch.load(extra["early_stop"])
    # A run that was stopped in its last evaluation still has to make it.
    is_evaluated = config.evaluation is None or int(extra["evaluated_step"]) >= step
    limits = [event["max_seconds"] for event in read_events(folder, kinds=("time_limit",)) if event["step"] == step]
    is_late = config.training.max_seconds in limits
    return _Last(latest, step, step >= config.training.steps and is_evaluated, is_evaluated, is_late, watch)


_LIMITS = ("training.max_seconds", "evaluation.stop_at", "evaluation.patience")
"""Settings that end a run before its last step."""


def is_complete(folder: Path, config: RunConfig | PlannedConfig) -> bool:
    """Whether the run in `folder` has finished and `config` asks for no more: as many steps, or, where it ended before
    its last one, as many as it was asked for then under the same limits. False while steps are not derived yet."""
    report, steps = read_exit(folder), config.training.steps
    if report is None or report.status != "finished" or steps is None:
        return False
    before, after = read_settings(folder), config.model_dump()
    limits = {name: (after[section] or {}).get(key) for name in _LIMITS for section, key in [name.split(".")]}
    same_limits = all(before.get(name) == value for name, value in limits.items())
    return report.step >= steps or (steps <= before.get("training.steps", 0) and same_limits)


def same_commit(loaded: Loaded) -> Loaded:
    """Set `model.revision` to the hub commit that the run in `run.folder` began with, where the run file names none."""
    config = loaded.config
    settings = read_settings(config.run.folder) if config.run.folder is not None and config.run.folder.is_dir() else {}
    recorded = settings.get("model.revision")
    if config.model.revision is not None or recorded is None or settings.get("model.path") != config.model.path:
        return loaded
    return replace(loaded, config=with_values(config, {"model.revision": recorded}))


_OF_A_START = ("run.folder", "run.allow_changes", "cluster.address", "cluster.run_id")


def changed_settings(before: dict[str, Any], after: dict[str, Any], missing: str = "not set") -> list[str]:
    """List the settings in which two resolved configs differ, with both values."""
    # Runs of before [algorithm.arguments] have its keys in [algorithm].
    moved = {f"algorithm.{name}": f"algorithm.arguments.{name}" for name in ArgumentsConfig.model_fields}
    before = {moved.get(name, name): value for name, value in before.items()}
    if isinstance(is_apart := before.pop("environment.apart", None), bool):
        before["environment.processes"] = int(is_apart)
    names = [name for name in {**before, **after} if name not in _OF_A_START and before.get(name) != after.get(name)]
    return [f"{name} was {before.get(name, missing)} and is {after.get(name, missing)}" for name in names]


def identity_of(
    config: RunConfig, tasks: Sequence[Task], conversations: Sequence[Sequence[Message]], folder: Path
) -> dict[str, str]:
    """Return digests of the training set and, where the weights in `folder` stay in use (as base of an adapter or as
    reference of a KL term), of these."""
    from slipstream.plan.memory.trainer import needs_reference
    from slipstream.weights.model_files import weights_digest

    found = {"training items": tasks_digest(tasks) if not conversations else _digest([*map(content_of, conversations)])}
    if config.environment is not None and config.environment.mixture:
        found["weights of environment.mixture"] = _digest(
            [config.environment.curriculum, *([n, part.weight] for n, part in config.environment.mixture.items())]
        )
    if config.lora is not None or needs_reference(config):
        found["weights at model.path"] = weights_digest(folder)
    return found


def tasks_digest(tasks: Sequence[Task]) -> str:
    """Digest of these tasks in their order."""
    return _digest([[task.id, content_of(task.prompt), task.answer] for task in tasks])


def _digest(items: list[Any]) -> str:
    return hashlib.sha256(msgspec.json.encode(items)).hexdigest()
