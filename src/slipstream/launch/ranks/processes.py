"""Starts, commands, watches and ends the trainer's ranks 1 and up, from rank 0.

Each rank is a child process with its own log, `logs/rank-1.log`. Commands and answers go over its channel,
tensors over the ranks' process group. Guarantees: a rank that fails, dies, or does not answer within
`training.rank_timeout_s` ends the run with an error that names it; no rank outlives the run, however it ends, since
each ends with its channel (`processes/lifeline.py`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from slipstream.config import PlannedConfig
from slipstream.errors import RankDeadlineError, RankError, SlipstreamError, ZeroGradientError, named_error
from slipstream.nodes.launcher import Nodes
from slipstream.plan.nodes import assign, node_name, ranks_of_a_node
from slipstream.plan.rank_layout import num_copies
from slipstream.processes import exits
from slipstream.processes.channel import Channel, ChannelClosed, Garbage
from slipstream.processes.launchers import LOCAL, Child, Resources
from slipstream.processes.rendezvous import address_in
from slipstream.processes.temporary import make_temporary, remove_temporary
from slipstream.records import SamplingParams
from slipstream.weights.bridges.single_copy import SharedWeights

if TYPE_CHECKING:
    from slipstream.trainer.distributed.fsdp import RankGroup
    from slipstream.trainer.distributed.worker import Answer, AnyCommand

PROGRAM = "slipstream.launch.ranks.child"
"""The module that a child process runs."""
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", **exits.SAFE_PATH}
_START_S = 300.0
"""How long a rank may take to start and import its modules, at least."""
_GRACE_S = 5.0
"""How long to look for the rank that died, when its death caused an error here."""
_DYING_S = 30.0
"""How long a killed rank may take to end."""
_POLL_S = 0.1


class RankSettings(msgspec.Struct, frozen=True):
    """Settings of a rank, read from a file when it starts."""

    config: str
    """The planned `PlannedConfig` as JSON."""
    sampling: SamplingParams
    rank: int
    size: int
    store: str
    """Address of the process group, see `processes.rendezvous`."""
    gpu: int
    """The number of its GPU on its node, if it has one."""
    shared: tuple[SharedWeights, ...] = ()
    """Exported weights of the engine's workers, one per rank, where the policy is trained in their memory."""
    trains: bool = True
    """Without it the ranks only hold the policy, for a benchmark."""


