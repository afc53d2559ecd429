"""Slots, draws and ledgers of one to three orchestrators under a trainer that saves, stops and is killed when it likes:
every group ends exactly once, none is trained on too old or twice, and the run comes to its end."""

import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipstream.data.draws import Draws
from slipstream.orchestrator.batches.batcher import group_name
from slipstream.orchestrator.batches.share import Share
from slipstream.orchestrator.batches.slots import Slots
from slipstream.records import Rollout, Sequence, VersionSpan
from slipstream.runlog.ledger import Ledger, balance, end_ledgers

MEMORY = Path("/dev/shm")
"""No disk is waited for."""


@dataclass
class Orchestrator:
    """As `ReadyFirst` uses its parts, without an event loop."""

    slots: Slots
    ledger: Ledger
    draws: object
    whole: int
    lineage: int
    released: int
    running: dict[int, int] = field(default_factory=dict)
    """The version under which each running group began."""
    ready: dict[int, list[Rollout]] = field(default_factory=dict)
    silent: list[int] = field(default_factory=list)
    parts: list[tuple[list[int], list[Rollout], int]] = field(default_factory=list)
    """Draws, rollouts and number of chosen groups of the batches that wait for the trainer."""

    def name(self, number):
        return group_name(*divmod(number, self.whole))

    def begin(self):
        number = next(self.draws)
        kept = self.ledger.kept(self.name(number), self.slots.step, self.slots.is_in_time)
        if kept is None:
            self.slots.begin(number)
            self.ledger.begin(self.name(number))
            self.running[number] = self.released
        else:
            self.slots.begin(number, kept[0])
            self.ready[number] = kept[1]
            self.slots.finish(number)

    def finish(self, number, *, has_signal=True):
        steps = range(self.running.pop(number), self.released + 1)
        spans = [VersionSpan(2, f"{self.lineage}.{step}") for step in steps]
        mask = [False, *[True] * (2 * len(spans))]
        sequence = Sequence([1] * len(mask), mask, [0.0] * len(mask), spans)
        group = [Rollout(f"{self.name(number)}.0", "t", self.name(number), [sequence], 1.0, "done")]
        self.ledger.finish(self.name(number), group)
        if has_signal:
            self.ready[number] = group
            self.slots.finish(number)
        else:
            self.silent.append(number)
            self.ledger.drop(self.name(number), "no_signal")
            self.slots.drop(number)

    def cut(self):
        step = self.slots.step
        numbers = self.slots.cut()
        if numbers is not None:
            self.ledger.batch(step, [self.name(number) for number in numbers])
            rollouts = [rollout for number in numbers for rollout in self.ready.pop(number)]
            for number in self.slots.surplus:
                if self.ready.pop(number, None) is not None:
                    self.ledger.drop(self.name(number), "surplus")
                else:
                    del self.running[number]
                    self.ledger.cancel(self.name(number), "surplus")
            self.parts.append(([*numbers, *self.silent, *self.slots.surplus], rollouts, len(numbers)))
            self.silent = []
        return numbers

    def release(self, version):
        self.released = version
        self.slots.release(version)
        self.ledger.trained(version)


