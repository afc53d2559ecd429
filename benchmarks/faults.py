"""Faults in the weights' way, each provoked many times: how long until the outcome is clear, and was any answer wrong?

    python benchmarks/faults.py [--faults NAME ...] [--times 20]

With real vLLM on this CPU and a model of 0.1 M parameters. After each fault, and while it happens where somebody can
ask, every completion is checked: its log-probabilities must be those of the version that it names. Prints a Markdown
table; the exit code is 1 when an outcome was not the expected one, an answer was wrong, or anything was left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil
import torch
from rich.progress import track
from safetensors.torch import load_file

from slipstream.errors import EngineError, SlipstreamError, WeightsError
from slipstream.inference.client import EngineClient
from slipstream.inference.engine import SupervisedEngine
from slipstream.inference.replicas import EngineReplicas
from slipstream.inference.settings import EngineSettings
from slipstream.orchestrator.runtime import EventLoopThread
from slipstream.records import Completion, GenerateRequest, SamplingParams, Sequence, Ticket
from slipstream.trainer.learner import score
from slipstream.trainer.model import PolicyModel
from slipstream.trainer.new_model import new_model
from slipstream.weights import check_report, create_bridge
from slipstream.weights.base import Bridge
from slipstream.weights.fingerprint import digest

TIMEOUT_S, GROUP_TIMEOUT_S = 60.0, 2.0
START_S = 300.0
PROMPTS = [[(7 * i + 3 * j) % 90 + 1 for j in range(12 + 5 * i)] for i in range(4)]


class Weights:
    """Versions that anybody can make again from their number, and what they answer."""

    def __init__(self, model: Path) -> None:
        self.original = load_file(model / "model.safetensors")
        self.policy = PolicyModel.load(model)

    def of(self, step: int) -> dict[str, torch.Tensor]:
        """The weights of version `step`."""
        generator = torch.Generator().manual_seed(step)
        return {k: w + 0.02 * torch.randn(w.shape, generator=generator) for k, w in self.original.items()}

    def num_wrong(self, completions: list[Completion]) -> int:
        """How many of these are not what the versions that they name would have sampled."""
        return sum(not self._is_right(completion) for completion in completions)

    def _is_right(self, completion: Completion) -> bool:
        prompt = PROMPTS[int(completion.id.rpartition("-")[2])]
        ends = [span.start for span in completion.versions[1:]] + [len(completion.token_ids)]
        for span, end in zip(completion.versions, ends, strict=True):
            self.policy.network.load_state_dict(self.of(int(span.version.split(".")[1])), strict=False)
            tokens = [*prompt, *completion.token_ids[:end]]
            mask = [False] * (len(prompt) + span.start) + [True] * (end - span.start)
            (ours,) = score(self.policy, [Sequence(tokens, mask)], micro_batch_tokens=8192).logprobs
            if (ours - torch.tensor(completion.logprobs[span.start : end])).abs().max() > 1e-3:
                return False
        return True


class Pair:
    """An engine that may die any number of times, and a bridge to it."""

    def __init__(self, folder: Path, bridge: str, timeout_s: float = TIMEOUT_S) -> None:
        self.folder = folder
        self.model = folder / "model"
        if not self.model.exists():
            new_model(self.model, hidden_size=64, num_layers=2, seed=3)
        self.weights = Weights(self.model)
        self.thread = EventLoopThread(lambda: False)
        self.engine = self.thread.call(self._start(), 300, "the engine")
        self.bridge = self.to(bridge, timeout_s)
        self.step = 0

    async def _start(self) -> SupervisedEngine | EngineReplicas:
        engine = self.supervised()
        engine.launch()
        await engine.wait_ready()
        return engine

    def supervised(self, number: int = 0, threads: int = 2) -> SupervisedEngine:
        """An engine that does not run yet, the one of that number."""
        settings = EngineSettings(
            model=str(self.model),
            socket="",
            dtype="float32",
            max_model_len=256,
            max_num_seqs=16,
            kv_cache_bytes=1 << 27,
            threads=threads,
            first_rank=1 + number,
        )
        return SupervisedEngine(
            settings,
            self.folder / f"engine-{number}.log",
            start_timeout_s=300,
            max_restarts=10_000,
            on_event=lambda *_, **__: None,
        )

    def to(self, bridge: str, timeout_s: float = TIMEOUT_S) -> Bridge:
        """A bridge to the engine."""
        folder = self.folder / f"weights-{bridge}"
        return create_bridge(bridge, folder=folder, source=self.model, engine=self.engine, timeout_s=timeout_s)

    def publish(self, spoil: Callable[[Ticket], Ticket] = lambda ticket: ticket) -> None:
        """Send the next version; raises what a run would."""
        self.step += 1
        under_way = []

        def announce(ticket: Ticket) -> None:
            under_way.append(self.thread.submit(self.bridge.receiver.apply(spoil(ticket), TIMEOUT_S)))

        ticket = self.bridge.publisher.publish(self.weights.of(self.step).items(), self.step, 0, announce)
        check_report(under_way[0].result(START_S), spoil(ticket))

    def ask(self) -> list[Completion]:
        """One completion for each prompt; raises when the engine refuses."""

        async def all_of_them() -> list[Completion]:
            requests = [
                GenerateRequest(f"ask-{i}", p, SamplingParams(max_tokens=16), seed=i, timeout_s=20)
                for i, p in enumerate(PROMPTS)
            ]
            return await asyncio.gather(*(self.engine.generate(request) for request in requests))

        return self.thread.call(all_of_them(), TIMEOUT_S, "the engine")

    def close(self) -> None:
        """Stop the engine."""
        self.bridge.publisher.close()
        self.thread.stop(self.engine.stop())


class Two(Pair):
    """Two engines as one, which may die any number of times, and a bridge to both."""

    engine: EngineReplicas

    async def _start(self) -> EngineReplicas:
        engines = [self.supervised(number, threads=1) for number in range(2)]
        replicas = EngineReplicas(engines, num_places=16, on_event=lambda *_, **__: None)
        replicas.launch()
        await replicas.wait_ready()
        return replicas

    def to(self, bridge: str, timeout_s: float = TIMEOUT_S) -> Bridge:
        """A bridge to both."""

        def joined() -> int:
            return self.thread.call(self.engine.joined(), START_S, "both engines")

        folder = self.folder / f"weights-{bridge}"
        return create_bridge(
            bridge,
            folder=folder,
            source=self.model,
            engine=self.engine,
            timeout_s=timeout_s,
            num_workers=2,
            joined=joined,
        )

    def kill(self, number: int) -> None:
        """The one of that number."""
        os.kill(self.engine.pids[number], signal.SIGKILL)


class Asking:
    """Eight who ask the engines all the time, as a run does, until `stop`."""

    def __init__(self, two: Two) -> None:
        self._two = two
        self._goes_on = True
        self._asked = 0
        self.answered: list[tuple[float, Completion]] = []
        self._running = two.thread.submit(self._all())

    async def _all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(self._one_after_the_other())

    async def _one_after_the_other(self) -> None:
        while self._goes_on:
            number, self._asked = self._asked, self._asked + 1
            place = number % len(PROMPTS)
            request = GenerateRequest(
                f"{number}-{place}", PROMPTS[place], SamplingParams(max_tokens=64), number, 60, f"group {number // 4}"
            )
            completion = await self._two.engine.generate(request)
            self.answered.append((time.monotonic(), completion))
            await asyncio.sleep(0.1)

    def stop(self) -> list[Completion]:
        """All answers, each asked once; raises what a request raised."""
        self._goes_on = False
        self._running.result(TIMEOUT_S)
        found = [completion for _, completion in self.answered]
        if len({completion.id for completion in found}) != self._asked or len(found) != self._asked:
            raise EngineError(f"{self._asked} were asked and {len(found)} answered")
        return found


@dataclass
class Outcomes:
    """What became of one fault, each time."""

    seconds: list[float] = field(default_factory=list)
    sentences: set[str] = field(default_factory=set)
    asked: int = 0
    wrong: int = 0
    unexpected: list[str] = field(default_factory=list)

    def check(self, weights: Weights, completions: list[Completion]) -> None:
        """Count answers, and those that no version would have given."""
        self.asked += len(completions)
        self.wrong += weights.num_wrong(completions)

    def expect(self, *, holds: bool, otherwise: str) -> None:
        """Note what should have been and was not."""
        if not holds:
            self.unexpected.append(otherwise)


def engine_killed(times: int, folder: Path) -> Outcomes:
    """The engine is killed at some moment of an update by `disk`: it comes back and takes the version."""
    pair, outcomes = Pair(folder, "disk"), Outcomes()
    pair.publish()
    for _ in track(range(times), "engine killed in an update"):
        delay = random.uniform(0, 0.05)
        (pid,) = pair.engine.pids
        killer = subprocess.Popen(["sh", "-c", f"sleep {delay:.3f}; kill -9 {pid}"])
        began = time.monotonic()
        pair.publish()
        killer.wait()
        try:
            completions = pair.ask()
        except EngineError:  # killed under these requests: a run makes them again
            completions = pair.ask()
        outcomes.check(pair.weights, completions)
        outcomes.seconds.append(time.monotonic() - began)
        outcomes.sentences.add("started again on the last verified version, which it proves, and takes the new one")
    pair.close()
    return outcomes


def replica_killed(times: int, folder: Path) -> Outcomes:
    """One replica of two is killed, while it generates and in an update by `disk` in turn: the other goes on, and it is
    back on the same version."""
    two, outcomes = Two(folder, "disk"), Outcomes()
    two.publish()
    for turn in track(range(times), "one replica of two killed"):
        asking, in_update = Asking(two), bool(turn % 2)
        time.sleep(random.uniform(0.1, 0.4))
        killer = threading.Timer(random.uniform(0, 0.05) * in_update, two.kill, [random.randrange(2)])
        began = time.monotonic()
        killer.start()
        if in_update:
            two.publish()
        killer.join()
        time.sleep(0.5)  # until it is found by those who ask
        held = two.thread.call(two.engine.held(), START_S, "both engines")
        outcomes.seconds.append(time.monotonic() - began)
        meanwhile = [at for at, _ in asking.answered if at > began]
        time.sleep(0.2)
        outcomes.expect(holds=bool(meanwhile), otherwise="nobody answered meanwhile")
        outcomes.expect(holds=held is not None and held.step == two.step, otherwise=f"they hold {held}")
        outcomes.expect(holds=len(two.engine.each) == 2, otherwise="one is out of service")
        _note_answers(asking, outcomes, two.weights)
        outcomes.sentences.add("started again on the last verified version, while the other answers")
    two.close()
    return outcomes


def replica_killed_without_files(times: int, folder: Path) -> Outcomes:
    """One replica of two is killed while it generates, under `broadcast`, where no file holds its weights: the other
    goes on, and both have the next version, which comes whole over a new group."""
    two, outcomes = Two(folder, "broadcast"), Outcomes()
    two.publish()
    for _ in track(range(times), "one replica of two killed under broadcast"):
        asking = Asking(two)
        time.sleep(random.uniform(0.1, 0.4))
        began = time.monotonic()
        two.kill(random.randrange(2))
        time.sleep(0.5)
        two.publish()
        outcomes.seconds.append(time.monotonic() - began)
        held = two.thread.call(two.engine.held(), START_S, "both engines")
        outcomes.expect(holds=held is not None and held.step == two.step, otherwise=f"they hold {held}")
        outcomes.expect(holds=len(two.engine.each) == 2, otherwise="one is out of service")
        _note_answers(asking, outcomes, two.weights)
        outcomes.sentences.add("out of service until the next version, while the other answers")
    two.close()
    return outcomes


def _note_answers(asking: Asking, outcomes: Outcomes, weights: Weights) -> None:
    """Every request must have been answered, and once; of the answers 64 by chance are checked."""
    try:
        completions = asking.stop()
        outcomes.check(weights, random.sample(completions, min(64, len(completions))))
    except EngineError as error:
        outcomes.unexpected.append(str(error))


def disk_full(times: int, folder: Path) -> Outcomes:
    """There is no room for a version's files: an error; the engine keeps the old version."""
    pair, outcomes = Pair(folder, "disk"), Outcomes()
    pair.publish()
    free = resource.getrlimit(resource.RLIMIT_FSIZE)
    for _ in track(range(times), "no room for the files"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (random.randrange(1, 300_000), free[1]))
        began = time.monotonic()
        try:
            pair.publish()
            outcomes.unexpected.append("it could be published")
        except SlipstreamError as error:
            outcomes.sentences.add(" ".join(str(error).split()[1:]))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, free)
        outcomes.seconds.append(time.monotonic() - began)
        completions = pair.ask()
        outcomes.check(pair.weights, completions)
        held = {span.version for completion in completions for span in completion.versions}
        outcomes.expect(holds=f"0.{pair.step}" not in held, otherwise=f"the engine answers as {held}")
        left = [path.name for path in (folder / "weights-disk").iterdir() if path.name.startswith(".")]
        outcomes.expect(holds=not left, otherwise=f"left behind: {left}")
        pair.publish()
    pair.close()
    return outcomes