def rank_threads(config: PlannedConfig) -> int:
    """CPU threads of each trainer process."""
    return max(1, config.run.threads // ranks_of_a_node(config))


@dataclass
class _Rank:
    number: int
    process: Child
    channel: Channel
    log: Path
    node: str = ""


class RankProcesses:
    """The other ranks, as rank 0 uses them; see the module. Implements `trainer.distributed.learner.Crew`."""

    def __init__(
        self,
        config: PlannedConfig,
        sampling: SamplingParams,
        logs: Path,
        shared: tuple[SharedWeights, ...] = (),
        *,
        trains: bool = True,
        nodes: Nodes | None = None,
    ) -> None:
        self.shared, self._nodes = shared, nodes
        self._size, self._timeout_s = config.training.ranks, config.training.rank_timeout_s
        self._num_together, self._num_copies = config.training.context_parallel, num_copies(config)
        # The folder of the logs is on all nodes.
        self._folder = make_temporary("ranks", None if nodes is None else logs.parent)
        self._store = address_in(self._folder)
        self._ranks: list[_Rank] = []
        self._group: RankGroup | None = None
        self._ended = threading.Event()
        logs.mkdir(parents=True, exist_ok=True)
        try:
            text, per_node = config.model_dump_json(), config.cluster.gpus_per_node or self._size
            for number, node in enumerate(assign(config).ranks[1:], 1):
                place = number, self._size, self._store, number % per_node
                settings = RankSettings(text, sampling, *place, shared, trains)
                log = logs / f"rank-{number}.log"
                self._ranks.append(self._launch(settings, log, rank_threads(config), node_name(node)))
        except BaseException:
            self.close()
            raise

    def _launch(self, settings: RankSettings, log: Path, threads: int, node: str) -> _Rank:
        path = self._folder / f"rank-{settings.rank}.json"
        path.write_bytes(msgspec.json.encode(settings))
        environment, resources = {**os.environ, **ENVIRONMENT}, Resources(threads=threads)
        launcher = LOCAL if self._nodes is None else self._nodes
        process = launcher.launch(PROGRAM, [str(path)], environment, resources, node, output=log)
        return _Rank(settings.rank, process, Channel(process.socket), log, node)

    @property
    def pids(self) -> tuple[int, ...]:
        """The child processes, each with its own session."""
        return tuple(rank.process.pid for rank in self._ranks)

    def join(self) -> RankGroup:
        """Form the process group with the other ranks; every rank then loads its shard, see `loading`."""
        from slipstream.trainer.distributed.fsdp import RankGroup

        self._answers("start", max(_START_S, self._timeout_s))
        with self._naming_failed_rank("meet"):
            self._group = RankGroup(
                self._store,
                0,
                self._size,
                timeout_s=self._timeout_s,
                num_together=self._num_together,
                num_copies=self._num_copies,
            )
        if self._group.device.type == "cuda":
            threading.Thread(target=self._watch, name="watch-ranks", daemon=True).start()
        return self._group

    @contextlib.contextmanager
    def loading(self) -> Generator[None]:
        """Inside, this rank loads its shard; at the end it waits for the others."""
        with self._naming_failed_rank("load the model"):
            yield
        self._answers("load the model")

    def run_on_all(self, commands: Sequence[AnyCommand], do: Callable[[AnyCommand], Answer]) -> list[Answer]:
        """Have every rank execute its command, this one with `do`; returns their answers in order of rank."""
        doing = commands[0].doing
        with self._naming_failed_rank(doing):
            self._send(commands[1:])
            try:
                own = do(commands[0])
            except ZeroGradientError:
                # The same on all ranks: they wait for the next command.
                self._answers(doing)
                raise
        return [own, *self._answers(doing)]

    @contextlib.contextmanager
    def run_on_others(self, command: AnyCommand) -> Generator[None]:
        """Inside, the other ranks execute `command` while this one executes its part."""
        doing = command.doing
        with self._naming_failed_rank(doing):
            self._send([command] * len(self._ranks))
            try:
                yield
            except GeneratorExit:
                # The caller stopped iterating early; all ranks have finished the command nevertheless.
                self._answers(doing)
                raise
        self._answers(doing)

    def _send(self, commands: Sequence[AnyCommand]) -> None:
        from slipstream.trainer.distributed.worker import encode

        for rank, command in zip(self._ranks, commands, strict=True):
            with contextlib.suppress(ChannelClosed):
                rank.channel.send(encode(command), self._timeout_s)

    def _answers(self, doing: str, timeout_s: float | None = None) -> list[Answer]:
        longest_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + longest_s
        found: list[Answer] = []
        for rank in self._ranks:
            try:
                answer = _receive(rank, max(0.0, deadline - time.monotonic()))
            except Garbage as error:
                raise RankError(f"{self._name(rank)} sent what cannot be read ({error}): look at {rank.log}") from error
            except ChannelClosed as error:
                raise self._failure() or RankError(f"{self._name(rank)} ended while it was to {doing}") from error
            except TimeoutError as error:
                raise RankDeadlineError(
                    f"{self._name(rank)} did not {doing} within {longest_s:g} s (training.rank_timeout_s): raise it, "
                    f"or look at {rank.log}"
                ) from error
            if answer.error:
                raise self._failure({rank.number: answer}) or self._error_of(rank, answer)
            found.append(answer)
        return found

    @contextlib.contextmanager
    def _naming_failed_rank(self, doing: str) -> Generator[None]:
        """Turn an error here into the error of the rank that caused it."""
        from torch import OutOfMemoryError

        try:
            yield
        except OutOfMemoryError:
            raise
        except (RuntimeError, OSError, ValueError) as error:
            if (failure := self._failure()) is not None:
                raise failure from error
            if "timed out" in str(error).lower() or "timeout" in str(error).lower():
                raise RankDeadlineError(
                    f"the trainer's {self._size} processes did not all {doing} within {self._timeout_s:g}"
                    " s (training.rank_timeout_s): look at logs/rank-*.log"
                ) from error
            raise

    def _failure(self, known: dict[int, Answer] | None = None) -> SlipstreamError | None:
        """Find the rank that failed first, as far as possible: one that was killed, one that sent an error, one that
        ended."""
        errors_of = dict(known or {})
        deadline = time.monotonic() + _GRACE_S
        while True:
            if self._nodes is not None and self._nodes.lost:
                return RankError(f"{self._nodes.lost}: continue with --resume")
            for rank in self._ranks:
                code = rank.process.poll()
                if code is not None and code < 0:
                    name = signal.Signals(-code).name
                    return RankError(f"{self._name(rank)} was killed ({name}): continue with --resume")
                if rank.number not in errors_of and (answer := _pending(rank)) is not None:
                    errors_of[rank.number] = answer
            for rank in self._ranks:
                answer = errors_of.get(rank.number)
                if answer is not None and answer.kind not in ("RuntimeError", "DistBackendError", "DistNetworkError"):
                    return self._error_of(rank, answer)
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        for rank in self._ranks:
            if (answer := errors_of.get(rank.number)) is not None:
                return self._error_of(rank, answer)
            if (code := rank.process.poll()) is not None:
                return RankError(f"{self._name(rank)} {exits.ending(code, rank.log)}")
        return None

    def _error_of(self, rank: _Rank, answer: Answer) -> SlipstreamError:
        unnamed = f"{self._name(rank)} failed ({answer.kind}: {answer.error}): look at {rank.log}"
        return named_error(answer.kind, answer.error) or RankError(unnamed)

    def _name(self, rank: _Rank) -> str:
        return f"trainer process {rank.number} (of 0 to {self._size - 1}){f' on {rank.node}' * bool(rank.node)}"

    def _watch(self) -> None:
        """Abort NCCL's waits for a rank that has died; gloo notices by itself."""
        while not self._ended.wait(_POLL_S):
            if any(rank.process.poll() is not None for rank in self._ranks) and self._group is not None:
                self._group.abort()
                return

    def kill(self) -> None:
        """Kill all ranks at once, from any thread."""
        self._ended.set()
        for rank in self._ranks:
            rank.process.kill()

    def close(self) -> None:
        """End all ranks: each ends when its channel closes, and is killed if it does not."""
        self._ended.set()
        for rank in self._ranks:
            rank.channel.close()
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(_GRACE_S)
        self.kill()
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in a driver
                rank.process.wait(_DYING_S)
        if self._group is not None:
            self._group.leave()
            self._group = None
        remove_temporary(self._folder)


def _receive(rank: _Rank, timeout_s: float) -> Answer:
    from slipstream.trainer.distributed.worker import Answer, decode

    try:
        return decode(rank.channel.receive(timeout_s), Answer)
    except msgspec.DecodeError as error:
        raise Garbage(str(error)) from error


def _pending(rank: _Rank) -> Answer | None:
    """The error that a failed rank has sent, if it has arrived."""
    try:
        answer = _receive(rank, 0.0)
    except (ChannelClosed, TimeoutError):
        return None
    return answer if answer.error else None
