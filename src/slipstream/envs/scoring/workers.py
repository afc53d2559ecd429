"""Worker processes for calls, killed at a call's deadline; see `pool.py` for the guarantees.

A worker answers each request as soon as it is done, so a hang is the first unanswered request's. This does not hold for
coroutines: they run concurrently, and end at their deadlines, or with their callers. If their worker hangs or dies,
each of them is run again, alone.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from slipstream.envs.base import Episode
from slipstream.envs.scoring.process import Answer, Request, Setup, Worker, WorkerDied, encode
from slipstream.errors import EnvironmentFault
from slipstream.records import Task, ToolCall

_MAX_NOT_BEGUN = 8  # how many a worker has not looked at yet
_PATIENCE_S = 0.25  # after this wait, a job starts another worker
START_TIMEOUT_S = 120.0
_GRACE_S = 1.0  # how late a worker may cancel coroutines after their deadline


class _Job:
    """One call waiting for its answer."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.data = encode(request)
        self.future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.alone = False
        """It must be its worker's only job."""

    @property
    def id(self) -> str:
        """As in the request."""
        return self.request.id

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def settle(self, answer: Answer) -> None:
        if not self.future.done():
            self.future.set_result(answer)


class _Slot:
    """A worker and its jobs."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.queue: dict[str, _Job] = {}
        """Jobs in the order of sending; the worker does the first."""
        self.begun: dict[str, _Job] = {}
        """Coroutines, run concurrently."""
        self.runs_coroutines = False
        self.ends = False
        """It gets no more jobs, because a coroutine has passed its deadline here."""
        self.heard_at = 0.0
        """When it last answered, or was sent a job while it had none to look at, by the loop's clock."""

    def __len__(self) -> int:
        return len(self.queue) + len(self.begun)

    def may_have_written(self, answer: Answer) -> bool:
        """Whether `answer` belongs to a job the worker can be working on."""
        job = self.begun.get(answer.id) or next(iter(self.queue.values()), None)
        return job is not None and job.id == answer.id and answer.answers(job.request)

    def pop(self, id_: str) -> _Job:
        """Removes a job."""
        return self.begun.pop(id_) if id_ in self.begun else self.queue.pop(id_)

    def suspects(self) -> list[_Job]:
        """Possible causes of the worker's death."""
        return [*self.begun.values(), *list(self.queue.values())[:1]]

    @property
    def is_reserved(self) -> bool:
        """Whether its job must be the only one."""
        return len(self) == 1 and next(iter((self.queue or self.begun).values())).alone


