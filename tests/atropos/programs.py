"""Programs of `atroposlib` in tests: its interpreter, environments, and a real `run-api`."""

import json
import os
import shlex
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from slipstream.runlog import read_events

REQUIRE = "SLIPSTREAM_REQUIRE_ATROPOS"
LETTER = Path(__file__).with_name("environment_letter.py")
_FOLDER = Path(os.environ.get("SLIPSTREAM_ATROPOS", Path(__file__).parents[2] / ".venv/atropos"))


def interpreter():
    """The one that has atroposlib; the test is skipped where there is none."""
    path = _FOLDER / "bin/python"
    if not path.exists() and REQUIRE not in os.environ:
        pytest.skip(f"{path} is not there: make it with scripts/install.py --for-tests")
    return str(path)


class Programs:
    """Starts programs; none outlives the test."""

    def __init__(self, folder):
        self.folder = folder
        self._started = []

    def start(self, name, *arguments):
        variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        variables |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
        with open(self.folder / f"{name}.log", "w") as log:
            process = subprocess.Popen(
                [interpreter(), *map(str, arguments)],
                cwd=self.folder, env=variables, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self._started.append(process)
        return process

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def environment(self, command, *more, name="environment", verb="serve", program=LETTER):
        """An environment, by the command line that a run has printed."""
        words = shlex.split(command)
        arguments = words[words.index("serve") + 1 :]
        return self.start(name, program, verb, *arguments, *more)

    def run_api(self):
        """The address of a real `run-api`."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        module = "from atroposlib.cli.run_api import main; main()"
        self.start("run-api", "-c", module, "--host", "127.0.0.1", "--port", port)
        url = f"http://127.0.0.1:{port}"
        until(lambda: answers(url), 60)
        return url

    def end(self):
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait(30)


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer) is not None
    except OSError:
        return False


def until(condition, timeout_s=120.0):
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.1)
    return found


def entrance(folder):
    """The event in which a run tells where environments find it."""
    if not (folder / "events.jsonl").exists():
        return None
    return next(iter(read_events(folder, kinds=("atropos",))), None)


@pytest.fixture
def programs(tmp_path):
    interpreter()
    made = Programs(tmp_path)
    yield made
    made.end()
