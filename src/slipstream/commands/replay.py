"""Trains again on a batch kept by a run, and compares loss and metrics with the run's records.

A replay begins with the newest checkpoint at or before the batch, or with the start model, and trains on every kept
batch from there on by the run's own code (`BatchTrainer`), in this process alone: no engine, no reward, no environment.
Guarantees: the run folder is only read; with the same versions on the same machine's CPU the loss is the recorded one
bit for bit. Random numbers do not get in the way: there is no dropout, step batches are cut in the order of the batch,
and the noise of `adamw_bf16` follows from seed and step. A user's loss may draw from torch's generator; it
is restored with the checkpoint and seeded for the start model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config import PlannedConfig, RunConfig, SFTConfig, load_config, with_values
from slipstream.config.checks import inapplicable, reason_against
from slipstream.errors import ConfigError, DataError, OutOfMemory, TrainingError
from slipstream.launch.build import build, build_objective
from slipstream.launch.prepare import sampling_of
from slipstream.launch.ranks.processes import rank_threads
from slipstream.launch.recovery.out_of_memory import who_ran_out
from slipstream.launch.startup.compile_caches import persistent_caches
from slipstream.plan.decided import planned_config, undecided
from slipstream.plan.machine import gpu_capability
from slipstream.plan.preflight.model_folder import find_model
from slipstream.plan.preflight.torch_builds import check_torch_builds
from slipstream.plan.vllm_version import read_engine
from slipstream.runlog import holds_run, read_events, read_metrics
from slipstream.runlog.batches import kept_steps, made_by, read_batch
from slipstream.shared_kernels import CAPABILITY

if TYPE_CHECKING:
    from slipstream.launch.build import Trained
    from slipstream.trainer.batch_trainer import BatchTrainer

TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-2}
"""By `model.dtype`: largest distance of a loss from the recorded one, as a part of it or of 1, whichever is larger, if
the two were rounded otherwise: on a GPU, another machine or other versions. On a CPU, with rows cut otherwise and
another number of threads, losses were seen to differ by 2e-7 and 8e-4 at most, up to six batches after the start."""
JUDGED = ("train/loss", "value/loss", "train/skipped")
"""Metrics required to equal the recorded ones; all others are for reading."""
_OF_A_PROCESS = "memory/"
START = "the start model"


@dataclass(frozen=True)
class Metric:
    """One metric of the replayed step; None if there is none, or it is not finite."""

    name: str
    recorded: float | None
    replayed: float | None

    @property
    def difference(self) -> float | None:
        """Replayed less recorded."""
        return None if self.recorded is None or self.replayed is None else self.replayed - self.recorded


@dataclass(frozen=True)
class Replay:
    """The result of a replay."""

    step: int
    """The batch's: its update made version `step + 1`, the step of its row of metrics."""
    begins: str
    """Its first checkpoint, or `START`."""
    batches: tuple[int, ...]
    """The steps of all batches trained on."""
    is_recorded: bool
    """Whether the run has a row of metrics of this step."""
    metrics: tuple[Metric, ...]
    """The judged ones first."""
    tolerance: float
    """0 if the loss must be the same bit for bit."""
    made_by: str
    """The facts behind the rounding: of the run, and of this process."""
    replayed_by: str
    changed: tuple[str, ...] = ()
    """Settings changed by a later resume: the replay had other ones than the step."""
    no_signal: str = ""
    """Why the batch teaches nothing."""

    @property
    def wrong(self) -> tuple[Metric, ...]:
        """The judged metrics with a difference above the tolerance."""
        return tuple(metric for metric in self.metrics if metric.name in JUDGED and not self._is_equal(metric))

    @property
    def is_exact(self) -> bool:
        """Whether the judged metrics are the same bit for bit."""
        return all(each.recorded == each.replayed for each in self.metrics if each.name in JUDGED)

    def _is_equal(self, metric: Metric) -> bool:
        if metric.recorded is None or metric.replayed is None:
            return metric.recorded == metric.replayed
        return abs(metric.replayed - metric.recorded) <= self.tolerance * max(1.0, abs(metric.recorded))


