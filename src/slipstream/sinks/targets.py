"""The sinks that there are. Each imports its library only when it is made."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

PROJECT = "slipstream"


@dataclass(frozen=True)
class Run:
    """What a sink is told of the run that it shows."""

    name: str
    folder: Path
    lineage: int
    settings: dict[str, Any]
    """`section.key` and value, without secrets."""


class Sink(Protocol):
    """A place for metrics; used by one thread."""

    def write(self, step: int, when: float, values: Mapping[str, float]) -> None:
        """The metrics of a step; `when` is Unix time. May raise."""
        ...

    def close(self) -> None:
        """Write what is held back. May raise."""
        ...


class TensorBoard:
    """Event files in the run folder's `tensorboard/`, one for each lineage; needs no torch."""

    def __init__(self, run: Run) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        # Made by protobuf when they are imported: no checker can see into them.
        self._event = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._is_first = True
        self._writer = EventFileWriter(str(run.folder / "tensorboard"), flush_secs=10)

    def write(self, step: int, when: float, values: Mapping[str, float]) -> None:
        """See `Sink`."""
        if self._is_first:
            # Tells readers that an earlier lineage's rows from this step on were made again.
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._writer.add_event(self._event.Event(wall_time=when, step=step, session_log=start))
            self._is_first = False
        points = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._event.Event(wall_time=when, step=step, summary=self._summary(value=points)))

    def close(self) -> None:
        """See `Sink`."""
        self._writer.close()


class WandB:
    """A run of Weights & Biases for each lineage, grouped by the run's name; its files are in the run folder's
    `wandb/`.

    Without a login it is offline, to be sent later with `wandb sync`; WANDB_MODE and WANDB_PROJECT are heeded. Only
    metrics and settings go there: no command line, console, code or package list.
    """

    def __init__(self, run: Run) -> None:
        import wandb

        has_login = "WANDB_API_KEY" in os.environ or (Path.home() / ".netrc").is_file()
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=f"{run.name}-{run.lineage}" if run.lineage else run.name,
            group=run.name,
            dir=str(run.folder),
            config=run.settings,
            mode=None if has_login or "WANDB_MODE" in os.environ else "offline",
            reinit="create_new",
            settings=wandb.Settings(
                console="off",
                disable_code=True,
                disable_git=True,
                silent=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )

    def write(self, step: int, when: float, values: Mapping[str, float]) -> None:
        """See `Sink`."""
        self._run.log({**values, "time/unix_s": when}, step=step)

    def close(self) -> None:
        """See `Sink`."""
        self._run.finish()


class Trackio:
    """A run of trackio in its local store, which `trackio show` shows; TRACKIO_DIR says where that is."""

    def __init__(self, run: Run) -> None:
        # Not in the development environment, whose pillow it refuses.
        self._run = importlib.import_module("trackio").init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{run.name}-{run.lineage}" if run.lineage else run.name,
            group=run.name,
            config=run.settings,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, when: float, values: Mapping[str, float]) -> None:
        """See `Sink`."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """See `Sink`."""
        self._run.finish()


TARGETS: Mapping[str, Callable[[Run], Sink]] = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}
