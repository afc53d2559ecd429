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
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil
from fault_engines import GROUP_TIMEOUT_S, PROMPTS, START_S, TIMEOUT_S, Asking, Pair, Two, Weights
from rich.progress import track

from benchmarks.event_loop import call
from benchmarks.weight_sync.process_memory import pids_of
from slipstream.errors import EngineError, SlipstreamError, WeightsError
from slipstream.inference.client import EngineClient
from slipstream.records import Completion, GenerateRequest, SamplingParams, Ticket
from slipstream.weights.fingerprint import digest


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
        (pid,) = pids_of(pair.engine)
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
        held = call(two.thread, two.engine.held(), START_S, "both engines")
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
        held = call(two.thread, two.engine.held(), START_S, "both engines")
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
    print(*pids_of(pair.engine), *pair.engine.sockets, flush=True)
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
