"""Crash matrix and freeze matrix: runs whose processes are killed (SIGKILL) or stopped (SIGSTOP) at random moments.

    python benchmarks/crashes.py [--runs 20] [--faults 5] [--kind kill|freeze] [--seed 0]

Each run is GRPO with real vLLM on this CPU, asynchronous (staleness 1), over a real Redis server without persistence:
supervisor, trainer, orchestrator, engine and Redis are processes of their own. A fault hits one of the five, while the
processes start, right after a version is announced, a checkpoint begins or a row of metrics is written, or at any
moment. After the death of the supervisor the same command is given again; Redis is started again, and is empty then.
A frozen Redis or supervisor is woken once the run has named it, or after two minutes.

Each run must end with exit code 0 and the asked number of steps, its ledger balanced and `slipstream verify` content;
no process, key in Redis, temporary file or shared memory may be left. Prints a Markdown table of faults by process and
moment, with the time until the run has made a further step, and one line of JSON for each run on standard error; the
exit code is 1 when anything was not as it must be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from rich.progress import track

from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.runlog import read_events, read_exit, read_metrics
from slipstream.runlog.ledger import balance

LETTERS = Path(__file__).parents[1] / "tests" / "system" / "letters.py"
RUN_FILE = """
evaluation = false
[model]
path = "{model}"
[environment]
name = "{letters}"
settings = {{ coin = true }}
[algorithm]
kind = "grpo"
group_size = 4
[training]
steps = {steps}
prompts_per_batch = 4
learning_rate = 1e-3
staleness = 1
[weights]
bridge = "disk"
probe_tasks = 2
[inference]
max_restarts = 1000
[run]
checkpoint_every = 3
streams = "redis"
max_restarts = 1000
threads = 1
[redis]
url = "{url}"
password_variable = "REDISCLI_AUTH"
"""
os.environ.setdefault("REDISCLI_AUTH", secrets.token_hex(16))  # where redis-cli looks, too
PARTS = ("supervisor", "trainer", "orchestrator", "engine", "redis")
MOMENTS = ("start", "publish", "checkpoint", "step", "any")
TIMEOUT_S, WOKEN_AFTER_S, POLL_S = 600.0, 120.0, 0.002


def program(name: str) -> str:
    """Path of a program of Redis: on PATH, or beside this Python."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        raise SystemExit(f"{name} is not here: install it, or Slipstream with its extra `dev`")
    return found


class Redis:
    """A server on the loopback interface that keeps nothing."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self._log, self._settings = folder / "redis.log", folder / "redis.conf"
        self._settings.touch(mode=0o600)
        self._settings.write_text(f"requirepass {os.environ['REDISCLI_AUTH']}\n")
        self.start()

    def start(self) -> None:
        """Start it, again on the same port."""
        command = [program("redis-server"), self._settings, "--bind", "127.0.0.1", "--port", str(self.port)]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen([*command, "--save", "", "--appendonly", "no"], stdout=log, stderr=log)

    def keys(self) -> list[str]:
        """What it holds."""
        command = [program("redis-cli"), "-p", str(self.port), "keys", "*"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.split()


@dataclass
class Fault:
    """One process that was killed or stopped."""

    part: str
    moment: str
    began: float
    step: int = 0
    """Steps made before."""
    lineage: int = 0
    """The attempt that made them."""
    recovered_s: float = 0.0
    """Until a further step was made, by the next attempt where one follows, or the run had ended."""
    named_s: float = 0.0
    """Until the run had said who is stopped."""


@dataclass
class Result:
    """One run and its faults."""

    faults: list[Fault] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    restarts: int = 0


class Run:
    """The command, and its processes by their parts."""

    def __init__(self, work: Path, model: Path, steps: int) -> None:
        self.folder, self.log, self.temporary = work / "run", work / "output.log", work / "tmp"
        for folder in (work / "redis", self.temporary):
            folder.mkdir(parents=True)
        self.redis, self.steps = Redis(work / "redis"), steps
        self.run_file = work / "run.toml"
        self.run_file.write_text(
            RUN_FILE.format(model=model, letters=LETTERS, steps=steps, url=f"redis://127.0.0.1:{self.redis.port}/0")
        )
        self.seen: dict[int, psutil.Process] = {}
        self.start()

    def start(self) -> None:
        """Give the command."""
        command = [sys.executable, "-m", "slipstream.cli", "train", str(self.run_file), "--plain", "--resume=auto"]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, "--run.folder", str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)},
                start_new_session=True,
            )

    def family(self) -> list[psutil.Process]:
        """All processes of the run that are alive; each is remembered."""
        try:
            root = psutil.Process(self.process.pid)
            found = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        self.seen |= {each.pid: each for each in found}
        return found

    def pid_of(self, part: str) -> int | None:
        """The part's process now."""
        if part == "redis":
            return self.redis.process.pid
        if part == "supervisor":
            return self.process.pid
        words = {
            "trainer": "slipstream.cli trainer",
            "orchestrator": "slipstream.launch.parts.child",
            "engine": "slipstream.inference.plugin.main",
        }
        for each in self.family():
            try:
                if words[part] in " ".join(each.cmdline()):
                    return each.pid
            except psutil.Error:
                continue
        return None

    @property
    def reached(self) -> tuple[int, int]:
        """Attempt and step of the newest row of metrics."""
        rows = read_metrics(self.folder) if self.folder.exists() else []
        return (int(rows[-1]["lineage"]), int(rows[-1]["step"])) if rows else (0, -1)

    @property
    def step(self) -> int:
        """The step of the newest row of metrics."""
        return self.reached[1]

    def size(self, name: str) -> int:
        """Of a file in the run folder."""
        try:
            return (self.folder / name).stat().st_size
        except OSError:
            return 0

    def num_events(self, kind: str) -> int:
        """Events of that kind so far."""
        try:
            return (self.folder / "events.jsonl").read_bytes().count(f'"kind":"{kind}"'.encode())
        except OSError:
            return 0

    def text(self) -> str:
        """What the command has printed, and its warnings."""
        return self.log.read_text(errors="replace")


