"""Where rewards run. `ScorerPool` runs them in worker processes that can be killed, `InlineScorer` right here.

Guarantees of the pool: a reward that hangs is killed at its deadline with all that it started (`RewardTimeout`); one
that raises, ends its process or returns something that is no finite number is a `RewardFailed`; a fresh worker goes
on with the others, and no call waits for longer than the deadlines say. The deadline counts for each reward from
the moment that the worker was free for it, not from the call. What a reward prints is seen only in the `details`
of its failure. None of what rewards have started outlives the pool, however that ends. A reward is not a sandbox: it
may read and write whatever this user may.

Several requests are with a worker at once, and every answer comes as soon as there is one: so the first request
without an answer is the one that hangs. Of coroutines, which a worker runs side by side and ends at their deadlines,
that cannot be said: where such a worker hangs or dies, each of them is graded again, by itself.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable

from slipstream.config.bounds import GIB
from slipstream.config.schema import EnvironmentConfig
from slipstream.envs.base import Environment, RewardError, RewardFailed, RewardTimeout, Score, judge
from slipstream.envs.scoring.process import Answer, Request, Setup, Worker, WorkerDied, frame
from slipstream.errors import EnvironmentFault
from slipstream.records import Task

MAX_NAMES = 256
"""Most names of metrics in a pool's life: each is a column of the run's metrics."""
_MAX_IN_FLIGHT = 64
_BATCH_S = 0.02  # slow rewards are sent one by one, so that a free worker does not wait beside a full one
_MAX_IN_FLIGHT_BYTES = 32 * 1024  # half of a pipe: the requests are with the worker even if this loop is busy
_PATIENCE_S = 0.25  # what has to wait for longer starts a further worker
_GRACE_S = 1.0  # how late a worker may end coroutines that have passed their deadline


class InlineScorer:
    """Runs rewards in this process, where nothing can stop them: for rewards known to end, and for tests."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    async def score(self, task: Task, completion: str) -> Score:
        """See `base.Scorer`."""
        found = judge(self._environment, task, completion)
        return found if isinstance(found, Score) else await found


class _Job:
    """One call waiting for its score."""

    def __init__(self, task: Task, completion: str) -> None:
        self.id = secrets.token_hex(16)
        self.data = frame(Request(task, completion, self.id))
        self.future: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self.begun = False
        """It is a coroutine, and others may be graded beside it."""
        self.alone = False
        """Nothing else may be with its worker."""

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def succeed(self, score: Score) -> None:
        if not self.future.done():
            self.future.set_result(score)


class _Desk:
    """A worker, and the jobs that are with it in the order in which they were sent."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.jobs: dict[str, _Job] = {}
        self.runs_coroutines = False
        self.ends = False
        """It gets no more, since a coroutine has passed its deadline here."""
        self.heard_at = 0.0
        """When it last said something or was sent something, by the loop's clock."""
        self.sent_at = 0.0

    def may_have_written(self, answer: Answer) -> bool:
        """Whether `answer` is to a job that the worker can be at."""
        job = self.jobs.get(answer.id)
        return job is not None and (job.begun or job is self.first)

    @property
    def first(self) -> _Job | None:
        """The one that the worker is at, coroutines aside."""
        return next((job for job in self.jobs.values() if not job.begun), None)

    def suspects(self) -> list[_Job]:
        """Those of which any may have cost the worker's life."""
        begun = [job for job in self.jobs.values() if job.begun]
        return [*begun, self.first] if self.first is not None else begun