def replay(run: Path, step: int) -> Replay:
    """Train again on the kept batch of `step` of the run in folder `run`. Raises training's errors, and a
    `SlipstreamError` if a replay is impossible."""
    config = _settings(run)
    checkpoint, batches = _way_to(run, step, config)
    rows = {int(row["step"]): row for row in read_metrics(run)}
    makers = [read_batch(run, each)[1] for each in batches]  # before minutes of loading
    check_torch_builds()
    try:
        with persistent_caches(lambda text: None):
            config = config.model_copy(update={"model": find_model(config.model, weights=True)})
            metrics, no_signal, device = _train(run, config, checkpoint, batches)
    except Exception as error:
        if who_ran_out(error, oom_killed=False) is None:
            raise
        raise OutOfMemory(
            f"the replay ran out of memory ({' '.join(str(error).split())[:200]}): end what else uses the device, or "
            "wait until the run has ended"
        ) from error
    row, ours = rows.get(step + 1), made_by(device)
    is_same = set(makers) == {ours} and device == "cpu"
    return Replay(
        step=step,
        begins=START if checkpoint is None else checkpoint.name,
        batches=batches,
        is_recorded=row is not None,
        metrics=tuple(_compared(row or {}, metrics)),
        tolerance=0.0 if is_same else TOLERANCE[config.model.dtype],
        made_by=makers[-1],
        replayed_by=ours,
        changed=_changed_since(run, row),
        no_signal=no_signal,
    )


def raise_unless_equal(found: Replay) -> None:
    """Raise `DataError` if the run recorded nothing to compare with, and `TrainingError` if its loss differs
    from the replay's."""
    if not found.is_recorded:
        raise DataError(
            f"the run recorded no metrics of step {found.step + 1}, which batch {found.step} leads to, so there is "
            "nothing to compare with: it ended in that step, or was resumed before it"
        )
    if not found.wrong:
        return
    what = ", ".join(f"{each.name} was {each.recorded!r} and is {each.replayed!r}" for each in found.wrong)
    bound = f"by more than {found.tolerance:g}" if found.tolerance else "on the same machine"
    if found.changed:
        reason = f"the run was resumed with other settings since: {'; '.join(found.changed)}"
    elif found.made_by != found.replayed_by:
        reason = f"the run was made by {found.made_by}, and the replay by {found.replayed_by}: replay it there"
    else:
        reason = (
            "look for what has changed since, in the code, the user's own loss or advantage, or the weights at "
            "model.path"
        )
    raise TrainingError(f"batch {found.step} does not give the loss that was recorded ({what}), {bound}: {reason}")


def _settings(run: Path) -> PlannedConfig:
    """The planned settings of the run. Raises ConfigError if it cannot be replayed."""
    if not holds_run(run):
        raise ConfigError(f"{run} holds no run: name a folder that `slipstream train` wrote")
    file = run / "resolved.toml"
    if not file.is_file():
        raise ConfigError(f"{run} has no resolved.toml, as the run ended before it was planned: name another run")
    if not file.stat().st_size:
        raise ConfigError(f"{file} is empty: copy it from the run again, or name another run")
    loaded = load_config(file).config
    if isinstance(loaded.algorithm, SFTConfig):
        raise ConfigError(
            f"{run} is a run of SFT, which keeps no batches; a replay would need the rows of its data set in the order "
            "of the seed: continue a copy of the folder with --resume, which trains on the same batches again"
        )
    if loaded.training.ranks > 1:
        raise ConfigError(
            f"{run} was trained over training.ranks = {loaded.training.ranks}, and a replay is one process: repeat the "
            "run with --training.ranks 1, or continue a copy of the folder with --resume"
        )
    if loaded.model.shared_kernels is not False and not _shares_kernels(loaded):
        loaded = with_values(loaded, {"model.shared_kernels": False})
    reasons = inapplicable(loaded)
    if left := [path for path in undecided(loaded) if not reason_against(path, reasons)]:
        raise ConfigError(f"{file} does not say what {left[0]} was planned to be: copy the file from the run again")
    return planned_config(loaded)


def _shares_kernels(config: RunConfig) -> bool:
    """Whether the run did (folders older than the setting do not say) and this machine can."""
    engine = read_engine(on_cpu=False)
    has_kernels = gpu_capability() == CAPABILITY and engine is not None and engine.has_flash3
    return config.model.shared_kernels is True and has_kernels


