"""The trainer's side of the weight update benchmark.

Loads the model as a run would: in this process or sharded over ranks, in memory of its own or in that of the engine's
workers. Nothing is trained: a new version has the signs of some elements flipped.
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.config import PlannedConfig
from slipstream.launch.build import POLICY, build_parts, load_model
from slipstream.launch.ranks.processes import RankProcesses
from slipstream.plan.measure import adapter_config
from slipstream.processes.signals import StopRequest
from slipstream.records import SamplingParams
from slipstream.trainer.model.loading import open_shared
from slipstream.weights.base import NamedWeights
from slipstream.weights.bridges.single_copy import SharedWeights

from .process_memory import session_of

if TYPE_CHECKING:
    from slipstream.trainer.distributed.learner import ShardedModel
    from slipstream.trainer.model.policy import PolicyModel


class SyncTrainer(ABC):
    """Owns the weights that are published; `model` is this process's shard of them, or all."""

    def __init__(self, model: PolicyModel) -> None:
        self.model = model

    @property
    def on_gpu(self) -> bool:
        """Return whether the weights are on a GPU."""
        return self.model.device.type == "cuda"

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters of the whole model."""
        return sum(parameter.numel() for parameter in self.model.network.parameters())

    @property
    @abstractmethod
    def pids(self) -> list[int]:
        """Return the ids of all trainer processes."""

    @abstractmethod
    def change(self, first: int, stride: int) -> int:
        """Flip the sign of every `stride`-th column from column `first` on, and wait until all is written.

        Returns the bytes that were copied to the engine for it.
        """

    @abstractmethod
    def published(self) -> NamedWeights:
        """Return what a version consists of: the adapter if there is one, else the model's weights."""

    def gather_s(self) -> float:
        """Gather all published weights in this process, one after the other, and return the seconds that it took."""
        began = time.perf_counter()
        for _ in self.published():
            pass
        self.settle()
        return time.perf_counter() - began

    def settle(self) -> None:
        """Wait until this process's GPU is idle."""
        import torch

        if self.on_gpu:
            torch.cuda.synchronize()

    def allocated_bytes(self) -> int | None:
        """Return the bytes that torch has allocated on GPUs, where the trainer is this process alone."""
        return None


class _SingleProcess(SyncTrainer):
    """A trainer of one process."""

    @property
    def pids(self) -> list[int]:
        return [os.getpid()]

    def change(self, first: int, stride: int) -> int:
        from slipstream.trainer.distributed.worker import negate

        negate(self.model, first, stride)
        self.settle()
        return 0

    def published(self) -> NamedWeights:
        adapter = self.model.adapter
        return self.model.named_weights() if adapter is None else adapter.named_weights()

    def allocated_bytes(self) -> int:
        import torch

        return torch.cuda.memory_allocated() if self.on_gpu else 0


class _ShardedTrainer(SyncTrainer):
    """A trainer of several ranks, each with a shard of the weights."""

    def __init__(self, spread: ShardedModel, crew: RankProcesses) -> None:
        super().__init__(spread.local.model)
        self._spread, self._crew = spread, crew

    @property
    def pids(self) -> list[int]:
        return [os.getpid(), *(pid for leader in self._crew.pids for pid in session_of(leader))]

    def change(self, first: int, stride: int) -> int:
        from slipstream.trainer.distributed.worker import Negate

        answers = self._spread.all_do(Negate(POLICY, first, stride))
        return sum(answer.num_bytes for answer in answers)

    def published(self) -> NamedWeights:
        return self._spread.weights("model")


@contextlib.contextmanager
def sync_trainer(
    config: PlannedConfig, workers: Sequence[SharedWeights], logs: Path, stop: StopRequest
) -> Generator[SyncTrainer]:
    """Start the trainer that `config` asks for and yield it; `workers` are the engine's weights that it shares, if any.

    Its other ranks end with the block, or when `stop.at_once` is called.
    """
    if config.training.ranks == 1:
        model = load_model(config, open_shared(config.model.path, config.model.dtype, workers))
        if config.lora is not None:
            model.add_adapter(adapter_config(config))
        yield _SingleProcess(model)
        return
    from slipstream.trainer.distributed.learner import ShardedModel

    sampling = SamplingParams(max_tokens=1)
    crew = RankProcesses(config, sampling, logs, tuple(workers), trains=False)
    kill_others = stop.at_once

    def kill() -> None:
        crew.kill()
        kill_others()

    stop.at_once = kill
    try:
        group = crew.join()
        with crew.loading():
            part = build_parts(config, sampling, group, crew.shared, trains=False)[POLICY]
        yield _ShardedTrainer(ShardedModel(POLICY, part, crew), crew)
    finally:
        crew.close()
