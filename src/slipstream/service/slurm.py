"""The provider of a Slurm cluster."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from slipstream.clusters import slurm
from slipstream.clusters.batch_script import Request, batch_script
from slipstream.clusters.slurm import JobState
from slipstream.config import Loaded, RunConfig
from slipstream.errors import ConfigError
from slipstream.service.cluster import LOG, Cluster, Seen, Shape, filled_in
from slipstream.service.preflight import Preflight
from slipstream.service.records import Asked, Job, Record, refuse_others
from slipstream.service.store import name_from

_LOST = ("BOOT_FAIL", "NODE_FAIL", "PREEMPTED")


class Slurm(Cluster):
    """See `Provider`."""

    name, title, fresh_s = "slurm", "Slurm", 2.0

    def preflight(self, folder: Path, loaded: Loaded, asked: Asked) -> Preflight:
        """See `Provider`."""
        refuse_others(self.name, asked)
        shape = _shape(asked)
        asked = filled_in(loaded.config, asked, shape)
        slurm.check(script_of(folder, name_from(folder.name), asked, loaded.config.run.grace_s))
        return self.planned(folder, loaded, asked, shape.kind if shape is not None else "")

    def list_jobs(self, record: Record) -> dict[str, Seen]:
        """See `Cluster`."""
        return {name: _seen(state) for name, state in slurm.own_jobs().items()}

    def submit_job(self, folder: Path, record: Record, name: str) -> str:
        """See `Cluster`."""
        return slurm.submit(script_of(folder, name, record.asked, record.grace_s))

    def end_job(self, record: Record, seen: Seen) -> None:
        """See `Cluster`."""
        slurm.cancel(seen.id)

    def accounted(self, job: Job) -> Seen | None:
        """See `Cluster`."""
        state = slurm.ended_job(job.id)
        return _seen(state) if state is not None else None


def _seen(state: JobState) -> Seen:
    text = f"{state.name}, {state.reason}" if state.reason else state.name
    return Seen(state.id, text, state.has_ended, state.name == "CANCELLED", state.name in _LOST)


def _shape(asked: Asked) -> Shape | None:
    found = slurm.node_shape(asked.partition or os.environ.get("SBATCH_PARTITION"))
    return Shape(found.cpus, found.gpus, found.kind) if found is not None else None


def script_of(folder: Path, name: str, asked: Asked, grace_s: float) -> str:
    """The batch script of a run's job `name`. Raises ConfigError for a time limit without time to train."""
    given = (("partition", asked.partition), ("account", asked.account))
    site = [f"--{option}={value}" for option, value in given if value]
    return batch_script(
        Request(
            name,
            [sys.executable, "-P", "-m", "slipstream.service.slurm_job", str(folder), name],
            folder / LOG,
            asked.nodes or 1,
            grace_s,
            asked.time,
            asked.gpus_per_node or 0,
            asked.cpus_per_task,
            [*site, *asked.options],
        )
    )


def dry_script(folder: Path, config: RunConfig, asked: Asked) -> str:
    """The batch script, also on a machine without Slurm."""
    try:
        shape = _shape(asked)
    except ConfigError:
        shape = None
    return script_of(folder, name_from(folder.name), filled_in(config, asked, shape), config.run.grace_s)
