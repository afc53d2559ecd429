"""The learner of rank 0 when several trainer ranks share the work; the training loop uses it like any other learner.

Rank 0 sends each primitive to the other ranks as a command (`worker.py`), and all execute it. Guarantees: gradients and
losses of a step equal a single process's up to rounding; weights are gathered in batches of bounded size, and
fingerprints without gathering. `OtherRanks` knows the other processes and what to do when one dies.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from slipstream import records
from slipstream.trainer.distributed.worker import (
    Answer,
    AnyCommand,
    Backward,
    Commit,
    Describe,
    Gather,
    Load,
    Prepare,
    RankBatch,
    RankModel,
    Save,
    Score,
    rank_batch_of,
)
from slipstream.trainer.learner import Learner, Sums
from slipstream.trainer.loss import Objective
from slipstream.trainer.model.policy import shares_memory
from slipstream.trainer.optim.base import OptimStats
from slipstream.trainer.packing import StepBatch, even_rows
from slipstream.weights.base import NamedWeights
from slipstream.weights.fingerprint import as_hex, describe
from slipstream.weights.shards import ShardedWeights


class OtherRanks(Protocol):
    """The connection to the other ranks."""

    def run_on_all(self, commands: Sequence[AnyCommand], do: Callable[[AnyCommand], Answer]) -> list[Answer]:
        """Have each rank execute its command, this one by calling `do`; returns their answers in rank order."""
        ...

    def run_on_others(self, command: AnyCommand) -> AbstractContextManager[None]:
        """The other ranks execute `command` while this one runs the body of the `with` statement."""
        ...


class ShardedModel:
    """Rank 0's view of a model sharded over the ranks: its weights, and commands to all ranks."""

    def __init__(self, name: str, local: RankModel, others: OtherRanks) -> None:
        self.name, self.local, self.others = name, local, others
        self._specs: dict[str, tuple[records.ParameterSpec, ...] | None] = {}

    def predictions(
        self, sequences: Sequence[records.Sequence], sampling: records.SamplingParams | None, micro_batch_tokens: int
    ) -> list[list[Tensor]]:
        """See `learner.predicted`."""
        shares, chosen = self.split_batch(StepBatch(list(sequences)), micro_batch_tokens)
        answers = self.others.run_on_all([Score(self.name, share, sampling) for share in shares], self.local.do)
        found = [[torch.zeros(0)] * len(sequences) for _ in range(1 if sampling is None else 2)]
        for answer, indices in zip(answers, chosen, strict=True):  # equal among the ranks of a row
            counts = [sequences[index].num_trainable for index in indices]
            for own, joined in zip(found, answer.predictions, strict=False):  # none of a rank without a row
                for index, values in zip(indices, joined.split(counts), strict=True):
                    own[index] = values.clone()
        return found

    def split_batch(self, batch: StepBatch, micro_batch_tokens: int) -> tuple[list[RankBatch], list[list[int]]]:
        """Split a step batch over the ranks; also returns the indices of each rank's sequences. The ranks of a row get
        the same."""
        model, each = self.local.model, self.num_together
        num_rows = self.local.group.size // each
        passes = even_rows(batch, micro_batch_tokens, num_rows, packing=model.packing, device=model.device)
        dealt = [rank_batch_of(batch, [row[place] for row in passes]) for place in range(num_rows)]
        return [share for share, _ in dealt for _ in range(each)], [chosen for _, chosen in dealt for _ in range(each)]

    @property
    def num_together(self) -> int:
        """Neighbouring ranks of a row."""
        context = self.local.model.context
        return 1 if context is None else context.size

    def all_do(self, command: AnyCommand) -> list[Answer]:
        """Have every rank execute `command`; returns their answers in rank order."""
        return self.others.run_on_all([command] * self.local.group.size, self.local.do)

    def weights(self, what: str) -> ShardedWeights:
        """The weights of the `model`, its `base` or its `adapter`; iterating over them gathers them."""
        return ShardedWeights(lambda: self._gathered(what), lambda: self._described(what))

    def _gathered(self, what: str) -> Generator[tuple[str, Tensor]]:
        specs = self._stored(what)
        # `closing` runs first: after an early end of its consumer it still takes part in the remaining collectives.
        with self.others.run_on_others(Gather(self.name, what)), closing(self.local.gather(what)) as tensors:
            if specs is None:
                for name, tensor in tensors:
                    yield from self.local.stored(what, name, tensor)
                return
            for spec, (_, tensor) in zip(specs, tensors, strict=True):
                yield spec.name, tensor

    def _described(self, what: str) -> tuple[records.ParameterSpec, ...]:
        specs = self._stored(what)
        if specs is None:
            # Transformers fuses or converts stored tensors: their fingerprints need the full tensors.
            return tuple(spec for each in self._gathered(what) for spec in describe([each]))
        batches = [answer.fingerprints for answer in self.all_do(Describe(self.name, what))]
        sums = [sum(each) for each in zip(*batches, strict=True)]
        found = zip(specs, sums, strict=True)
        return tuple(msgspec.structs.replace(spec, fingerprint=as_hex(total)) for spec, total in found)

    def _stored(self, what: str) -> tuple[records.ParameterSpec, ...] | None:
        """`_find_specs`, cached: transformers takes milliseconds for each tensor."""
        if what not in self._specs:
            self._specs[what] = self._find_specs(what)
        return self._specs[what]

    def _find_specs(self, what: str) -> tuple[records.ParameterSpec, ...] | None:
        """Name, shape and dtype of every tensor as it is saved, without fingerprints; None if the saved layout of one
        differs from the network's."""
        specs: list[records.ParameterSpec] = []
        for shard in self.local.shards(what):
            # Expanded from one element: only names and shapes matter.
            probe = torch.zeros((), dtype=shard.part.dtype).expand(shard.shape)
            stored = self.local.stored(what, shard.name, probe)
            if len(stored) != 1 or not shares_memory(stored[0][1], probe):
                return None
            specs.append(replace(shard, name=stored[0][0]).spec(""))
        return tuple(specs)


