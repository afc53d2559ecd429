"""A day in four minutes: 2,000 steps with a scripted engine, and what they leave in memory, descriptors and on disk.

    python benchmarks/soak.py [--steps 2000] [--staleness 1] [--streams memory]

Everything but vLLM is real: trainer, orchestrator, reward workers, publications, checkpoints, the run folder; under
`--streams files` batches and commands travel over files to an orchestrator in another thread. The engine answers at
once, with the log-probabilities of the weights that were published last. Every hundred steps this process's memory
(resident, after a garbage collection), its open files, its threads and the bytes of the run folder are noted.

From step 200 on the number of open files must be constant, memory may grow by less than 5 MB, and of the disk only the
logs and the ledger may grow. Prints a Markdown table and what the disk takes for each step, by file; the exit code is 1
when a bound is broken.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.scripted_engine import ScriptedEngine
from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.config import load_config
from slipstream.data.chat_template import ChatTokenizer
from slipstream.launch.parts import child, process
from slipstream.launch.prepare import prepare
from slipstream.launch.run import train
from slipstream.records import GenerateRequest, Message, Sequence
from slipstream.trainer.learner import score
from slipstream.trainer.model.policy import PolicyModel
from slipstream.view import make_view

EVERY, FROM, MEMORY_BOUND = 100, 200, 5e6
LETTERS = Path(__file__).parents[1] / "tests" / "system" / "letters.py"
RUN_FILE = """
evaluation = false
[model]
path = "{model}"
[environment]
name = "{letters}"
settings = {{ letters = "ab", size = 500 }}
[algorithm]
kind = "grpo"
group_size = 4
[training]
steps = {steps}
prompts_per_batch = 4
learning_rate = 1e-6
staleness = {staleness}
[weights]
bridge = "disk"
probe_tasks = 1
[run]
checkpoint_every = 50
streams = "{streams}"
threads = 1
max_steps_without_signal = 1000
"""


@dataclass
class Look:
    """What there is at a step."""

    step: int
    memory: int
    files: int
    threads: int
    disk: dict[str, int]
    """Bytes by file, or by folder of the run folder."""
    at: float


def look(step: int, folder: Path) -> Look:
    """What there is now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    own, disk = psutil.Process(), dict[str, int]()
    for path in folder.rglob("*"):
        if path.is_file():
            name = path.relative_to(folder).parts[0]
            disk[name] = disk.get(name, 0) + path.stat().st_size
    return Look(step, own.memory_info().rss, own.num_fds(), own.num_threads(), disk, time.monotonic())


class Engines:
    """Makes the run's engine: one letter of two, by the seed."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = ChatTokenizer(model)
        self._load = functools.lru_cache(4)(lambda location: PolicyModel.load(location, "float32"))

    def __call__(self, plan: Any, logs: Path, on_event: Any) -> ScriptedEngine:
        """See `EngineMaker`."""
        answers = [self._tokens(letter) for letter in "ab"]
        script = lambda prompt_ids, seed: answers[seed % 2]  # noqa: E731
        return ScriptedEngine(script, self._logprobs, max_restarts=plan.max_restarts, on_event=on_event)

    def _tokens(self, text: str) -> list[int]:
        made = self._tokenizer.training_tokens([Message("user", ""), Message("assistant", text)])
        return [token for token, trained in zip(made.token_ids, made.mask, strict=True) if trained]

    def _logprobs(self, location: str, request: GenerateRequest, tokens: list[int]) -> list[float]:
        given = request.prompt_ids
        sequence = Sequence([*given, *tokens], [False] * len(given) + [True] * len(tokens))
        scores = score(self._load(location), [sequence], request.sampling, micro_batch_tokens=256)
        return scores.logprobs[0].tolist()


class Beside(process.OrchestratorProcess):
    """The orchestrator in a thread of this process, so that its engine can be scripted."""

    def _launch(self) -> Any:
        run = self._run
        config, planned = run.prepared.loaded.config.model_dump_json(), run.config.model_dump_json()
        tasks, folder = process.tasks_of(run.prepared), str(run.folder.absolute())
        settings = process.Settings(config, planned, tasks, folder, run.log.lineage, run.stages.began)
        sleeper = subprocess.Popen(["sleep", "100000"], stdin=-1, start_new_session=True)

        def serve() -> None:
            try:
                child.carry_out(settings, run.prepared, run.make_engine)
            finally:
                sleeper.terminate()

        threading.Thread(target=serve, name="beside", daemon=True).start()
        return sleeper


class Looking:
    """A view of the run that looks every hundred steps."""

    def __init__(self, folder: Path) -> None:
        self._view, self._folder, self.looks = make_view("none"), folder, list[Look]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Progress`."""
        if step % EVERY == 0 and step:
            self.looks.append(look(step, self._folder))


def problems(looks: list[Look]) -> list[str]:
    """What is not as it must be, from step 200 on."""
    first, *others = [each for each in looks if each.step >= FROM]
    found: list[str] = []
    # In the middle of a checkpoint or a publication one file or two are open for a moment.
    usual = sorted(each.files for each in (first, *others))
    if usual[len(usual) // 2] > first.files or others[-1].files > first.files:
        found.append(f"open files: {[each.files for each in (first, *others)]}")
    if (more := max(each.memory for each in others) - first.memory) >= MEMORY_BOUND:
        found.append(f"memory grew by {more / 1e6:.1f} MB")
    for name in others[-1].disk:
        is_log = name.endswith(".jsonl") or name == "logs"
        grown = others[-1].disk[name] - first.disk.get(name, 0)
        if grown > 200_000 and not is_log and not name.startswith("ledger"):
            found.append(f"{name} grew by {grown:,} bytes")
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="at least 300")
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--streams", choices=("memory", "files"), default="memory")
    arguments = parser.parse_args()
    process.OrchestratorProcess._launch = Beside._launch  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        work = Path(name)
        shape = {"hidden_size": 32, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "context_length": 64}
        model = new_model(work / "model", **shape)
        run_file, folder = work / "run.toml", work / "run"
        options = {"steps": arguments.steps, "staleness": arguments.staleness, "streams": arguments.streams}
        run_file.write_text(RUN_FILE.format(model=model, letters=LETTERS, **options))
        view, began = Looking(folder), time.monotonic()
        train(prepare(load_config(run_file, ())), folder, view, make_engine=Engines(model))
        seconds, looks = time.monotonic() - began, view.looks
    print("| step | resident MB | open files | threads | run folder MB | s a hundred steps |")
    print("|---|---|---|---|---|---|")
    for before, each in zip([None, *looks], looks, strict=False):
        took = f"{each.at - before.at:.1f}" if before else ""
        memory, disk = each.memory / 1e6, sum(each.disk.values()) / 1e6
        print(f"| {each.step} | {memory:.1f} | {each.files} | {each.threads} | {disk:.2f} | {took} |")
    first, last = next(each for each in looks if each.step >= FROM), looks[-1]
    rates = {
        name: (size - first.disk.get(name, 0)) / (last.step - first.step)
        for name, size in last.disk.items()
        if size - first.disk.get(name, 0) > 0
    }
    print(f"\n{seconds:.0f} s; bytes a step: " + ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items()))
    if found := problems(looks):
        print("; ".join(found), file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