class Workers:
    """Up to `num_workers` killable processes for one environment; the first one starts in `start`, further ones when
    calls wait."""

    def __init__(
        self,
        name: str,
        setup: Setup,
        *,
        role: str,
        num_workers: int,
        concurrency: int,
        variables: Sequence[str],
        stacks: Path | None,
    ) -> None:
        """`role`: a worker's name in messages. `concurrency`: most requests of a worker at once."""
        self._name = name
        self._setup = setup
        self._role = role
        self._num_workers = num_workers
        self._concurrency = concurrency
        self._variables = variables
        self._stacks = stacks
        self._waiting: deque[_Job] = deque()
        self._work = asyncio.Event()
        self._slots: list[_Slot] = []
        self._num_starting = 0
        self._servers: list[asyncio.Task[None]] = []
        self._fault: EnvironmentFault | None = None
        self.num_restarts = 0
        """Replaced workers."""
        self.ready = Answer("ready")
        """The first worker's facts about itself and its environment."""

    async def start(self) -> None:
        """Starts a worker and waits for it. Raises `EnvironmentFault`."""
        worker, self.ready = await self._start()
        slots = [_Slot(worker), *[None] * (self._num_workers - 1)]
        self._slots = [slot for slot in slots if slot is not None]
        self._servers = [asyncio.create_task(self._serve(slot)) for slot in slots]

    async def stop(self) -> None:
        """Ends the workers and everything they started; waiting calls fail."""
        self._fault = self._fault or EnvironmentFault(f"the {self._role}s of {self._name} were stopped")
        for server in self._servers:
            server.cancel()
        await asyncio.gather(*self._servers, return_exceptions=True)
        for slot in self._slots:
            if slot.worker.alive:  # its server was cancelled before it had begun
                await slot.worker.stop()
        self._fail_waiting(self._fault)

    async def ask(
        self,
        kind: Literal["score", "group", "tool"],
        task: Task,
        episodes: tuple[Episode, ...] = (),
        call: ToolCall = ToolCall(""),  # noqa: B008 (it cannot change)
    ) -> Answer:
        """Carries out a call. Raises `EnvironmentFault` if no worker can be started any more. In an answer of the kind
        `died` or `timeout`, `message` says how the worker ended."""
        if self._fault is not None:
            raise self._fault
        if not self._servers:
            raise EnvironmentFault(f"the {self._role}s of {self._name} were not started: use 'async with'")
        job = _Job(Request(os.urandom(16).hex(), kind, task, episodes, call))
        self._waiting.append(job)
        self._work.set()
        for slot in sorted((slot for slot in self._slots if slot.begun and slot.worker.is_open), key=len):
            self._send(slot)  # `_go_on` waits for its answers
        try:
            return await job.future
        except asyncio.CancelledError:
            self._give_up(job)
            raise

    def _give_up(self, job: _Job) -> None:
        """Nobody waits for a job any more: a coroutine is cancelled, and its place is free when it has ended. A plain
        function runs to its deadline at most."""
        if job in self._waiting:
            self._waiting.remove(job)
        for slot in self._slots:
            if job.id in slot.begun:
                self._cancel(slot, job)

    def _cancel(self, slot: _Slot, job: _Job) -> None:
        slot.worker.send(encode(Request(job.id, "cancel", Task("", ()))))

    async def _start(self) -> tuple[Worker, Answer]:
        try:
            worker = await Worker.start(self._setup, self._variables, self._stacks)
        except OSError as error:
            raise EnvironmentFault(f"no {self._role} of {self._name} can be started: {error}") from error
        try:
            due = asyncio.get_running_loop().time() + START_TIMEOUT_S
            answer = await worker.receive(due, START_TIMEOUT_S)
        except TimeoutError:
            reason = f"was not ready after {START_TIMEOUT_S:g} s"
        except WorkerDied as death:
            reason = f"ended with {death}"
        except BaseException:
            await worker.kill()
            raise
        else:
            if answer.kind == "ready":
                return worker, answer
            reason = f"failed: {answer.message}"
        await worker.kill()
        tail = " ".join(worker.stderr_tail.split())[-300:]
        detail = f" ({tail})" if tail else ""
        if "MemoryError" in reason + tail:
            detail += f" with environment.reward_memory_gib = {self._setup.memory_limit_bytes / 2**30:g}"
        raise EnvironmentFault(f"the {self._role} of {self._name} {reason}{detail}: run `slipstream env test`")

    async def _serve(self, slot: _Slot | None) -> None:
        """Carries out calls until cancelled; replaces killed and dead workers."""
        try:
            while True:
                if slot is None:
                    slot = await self._start_another()
                while not self._waiting and not slot:
                    self._work.clear()
                    await self._work.wait()
                if not await self._go_on(slot):
                    self.num_restarts += 1
                    self._slots.remove(slot)
                    slot = _Slot((await self._start())[0])
                    self._slots.append(slot)
        except EnvironmentFault as fault:
            self._fail_all(fault, slot)
        except Exception as error:  # noqa: BLE001 (waiting callers must learn of any error)
            self._fail_all(
                EnvironmentFault(f"a {self._role} of {self._name} failed ({error!r}): report this as a bug"), slot
            )
        finally:
            if slot is not None:
                self._return_jobs(slot)
                await slot.worker.stop()

    async def _start_another(self) -> _Slot:
        """Starts one more worker if the others leave jobs waiting."""
        while True:
            while not self._waiting:
                self._work.clear()
                await self._work.wait()
            waits = self._waiting[-1]  # the first may be about to be taken, however many there are
            await asyncio.sleep(_PATIENCE_S)
            if waits in self._waiting and len(self._waiting) > self._num_starting:
                break
        self._num_starting += 1
        try:
            worker, _ = await self._start()
        finally:
            self._num_starting -= 1
        slot = _Slot(worker)
        self._slots.append(slot)
        return slot

    async def _go_on(self, slot: _Slot) -> bool:
        """Sends jobs while it has room, and handles the next answer; false if the worker was killed."""
        self._send(slot)
        if not slot:
            return not slot.ends
        # Each coroutine ends at its own deadline, so one of them answers in time unless the worker hangs.
        timeout_s = self._setup.timeout_s + (_GRACE_S if slot.runs_coroutines else 0.0)
        due = slot.heard_at + timeout_s
        try:
            answer = await slot.worker.receive(due, timeout_s)
        except TimeoutError:
            if slot.heard_at + timeout_s > due:  # jobs were sent since
                return True
            await slot.worker.kill()
            self._blame(slot, "timeout", f"was killed after {self._setup.timeout_s:g} s")
            return False
        except WorkerDied as death:
            self._blame(slot, "died", f"ended its process with {death}")
            return False
        slot.heard_at = asyncio.get_running_loop().time()
        if not slot.may_have_written(answer):
            await slot.worker.kill()
            self._blame(
                slot, "died", "wrote into the pipe of answers: it must not use file descriptors that it did not open"
            )
            return False
        if answer.kind == "begun":
            job = slot.begun[answer.id] = slot.queue.pop(answer.id)
            slot.runs_coroutines = True
            if job.future.done():  # its caller gave up before
                self._cancel(slot, job)
            return True
        self._settle(slot, slot.pop(answer.id), answer)
        if slot.ends and not slot:
            await slot.worker.kill()
            return False
        return True

    def _send(self, slot: _Slot) -> None:
        """Sends several jobs in one write if there is room. Alone, a write takes longer than a quick reward."""
        if len(slot.queue) > _MAX_NOT_BEGUN // 2:
            return
        jobs: list[_Job] = []
        while self._waiting and self._has_room(slot, self._waiting[0]):
            job = self._waiting.popleft()
            if job.future.done():  # the caller has given up
                continue
            if not slot.queue:
                slot.heard_at = asyncio.get_running_loop().time()
            slot.queue[job.id] = job
            jobs.append(job)
        if jobs:
            slot.worker.send(*(job.data for job in jobs))

    def _has_room(self, slot: _Slot, job: _Job) -> bool:
        """Whether the worker may get a job now."""
        if not slot or slot.ends or slot.is_reserved or job.alone:
            return not slot and not slot.ends
        # A plain function keeps later jobs waiting; another worker might do them meanwhile.
        most = _MAX_NOT_BEGUN if slot.runs_coroutines or self._num_workers == 1 else 1
        return len(slot) < self._concurrency and len(slot.queue) < most

    def _settle(self, slot: _Slot, job: _Job, answer: Answer) -> None:
        if answer.kind == "timeout":
            slot.ends = True
            job.settle(msgspec.structs.replace(answer, message=f"was killed after {self._setup.timeout_s:g} s"))
        elif answer.kind == "died":
            message = f"ended its process with {answer.message}"
            job.settle(msgspec.structs.replace(answer, message=message, details=slot.worker.stderr_tail))
        else:
            job.settle(answer)

    def _blame(self, slot: _Slot, kind: Literal["timeout", "died"], message: str) -> None:
        """Fails the job behind the worker's death, or has every suspect run again, alone."""
        suspects = slot.suspects()
        if len(suspects) == 1:
            answer = Answer(kind, message=message, details=slot.worker.stderr_tail)
            slot.pop(suspects[0].id).settle(answer)
        for job in suspects:
            job.alone = True
        self._return_jobs(slot)

    def _return_jobs(self, slot: _Slot) -> None:
        self._waiting.extendleft(reversed([*slot.begun.values(), *slot.queue.values()]))
        slot.begun.clear()
        slot.queue.clear()
        self._work.set()

    def _fail_all(self, fault: EnvironmentFault, slot: _Slot | None) -> None:
        """Fails all jobs."""
        self._fault = fault
        if slot is not None:
            self._return_jobs(slot)
        self._fail_waiting(fault)

    def _fail_waiting(self, fault: EnvironmentFault) -> None:
        while self._waiting:
            self._waiting.popleft().fail(fault)