class ShardedLearner(Learner):
    """A `Learner` with its model, called `name`, sharded over the ranks."""

    def __init__(self, name: str, local: RankModel, others: OtherRanks, *, micro_batch_tokens: int) -> None:
        assert local.optimizer is not None
        super().__init__(local.model, local.optimizer, micro_batch_tokens=micro_batch_tokens)
        self._sharded = ShardedModel(name, local, others)
        self._predict = self._sharded.predictions

    def _add_gradients(self, batch: StepBatch, objective: Objective, divisors: dict[str, float]) -> Sums:
        name, local, others = self._sharded.name, self._sharded.local, self._sharded.others
        loss = local.objectives.put(objective)
        shares, _ = self._sharded.split_batch(batch, self.micro_batch_tokens)
        answers = others.run_on_all([Backward(name, share, divisors, loss) for share in shares], local.do)
        sums = Sums()
        # The ranks of a row all have the sums of the whole row.
        for answer in answers[:: self._sharded.num_together]:
            sums.add(answer.sums)
        sums.longest_row = answers[0].sums.longest_row  # rank 0's: its memory is reported too
        return sums

    def _prepare(self, learning_rate: float) -> OptimStats:
        found = self._sharded.all_do(Prepare(self._sharded.name, learning_rate))[0].update
        assert found is not None
        return found

    def optim_commit(self) -> None:
        """See the base."""
        self._sharded.all_do(Commit(self._sharded.name))

    def named_weights(self) -> NamedWeights:
        """See the base; iterating gathers them. The config's checks refuse models with an adapter, since it would have
        to be merged."""
        assert self.model.adapter is None
        return self._sharded.weights("model")

    def base_weights(self) -> NamedWeights:
        """See the base."""
        return self._sharded.weights("base")

    def adapter_weights(self) -> NamedWeights:
        """See the base."""
        return self._sharded.weights("adapter")

    def save(self, folder: Path) -> None:
        """See the base; every rank writes its own shard."""
        folder.mkdir(parents=True, exist_ok=True)
        self._sharded.all_do(Save(self._sharded.name, str(folder.absolute())))

    def load(self, folder: Path) -> None:
        """See the base; `folder` may have been written by any number of ranks."""
        self._sharded.all_do(Load(self._sharded.name, str(folder.absolute())))