def _way_to(run: Path, step: int, config: PlannedConfig) -> tuple[Path | None, tuple[int, ...]]:
    """The first checkpoint of a replay of `step`, None for the start model, and the batches from there on.
    Raises DataError when one of them is not kept."""
    from slipstream.trainer.checkpoints.checkpoint import CheckpointStore

    kept, number = kept_steps(run), config.run.keep_batches
    if step not in kept:
        there = f"it has {_listed(kept)}" if kept else "it has none"
        remedy = "replay one of these" if kept else "let it make a step"
        if not number:
            remedy = "run with --run.keep_batches 3"
        raise DataError(
            f"{run} has not kept batch {step}, the update from version {step} to {step + 1} ({there}; run.keep_batches "
            f"= {number}): {remedy}"
        )
    checkpoint = CheckpointStore(run / "checkpoints").latest(until=step)
    first = 0 if checkpoint is None else int(CheckpointStore.read_loop_state(checkpoint)["step"])
    missing = [each for each in range(first, step) if each not in kept]
    if missing:
        begins = START if checkpoint is None else checkpoint.name
        raise DataError(
            f"a replay of batch {step} begins with {begins}, the nearest before it that can be resumed from, and "
            f"{'batch' if len(missing) == 1 else 'batches'} {_listed(missing)} between them "
            f"{'is' if len(missing) == 1 else 'are'} not kept: run with more checkpoints (run.checkpoint_every, "
            f"run.keep_checkpoints) or with run.keep_batches = {step - first + 1}"
        )
    return checkpoint, tuple(range(first, step + 1))


def _listed(steps: list[int]) -> str:
    shown = [str(each) for each in steps]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:4], "...", *shown[-3:]])


def _train(
    run: Path, config: PlannedConfig, checkpoint: Path | None, batches: Iterable[int]
) -> tuple[dict[str, float], str, str]:
    """Train on the batches; the metrics of the last, why it teaches nothing, and the kind of device."""
    import torch

    from slipstream.trainer.batch_trainer import BatchTrainer
    from slipstream.trainer.checkpoints.checkpoint import CheckpointStore

    # As `launch.run` has it: the start of a new adapter follows from the seed.
    torch.set_num_threads(rank_threads(config))
    torch.manual_seed(config.run.seed)
    sampling = sampling_of(config)
    trained = build(config, (), 0)
    if checkpoint is not None:
        extra = CheckpointStore(checkpoint.parent).load(checkpoint, trained.learner, trained.critic)
        _check_frozen(extra["identity"], trained)
    trainer = BatchTrainer(
        config,
        trained.learner,
        build_objective(config, sampling),
        sampling,
        trained.reference,
        trained.critic,
        on_optimizer_steps=lambda count: None,
        before_write=lambda: None,
    )
    metrics: dict[str, float] = {}
    no_signal = ""
    for step in batches:
        metrics, no_signal = _one_step(trainer, run, step)
    return metrics, no_signal, trained.learner.model.device.type


def _one_step(trainer: BatchTrainer, run: Path, step: int) -> tuple[dict[str, float], str]:
    batch = read_batch(run, step)[0]
    result = trainer.train(batch)
    if result.no_signal is None:
        return result.metrics, ""
    from slipstream.trainer.metrics import skipped_batch

    return result.metrics | skipped_batch(batch, result.metrics) | {"train/skipped": 1.0}, result.no_signal.reason


def _check_frozen(identity: Mapping[str, str], trained: Trained) -> None:
    """Refuse another base of the adapter, or reference model, than the checkpoint was made with."""
    from slipstream.weights.model_files import weights_digest

    name, folder = "weights at model.path", trained.learner.model.folder
    if name in identity and identity[name] != weights_digest(folder):
        raise ConfigError(f"the run was made with other weights than there are now in {folder}: put those there again")


def _compared(row: Mapping[str, Any], metrics: Mapping[str, float]) -> Iterable[Metric]:
    """All metrics of training, judged ones first; None for a recorded number that was not finite."""
    names = [name for name in JUDGED if row.get(name) or name in metrics]  # rows later than a skipped one have a 0
    names += [name for name in metrics if name not in JUDGED and not name.startswith(_OF_A_PROCESS)]
    for name in names:
        value = metrics.get(name)
        yield Metric(name, row.get(name), value if value is not None and math.isfinite(value) else None)


def _changed_since(run: Path, row: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The settings changed by resumes after this row."""
    if row is None:
        return ()
    starts = [event for event in read_events(run, kinds=("start",)) if event["lineage"] > row["lineage"]]
    return tuple(dict.fromkeys(text for event in starts for text in event.get("changed", ())))