def wait_until(condition: Callable[[], object], timeout_s: float, run: Run) -> bool:
    """Whether it came true before the command ended."""
    until = time.monotonic() + timeout_s
    while not condition():
        if run.process.poll() is not None or time.monotonic() > until:
            return False
        time.sleep(POLL_S)
    return True


def wait_for_moment(run: Run, moment: str, chance: random.Random) -> bool:
    """Until the moment; False where it does not come."""
    if moment == "start":  # of the command, or of what the last fault has ended
        time.sleep(chance.uniform(0.5, 15.0))
        return True
    reached = run.step
    wait_until(lambda: run.step > reached, TIMEOUT_S, run)  # in the middle of its work
    if moment == "any":
        time.sleep(chance.uniform(0.0, 2.0))
        return True
    looks: dict[str, Callable[[], object]] = {
        "publish": lambda: run.num_events("publish"),
        "checkpoint": lambda: {path.name for path in run.folder.glob("checkpoints/*")},
        "step": lambda: run.size("metrics.jsonl"),
    }
    before = looks[moment]()
    came = wait_until(lambda: looks[moment]() != before, 60.0, run)
    time.sleep(chance.uniform(0.0, 0.05))
    return came


def strike(run: Run, kind: str, part: str, moment: str, chance: random.Random) -> Fault | None:
    """One fault; None where the run ended before, or the moment did not come."""
    if not wait_for_moment(run, moment, chance) or not wait_until(lambda: run.pid_of(part), TIMEOUT_S, run):
        return None
    pid, fault = run.pid_of(part), Fault(part, moment, time.monotonic())
    if pid is None or run.process.poll() is not None:
        return None
    run.family()
    os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    if kind == "freeze":
        fault.named_s = wait_for_name(run, part, pid, fault.began)
    elif part == "redis":
        run.redis.process.wait(30)
        run.redis.start()
    elif part == "supervisor":
        run.process.wait(30)
        psutil.wait_procs([*run.seen.values()], timeout=30)
        run.start()
    fault.lineage, fault.step = run.reached
    return fault


def wait_for_recovery(run: Run, faults: list[Fault]) -> None:
    """Until a step after each of the faults was made, or the run has ended."""
    for fault in faults:
        while not fault.recovered_s:
            run.family()
            is_over = run.process.poll() is not None or time.monotonic() > fault.began + TIMEOUT_S
            lineage, step = run.reached
            # Batches that were made before may still be trained on; Redis may be back before it is missed.
            goes_on = (fault.part in ("engine", "redis") or fault.step < 0) and step > fault.step + 2
            if lineage > fault.lineage or goes_on or is_over:
                fault.recovered_s = time.monotonic() - fault.began
            time.sleep(0.05)


def wait_for_name(run: Run, part: str, pid: int, began: float) -> float:
    """Seconds until the run has named who is stopped; wakes who would stay so."""
    words = {
        "engine": "said nothing",
        "orchestrator": f"the orchestrator, process {pid}",
        "trainer": f"the trainer, process {pid}, is stopped",
        "supervisor": f"the supervisor, process {pid}",
        "redis": f"127.0.0.1:{run.redis.port}",
    }
    num_before = said(run).count(words[part])
    wait_until(lambda: said(run).count(words[part]) > num_before, WOKEN_AFTER_S, run)
    named = time.monotonic() - began
    if part in ("supervisor", "redis"):
        os.kill(pid, signal.SIGCONT)
    return named


def said(run: Run) -> str:
    """All that the run has said: its output and its events."""
    events = [str(event.get("reason", event.get("message", ""))) for event in read_events(run.folder)]
    return "\n".join([run.text(), *events])