class Machine(RuleBasedStateMachine):
    """One run with its attempts."""

    @initialize(
        number=st.sampled_from([1, 2, 3]),
        size=st.sampled_from([6, 12]),
        staleness=st.integers(0, 3),
        steps=st.integers(2, 8),
        delays=st.booleans(),
        further=st.sampled_from([0, 0, 1, 3]),
    )
    def start(self, number, size, staleness, steps, delays, further):
        self.further = further
        self.scratch = tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None)
        self.folder = Path(self.scratch.name)
        self.number, self.size, self.staleness, self.steps = number, size, staleness, steps
        self.delays = delays
        """Whether what is written later is never written by itself."""
        self.lineage, self.saved, self.saved_draws = -1, 0, Draws().state()
        self.starts: list[int] = []
        """The steps that the attempts went on from."""
        self.trained: list[set[str]] = []
        """By step, the groups of the history that the weights descend from."""
        self.attempt()

    def attempt(self):
        """The next one, from the newest checkpoint."""
        self.lineage += 1
        self.step, self.draws = self.saved, Draws.of_state(self.saved_draws)
        self.starts.append(self.step)
        del self.trained[self.saved :]
        number = self.number
        end_ledgers(self.folder, number, self.lineage, self.step)
        own = self.size // number
        self.orchestrators = [
            Orchestrator(
                Slots(own, self.staleness, self.step, self.steps, self.further),
                Ledger(
                    self.folder, self.lineage, self.step, staleness=self.staleness, shape={"orchestrators": number},
                    saved_step=lambda: self.saved, orchestrator=each,
                    later=(lambda seconds, write: None) if self.delays else None,
                ),
                Share(each, number).draws(self.draws.unused(), own),
                self.size,
                self.lineage,
                self.step,
            )
            for each in range(number)
        ]  # fmt: skip

    @rule(num=st.integers(1, 20))
    def begin(self, num):
        for orchestrator in self.orchestrators:
            for _ in range(min(num, orchestrator.slots.num_free)):
                orchestrator.begin()

    @rule(chance=st.randoms(use_true_random=False), num=st.integers(1, 20), silent=st.sampled_from([0, 0, 0, 1]))
    def finish(self, chance, num, silent):
        for orchestrator in self.orchestrators:
            for place in range(min(num, len(orchestrator.running))):
                free = orchestrator.slots.num_free
                orchestrator.finish(chance.choice(sorted(orchestrator.running)), has_signal=place >= silent)
                assert orchestrator.slots.num_free == free + (place < silent)

    @rule(num=st.integers(1, 4))
    def cut_and_train(self, num):
        for _ in range(num):
            for each in self.orchestrators:
                each.cut()
        for _ in range(num):
            if all(each.parts for each in self.orchestrators):
                self.train()

    @rule(seed=st.integers(0, 1 << 32))
    def go_on(self, seed):
        """Many of the others: hypothesis by itself seldom makes a story in which anything is left to take over."""
        chance = random.Random(seed)
        most_silent = chance.choice([0, 1, 6])
        for _ in range(12):
            match chance.choice("bfcbfcsk"):
                case "b":
                    self.begin(20)
                case "f":
                    self.finish(chance, chance.randint(1, 12), chance.randint(0, most_silent))
                case "c":
                    self.cut_and_train(chance.randint(1, 3))
                case "s":
                    self.save()
                case "k" if self.can_end():
                    self.end(chance.random() < 0.7, chance.choice([None, None, None, None, 1, 2, 3]))

    def train(self):
        parts = [each.parts.pop(0) for each in self.orchestrators]
        rollouts = [rollout for _, own, _ in parts for rollout in own]
        assert sum(num for *_, num in parts) == self.size
        names = {rollout.group_id for rollout in rollouts}
        assert len(names) == self.size
        assert not names & set().union(*self.trained), "a group was trained on before"
        for lineage, step in {
            tuple(map(int, span.version.split("."))) for r in rollouts for span in r.sequences[0].versions
        }:
            assert step >= self.step - self.staleness, "too old"
            assert step <= min(self.starts[lineage + 1 :], default=self.step), "of weights that a resume has undone"
        self.trained.append(names)
        self.draws.use(number for numbers, *_ in parts for number in sorted(numbers))
        self.step += 1
        for each in self.orchestrators:
            each.release(self.step)

    @rule()
    def save(self):
        self.saved, self.saved_draws = self.step, self.draws.state()

    def can_end(self):
        return self.lineage < 5 and any(each.running or each.ready for each in self.orchestrators)

    @precondition(can_end)
    @rule(is_killed=st.booleans(), number=st.sampled_from([None, None, None, 1, 2, 3]))
    def end(self, is_killed, number):
        self.number = number or self.number
        if not is_killed:
            self.save()
        for each in self.orchestrators:
            if is_killed:
                each.ledger._data.close()
            else:
                each.ledger.close(self.step)
        self.attempt()

    @invariant()
    def bounded(self):
        for each in self.orchestrators if hasattr(self, "orchestrators") else ():
            slots = each.slots
            waiting = slots.num_running + slots.num_ready + slots.num_free + len(each.parts) * slots.size
            assert waiting <= (self.staleness + 1) * slots.size + self.further

    def teardown(self):
        if not hasattr(self, "orchestrators"):
            return
        while self.step < self.steps:
            before = self.step
            for each in self.orchestrators:
                while each.slots.num_free:
                    each.begin()
                while each.running:
                    each.finish(min(each.running))
                if each.slots.step < self.steps:
                    each.cut()
            if all(each.parts for each in self.orchestrators):
                self.train()
            assert self.step > before, "the run stands still"
        for each in self.orchestrators:
            assert not each.slots.num_free
            each.ledger.close(self.step, is_whole=True)
        found = balance(self.folder)
        assert found.num_open == 0, found
        assert len(set().union(*self.trained)) == self.steps * self.size
        assert found.num("trained") >= self.steps * self.size
        self.scratch.cleanup()


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=10, deadline=None)
TestLedgers = Machine.TestCase
