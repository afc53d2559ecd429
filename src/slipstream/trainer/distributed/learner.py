"""The learner of rank 0 where several trainer processes share the work: the loop does not notice.

Each primitive is told to the other ranks as a command (`rank_part`) and done by all. Guarantees: a step split over
ranks has the gradients and losses of one process but for rounding; weights come together a bunch at a time, and for a
fingerprint none do. Who the other ranks are, and what happens when one dies, is left to the `Crew`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from slipstream import records
from slipstream.trainer.batching import StepBatch, even_rows
from slipstream.trainer.distributed.worker import (
    Answer,
    AnyCommand,
    Backward,
    Commit,
    Describe,
    Gather,
    Load,
    Part,
    Prepare,
    Save,
    Score,
    Share,
    share_of,
)
from slipstream.trainer.learner import UNPROCESSED, Learner, Scores, Sums
from slipstream.trainer.model.policy import is_same
from slipstream.trainer.objectives import Objective
from slipstream.trainer.optim.base import OptimStats
from slipstream.weights.base import NamedWeights
from slipstream.weights.fingerprint import as_hex, describe
from slipstream.weights.shards import ShardedWeights


class Crew(Protocol):
    """The other ranks."""

    def together(self, commands: Sequence[AnyCommand], do: Callable[[AnyCommand], Answer]) -> list[Answer]:
        """Have every rank carry out its command, this one with `do`; their answers in order."""
        ...

    def meanwhile(self, command: AnyCommand) -> AbstractContextManager[None]:
        """The other ranks carry out `command` while this one does its part inside."""
        ...


@dataclass(frozen=True)
class ShardedScorer:
    """A model that every rank has a share of, and what it says of tokens; see `learner.Scorer`."""

    name: str
    part: Part
    crew: Crew
    micro_batch_tokens: int

    def forward(self, sequences: Sequence[records.Sequence], sampling: records.SamplingParams = UNPROCESSED) -> Scores:
        """See `learner.Scorer`."""
        return self.scores(sequences, sampling, self.micro_batch_tokens)

    def scores(
        self, sequences: Sequence[records.Sequence], sampling: records.SamplingParams, micro_batch_tokens: int
    ) -> Scores:
        """The same in rows of at most so many tokens."""
        return Scores(*self.predictions(sequences, sampling, micro_batch_tokens))

    def predictions(
        self, sequences: Sequence[records.Sequence], sampling: records.SamplingParams | None, micro_batch_tokens: int
    ) -> list[list[Tensor]]:
        """Of each kind of prediction (see `learner.predictions`) each sequence's."""
        batch = StepBatch(list(sequences))
        shares, chosen = self.deal(batch, micro_batch_tokens)
        answers = self.crew.together([Score(self.name, share, sampling) for share in shares], self.part.do)
        found = [[torch.zeros(0)] * len(sequences) for _ in range(1 if sampling is None else 2)]
        for answer, indices in zip(answers, chosen, strict=True):
            counts = [sequences[index].num_trainable for index in indices]
            for number, packed in answer.tensors.items():
                for index, values in zip(indices, packed.tensor().split(counts), strict=True):
                    found[int(number)][index] = values.clone()
        return found

    def deal(self, batch: StepBatch, micro_batch_tokens: int) -> tuple[list[Share], list[list[int]]]:
        """Every rank's share of a step, and which sequences are in it."""
        model, size = self.part.model, self.part.group.size
        passes = even_rows(batch, micro_batch_tokens, size, packing=model.packing, device=model.device)
        dealt = [share_of(batch, [row[rank] for row in passes]) for rank in range(size)]
        return [share for share, _ in dealt], [chosen for _, chosen in dealt]