def check_end(run: Run, result: Result, shared_before: set[str]) -> None:
    """Note what is not as it must be after the run's end."""
    wrong = result.wrong
    try:
        code = run.process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        wrong.append("it did not end")
        run.process.kill()
        return
    report, found = read_exit(run.folder), balance(run.folder)
    result.restarts = report.restarts if report is not None else -1
    if code or report is None or (report.status, report.step) != ("finished", run.steps):
        wrong.append(f"exit code {code}: {run.text()[-600:]}")
    if found is None or found.num_open or found.num("trained") < run.steps * 4:
        wrong.append(f"the ledger: {found}")
    verify = [sys.executable, "-m", "slipstream.cli", "verify", str(run.folder)]
    checked = subprocess.run(verify, capture_output=True, text=True, timeout=300)
    if checked.returncode:
        wrong.append(f"verify: {checked.stdout[-300:]}{checked.stderr[-300:]}")
    _, alive = psutil.wait_procs([*run.seen.values()], timeout=20)
    if alive:
        wrong.append(f"left behind: {alive}")
    if left := sorted(path.name for path in run.temporary.iterdir()):
        wrong.append(f"temporary files: {left}")
    if left := left_in_shared_memory(shared_before):
        wrong.append(f"shared memory: {left}")
    if keys := run.redis.keys():
        wrong.append(f"keys in Redis: {keys}")


def left_in_shared_memory(before: set[str]) -> set[str]:
    """New names there that no process has mapped or open; those of others, who are at work beside, change."""
    folder, left = Path("/dev/shm"), set(os.listdir("/dev/shm")) - before
    for _ in range(2):  # a name is made an instant before it is mapped
        used = "".join(map(uses_of, psutil.pids()))
        left = {name for name in left if (folder / name).exists() and f"{folder / name}\n" not in used}
        if not left:
            break
        time.sleep(2.0)
    return left


def uses_of(pid: int) -> str:
    """Files that a process has mapped and open, a line each; none where it has ended."""
    found = ""
    with contextlib.suppress(OSError):
        found = Path(f"/proc/{pid}/maps").read_text()
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                found += f"{os.readlink(each)}\n"
    return found


def run_once(
    work: Path, model: Path, steps: int, plan: Iterator[tuple[str, str]], kind: str, num: int, seed: int
) -> Result:
    """One run with `num` faults from the plan."""
    chance, result, shared, began = random.Random(seed), Result(), set(os.listdir("/dev/shm")), time.monotonic()
    run = Run(work, model, steps)
    try:
        while len(result.faults) < num and run.process.poll() is None:
            part, moment = next(plan)
            if moment != "start":
                wait_for_recovery(run, result.faults)
            fault = strike(run, kind, part, moment, chance)
            if fault is not None:
                result.faults.append(fault)
        wait_for_recovery(run, result.faults)
        while run.process.poll() is None and time.monotonic() < began + 2 * TIMEOUT_S:
            run.family()
            time.sleep(0.1)
        check_end(run, result, shared)
    finally:
        for each in (*run.seen.values(),):
            if each.is_running() and each.pid != run.process.pid:
                each.kill()
        run.process.kill()
        run.redis.process.kill()
        run.redis.process.wait(30)
    result.seconds = time.monotonic() - began
    return result


def matrix(chance: random.Random, parts: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Pairs of part and moment without end: every pair once before any comes again."""
    while True:
        pairs = [(part, moment) for part in parts for moment in MOMENTS]
        chance.shuffle(pairs)
        yield from pairs


def table(faults: list[Fault], kind: str) -> str:
    """Markdown: number of faults by part and moment, and how long it took."""
    lines = [f"| {kind} | {' | '.join(MOMENTS)} | all | seconds to the next step: median (longest) |"]
    lines.append("|" + "---|" * (len(MOMENTS) + 3))
    for part in PARTS:
        own = [fault for fault in faults if fault.part == part]
        if not own:
            continue
        counts = [str(sum(fault.moment == moment for fault in own)) for moment in MOMENTS]
        times = [fault.recovered_s for fault in own]
        text = f"{statistics.median(times):.0f} ({max(times):.0f})"
        if kind == "freeze":
            text += f"; named after {statistics.median(f.named_s for f in own):.0f} ({max(f.named_s for f in own):.0f})"
        lines.append(f"| {part} | {' | '.join(counts)} | {len(own)} | {text} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--faults", type=int, default=5, help="in each run")
    parser.add_argument("--kind", choices=("kill", "freeze"), default="kill")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    plan, results = matrix(random.Random(arguments.seed), tuple(arguments.parts)), []
    with tempfile.TemporaryDirectory(prefix="crashes-") as name:
        shape = {"hidden_size": 32, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "context_length": 64}
        model = new_model(Path(name) / "model", **shape)
        for number in track(range(arguments.runs), "runs", disable=not sys.stderr.isatty()):
            work, seed = Path(name) / str(number), arguments.seed * 1000 + number
            made = run_once(work, model, arguments.steps, plan, arguments.kind, arguments.faults, seed)
            results.append(made)
            faults = [(each.part, each.moment, each.step, round(each.recovered_s, 1)) for each in made.faults]
            line = {"run": number, "s": round(made.seconds), "restarts": made.restarts, "faults": faults}
            print(json.dumps(line | {"wrong": made.wrong}), file=sys.stderr, flush=True)
    print(table([fault for result in results for fault in result.faults], arguments.kind))
    if any(result.wrong for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
