"""Small runs: in this process with a scripted engine, or through the real command with a real one."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from benchmarks.scripted_engine import ScriptedEngine

from slipstream import records
from slipstream.cli import main
from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.config import load_config
from slipstream.data.chat_template import ChatTokenizer
from slipstream.errors import SlipstreamError
from slipstream.inference.replicas import EngineReplicas
from slipstream.launch.prepare import prepare
from slipstream.launch.run import train
from slipstream.processes import launchers
from slipstream.runlog import read_events, read_exit, read_metrics
from slipstream.trainer.learner import score
from slipstream.trainer.model.policy import PolicyModel
from slipstream.view import make_view
from slipstream.weights.model_files import read_model_folder

from ..fork_server import forked_by

LETTERS = Path(__file__).with_name("letters.py")
GRPO = """
[model]
path = "{model}"
[environment]
name = "{environment}"
reward_timeout_s = 60
[algorithm]
kind = "grpo"
group_size = 4
[training]
steps = 3
prompts_per_batch = 4
learning_rate = 1e-3
[weights]
probe_tasks = 2
[evaluation]
num_tasks = 8
[run]
threads = 1
"""


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return new_model(folder, hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, context_length=64)


@pytest.fixture
def run_file(model, tmp_path):
    return write_run_file(model, tmp_path)


def write_run_file(model, folder):
    """A GRPO run of three steps; `sft.toml` beside it is the same as SFT."""
    path = folder / "run.toml"
    text = GRPO.format(model=model, environment=LETTERS)
    path.write_text(text)
    sft = text.replace('kind = "grpo"\ngroup_size = 4', 'kind = "sft"').replace("reward_timeout_s = 60\n", "")
    path.with_name("sft.toml").write_text(sft)
    return path


class Scripted:
    """Runs with a scripted engine, and what they left. Log-probabilities are those of the published weights."""

    def __init__(self, model, run_file, folder):
        self.folder = folder
        self._run_file = run_file
        self._tokenizer = ChatTokenizer(model)
        self._first = {}
        """By configuration."""
        self._load = functools.lru_cache(4)(self._loaded)
        self._loading = threading.Lock()
        """transformers loads one model at a time."""
        self.engine = None
        self.engines = []
        """Where there are several, `engine` is all of them."""

    def say(self, text):
        """A completion's tokens."""
        messages = [records.Message("user", ""), records.Message("assistant", text)]
        sequence = self._tokenizer.training_tokens(messages)
        return [token for token, trained in zip(sequence.token_ids, sequence.mask, strict=True) if trained]

    def letter(self, prompt_ids, seed):
        """a or b, as chance will have it."""
        return self.say("ab"[seed % 2])

    def _loaded(self, location):
        """The model in this folder: read whole the first time, then a copy with the folder's weights."""
        weights, config = dict(read_model_folder(Path(location))), Path(location, "config.json").read_text()
        if config not in self._first:
            self._first[config] = PolicyModel.load(location, "float32")
        if weights.keys() != dict(self._first[config].network.named_parameters()).keys():
            return PolicyModel.load(location, "float32")
        model = copy.deepcopy(self._first[config])
        model.network.load_state_dict(weights, strict=False)  # what is tied has one name in the folder
        return model

    def _logprobs(self, location, request, tokens):
        given = request.prompt_ids
        sequence = records.Sequence([*given, *tokens], [False] * len(given) + [True] * len(tokens))
        if not tokens:
            return []
        with self._loading:
            model = self._load(location)
        scores = score(model, [sequence], request.sampling, micro_batch_tokens=256)
        return scores.logprobs[0].tolist()

    def run(
        self, *overrides, script=None, change=lambda engine: None, on_request=None, before=None, view=None,
        kind=ScriptedEngine, **how,
    ):  # fmt: skip
        """Train; returns how it ended. `change` sets what is to go wrong with each engine, `on_request` looks at each
        (engine, request), `before` is awaited with them; `view` shows the run; `how`: `resume`, `supervisor`."""

        def make_engine(plan, logs, on_event):
            options = {"max_restarts": plan.max_restarts, "on_event": on_event}
            self.engines = [kind(script or self.letter, self._logprobs, **options) for _ in plan.places]
            for engine in self.engines:
                change(engine)
                if on_request:
                    engine.on_request = functools.partial(on_request, engine)
                if before:
                    engine.generate = functools.partial(_generate, engine, before, engine.generate)
            several = len(self.engines) > 1
            self.engine = EngineReplicas(self.engines, num_places=64, on_event=on_event) if several else self.engines[0]
            return self.engine

        num_threads, prepared = torch.get_num_threads(), prepare(load_config(self._run_file, overrides))
        self.error = None
        try:
            train(prepared, self.folder, view or make_view("none"), make_engine=make_engine, **how)
        except SlipstreamError as error:
            self.error = error
        finally:
            torch.set_num_threads(num_threads)
        report = read_exit(self.folder)
        assert report.error == (type(self.error).__name__ if self.error else "")
        return report

    def finish(self, step, *overrides, **how):
        """A run that ends well at this step."""
        report = self.run(*overrides, **how)
        assert (report.status, report.step) == ("finished", step)
        return report

    def fail(self, how_it_ends, words, *overrides, **how):
        """A run that ends with (error, exit code), or with these and at a step, and says so."""
        report = self.run(*overrides, **how)
        assert (report.error, report.exit_code, report.step)[: len(how_it_ends)] == how_it_ends
        assert words in report.message
        return report

    @property
    def metrics(self):
        return read_metrics(self.folder)

    async def until_a_group_waits(self, step=None):
        """Until a group waits for a batch; one of this step's tasks."""
        found = "SELECT COUNT(*) FROM groups WHERE state = 'ready' AND id GLOB ?"
        async with asyncio.timeout(60):
            while True:
                with contextlib.closing(sqlite3.connect(self.folder / "ledger.sqlite")) as ledger:
                    if ledger.execute(found, ("*" if step is None else f"{step}.*",)).fetchone()[0]:
                        return
                await asyncio.sleep(0.02)

    def events(self, kind):
        return [event for event in read_events(self.folder) if event["kind"] == kind]


