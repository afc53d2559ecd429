"""Engines as servers, started as users start them."""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil

from slipstream.inference.lending import TOKEN_VARIABLE
from tests.waiting import WAIT_S, until

TOKEN = "the token of these servers"
PORT = 29511
DYING = Path(__file__).with_name("dying")


class Server:
    """One server; `lines` are those of a run file."""

    def __init__(self, model, prefix=(), host="", port=PORT, inference_port=0, dies_in="", **options):
        self.arguments, self.options = (model, prefix, host), {"port": port, **options}
        where = ("--control", f"{host}:{port}") if host else ("--control", f"unix:{options.pop('socket')}")
        given = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if host:
            environment |= {TOKEN_VARIABLE: TOKEN}
        if dies_in:
            path = os.pathsep.join([str(DYING), environment["PYTHONPATH"]])
            environment |= {"DIES_IN": dies_in, "PYTHONPATH": path}
        command = [*prefix, sys.executable, "-m", "slipstream.cli", "engine", str(model), *where, *given]
        command += ["--port", str(inference_port)]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self.log = []
        threading.Thread(target=self._follow, daemon=True).start()
        self.lines = []
        while line := self.process.stdout.readline():
            self.lines.append(line.rstrip())
            if line.startswith(("token_variable", 'url = "unix')):
                break
        assert self.lines, "".join(self.log)
        self.url = next(line for line in self.lines if line.startswith("url")).split('"')[1]

    def _follow(self):
        for line in self.process.stderr:
            self.log.append(line)
            sys.stderr.write(line)

    @property
    def inference(self):
        """The address for clients of OpenAI's API, with `/v1`."""
        return self.lines[0].split()[2].removesuffix(";")

    @property
    def setting(self):
        token = f', token_variable = "{TOKEN_VARIABLE}"' if self.url.startswith("http") else ""
        return f'{{url = "{self.url}"{token}}}'

    def end(self):
        """As its user ends it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.terminate()
        try:
            return self.process.wait(WAIT_S)
        finally:
            self.process.kill()


@contextlib.contextmanager
def server(*arguments, **options):
    started = Server(*arguments, **options)
    try:
        yield started
    finally:
        started.end()


def setting_of(*servers):
    """The option with them."""
    return ("--inference.servers", f"[{', '.join(each.setting for each in servers)}]")


def ended(process, within_s=200):
    return until(lambda: process.poll() is not None, within_s)
