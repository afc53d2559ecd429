"""The provider of a Ray cluster."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from slipstream.clusters import ray_jobs
from slipstream.config import Loaded
from slipstream.errors import ConfigError
from slipstream.runlog import is_running
from slipstream.service.cluster import LOG, Cluster, Seen, Shape, filled_in
from slipstream.service.preflight import Preflight
from slipstream.service.records import ACTIVE, Asked, Record, refuse_others


class Ray(Cluster):
    """See `Provider`."""

    name, title, fresh_s = "ray", "Ray", 15.0

    def preflight(self, folder: Path, loaded: Loaded, asked: Asked) -> Preflight:
        """See `Provider`."""
        refuse_others(self.name, asked)
        address = asked.address or os.environ.get("RAY_ADDRESS", "")
        found = ray_jobs.nodes(address)
        with_gpus = [node for node in found if node.gpus]
        smallest = min(with_gpus or found, default=None, key=lambda node: (node.gpus, node.cpus))
        shape = Shape(smallest.cpus, smallest.gpus, smallest.kind) if smallest is not None else Shape(0, 0)
        asked = filled_in(loaded.config, asked, shape)
        cpus, gpus, nodes = asked.cpus_per_task or 0, asked.gpus_per_node or 0, loaded.config.cluster.nodes
        fitting = sum(node.cpus >= cpus and node.gpus >= gpus for node in found)
        if fitting < nodes:
            have = "; ".join(f"{node.cpus} CPUs, {node.gpus} GPUs" for node in found)
            raise ConfigError(f"{nodes} nodes with {cpus} CPUs and {gpus} GPUs are asked for, and Ray has {have}")
        return self.planned(folder, loaded, msgspec.structs.replace(asked, address=address), shape.kind)

    def sweep(self, folder: Path, record: Record) -> Record:
        """See `Provider`. A run that holds its folder needs no question to Ray, which takes seconds."""
        if record.state in ACTIVE and not record.cancel_requested and is_running(folder):
            return record
        return super().sweep(folder, record)

    def list_jobs(self, record: Record) -> dict[str, Seen]:
        """See `Cluster`."""
        found = ray_jobs.actors(record.asked.address)
        return {name: Seen(actor.id, actor.state, actor.has_ended) for name, actor in found.items()}

    def submit_job(self, folder: Path, record: Record, name: str) -> str:
        """See `Cluster`."""
        asked = record.asked
        cpus, gpus = asked.cpus_per_task or 0, asked.gpus_per_node or 0
        return ray_jobs.submit(asked.address, ray_jobs.Start(name, str(folder), str(folder / LOG), cpus, gpus))

    def end_job(self, record: Record, seen: Seen) -> None:
        """See `Cluster`."""
        if record.job is not None:
            ray_jobs.kill(record.asked.address, record.job.name)
