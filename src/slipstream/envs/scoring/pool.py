"""Runs rewards: `ScorerPool` in worker processes that can be killed, `InlineScorer` in this process.

Guarantees of the pool: a reward that hangs is killed at its deadline with all its descendants (`RewardTimeout`); one
that raises, exits or returns a value that is not finite is a `RewardFailed`; a new worker then takes the other
requests, and no call waits longer than the deadlines allow. A reward's deadline counts from the moment the worker was
free for it, not from the call. Output of a reward appears only in the `details` of its failure. No descendant of a
reward outlives the pool, however the pool ends.

A reward is not sandboxed: it may read and write whatever this user may.

A worker holds several requests at once and answers each as soon as it is done, so the first request without an answer
is the one that hangs. This does not hold for coroutines, which a worker runs concurrently and cancels at their
deadlines: if such a worker hangs or dies, each of its coroutines is graded again, alone.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable
from pathlib import Path

from slipstream.config.bounds import GIB
from slipstream.config.python_objects import given, is_python_object
from slipstream.config.schema import EnvironmentConfig
from slipstream.envs.base import Environment, Episode, RewardError, RewardFailed, RewardTimeout, Score, judge
from slipstream.envs.scoring.process import Answer, Request, Setup, Worker, WorkerDied, frame
from slipstream.errors import EnvironmentFault
from slipstream.records import Task

MAX_NAMES = 256
"""Most distinct metric names in a pool's life: each becomes a metric of the run."""
_MAX_IN_FLIGHT = 64
_BATCH_S = 0.02  # slower rewards are sent one by one, so that no worker idles while another has a queue
_MAX_IN_FLIGHT_BYTES = 32 * 1024  # half of a pipe: requests reach the worker even if this loop is busy
_PATIENCE_S = 0.25  # a job that waits longer starts another worker
_GRACE_S = 1.0  # how late a worker may cancel coroutines after their deadline


class InlineScorer:
    """Runs rewards in this process, where they cannot be killed: for rewards known to end, and for tests."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    async def score(self, task: Task, episode: Episode | str) -> Score:
        """See `base.Scorer`."""
        completion = episode if isinstance(episode, str) else episode.completion
        found = judge(self._environment, task, completion)
        return found if isinstance(found, Score) else await found


class _Job:
    """One call waiting for its score."""

    def __init__(self, task: Task, completion: str) -> None:
        self.id = secrets.token_hex(16)
        self.data = frame(Request(task, completion, self.id))
        self.future: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self.begun = False
        """It is a coroutine, and others may run concurrently."""
        self.alone = False
        """It must be its worker's only job."""

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def succeed(self, score: Score) -> None:
        if not self.future.done():
            self.future.set_result(score)


class _Slot:
    """A worker and its jobs, in the order in which they were sent."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.jobs: dict[str, _Job] = {}
        self.runs_coroutines = False
        self.ends = False
        """It gets no more jobs, because a coroutine has passed its deadline here."""
        self.heard_at = 0.0
        """When it last answered or was sent a job, by the loop's clock."""
        self.sent_at = 0.0

    def may_have_written(self, answer: Answer) -> bool:
        """Whether `answer` belongs to a job that the worker can be working on."""
        job = self.jobs.get(answer.id)
        return job is not None and (job.begun or job is self.first)

    @property
    def first(self) -> _Job | None:
        """The job that the worker is working on, not counting coroutines."""
        return next((job for job in self.jobs.values() if not job.begun), None)

    def suspects(self) -> list[_Job]:
        """Jobs that may have caused the worker's death."""
        begun = [job for job in self.jobs.values() if job.begun]
        return [*begun, self.first] if self.first is not None else begun


