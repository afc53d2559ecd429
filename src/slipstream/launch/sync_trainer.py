"""The trainer's side of `slipstream bench sync`: a model in this process, or spread over ranks as in a run, be it in
the memory of an engine's workers. Nothing is trained: a new version is made by changing signs.
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.config import RunConfig
from slipstream.launch.build import POLICY, build_parts, load_model, open_shared
from slipstream.launch.plan.measure import adapter_config
from slipstream.launch.ranks.processes import RankCrew
from slipstream.launch.signals import StopRequest
from slipstream.launch.usage import session_of
from slipstream.records import SamplingParams
from slipstream.weights.base import NamedWeights
from slipstream.weights.bridges.single_copy import SharedWeights

if TYPE_CHECKING:
    from slipstream.trainer.distributed.learner import ShardedModel
    from slipstream.trainer.model.policy import PolicyModel


class SyncTrainer(ABC):
    """Who has the weights that are published; `model` is this process's part of it."""

    def __init__(self, model: PolicyModel) -> None:
        self.model = model

    @property
    def on_gpu(self) -> bool:
        """Whether the weights are on a GPU."""
        return self.model.device.type == "cuda"

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        return sum(parameter.numel() for parameter in self.model.network.parameters())

    @property
    @abstractmethod
    def pids(self) -> list[int]:
        """All its processes."""

    @abstractmethod
    def change(self, first: int, stride: int) -> int:
        """Change the sign of every `stride`-th column from `first` on; returns when all of it is written, with the
        number of bytes that were copied to the engine for it."""

    @abstractmethod
    def published(self) -> NamedWeights:
        """What a version is: an adapter where there is one, or the model."""

    def gather_s(self) -> float:
        """Seconds until all that is published has been in this process, and was let go of."""
        began = time.perf_counter()
        for _ in self.published():
            pass
        self.settle()
        return time.perf_counter() - began

    def settle(self) -> None:
        """Returns when this process's GPU has done what it was told."""
        import torch

        if self.on_gpu:
            torch.cuda.synchronize()

    @abstractmethod
    def allocated_bytes(self) -> int:
        """By torch on GPUs, of all its processes."""


class _Alone(SyncTrainer):
    """One process."""

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


class _Ranks(SyncTrainer):
    """Several processes, each with a share."""

    def __init__(self, spread: ShardedModel, crew: RankCrew) -> None:
        super().__init__(spread.local.model)
        self._spread, self._crew = spread, crew

    @property
    def pids(self) -> list[int]:
        return [os.getpid(), *(pid for leader in self._crew.pids for pid in session_of(leader))]

    def change(self, first: int, stride: int) -> int:
        from slipstream.trainer.distributed.worker import Negate

        answers = self._spread.all_do(Negate(POLICY, first, stride))
        return sum(int(answer.numbers[0]) for answer in answers)

    def published(self) -> NamedWeights:
        return self._spread.weights("model")

    def allocated_bytes(self) -> int:
        from slipstream.trainer.distributed.worker import Allocated

        return sum(int(answer.numbers[0]) for answer in self._spread.all_do(Allocated(POLICY)))


@contextlib.contextmanager
def sync_trainer(
    config: RunConfig, workers: Sequence[SharedWeights], logs: Path, stop: StopRequest
) -> Generator[SyncTrainer]:
    """The trainer that `config` asks for, in the memory of `workers` where there are such; whoever else belongs to it
    ends with the block, or when `stop` ends all at once."""
    if config.training.ranks == 1:
        model = load_model(config, open_shared(config, workers))
        if config.lora is not None:
            model.add_adapter(adapter_config(config))
        yield _Alone(model)
        return
    from slipstream.trainer.distributed.learner import ShardedModel

    sampling = SamplingParams(max_tokens=1)
    crew = RankCrew(config, sampling, logs, tuple(workers), trains=False)
    kill_others = stop.at_once

    def kill() -> None:
        crew.kill()
        kill_others()

    stop.at_once = kill
    try:
        group = crew.join()
        with crew.loading():
            part = build_parts(config, sampling, group, crew.shared, trains=False)[POLICY]
        yield _Ranks(ShardedModel(POLICY, part, crew), crew)
    finally:
        crew.close()
