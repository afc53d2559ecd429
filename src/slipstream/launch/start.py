"""From checked settings to a finished run: what `slipstream train` and the Python API have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slipstream.config import Loaded
from slipstream.errors import ConfigError, Interrupted
from slipstream.launch.recovery.resume import end_unsaid, is_complete, same_commit
from slipstream.launch.startup import preimport_vllm
from slipstream.launch.startup.compile_caches import persistent_caches
from slipstream.launch.startup.stages import Stages
from slipstream.runlog import holds_run, read_exit, read_metrics, refuse_used
from slipstream.runlog.files import refuse_in_use

if TYPE_CHECKING:
    from slipstream.launch.parts.supervised import SupervisorWatch
    from slipstream.launch.run import Restarts, RunResult
    from slipstream.progress import Progress


ResumeMode = bool | Literal["auto"]
"""Whether to continue a run; `auto`: where there is one. One that is complete is left as it is."""


def new_run_folder(name: str) -> Path:
    """A new folder below `runs/`, named after the run file and the time."""
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def run_training(
    loaded: Loaded,
    name: str,
    *,
    resume: ResumeMode,
    make_progress: Callable[[], Progress],
    last_words: Callable[[Interrupted], None] = lambda error: None,
    supervisor: SupervisorWatch | None = None,
    restarts: Restarts = "here",
    owns_process: bool = False,
) -> tuple[RunResult, dict[str, Any]]:
    """Read, plan and train, in `run.folder` or a new folder named after `name`; the result, and its summary.

    Raises what ends the run early, and `StartsAgain` where it goes on in another process. `last_words`, `supervisor`,
    `restarts`, `owns_process`: see `train`.
    """
    folder = loaded.config.run.folder
    if resume and folder is None:
        flag = "--resume=auto" if resume == "auto" else "--resume"
        raise ConfigError(f"{flag} needs the folder of the run to continue: add --run.folder FOLDER")
    may_be_complete = resume == "auto" and folder is not None and holds_run(folder)
    resume = may_be_complete if resume == "auto" else resume
    if folder is not None:  # before minutes of reading data
        refuse_in_use(folder)
        if not resume:
            refuse_used(folder)
    if folder is not None and may_be_complete and is_complete(folder, loaded.config):
        return _finished(folder)
    stages = Stages()
    # An engine of the orchestrator's process is preimported there.
    ahead_of_time = preimport_vllm(loaded.config) if loaded.config.run.streams == "memory" else nullcontext()
    with persistent_caches(lambda text: None), ahead_of_time as ahead:  # `train` warns
        with stages.stage("read model and data"):
            from slipstream.launch.engines import create_engine
            from slipstream.launch.prepare import prepare
            from slipstream.launch.recovery.restarts import end_on_early_error
            from slipstream.launch.run import train

            with end_on_early_error(folder) if folder is not None and resume else nullcontext():
                prepared = prepare(same_commit(loaded) if resume else loaded)
        if folder is not None and may_be_complete and is_complete(folder, prepared.config):  # steps derived from epochs
            return _finished(folder)
        if folder is not None and resume and end_unsaid(folder, prepared.config, with_time_limit=may_be_complete):
            return _finished(folder)
        result = train(
            prepared,
            prepared.config.run.folder or new_run_folder(name),
            make_progress(),
            resume=resume,
            make_engine=partial(create_engine, ahead=ahead),
            stages=stages,
            last_words=last_words,
            supervisor=supervisor,
            restarts=restarts,
            owns_process=owns_process,
        )
    metrics = {} if result.evaluation is None else result.evaluation.metrics()
    return result, _summary(result, {**metrics, **result.held_out_loss}) | {"startup": stages.summary()}


def _finished(folder: Path) -> tuple[RunResult, dict[str, Any]]:
    """The result of the complete run in `folder`, and its summary."""
    from slipstream.launch.run import RunResult
    from slipstream.trainer.checkpoints.checkpoint import CheckpointStore

    store, rows = CheckpointStore(folder / "checkpoints"), read_metrics(folder)
    weights, best = store.latest(resumable=False), store.best()
    metrics: dict[str, float] = {}
    for row in rows:
        metrics |= {name: value for name, value in row.items() if name.startswith("eval/")}
    result = RunResult(
        folder=folder,
        steps=report.step if (report := read_exit(folder)) is not None else 0,
        evaluation=None,
        held_out_loss={name: metrics[name] for name in ("eval/loss", "eval/perplexity") if name in metrics},
        checkpoint=weights / "weights" if weights else None,
        best=best / "weights" if best else None,
    )
    return result, _summary(result, metrics)


def _summary(result: RunResult, metrics: Mapping[str, float]) -> dict[str, Any]:
    summary: dict[str, Any] = {"folder": str(result.folder), "steps": result.steps}
    if result.checkpoint is not None:
        summary["weights"] = str(result.checkpoint)
    if result.best is not None:
        summary["best_weights"] = str(result.best)
    return {**summary, **metrics}
