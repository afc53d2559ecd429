"""Runs that wait for nodes, and real agents."""

import contextlib
import os
import signal
import subprocess
import sys

from slipstream.nodes.launcher import Nodes
from slipstream.nodes.protocol import TOKEN_VARIABLE
from tests.nodes import many_agents as many
from tests.waiting import WAIT_S

TOKEN, RUN_ID = "the token of these tests", "run-7"


@contextlib.contextmanager
def agent(address, *options, token=TOKEN, run_id=RUN_ID, prefix=()):
    """A real agent; its output is a pipe."""
    where = "{}:{}".format(*address)
    command = [*prefix, sys.executable, "-m", "slipstream.cli", "node", "--join", where, "--run-id", run_id, *options]
    environment = {**os.environ, TOKEN_VARIABLE: token}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()
            process.wait(WAIT_S)


@contextlib.contextmanager
def many_agents(address, names):
    """A process for each of these nodes, and their names once all of them have joined. All end well with the run."""
    command = [sys.executable, "-m", many.__name__, "{}:{}".format(*address), RUN_ID, *names]
    environment = {**os.environ, TOKEN_VARIABLE: TOKEN}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True) as first:
        try:
            yield [first.stdout.readline().strip() for _ in names]
            assert first.wait(WAIT_S) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(first.pid, signal.SIGKILL)


@contextlib.contextmanager
def open_nodes(num, address=("127.0.0.1", 0), **options):
    """A run on this host and `num - 1` others that have not joined."""
    nodes = Nodes(num, address, TOKEN, RUN_ID, **options)
    try:
        yield nodes
    finally:
        nodes.close()