async def _generate(engine, before, generate, request):
    await before(engine, request)
    return await generate(request)


@pytest.fixture
def scripted(model, run_file, tmp_path):
    return Scripted(model, run_file, tmp_path / "run")


class Left:
    """A finished run that several tests look at, and may change: each finds it as it ended."""

    def __init__(self, model, folder, *options):
        self.folder, self._kept = folder / "run", folder / "kept"
        assert Scripted(model, write_run_file(model, folder), self.folder).run(*options).status == "finished"
        shutil.copytree(self.folder, self._kept, symlinks=True)

    def again(self):
        shutil.rmtree(self.folder)
        return shutil.copytree(self._kept, self.folder, symlinks=True)


def family_of(pid):
    """What a process has started, and what was forked for it; by id."""
    family, parents = {}, {pid}
    while parents:
        found = {each for parent in parents for each in forked_by({parent}) if _is_older(parent, each)}
        for parent in parents:
            with contextlib.suppress(psutil.NoSuchProcess):
                found |= {each.pid for each in psutil.Process(parent).children(recursive=True)}
        parents = found - family.keys()
        for each in parents:
            with contextlib.suppress(psutil.NoSuchProcess):
                family[each] = psutil.Process(each)
    return family


def _is_older(parent, child):
    """Whether these began in this order. In a long session ids are used again, and an earlier process of the id may
    have had something forked, whose id is a stranger's by now."""
    try:
        return psutil.Process(parent).create_time() <= psutil.Process(child).create_time()
    except psutil.NoSuchProcess:
        return not psutil.pid_exists(parent)


class Held:
    """A run with the task of `letters.py` that gets on slowly from the moment at which it has so many rows of metrics,
    and at full speed again after `go`: what a test does to it does not come after its end, however late the test is.

    `settings` are those of the environment, with `more` of them."""

    def __init__(self, folder, rows, more="coin = true"):
        self._go = Path(f"{folder}.go")
        held = f'metrics = "{folder}/metrics.jsonl", rows = {rows}, go = "{self._go}"'
        self.settings = ("--environment.settings", f"{{{more}, held = {{{held}}}}}")

    def go(self):
        self._go.touch()


def learned(folder):
    """What does not depend on when it was made."""
    names = ("train/", "reward/", "value/", "rollout/", "dropped/", "staleness/")
    return [{name: value for name, value in row.items() if name.startswith(names)} for row in read_metrics(folder)]


class Command:
    """`slipstream ...`, or another module (with first arguments), in a process of its own, and all that it starts."""

    def __init__(self, *arguments, cwd=None, module=("slipstream.cli",)):
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        self.process = launchers.popen(
            [sys.executable, "-m", *map(str, (*module, *arguments))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=cwd,
            start_new_session=True,
        )
        self._family = {}

    def children(self):
        """Every process it has started so far, also those that have sessions of their own; by id."""
        self._family |= family_of(self.process.pid)
        return self._family

    def engines(self):
        """The engine's processes that are alive."""
        return self.running("slipstream.inference.plugin.main")

    def running(self, module):
        """Those of its processes that run this module."""
        found = []
        for each in self.children().values():
            try:
                if module in " ".join(each.cmdline()):
                    found.append(each)
            except psutil.Error:
                continue
        return found

    def until(self, condition, timeout_s=400.0):
        """Wait for something while the command runs."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.children()
            if self.process.poll() is not None:
                raise AssertionError(f"the command ended with {self.process.returncode}: {self.process.stderr.read()}")
            assert time.monotonic() < deadline, "what was waited for did not come"
            time.sleep(0.05)

    def wait(self, timeout_s=500.0):
        """(exit code, standard output, standard error)."""
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err

    def ok(self, timeout_s=500.0):
        """Its standard output, once it has ended well."""
        code, out, err = self.wait(timeout_s)
        assert code == 0, err
        return out

    def left_behind(self, timeout_s=60.0):
        """Children that live on after the command's end."""
        _, alive = psutil.wait_procs(list(self._family.values()), timeout=timeout_s)
        return alive

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)
        for each in self.left_behind(15.0):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


@pytest.fixture
def command():
    """Starts commands; none of them outlives the test."""
    started = []

    def start(*arguments, **options):
        started.append(Command(*arguments, **options))
        return started[-1]

    yield start
    for each in started:
        each.end()


@pytest.fixture
def slipstream(capsys):
    """Runs a command here; (exit code, output, error)."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([*map(str, arguments)])
        return ended.value.code, *capsys.readouterr()

    return run


def kill_when(condition, work):
    """Do `work` in a forked process, which is killed as soon as `condition` holds."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            work()
        os._exit(1)
    try:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "the run has ended"
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def has_row(folder, step):
    """Whether a run has written the metrics of this step."""
    return (folder / "metrics.jsonl").is_file() and any(row["step"] == step for row in read_metrics(folder))


def kinds(folder):
    return [event["kind"] for event in read_events(folder)]