class ScorerPool:
    """Killable workers that grade for one environment. Use as `async with ScorerPool(...) as scorer`.

    Entering starts a worker and waits for it: `EnvironmentFault` when the environment cannot be made there. Further
    ones, up to `num_workers`, start when rewards wait. What is not given is the config's (`auto`: one worker). `warn`
    gets a sentence.
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
    ) -> None:
        self._config = config
        self._name = config.name
        self._timeout_s = config.reward_timeout_s if timeout_s is None else timeout_s
        self._start_timeout_s = start_timeout_s
        self._memory_gib = config.reward_memory_gib if memory_limit_gib is None else memory_limit_gib
        self._setup = Setup(config.model_dump_json(), self._timeout_s, int(self._memory_gib * GIB))
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
        """Workers that had to be replaced."""

    async def __aenter__(self) -> ScorerPool:
        first = _Desk(await self._start())
        self._num_started = 1
        desks = [first, *[None] * (self._num_workers - 1)]
        self._servers = [asyncio.create_task(self._serve(desk)) for desk in desks]
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
        return self._bounded(await job.future)

    async def _start(self) -> Worker:
        try:
            worker = await Worker.start(self._setup, self._config.variables)
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
        said = f" ({tail})" if tail else ""
        if "MemoryError" in reason + tail:
            said += f" with environment.reward_memory_gib = {self._memory_gib:g}"
        raise EnvironmentFault(f"the reward worker of {self._name} {reason}{said}: run `slipstream env test`")

    async def _serve(self, desk: _Desk | None) -> None:
        """Grade until cancelled, replacing the worker when it was killed or died."""
        try:
            while True:
                if desk is None:
                    desk = await self._further()
                while not self._waiting and not desk.jobs:
                    self._work.clear()
                    await self._work.wait()
                if not await self._grade(desk):
                    self.num_restarts += 1
                    desk = _Desk(await self._start())
        except EnvironmentFault as fault:
            self._end(fault, desk)
        except Exception as error:  # noqa: BLE001 (callers wait: whatever it is, they must learn of it)
            self._end(EnvironmentFault(f"grading by {self._name} broke ({error!r}): report this as a bug"), desk)
        finally:
            if desk is not None:
                self._take_back(desk)
                await desk.worker.stop()

    async def _further(self) -> _Desk:
        """One more worker, once there is work that the others leave waiting."""
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
        return _Desk(worker)

    async def _grade(self, desk: _Desk) -> bool:
        """Send what there is room for and settle what comes next; false when the worker has been killed for it."""
        self._send(desk)
        if not desk.jobs:
            return not desk.ends
        try:
            answer = await self._hear(desk)
        except TimeoutError:
            await desk.worker.kill()
            self._blame(desk, RewardTimeout, f"was killed after {self._timeout_s:g} s")
            return False
        except WorkerDied as death:
            self._blame(desk, RewardFailed, f"ended its process with {death}")
            return False
        if answer is None:
            return True
        desk.heard_at = asyncio.get_running_loop().time()
        if not desk.may_have_written(answer):
            await desk.worker.kill()
            self._blame(desk, RewardFailed, "had an answer written that is not its own")
            return False
        if answer.kind == "begun":
            desk.jobs[answer.id].begun = desk.runs_coroutines = True
            return True
        self._settle(desk, desk.jobs.pop(answer.id), answer)
        if desk.ends and not desk.jobs:
            await desk.worker.kill()
            return False
        return True

    def _send(self, desk: _Desk) -> None:
        batch = self._take(self._room(desk), beside=len(desk.jobs))
        if batch:
            now = asyncio.get_running_loop().time()
            desk.heard_at = now
            if not desk.jobs:
                desk.sent_at = now
            desk.jobs |= {job.id: job for job in batch}
            desk.worker.send(b"".join(job.data for job in batch))

    def _room(self, desk: _Desk) -> int:
        """How many more the worker may have."""
        if desk.ends or any(job.alone for job in desk.jobs.values()):
            return 0
        if desk.runs_coroutines:
            return max(0, self._config.reward_concurrency - len(desk.jobs))
        if desk.jobs:
            return 0
        return 1 if self._config.fresh_worker else self._share

    def _take(self, room: int, *, beside: int) -> list[_Job]:
        """A fair share of what is waiting, within the limits."""
        share = min(room, -(-len(self._waiting) // self._num_started))
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

    async def _hear(self, desk: _Desk) -> Answer | None:
        """The worker's next answer; nothing when there is more work that it has room for."""
        # Each coroutine ends at its own deadline, so one of them speaks up in time unless the worker hangs.
        timeout_s = self._timeout_s + (_GRACE_S if desk.runs_coroutines else 0.0)
        due = desk.heard_at + timeout_s
        if not desk.runs_coroutines or not self._room(desk):
            return await desk.worker.receive(due, timeout_s)
        self._work.clear()
        waits = (
            asyncio.create_task(desk.worker.receive(due, timeout_s)),
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

    def _settle(self, desk: _Desk, job: _Job, answer: Answer) -> None:
        name, details = self._name, answer.details
        if answer.kind == "timeout":
            desk.ends = True
            job.fail(RewardTimeout(f"the reward of {name} was killed after {self._timeout_s:g} s", details))
        elif answer.kind == "died":
            said = f"the reward of {name} ended its process with {answer.message}"
            job.fail(RewardFailed(said, desk.worker.stderr_tail))
        elif answer.score is None:
            job.fail(RewardFailed(answer.message, details))
        else:
            job.succeed(answer.score)
        if not desk.jobs and not desk.runs_coroutines:
            quick = asyncio.get_running_loop().time() - desk.sent_at < _BATCH_S
            self._share = min(_MAX_IN_FLIGHT, self._share * 2) if quick else max(1, self._share // 2)

    def _blame(self, desk: _Desk, kind: type[RewardError], said: str) -> None:
        """Fail the job that has cost the worker its life, or have each that may have done so graded by itself."""
        suspects = desk.suspects()
        if len(suspects) == 1:
            desk.jobs.pop(suspects[0].id).fail(kind(f"the reward of {self._name} {said}", desk.worker.stderr_tail))
        for job in suspects:
            job.alone, job.begun = True, False
        self._take_back(desk)

    def _take_back(self, desk: _Desk) -> None:
        self._waiting.extendleft(reversed(desk.jobs.values()))
        desk.jobs.clear()
        self._work.set()

    def _bounded(self, score: Score) -> Score:
        """Without those metrics whose names are more than a run can have; they are counted."""
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

    def _end(self, fault: EnvironmentFault, desk: _Desk | None) -> None:
        """Nobody waits any longer."""
        self._fault = fault
        if desk is not None:
            self._take_back(desk)
        self._fail_waiting(fault)

    def _fail_waiting(self, fault: EnvironmentFault) -> None:
        while self._waiting:
            self._waiting.popleft().fail(fault)
