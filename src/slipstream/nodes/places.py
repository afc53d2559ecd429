"""A process's place in a run over several nodes, by the variables of torchrun or srun. Pure.

Rank 0 is the run, and every other process is the agent of its node. torchrun's store has MASTER_PORT, so agents join at
the next port. Under Slurm agents join on the step's first node, at a port derived from the job's number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from slipstream.errors import ConfigError

OWNER_VARIABLE = "SLIPSTREAM_RESTARTED_BY"
"""Set by a batch script: it starts the run again after exit code `AGAIN`."""
_TORCHRUN = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+")
"""Variables of torchrun. torch.distributed would read them in the processes of the run."""
_FIRST_PORT, _NUM_PORTS, _STEP_STRIDE = 20_000, 10_000, 101
_LAST_PORT = 65_535


@dataclass(frozen=True)
class Place:
    """A process of a launcher with one process for each node."""

    launcher: str
    """`torchrun` or `srun`."""
    num_nodes: int
    node: int
    address: str
    """`HOST:PORT`, at which agents join."""
    run_id: str
    attempt: int
    """How often the launcher has started the command again; under torchrun by this node's count."""
    is_restarted: bool = False
    """Whether the launcher starts the command again if the run asks for it."""

    @property
    def name(self) -> str:
        """The node's name. Two nodes can have one host name, so it is the number."""
        return f"node-{self.node}"

    @property
    def settings(self) -> dict[str, object]:
        """The run's settings by it."""
        return {"cluster.nodes": self.num_nodes, "cluster.address": self.address, "cluster.run_id": self.run_id}

    def check(self, nodes: int) -> None:
        """Raises ConfigError if the user's `cluster.nodes` are others."""
        if nodes != self.num_nodes:
            raise ConfigError(
                f"cluster.nodes = {nodes} contradicts {self.launcher}, which started {self.num_nodes} nodes: leave the "
                "setting out, or start as many"
            )


def place_of(variables: Mapping[str, str]) -> Place | None:
    """The place by these variables; None for a process alone. Raises ConfigError for several on one node."""
    return _of_torchrun(variables) or _of_srun(variables)


def forget(variables: MutableMapping[str, str]) -> None:
    """Remove torchrun's variables."""
    for name in [name for name in variables if _TORCHRUN.fullmatch(name)]:
        del variables[name]


def _of_torchrun(variables: Mapping[str, str]) -> Place | None:
    size = _number(variables, "WORLD_SIZE", 1)
    if size < 2 or not all(name in variables for name in ("RANK", "MASTER_ADDR", "MASTER_PORT")):
        return None
    if (here := _number(variables, "LOCAL_WORLD_SIZE", 1)) > 1:
        raise _several("torchrun", here, "--nproc-per-node 1")
    port, attempt = _number(variables, "MASTER_PORT", 0), _number(variables, "TORCHELASTIC_RESTART_COUNT", 0)
    port += 1 if port < _LAST_PORT else -1
    address = f"{variables['MASTER_ADDR']}:{port}"
    run_id = variables.get("TORCHELASTIC_RUN_ID") or address
    return Place("torchrun", size, _number(variables, "RANK", 0), address, run_id, attempt)


def _of_srun(variables: Mapping[str, str]) -> Place | None:
    # A batch shell has SLURM_PROCID and SLURM_NNODES too, but no step.
    if "SLURM_STEP_ID" not in variables:
        return None
    tasks, nodes = (_number(variables, f"SLURM_STEP_NUM_{each}", 1) for each in ("TASKS", "NODES"))
    if tasks < 2:
        return None
    if tasks > nodes:
        raise _several("srun", -(-tasks // nodes), "--ntasks-per-node=1")
    job, step = _number(variables, "SLURM_JOB_ID", 0), _number(variables, "SLURM_STEP_ID", 0)
    attempt = _number(variables, "SLURM_RESTART_COUNT", 0)
    host, port = first_host(variables["SLURM_STEP_NODELIST"]), (job + _STEP_STRIDE * step) % _NUM_PORTS
    return Place(
        "srun",
        nodes,
        _number(variables, "SLURM_PROCID", 0),
        f"{host}:{_FIRST_PORT + port}",
        f"{job}.{step}-{attempt}" if attempt else f"{job}.{step}",  # agents of an earlier attempt are refused
        attempt,
        bool(variables.get(OWNER_VARIABLE)),
    )


def first_host(nodes: str) -> str:
    """The first host of Slurm's list, as `gpu[003-007,9],login1`."""
    found = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", found[0]) if found else ""


def _several(launcher: str, number: int, option: str) -> ConfigError:
    return ConfigError(
        f"{launcher} started {number} processes on this node, and one is needed: give it {option}, and set "
        "training.ranks to the trainer's processes on all nodes"
    )


def _number(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise ConfigError(f"{name} = {text[:60]!r} is no whole number: correct the variable, or unset it") from None
