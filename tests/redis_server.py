"""A Redis server for tests: `redis-server` on PATH, beside this Python or in its packages, on a free port. It has a
password, as any user of this machine can connect to it."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

REQUIRE = "SLIPSTREAM_REQUIRE_REDIS"
START_S = 60.0
PORTS = range(20_000, 30_000)
"""Below those that the system gives to whoever asks for any port, so that nobody else gets one by chance."""
VARIABLE = "SLIPSTREAM_TEST_REDIS_PASSWORD"
PASSWORD = os.environ.setdefault(VARIABLE, secrets.token_hex(16))
"""Of all servers of this process and of those that it starts."""


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
        self.start(may_move=port is None)

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self, may_move=False):
        """Returns when it can be asked. Another process may have got the port meanwhile: waits until it is free again,
        or takes another one."""
        deadline = time.monotonic() + START_S
        while not self._starts(deadline):
            assert time.monotonic() < deadline, "redis-server did not start"
            time.sleep(0.1)
            if may_move:
                self.port = free_port()

    def _starts(self, deadline):
        settings = self.folder / "redis.conf"  # a command line can be read by anybody
        settings.touch(mode=0o600)
        settings.write_text(f"requirepass {PASSWORD}\n")
        program = [find_or_skip(), settings, "--bind", "127.0.0.1", "--port", str(self.port), "--dir", self.folder]
        if "--save" not in self.options:
            program += ["--save", "", "--appendonly", "no"]
        with (self.folder / "redis.log").open("ab") as log:
            begin = log.seek(0, os.SEEK_END)
            self.process = subprocess.Popen([*program, *self.options], stdout=log, stderr=log)
        while True:
            has_ended = self.process.poll() is not None
            said = (self.folder / "redis.log").read_bytes()[begin:]
            if b"Ready to accept connections" in said:
                return True
            if has_ended:
                assert b"in use" in said, said.decode(errors="replace")
                return False
            if time.monotonic() > deadline:
                self.end()
                return False
            time.sleep(0.01)

    def end(self, number=signal.SIGKILL):
        self.process.send_signal(number)
        if number not in (signal.SIGSTOP, signal.SIGCONT):
            self.process.wait(START_S)


def keys_at(server):
    """Names of all keys of a server."""
    command = [find("redis-cli"), "-p", str(server.port), "keys", "*"]
    environment = {**os.environ, "REDISCLI_AUTH": PASSWORD}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout.split()


def free_port():
    while True:
        port = secrets.choice(PORTS)  # not `random`, which tests seed alike in each worker
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
