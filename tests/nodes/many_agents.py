"""Agents of many nodes, each a process: `python -m tests.nodes.many_agents HOST:PORT RUN_ID NAME ...`.

This process imports an agent and forks the others. Each prints its node's name once it has joined, and serves the run.
"""

import os
import sys

from slipstream.nodes.agent import Agent
from slipstream.nodes.protocol import TOKEN_VARIABLE
from tests.waiting import WAIT_S


def serve(address, run_id, name):
    agent = Agent(address, os.environ[TOKEN_VARIABLE], run_id, node=name)
    agent.join(WAIT_S)
    os.write(1, f"{agent.node}\n".encode())
    return agent.serve()


def main(where, run_id, *names):
    host, _, port = where.rpartition(":")
    for name in names:
        if not os.fork():
            code = 1
            try:
                code = serve((host, int(port)), run_id, name)
            finally:
                os._exit(1 if code is None else code)
    return sum(os.waitstatus_to_exitcode(os.wait()[1]) != 0 for _ in names)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