class ScorerPool:
    """Killable workers that grade for one environment. Use as `async with ScorerPool(...) as scorer`.

    Entering starts a worker and waits for it: `EnvironmentFault` if the environment cannot be constructed there.
    Further workers, up to `num_workers`, start when rewards wait. Defaults come from the config (`auto`: one worker).
    `warn` receives a sentence. `stacks`: where workers answer for their stacks, see `runlog.stacks.register`.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        *,
        num_workers: int | None = None,
        timeout_s: float | None = None,
        start_timeout_s: float = 120.0,
        memory_limit_gib: float | None = None,
        warn: Callable[[str], None] = lambda text: None,
        stacks: Path | None = None,
    ) -> None:
        self._config = config
        self._stacks = stacks
        self._name = config.name
        self._timeout_s = config.reward_timeout_s if timeout_s is None else timeout_s
        self._start_timeout_s = start_timeout_s
        self._memory_gib = config.reward_memory_gib if memory_limit_gib is None else memory_limit_gib
        passed = given(config.name) if is_python_object(config.name) else None
        # A planned section has values here that mean "no effect" and that no run file may have; a worker needs neither.
        config_json = config.model_dump_json(exclude={"num_train_tasks", "reward_workers"})
        self._setup = Setup(config_json, self._timeout_s, int(self._memory_gib * GIB), passed)
        planned = 1 if config.reward_workers == "auto" else config.reward_workers
        self._num_workers = planned if num_workers is None else num_workers
        self._warn = warn
        self._names: set[str] = set()
        self._warned = False
        self._waiting: deque[_Job] = deque()
        self._work = asyncio.Event()
        self._share = 1
        self._num_started = 0
        self._num_starting = 0
        self._servers: list[asyncio.Task[None]] = []
        self._fault: EnvironmentFault | None = None
        self.num_restarts = 0
        """Workers that were replaced."""

    async def __aenter__(self) -> ScorerPool:
        first = _Slot(await self._start())
        self._num_started = 1
        slots = [first, *[None] * (self._num_workers - 1)]
        self._servers = [asyncio.create_task(self._serve(slot)) for slot in slots]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._fault = self._fault or EnvironmentFault(f"the reward workers of {self._name} were stopped")
        for server in self._servers:
            server.cancel()
        await asyncio.gather(*self._servers, return_exceptions=True)
        self._fail_waiting(self._fault)

    async def score(self, task: Task, episode: Episode | str) -> Score:
        """See `base.Scorer`. Raises `EnvironmentFault` if no worker can be started any more."""
        if self._fault is not None:
            raise self._fault
        if not self._servers:
            raise EnvironmentFault(f"the reward workers of {self._name} were not started: use 'async with'")
        job = _Job(task, episode if isinstance(episode, str) else episode.completion)
        self._waiting.append(job)
        self._work.set()
        return self._limit_metrics(await job.future)

    async def _start(self) -> Worker:
        try:
            worker = await Worker.start(self._setup, self._config.variables, self._stacks)
        except OSError as error:
            raise EnvironmentFault(f"no reward worker of {self._name} can be started: {error}") from error
        try:
            due = asyncio.get_running_loop().time() + self._start_timeout_s
            answer = await worker.receive(due, self._start_timeout_s)
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
        detail = f" ({tail})" if tail else ""
        if "MemoryError" in reason + tail:
            detail += f" with environment.reward_memory_gib = {self._memory_gib:g}"
        raise EnvironmentFault(f"the reward worker of {self._name} {reason}{detail}: run `slipstream env test`")

    async def _serve(self, slot: _Slot | None) -> None:
        """Grades until cancelled; replaces a worker that was killed or died."""
        try:
            while True:
                if slot is None:
                    slot = await self._start_another()
                while not self._waiting and not slot.jobs:
                    self._work.clear()
                    await self._work.wait()
                if not await self._grade(slot):
                    self.num_restarts += 1
                    slot = _Slot(await self._start())
        except EnvironmentFault as fault:
            self._fail_all(fault, slot)
        except Exception as error:  # noqa: BLE001 (callers wait: whatever it is, they must learn of it)
            self._fail_all(EnvironmentFault(f"grading by {self._name} broke ({error!r}): report this as a bug"), slot)
        finally:
            if slot is not None:
                self._return_jobs(slot)
                await slot.worker.stop()

    async def _start_another(self) -> _Slot:
        """Starts one more worker if jobs are waiting that the others do not take."""
        while True:
            while not self._waiting:
                self._work.clear()
                await self._work.wait()
            waits = self._waiting[0]
            await asyncio.sleep(_PATIENCE_S)
            if waits in self._waiting and len(self._waiting) > self._num_starting:
                break
        self._num_starting += 1
        try:
            worker = await self._start()
        finally:
            self._num_starting -= 1
        self._num_started += 1
        return _Slot(worker)

    async def _grade(self, slot: _Slot) -> bool:
        """Sends as many jobs as fit and handles the next answer; false if the worker was killed."""
        self._send(slot)
        if not slot.jobs:
            return not slot.ends
        try:
            answer = await self._next_answer(slot)
        except TimeoutError:
            await slot.worker.kill()
            self._blame(slot, RewardTimeout, f"was killed after {self._timeout_s:g} s")
            return False
        except WorkerDied as death:
            self._blame(slot, RewardFailed, f"ended its process with {death}")
            return False
        if answer is None:
            return True
        slot.heard_at = asyncio.get_running_loop().time()
        if not slot.may_have_written(answer):
            await slot.worker.kill()
            self._blame(slot, RewardFailed, "had an answer written that is not its own")
            return False
        if answer.kind == "begun":
            slot.jobs[answer.id].begun = slot.runs_coroutines = True
            return True
        self._settle(slot, slot.jobs.pop(answer.id), answer)
        if slot.ends and not slot.jobs:
            await slot.worker.kill()
            return False
        return True

    def _send(self, slot: _Slot) -> None:
        batch = self._take(self._num_free(slot), beside=len(slot.jobs))
        if batch:
            now = asyncio.get_running_loop().time()
            slot.heard_at = now
            if not slot.jobs:
                slot.sent_at = now
            slot.jobs |= {job.id: job for job in batch}
            slot.worker.send(b"".join(job.data for job in batch))

    def _num_free(self, slot: _Slot) -> int:
        """How many more jobs the worker may get."""
        if slot.ends or any(job.alone for job in slot.jobs.values()):
            return 0
        if slot.runs_coroutines:
            return max(0, self._config.reward_concurrency - len(slot.jobs))
        if slot.jobs:
            return 0
        return 1 if self._config.fresh_worker else self._share

    def _take(self, num_free: int, *, beside: int) -> list[_Job]:
        """Takes a fair share of the waiting jobs, within the limits."""
        share = min(num_free, -(-len(self._waiting) // self._num_started))
        batch: list[_Job] = []
        num_bytes = 0
        while self._waiting and len(batch) < share:
            job = self._waiting[0]
            num_bytes += len(job.data)
            if (batch and num_bytes > _MAX_IN_FLIGHT_BYTES) or ((batch or beside) and job.alone):
                break
            self._waiting.popleft()
            if not job.future.done():  # the caller may have given up
                batch.append(job)
                if job.alone:
                    break
        return batch

    async def _next_answer(self, slot: _Slot) -> Answer | None:
        """The worker's next answer; None if more jobs arrive that it has room for."""
        # Each coroutine ends at its own deadline, so one of them answers in time unless the worker hangs.
        timeout_s = self._timeout_s + (_GRACE_S if slot.runs_coroutines else 0.0)
        due = slot.heard_at + timeout_s
        if not slot.runs_coroutines or not self._num_free(slot):
            return await slot.worker.receive(due, timeout_s)
        self._work.clear()
        waits = (
            asyncio.create_task(slot.worker.receive(due, timeout_s)),
            asyncio.create_task(self._work.wait()),
        )
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
            await asyncio.wait(waits)
        receiving = waits[0]
        return None if receiving.cancelled() else receiving.result()

    def _settle(self, slot: _Slot, job: _Job, answer: Answer) -> None:
        name, details = self._name, answer.details
        if answer.kind == "timeout":
            slot.ends = True
            job.fail(RewardTimeout(f"the reward of {name} was killed after {self._timeout_s:g} s", details))
        elif answer.kind == "died":
            detail = f"the reward of {name} ended its process with {answer.message}"
            job.fail(RewardFailed(detail, slot.worker.stderr_tail))
        elif answer.score is None:
            job.fail(RewardFailed(answer.message, details))
        else:
            job.succeed(answer.score)
        if not slot.jobs and not slot.runs_coroutines:
            quick = asyncio.get_running_loop().time() - slot.sent_at < _BATCH_S
            self._share = min(_MAX_IN_FLIGHT, self._share * 2) if quick else max(1, self._share // 2)

    def _blame(self, slot: _Slot, kind: type[RewardError], detail: str) -> None:
        """Fails the job that caused the worker's death, or has every job that may have caused it graded alone."""
        suspects = slot.suspects()
        if len(suspects) == 1:
            slot.jobs.pop(suspects[0].id).fail(kind(f"the reward of {self._name} {detail}", slot.worker.stderr_tail))
        for job in suspects:
            job.alone, job.begun = True, False
        self._return_jobs(slot)

    def _return_jobs(self, slot: _Slot) -> None:
        self._waiting.extendleft(reversed(slot.jobs.values()))
        slot.jobs.clear()
        self._work.set()

    def _limit_metrics(self, score: Score) -> Score:
        """The score without metrics beyond `MAX_NAMES`, which are counted."""
        known = [name for name in score.metrics if name in self._names]
        new = [name for name in score.metrics if name not in self._names][: MAX_NAMES - len(self._names)]
        self._names.update(new)
        left_out = len(score.metrics) - len(known) - len(new)
        if not left_out:
            return score
        if not self._warned:
            self._warned = True
            self._warn(
                f"the rewards of {self._name} have more than {MAX_NAMES} metrics by name (the first that is left out: "
                f"{next(name for name in score.metrics if name not in self._names):.60}): use fewer names"
            )
        kept = {name: score.metrics[name] for name in (*known, *new)}
        return Score(score.reward, kept | {"metrics_left_out": float(left_out)})

    def _fail_all(self, fault: EnvironmentFault, slot: _Slot | None) -> None:
        """Fails all jobs."""
        self._fault = fault
        if slot is not None:
            self._return_jobs(slot)
        self._fail_waiting(fault)

    def _fail_waiting(self, fault: EnvironmentFault) -> None:
        while self._waiting:
            self._waiting.popleft().fail(fault)
