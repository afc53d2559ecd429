"""Small real runs of SFT in a queue of their own."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.config import load_config
from slipstream.processes import launchers
from slipstream.processes.identity import is_alive
from slipstream.service.local import Local
from slipstream.service.preflight import Preflight
from slipstream.service.providers import all_providers
from slipstream.service.records import ACTIVE, Need
from slipstream.service.runs import LocalRuns
from slipstream.service.store import Store
from slipstream.service.submission import submit
from tests.waiting import until

from .made import ESTIMATE

RUN = """
evaluation = false
[model]
path = "{model}"
[data]
path = "{data}"
[algorithm]
kind = "sft"
[training]
steps = {steps}
prompts_per_batch = 4
[run]
threads = 1
"""
GRPO = f"""
evaluation = false
[model]
path = "{{model}}"
[environment]
name = "{Path(__file__).parents[1] / "system/letters.py"}"
settings = {{{{parity = true}}}}
reward_timeout_s = 60
[algorithm]
kind = "grpo"
group_size = 4
[training]
steps = {{steps}}
prompts_per_batch = 4
learning_rate = 1e-3
[weights]
probe_tasks = 2
[run]
threads = 1
"""
ENDS_S = 240.0
CPU_NEED = Need(0)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return new_model(folder, hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, context_length=64)


@pytest.fixture
def place(tmp_path, monkeypatch, model):
    """A folder with a run file, and an empty queue. Nothing of its runs outlives the test."""
    monkeypatch.setenv("SLIPSTREAM_STATE", str(tmp_path / "state"))
    for name in ("SLIPSTREAM_SERVICE", "SLIPSTREAM_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launchers, "popen", subprocess.Popen)
    monkeypatch.chdir(tmp_path)
    made = Place(tmp_path, model)
    made.run_file()
    yield made
    made.end()


class Place:
    template = RUN

    def __init__(self, folder, model):
        self.folder, self.model = folder, model
        with (folder / "data.jsonl").open("w") as file:
            for number in range(64):
                talk = [{"role": "user", "content": f"{number}"}, {"role": "assistant", "content": f"{number}"}]
                file.write(json.dumps({"messages": talk}) + "\n")
        self.store, self.provider = Store(folder / "state"), Local()
        self.runs = LocalRuns(self.store, providers={**all_providers(), "local": self.provider}, folder=folder / "runs")

    def run_file(self, steps=5, name="run.toml", more=""):
        path = self.folder / name
        path.write_text(self.template.format(model=self.model, data=self.folder / "data.jsonl", steps=steps) + more)
        return path

    def submit(self, name="run", steps=5, need=CPU_NEED, owner="", ticks=True, store="", resume=False, more=""):
        """Queue a run without planning it first."""
        loaded = load_config(self.run_file(steps, f"{name}.toml", more))
        found = Preflight(need, ESTIMATE, steps)
        runs = (self.folder / "runs").absolute()
        _, record = submit(
            self.store, loaded, name, lambda *_: found, owner=owner, runs=runs, resume=resume, address=store
        )
        if ticks:
            self.runs.keep_going()
        return record.id

    def record(self, name):
        return self.store.find(name)[1]

    def folder_of(self, name):
        return self.store.find(name)[0]

    def until(self, name, *states, timeout_s=ENDS_S, ticks=True):
        """Wait for one of these states; the record."""

        def is_there():
            if ticks:
                self.runs.keep_going()
            record = self.record(name)
            if record.has_ended and record.state not in states:
                raise AssertionError(f"{record.state}: {record.reason}\n{self.output(name)}")
            return record if record.state in states else None

        return until(is_there, timeout_s)

    def output(self, name):
        return self.runs.log(name, 0).data.decode()

    def end(self):
        for _, record in self.store.records():
            for handle in (record.handle, record.worker):
                if handle is not None and handle.host == socket.gethostname() and is_alive(handle):
                    os.kill(handle.pid, signal.SIGKILL)
        here = [(f, r) for f, r in self.store.records() if r.state in ACTIVE and r.to == "local"]
        until(lambda: not any(self.provider.poll(f, r) for f, r in here))

    def serve(self, files=0, **environment):
        return Served(self.folder, environment, files=files)


class Served:
    """`slipstream serve` in a process of its own, on a free port."""

    def __init__(self, folder, environment, host="127.0.0.1", files=0):
        """With `files` open files at most."""
        limited = ["prlimit", f"--nofile={files}"] if files else []
        command = [*limited, sys.executable, "-m", "slipstream.cli", "serve", "--port", "0", "--host", host]
        self.log = folder / f"serve-{time.monotonic_ns()}.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command, cwd=folder, env={**os.environ, **environment}, stdout=output, stderr=output
            )
        until(lambda: "service: " in self.log.read_text() or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text()
        self.url = self.log.read_text().split()[1]
        self.client = httpx.Client(base_url=self.url, timeout=60)
        until(self._answers)

    def _answers(self):
        try:
            return self.client.get("/v1/health").status_code in (200, 401, 403)
        except httpx.TransportError:
            return False

    def kill(self, number=signal.SIGKILL):
        self.process.send_signal(number)
        self.process.wait(30)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.close()
        if self.process.poll() is None:
            self.kill()