def nobody_joins(times: int, folder: Path) -> Outcomes:
    """The engine never comes to the group of `broadcast`: an error at the deadline, which is 2 s here."""
    pair, outcomes = Pair(folder, "disk"), Outcomes()
    pair.publish()
    for _ in track(range(times), "nobody joins the group"):
        bridge = pair.to("broadcast", GROUP_TIMEOUT_S)
        began = time.monotonic()
        try:
            bridge.publisher.publish(pair.weights.of(1).items(), 1, 0, lambda _: None)
            outcomes.unexpected.append("it could be sent")
        except WeightsError as error:
            outcomes.sentences.add(str(error).split(":")[0])
        outcomes.seconds.append(time.monotonic() - began)
        bridge.publisher.close()
        outcomes.check(pair.weights, pair.ask())
    pair.close()
    return outcomes


def wrong_version(times: int, folder: Path) -> Outcomes:
    """The ticket tells of other weights than the files hold: an error, and no answer until a version is proved."""
    pair, outcomes = Pair(folder, "disk"), Outcomes()
    pair.publish()

    def spoil(ticket: Ticket) -> Ticket:
        name = random.randrange(len(ticket.parameters))
        parameters = tuple(
            msgspec.structs.replace(p, fingerprint=f"{int(p.fingerprint, 16) ^ 1:016x}") if i == name else p
            for i, p in enumerate(ticket.parameters)
        )
        version = msgspec.structs.replace(ticket.version, digest=digest(parameters))
        return msgspec.structs.replace(ticket, version=version, parameters=parameters)

    for _ in track(range(times), "another version announced"):
        began = time.monotonic()
        try:
            pair.publish(spoil)
            outcomes.unexpected.append("it was accepted")
        except WeightsError as error:
            outcomes.sentences.add(" ".join(word for word in str(error).split() if "." not in word)[:90])
        outcomes.seconds.append(time.monotonic() - began)
        try:
            pair.ask()
            outcomes.unexpected.append("it answered before anything was proved")
        except EngineError:
            pass
        pair.publish()
        outcomes.check(pair.weights, pair.ask())
    pair.close()
    return outcomes


