"""Carries out the trainer's commands on the generating side. All of it belongs to one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Values
from dataclasses import KW_ONLY, dataclass

from slipstream.errors import DeadlineError, EngineError
from slipstream.inference.engine import RunEngine, ends_soon
from slipstream.orchestrator.batches.idle_time import IdleTime
from slipstream.orchestrator.control import commands
from slipstream.orchestrator.evaluate import Evaluation
from slipstream.orchestrator.versions import Versions
from slipstream.records import Batch, Rollout, Sequence

_DONE = commands.Done()


@dataclass
class Executor:
    """Answers commands; they may overlap."""

    engine: RunEngine
    versions: Versions
    _: KW_ONLY
    probe: Callable[[], Awaitable[list[Sequence]]]
    evaluate: Callable[[commands.Evaluate], Awaitable[Evaluation]]
    roll_out: Callable[[commands.RollOut], Awaitable[list[Rollout]]]
    start: Callable[[], Awaitable[None]]
    """Ends when engine, reward workers and teacher are ready."""
    open_ledger: Callable[[int], None]
    make_batches: Callable[[commands.MakeBatches], Awaitable[None]]
    make_batch: Callable[[commands.MakeBatch], Awaitable[Batch]]
    settle: Callable[[commands.Settle], None]
    close: Callable[[commands.Close], None]
    """Writes the last files, once nothing else is done here."""
    num_ended: Callable[[], int]
    """Counts ended turns and rollouts; any thread may ask."""
    change_weights: Callable[[int, Values[float]], None]
    """Gets a mixture's weights, with their first step in the order of the tasks."""
    teacher_digest: str
    idle: IdleTime
    saved_step: int = 0
    """The step of the newest whole checkpoint, as far as is known here."""
    has_started: bool = False
    _probing: asyncio.Future[list[Sequence]] | None = None
    """The probe, waiting in the engine with the next batch."""

    async def do(self, command: commands.AnyCommand) -> commands.AnyAnswer:
        """Carry out a command. Raises its failure."""
        engine = self.engine
        match command:
            case commands.Start():
                if not self.has_started:
                    await self.start()
                    self.has_started = True
            case commands.OpenLedger(first):
                self.open_ledger(first)
            case commands.MakeBatches():
                await self.make_batches(command)
            case commands.MakeBatch():
                return commands.Made(await self.make_batch(command))
            case commands.Settle():
                self.settle(command)
            case commands.Apply(ticket):
                self.idle.go_on()
                with self.idle.updates:
                    report = await self.versions.apply(ticket)
                return commands.Applied(report, engine.take_metrics())
            case commands.SampleProbe():
                with self.idle.updates:
                    return commands.Probed(await self._probed())
            case commands.Fence():
                with self.idle.updates:
                    await self.versions.fence()
            case commands.Begin(step):
                self.idle.hold()
                await self.versions.begin(step)
                self._probing = asyncio.ensure_future(self.probe())
                self._probing.add_done_callback(lambda task: task.cancelled() or task.exception())
            case commands.GoOn(version, timeout_s):
                self.idle.go_on()
                await engine.go_on(version, timeout_s)
            case commands.Release(step, saved_step, change):
                self.saved_step = saved_step
                if change is not None:
                    self.change_weights(*change)
                self.idle.released(step)
                await self.versions.release(step)
            case commands.RollOut():
                return commands.RolledOut(await self.roll_out(command))
            case commands.Evaluate():
                return commands.Evaluated(await self.evaluate(command))
            case commands.Close():
                self.close(command)
            case commands.AskHeld():
                return commands.Held(await engine.held())
            case commands.AskJoined():
                return commands.Joined(await engine.joined())
            case commands.AskState(settles):
                return await asyncio.to_thread(self.engine_state, settles=settles)
            case commands.AskTeacher():
                return commands.TeacherDigest(self.teacher_digest)
            case commands.Share():
                return await share(engine, command)
            case commands.Sleep(timeout_s):
                await engine.sleep(timeout_s)
            case commands.Wake(timeout_s):
                await engine.wake(timeout_s)
            case commands.Leave(timeout_s):
                await engine.leave(timeout_s)
            case _:
                raise TypeError(f"{type(command).__name__} is no command")
        return _DONE

    async def _probed(self) -> list[Sequence]:
        """The waiting probe, or a new one: without a waiting one, or after a repeated update."""
        probing, self._probing = self._probing, None
        if probing is not None:
            with contextlib.suppress(EngineError):
                return await probing
        return await self.probe()

    def engine_state(self, *, settles: bool) -> commands.EngineState:
        """Whether the engine runs; with `settles`, after a moment for a dying one to end. From any thread."""
        has_ended = ends_soon(self.engine) if settles else not self.engine.is_up
        return commands.EngineState(not has_ended, self.engine.is_in_memory_only, self.engine.wants_weights)


async def share(engine: RunEngine, command: commands.Share) -> commands.Shared | commands.NotShared:
    """Have the engine share its live weights."""
    try:
        return commands.Shared(await engine.share(command.parameters, command.timeout_s))
    except DeadlineError:
        raise
    except EngineError as error:
        if not engine.is_up:
            raise
        return commands.NotShared(f"the engine cannot share its weights ({error})")