class SpreadModel:
    """A model that every rank has a share of, as `name`: its weights, and what all ranks do alike with it."""

    def __init__(self, name: str, part: Part, crew: Crew) -> None:
        self.name, self.part, self.crew = name, part, crew
        self._specs: dict[str, tuple[records.ParameterSpec, ...] | None] = {}

    def all_do(self, command: AnyCommand) -> list[Answer]:
        """Have every rank carry out `command`; their answers in order."""
        return self.crew.together([command] * self.part.group.size, self.part.do)

    def weights(self, what: str) -> ShardedWeights:
        """All of the `model`, its `base` or its `adapter`; gathered by whoever goes through them."""
        return ShardedWeights(lambda: self._gathered(what), lambda: self._described(what))

    def _gathered(self, what: str) -> Generator[tuple[str, Tensor]]:
        specs = self._stored(what)
        # Closed before the others are waited for: whoever had enough goes through the rest with them.
        with self.crew.meanwhile(Gather(self.name, what)), closing(self.part.gather(what)) as tensors:
            if specs is None:
                for name, tensor in tensors:
                    yield from self.part.stored(what, name, tensor)
                return
            for spec, (_, tensor) in zip(specs, tensors, strict=True):
                yield spec.name, tensor

    def _described(self, what: str) -> tuple[records.ParameterSpec, ...]:
        specs = self._stored(what)
        if specs is None:
            # Transformers keeps several stored tensors as one, or otherwise: they are only known when made.
            return tuple(spec for each in self._gathered(what) for spec in describe([each]))
        shares = [answer.fingerprints for answer in self.all_do(Describe(self.name, what))]
        sums = [sum(each) for each in zip(*shares, strict=True)]
        return tuple(
            records.ParameterSpec(spec.name, spec.shape, spec.dtype, as_hex(total))
            for spec, total in zip(specs, sums, strict=True)
        )

    def _stored(self, what: str) -> tuple[records.ParameterSpec, ...] | None:
        """`_unmarked`, for which transformers is asked once: of each tensor it takes milliseconds."""
        if what not in self._specs:
            self._specs[what] = self._unmarked(what)
        return self._specs[what]

    def _unmarked(self, what: str) -> tuple[records.ParameterSpec, ...] | None:
        """Name, shape and type of every tensor as it is saved, without fingerprints; None when one of them is not
        element for element what the network has."""
        specs: list[records.ParameterSpec] = []
        for shard in self.part.shards(what):
            # A tensor without memory: only who comes out and in which shape is asked.
            probe = torch.zeros(1, dtype=shard.part.dtype).expand(shard.shape)
            stored = self.part.stored(what, shard.name, probe)
            if len(stored) != 1 or not is_same(stored[0][1], probe):
                return None
            specs.append(replace(shard, name=stored[0][0]).spec(""))
        return tuple(specs)


class ShardedLearner(Learner):
    """A `Learner` whose model is spread over ranks; `name` is what they call it."""

    def __init__(self, name: str, part: Part, crew: Crew, *, micro_batch_tokens: int) -> None:
        assert part.optimizer is not None
        super().__init__(part.model, part.optimizer, micro_batch_tokens=micro_batch_tokens)
        self._name = name
        self._part = part
        self._crew = crew
        self._scorer = ShardedScorer(name, part, crew, micro_batch_tokens)
        self._spread = SpreadModel(name, part, crew)

    def forward(
        self,
        sequences: Sequence[records.Sequence],
        sampling: records.SamplingParams = UNPROCESSED,
        *,
        micro_batch_tokens: int | None = None,
    ) -> Scores:
        """See the base."""
        return self._scorer.scores(sequences, sampling, micro_batch_tokens or self.micro_batch_tokens)

    def values(self, sequences: Sequence[records.Sequence]) -> list[Tensor]:
        """See the base."""
        return self._scorer.predictions(sequences, None, self.micro_batch_tokens)[0]

    def _add_gradients(self, batch: StepBatch, objective: Objective, divisors: dict[str, float]) -> Sums:
        self._part.objective = objective
        shares, _ = self._scorer.deal(batch, self.micro_batch_tokens)
        sums = Sums({})
        answers = self._crew.together([Backward(self._name, share, divisors) for share in shares], self._part.do)
        sums.longest_row = int(answers[0].numbers[2])  # of this rank, whose memory is noted beside it
        for answer in answers:
            for name, packed in answer.tensors.items():
                value = packed.tensor()
                sums.values[name] = sums.values[name] + value if name in sums.values else value
            sums.num_micro_batches += int(answer.numbers[0])
            sums.num_row_tokens += int(answer.numbers[1])
        return sums

    def optim_prepare(self, learning_rate: float) -> OptimStats:
        """See the base."""
        rate, norm, clipped = self._spread.all_do(Prepare(self._name, learning_rate))[0].numbers
        return OptimStats(rate, norm, bool(clipped))

    def optim_commit(self) -> None:
        """See the base."""
        self._spread.all_do(Commit(self._name))

    def named_weights(self) -> NamedWeights:
        """See the base; gathered by whoever goes through them. An adapter is not merged into them: the config's checks
        let nobody ask for that."""
        assert self.model.adapter is None
        return self._spread.weights("model")

    def base_weights(self) -> NamedWeights:
        """See the base."""
        return self._spread.weights("base")

    def adapter_weights(self) -> NamedWeights:
        """See the base."""
        return self._spread.weights("adapter")

    def save(self, folder: Path) -> None:
        """See the base; every rank writes its own share."""
        folder.mkdir(parents=True, exist_ok=True)
        self._spread.all_do(Save(self._name, str(folder.absolute())))

    def load(self, folder: Path) -> None:
        """See the base; what any number of ranks wrote."""
        self._spread.all_do(Load(self._name, str(folder.absolute())))
