"""From checked settings to a finished run: what `slipstream train` and the Python API have in common."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from slipstream.config import Loaded
from slipstream.errors import ConfigError
from slipstream.launch.startup import preimport_vllm
from slipstream.launch.startup.compile_caches import persistent_caches
from slipstream.launch.startup.stages import Stages
from slipstream.runlog import refuse_used

if TYPE_CHECKING:
    from slipstream.launch.run import RunResult
    from slipstream.progress import Progress


def run_training(
    loaded: Loaded, name: str, *, resume: bool, make_progress: Callable[[], Progress]
) -> tuple[RunResult, dict[str, Any]]:
    """Read, plan and train, in `run.folder` or a new folder named after `name`; the result, and its summary.

    Raises what ends the run early, and `StartsAgain` where it goes on in another process.
    """
    folder = loaded.config.run.folder
    if resume and folder is None:
        raise ConfigError("--resume needs the folder of the run to continue: add --run.folder FOLDER")
    if folder is not None and not resume:
        refuse_used(folder)  # before minutes of reading data
    stages = Stages()
    with persistent_caches(lambda text: None), preimport_vllm(loaded.config) as ahead:  # `train` warns
        with stages.stage("read model and data"):
            from slipstream.launch.engines import create_engine
            from slipstream.launch.prepare import prepare
            from slipstream.launch.recovery.resume import same_commit
            from slipstream.launch.run import run_folder_of, train

            prepared = prepare(same_commit(loaded) if resume else loaded)
        result = train(
            prepared,
            run_folder_of(prepared, name),
            make_progress(),
            resume=resume,
            make_engine=partial(create_engine, ahead=ahead),
            stages=stages,
        )
    return result, _summary(result, stages)


def _summary(result: RunResult, stages: Stages) -> dict[str, Any]:
    summary: dict[str, Any] = {"folder": str(result.folder), "steps": result.steps, "startup": stages.summary()}
    if result.checkpoint is not None:
        summary["weights"] = str(result.checkpoint)
    if result.best is not None:
        summary["best_weights"] = str(result.best)
    if result.evaluation is not None:
        summary |= result.evaluation.metrics()
    summary |= result.held_out_loss
    return summary
