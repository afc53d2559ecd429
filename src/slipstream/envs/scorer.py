"""Where rewards run. `ScorerPool` runs them in worker processes that can be killed, `InlineScorer` right here.

Guarantees of the pool: a reward that hangs is killed at its deadline with all that it started (`RewardTimeout`); one
that raises, ends its process or returns something that is no finite number is a `RewardFailed`; a fresh worker goes
on with the others, and no call waits for longer than the deadlines say. The deadline counts for each reward from
the moment that the worker was free for it, not from the call. What a reward prints is seen only in the `details`
of its failure.

Several requests are with a worker at once, and every answer comes as soon as there is one: so the first request
without an answer is the one that hangs.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import deque

from slipstream.config.schema import EnvironmentConfig
from slipstream.envs.base import Environment, RewardFailed, RewardTimeout, Score, judge
from slipstream.envs.scorer_process import Answer, Request, Setup, Worker, WorkerDied, frame
from slipstream.errors import EnvironmentFault
from slipstream.records import Task

_MAX_IN_FLIGHT = 64
_BATCH_S = 0.02  # slow rewards are sent one by one, so that a free worker does not wait beside a full one
_MAX_IN_FLIGHT_BYTES = 32 * 1024  # half of a pipe: the requests are with the worker even if this loop is busy


class InlineScorer:
    """Runs rewards in this process, where nothing can stop them: for rewards known to end, and for tests."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    async def score(self, task: Task, completion: str) -> Score:
        """See `base.Scorer`."""
        return judge(self._environment, task, completion)


class _Job:
    """One call waiting for its score."""

    def __init__(self, task: Task, completion: str) -> None:
        self.id = secrets.token_hex(16)
        self.data = frame(Request(task, completion, self.id))
        self.future: asyncio.Future[Score] = asyncio.get_running_loop().create_future()

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def settle(self, answer: Answer) -> None:
        if self.future.done():
            return
        if answer.score is None:
            self.future.set_exception(RewardFailed(answer.message, answer.details))
        else:
            self.future.set_result(answer.score)


class ScorerPool:
    """Killable workers that grade for one environment. Use as `async with ScorerPool(...) as scorer`.

    Entering starts the workers and waits for them: `EnvironmentFault` when the environment cannot be made there.
    `memory_limit_gib` bounds each worker's data; a reward that needs more meets a MemoryError.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        *,
        num_workers: int = 1,
        timeout_s: float | None = None,
        start_timeout_s: float = 120.0,
        memory_limit_gib: float | None = 8.0,
    ) -> None:
        self._setup = Setup(
            config.model_dump_json(),
            os.getpid(),
            None if memory_limit_gib is None else int(memory_limit_gib * 2**30),
        )
        self._name = config.name
        self._timeout_s = config.reward_timeout_s if timeout_s is None else timeout_s
        self._start_timeout_s = start_timeout_s
        self._num_workers = num_workers
        self._waiting: deque[_Job] = deque()
        self._work = asyncio.Event()
        self._share = 1
        self._servers: list[asyncio.Task[None]] = []
        self._fault: EnvironmentFault | None = None
        self.num_restarts = 0
        """Workers that had to be replaced."""

    async def __aenter__(self) -> ScorerPool:
        starts = [asyncio.create_task(self._start()) for _ in range(self._num_workers)]
        try:
            workers = [await start for start in starts]
        except BaseException:
            for start in starts:
                start.cancel()
            for result in await asyncio.gather(*starts, return_exceptions=True):
                if isinstance(result, Worker):
                    await result.stop()
            raise
        self._servers = [asyncio.create_task(self._serve(worker)) for worker in workers]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._fault = self._fault or EnvironmentFault(f"the reward workers of {self._name} were stopped")
        for server in self._servers:
            server.cancel()
        await asyncio.gather(*self._servers, return_exceptions=True)
        self._fail_waiting(self._fault)

    async def score(self, task: Task, completion: str) -> Score:
        """See `base.Scorer`. Raises `EnvironmentFault` when no worker can be started any more."""
        if self._fault is not None:
            raise self._fault
        if not self._servers:
            raise EnvironmentFault(f"the reward workers of {self._name} were not started: use 'async with'")
        job = _Job(task, completion)
        self._waiting.append(job)
        self._work.set()
        return await job.future

    async def _start(self) -> Worker:
        try:
            worker = await Worker.start(self._setup)
        except OSError as error:
            raise EnvironmentFault(f"no reward worker of {self._name} can be started: {error}") from error
        try:
            answer = await worker.receive(self._start_timeout_s)
        except TimeoutError:
            reason = f"was not ready after {self._start_timeout_s:g} s"
        except WorkerDied as death:
            reason = f"ended with {death}"
        except BaseException:
            await worker.kill()
            raise
        else:
            if answer.kind == "ready":
                return worker
            reason = f"failed: {answer.message}"
        await worker.kill()
        tail = " ".join(worker.stderr_tail.split())[-300:]
        said = f" ({tail})" if tail else ""
        raise EnvironmentFault(f"the reward worker of {self._name} {reason}{said}: run `slipstream env test`")

    async def _serve(self, worker: Worker) -> None:
        """Grade until cancelled, replacing the worker when it was killed or died."""
        try:
            while True:
                while not self._waiting:
                    self._work.clear()
                    await self._work.wait()
                if not await self._grade(worker, self._take()):
                    self.num_restarts += 1
                    worker = await self._start()
        except EnvironmentFault as fault:
            self._fault = fault
            self._fail_waiting(fault)
        finally:
            await worker.stop()

    def _take(self) -> deque[_Job]:
        """A fair share of what is waiting, within the limits."""
        share = min(self._share, -(-len(self._waiting) // self._num_workers))
        batch: deque[_Job] = deque()
        num_bytes = 0
        while self._waiting and len(batch) < share:
            num_bytes += len(self._waiting[0].data)
            if batch and num_bytes > _MAX_IN_FLIGHT_BYTES:
                break
            job = self._waiting.popleft()
            if not job.future.done():  # the caller may have given up
                batch.append(job)
        return batch

    async def _grade(self, worker: Worker, batch: deque[_Job]) -> bool:
        """Settle `batch`, or its part up to the job that cost the worker's life: then false; the rest waits again."""
        started = time.monotonic()
        worker.send(b"".join(job.data for job in batch))
        try:
            while batch:
                try:
                    answer = await worker.receive(self._timeout_s)
                except TimeoutError:
                    await worker.kill()
                    said = f"the reward of {self._name} was killed after {self._timeout_s:g} s"
                    batch.popleft().fail(RewardTimeout(said, worker.stderr_tail))
                    return False
                except WorkerDied as death:
                    said = f"the reward of {self._name} ended its process with {death}"
                    batch.popleft().fail(RewardFailed(said, worker.stderr_tail))
                    return False
                job = batch.popleft()
                if answer.id != job.id:
                    await worker.kill()
                    said = f"the reward of {self._name} had an answer written that is not its own"
                    job.fail(RewardFailed(said, worker.stderr_tail))
                    return False
                job.settle(answer)
            quick = time.monotonic() - started < _BATCH_S
            self._share = min(_MAX_IN_FLIGHT, self._share * 2) if quick else max(1, self._share // 2)
            return True
        finally:
            self._waiting.extendleft(reversed(batch))

    def _fail_waiting(self, fault: EnvironmentFault) -> None:
        while self._waiting:
            self._waiting.popleft().fail(fault)
