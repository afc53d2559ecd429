"""Starts the generating side of a run, as the trainer sees it: a caller that brings it commands, and its batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slipstream.config.traits import asks_teacher, num_replicas
from slipstream.launch.children import Children, Context, RunContext
from slipstream.launch.generation import build_executor
from slipstream.launch.parts.process import OrchestratorProcess
from slipstream.orchestrator.control import commands
from slipstream.orchestrator.control.handle import Caller, LocalCaller, Takes
from slipstream.orchestrator.control.several import JoinedBatches, SeveralCallers
from slipstream.orchestrator.teacher_engine import agreement_warning
from slipstream.records import Batch
from slipstream.transport import MemoryTransport


@dataclass(frozen=True)
class Generation:
    """The generating side of a run."""

    caller: Caller
    batches: Takes


def start_generation(run: RunContext, children: Children, end: Callable[[], commands.Close]) -> Generation:
    """Begin to start engine and teacher, in a process of their own or as children of this one, without waiting.
    `end`: how many batches were trained on when the run ends, and why it does."""
    if asks_teacher(run.config):
        run.log.listeners.append(agreement_warning(run.log))
    if run.config.run.streams != "memory":
        processes = [_start_process(run, children, end, number) for number in range(run.config.run.orchestrators)]
        if len(processes) == 1:
            return Generation(processes[0].caller, processes[0].batches)
        callers = [process.caller for process in processes]
        joined = JoinedBatches([process.batches for process in processes])
        return Generation(SeveralCallers(callers, num_replicas(run.config)), joined)
    begin(run, children)
    batches: MemoryTransport[Batch] = MemoryTransport(
        run.config.training.staleness + 1, producer="the rollouts of the next batch", consumer="the trainer"
    )
    executor = build_executor(run, children, batches)
    children.at_exit(lambda: executor.close(end()))  # after the thread has ended, which begins later
    return Generation(LocalCaller(children.event_loop(), executor), batches)


def _start_process(
    run: RunContext, children: Children, end: Callable[[], commands.Close], number: int
) -> OrchestratorProcess:
    process = OrchestratorProcess(run, number)
    children.killed_by(process.kill)
    children.at_exit(lambda: process.close(end()))
    return process


def begin(context: Context, children: Children) -> None:
    """Launch what takes longest to start."""
    if context.config.weights.bridge != "restart":
        children.create_engine().launch()
    if asks_teacher(context.config):
        children.launch_teacher()