def trainer_killed(times: int, folder: Path) -> Outcomes:
    """The trainer is killed at some moment of publishing, by `disk` and `broadcast` in turn, while another process asks
    the engine: the engine ends by itself and leaves nothing."""
    weights, outcomes = None, Outcomes()
    for number in track(range(times), "trainer killed while it publishes"):
        place = folder / str(number)
        place.mkdir(parents=True)
        bridge = ("disk", "broadcast")[number % 2]
        shared = set(os.listdir("/dev/shm"))
        command = [sys.executable, __file__, "--trainer", bridge, str(place)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
            assert trainer.stdout is not None
            engine, socket = trainer.stdout.readline().split()
            weights = weights or Weights(place / "model")
            answered = asyncio.run(_ask_until_killed(trainer, socket, random.uniform(0.3, 1.0)))
        began = time.monotonic()
        while psutil.pid_exists(int(engine)) and time.monotonic() < began + TIMEOUT_S:
            time.sleep(0.01)
        outcomes.seconds.append(time.monotonic() - began)
        outcomes.sentences.add("the engine ends by itself")
        outcomes.expect(holds=not psutil.pid_exists(int(engine)), otherwise="the engine lives on")
        left = set(os.listdir("/dev/shm")) - shared
        outcomes.expect(holds=not left, otherwise=f"left in /dev/shm: {left}")
        outcomes.check(weights, answered)
        shutil.rmtree(place)
    return outcomes


async def _ask_until_killed(trainer: subprocess.Popen[str], socket: str, seconds: float) -> list[Completion]:
    """Everything that the engine answers while its trainer publishes, and after it was killed."""
    client = EngineClient(socket, is_alive=lambda: True, describe=lambda: "the engine")
    answered: list[Completion] = []
    killed_at = time.monotonic() + seconds
    try:
        while time.monotonic() < killed_at + 5:
            if trainer.returncode is None and time.monotonic() >= killed_at:
                trainer.send_signal(signal.SIGKILL)
                trainer.wait()
            requests = [
                GenerateRequest(f"{len(answered)}-{i}", p, SamplingParams(max_tokens=16), seed=i, timeout_s=2)
                for i, p in enumerate(PROMPTS)
            ]
            completions = await asyncio.gather(*(client.generate(request) for request in requests))
            answered += [completion for completion in completions if completion.finish_reason != "abort"]
    except EngineError:
        if trainer.returncode is None:
            trainer.send_signal(signal.SIGKILL)
            trainer.wait()
    finally:
        await client.close()
    return answered


def be_the_trainer(bridge: str, folder: Path) -> None:
    """The process that is killed: publishes versions for ever, as fast as it can."""
    pair = Pair(folder, bridge)
    pair.publish()
    print(*pair.engine.pids, *pair.engine.sockets, flush=True)
    while True:
        pair.publish()


FAULTS = {
    "engine-killed": engine_killed,
    "replica-killed": replica_killed,
    "replica-killed-without-files": replica_killed_without_files,
    "trainer-killed": trainer_killed,
    "disk-full": disk_full,
    "nobody-joins": nobody_joins,
    "wrong-version": wrong_version,
}


def main() -> int:
    """Provoke them all and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--trainer", nargs=2, metavar=("BRIDGE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trainer:
        be_the_trainer(options.trainer[0], Path(options.trainer[1]))
    random.seed(0)
    lines, bad = [], False
    for name in options.faults:
        with tempfile.TemporaryDirectory() as folder:
            outcomes = FAULTS[name](options.times, Path(folder))
        seconds = outcomes.seconds
        doc = " ".join((FAULTS[name].__doc__ or "").split()).rstrip(".")
        lines.append(
            f"| {doc} | {len(seconds)} | {statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f}) "
            f"| {outcomes.asked} | {outcomes.wrong} | {len(outcomes.unexpected)} |"
        )
        print(name, *sorted(outcomes.sentences)[:3], *outcomes.unexpected[:5], sep="\n  ", file=sys.stderr)
        bad |= bool(outcomes.wrong or outcomes.unexpected)
    print("| fault and outcome | times | s until it is clear | answers | wrong | otherwise |")
    print("|---|---|---|---|---|---|")
    print("\n".join(lines))
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
