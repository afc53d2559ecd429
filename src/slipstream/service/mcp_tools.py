"""The queue as tools of the Model Context Protocol, for a coding agent, over standard input and output.

A run file is planned by a command in another process, because a plan imports the user's code. A failure is the
command's sentence.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgspec
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from slipstream.errors import SlipstreamError
from slipstream.service.deployments.deployments import Deployments, LocalDeployments
from slipstream.service.deployments.records import Options
from slipstream.service.runs import Runs

_COMMAND_S = 660.0
_INSTRUCTIONS = (
    "Post-trains language models. plan a run file, submit it, and look at status until it has ended: its state is then "
    "done, failed or cancelled, and `reason` and logs say why. checkpoints names the trained models, and deploy "
    "serves one."
)


class Tools:
    """The tools. Each is a method with its description."""

    def __init__(self, queue: Runs, deployments: Deployments) -> None:
        self._queue, self._deployments = queue, deployments

    def all(self) -> Sequence[Callable[..., Any]]:
        """The methods for a client."""
        return (
            *(self.plan, self.submit, self.status, self.logs, self.cancel),
            *(self.runs, self.checkpoints, self.gpus, self.deploy, self.undeploy, self.deployments),
        )

    def plan(self, run_file: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
        """Plan a run file (TOML) without a start: settings with reasons, memory. overrides: --section.key, value."""
        return _command("plan", run_file, *overrides)

    def submit(self, run_file: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
        """Queue a run of a run file (TOML); the answer has its id. overrides: --section.key, value, or options."""
        return _command("submit", run_file, *overrides)

    def status(self, run: str | None = None) -> dict[str, Any]:
        """Show a run: state, step, attempts, estimate, and after its end all measured figures. Without a name it
        shows all of them, in the field `runs`."""
        with _explained():
            self._queue.keep_going()
            if run is None:
                return {"runs": msgspec.to_builtins(self._queue.all())}
            return msgspec.to_builtins(self._queue.one(run))

    def logs(self, run: str, offset: int = -1) -> dict[str, Any]:
        """Read a piece of a run's output from a byte on, by default its end. `next` is the next piece's offset."""
        with _explained():
            chunk = self._queue.log(run, offset)
            return {"output": chunk.data.decode(errors="replace"), "next": chunk.next}

    def cancel(self, run: str) -> dict[str, Any]:
        """Cancel a run. It saves a checkpoint if there is time."""
        with _explained():
            return msgspec.to_builtins(self._queue.cancel(run))

    def runs(self) -> list[dict[str, Any]]:
        """List all runs of the queue in the order of submission, with state and step."""
        with _explained():
            self._queue.keep_going()
            names = ("id", "state", "step", "steps", "reason", "model", "algorithm", "submitted")
            return [{name: getattr(run, name) for name in names} for run in self._queue.all()]

    def checkpoints(self, run: str) -> list[dict[str, Any]]:
        """List a run's checkpoints. `name` is a value for model.path or lora.path of another run file."""
        with _explained():
            return msgspec.to_builtins(self._queue.checkpoints(run))

    def gpus(self) -> list[dict[str, Any]]:
        """List the GPUs of the queue with free memory and runs. Without GPUs the CPU is the one place."""
        with _explained():
            return msgspec.to_builtins(self._queue.places())

    def deploy(self, run: str, step: int | None = None) -> dict[str, Any]:
        """Deploy a checkpoint of a run, by default the best or last. It is ready once deployments says so."""
        with _explained():
            return msgspec.to_builtins(self._deployments.deploy(run, step, Options()))

    def undeploy(self, name: str) -> dict[str, Any]:
        """End a deployment."""
        with _explained():
            return msgspec.to_builtins(self._deployments.undeploy(name))

    def deployments(self) -> list[dict[str, Any]]:
        """List deployments with state and address (OpenAI). `name` is the model there."""
        with _explained():
            if isinstance(self._deployments, LocalDeployments):
                self._deployments.keep_going()
            return msgspec.to_builtins(self._deployments.all())


def make_server(queue: Runs, deployments: Deployments) -> MCPServer:
    """A server with all tools."""
    server = MCPServer("slipstream", instructions=_INSTRUCTIONS, log_level="WARNING")
    for tool in Tools(queue, deployments).all():
        server.add_tool(tool)
    return server


@contextlib.contextmanager
def _explained() -> Generator[None]:
    """Turn an error into its sentence, for the client's model."""
    try:
        yield
    except SlipstreamError as error:
        raise ToolError(str(error)) from None


def _command(name: str, run_file: str, *arguments: str) -> dict[str, Any]:
    """The JSON of a command. Standard output is the protocol's, so the child gets another one."""
    if run_file.startswith("-"):
        raise ToolError(f"run_file {run_file!r} is an option: give the path of a run file")
    command = [sys.executable, "-P", "-m", "slipstream.cli", name, run_file, *arguments, "--json"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ToolError(f"slipstream {name} did not end within {_COMMAND_S:g} s: try it in a terminal") from None
    try:  # lines of the user's code may come first
        answer = json.loads(done.stdout[f"\n{done.stdout}".rindex("\n{") :])
    except ValueError:
        raise ToolError(f"slipstream {name} ended with exit code {done.returncode}: {done.stderr[-500:]}") from None
    if done.returncode:
        raise ToolError(str(answer.get("message", answer)))
    return answer
