import asyncio
import time
from pathlib import Path

import pytest
import pytest_asyncio
import uvloop
from tests.envs.environments import config, task
from tests.inline_scorer import InlineScorer
from tests.waiting import is_there

from slipstream.config.planned import PlannedEnvironment
from slipstream.envs.base import MAX_METRICS, RewardFailed, RewardTimeout, Score
from slipstream.envs.registry import load_environment
from slipstream.envs.scoring import workers
from slipstream.envs.scoring.pool import ScorerPool
from slipstream.envs.scoring.process import Worker
from slipstream.errors import ConfigError, EnvironmentFault

SHARED = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool():
    """Of one worker, for tests that leave it as it is."""
    async with ScorerPool(of_workers(1)) as pool:
        yield pool


@pytest.fixture(params=["inline", "pool"])
def scorer(request, pool):
    """Both scorers do the same for rewards that neither hang nor exit."""
    return pool if request.param == "pool" else InlineScorer(load_environment(config()))


async def test_a_planned_section_without_training_tasks_is_graded_by():
    """SFT on a file beside an environment: `num_train_tasks` has no effect and is 0."""
    derived = {"max_turns": 1, "num_train_tasks": 0, "processes": 0, "reward_workers": 1}
    planned = PlannedEnvironment(**{**config().model_dump(), **derived})
    async with ScorerPool(planned) as pool:
        assert (await pool.score(task("4"), "4")).reward == 1.0


def of_workers(number, **options):
    return config(**options).model_copy(update={"reward_workers": number})


@SHARED
async def test_scores_and_metrics(scorer):
    assert await scorer.score(task("4"), "4") == Score(1.0, {"length": 1.0})
    assert await scorer.score(task("4"), "5") == Score(0.0, {"length": 1.0})
    assert await scorer.score(task("4"), "<think>a\nb</think>\n\n4") == Score(1.0, {"length": 1.0})
    assert await scorer.score(task("4"), "<think>4") == Score(0.0, {"unclosed_thinking": 1.0})
    assert (await scorer.score(task(), "give true")).reward == 1.0


@SHARED
@pytest.mark.parametrize(
    ("completion", "said"),
    [
        ("raise boom", r"raised KeyError: 'boom' \(line \d+ of .*environments.py\)"),
        ("sysexit 3", "raised SystemExit: 3"),
        ("give nan", "reward = nan, which is not finite"),
        ("give text", "reward = '1', a str"),
        ("give none", "reward = None, a NoneType"),
        ("give empty", "without the key 'reward'"),
        ("give inf", "x = inf, which is not finite"),
    ],
)
async def test_a_reward_that_fails_says_how(scorer, completion, said):
    with pytest.raises(RewardFailed, match=said):
        await scorer.score(task(), completion)
    assert (await scorer.score(task("4"), "4")).reward == 1.0


@SHARED
async def test_the_traceback_comes_along(scorer):
    with pytest.raises(RewardFailed) as failure:
        await scorer.score(task(), "raise boom")
    assert "raise KeyError(what)" in failure.value.details
    assert "slipstream/envs/base.py" not in failure.value.details, "only the environment's own calls"


@pytest.fixture
def patient(monkeypatch):
    """Guards and workers have time to say how a worker ended or where it hung; it passes only where they do not."""
    monkeypatch.setattr("slipstream.processes.guarded._OUTPUT_WAIT_S", 60.0)


async def test_a_hanging_reward_is_killed_and_the_others_are_graded(patient):
    async with ScorerPool(config(timeout_s=1.0)) as pool:
        first = (await pool.score(task(), "pid x")).reward
        started = time.monotonic()
        results = await asyncio.gather(
            *(pool.score(task("4"), text) for text in ["4", "4", "hang x", "4", "5", "4"]),
            return_exceptions=True,
        )
        assert time.monotonic() - started < 50, "it would hang for 60 s"
        kinds = [type(result) if isinstance(result, Exception) else result.reward for result in results]
        assert kinds == [1.0, 1.0, RewardTimeout, 1.0, 0.0, 1.0]
        assert "killed after 1 s" in str(results[2])
        assert "in _hang" in results[2].details, "where it hung, though it held the interpreter's lock"
        assert pool.num_restarts == 1
        assert (await pool.score(task(), "pid x")).reward != first
        assert not is_there(int(first))


async def test_each_reward_has_the_whole_deadline():
    async with ScorerPool(config(timeout_s=1.5)) as pool:
        results = await asyncio.gather(*(pool.score(task(), "sleep 0.4") for _ in range(4)))
        assert [result.reward for result in results] == [1.0] * 4
        assert pool.num_restarts == 0


async def test_a_busy_event_loop_is_not_taken_for_a_slow_reward():
    async with ScorerPool(config(timeout_s=1.0)) as pool:
        calls = [asyncio.create_task(pool.score(task("4"), "4")) for _ in range(3)]
        slow = asyncio.create_task(pool.score(task(), "sleep 0.3"))
        await asyncio.sleep(0.01)
        time.sleep(2.4)  # the blocked loop meets the deadline only now, with the answers already there
        assert [(await call).reward for call in [*calls, slow]] == [1.0] * 4
        assert pool.num_restarts == 0


async def test_an_answer_that_the_worker_did_not_give_is_believed_by_nobody():
    async with ScorerPool(config()) as pool:
        await asyncio.gather(*(pool.score(task(), "number 1") for _ in range(60)))
        asked = ["number 0", "forge x", *(f"number {number}" for number in range(2, 60))]
        found = await asyncio.gather(*(pool.score(task(), text) for text in asked), return_exceptions=True)
        assert isinstance(found[1], RewardFailed)
        assert "wrote into the pipe of answers" in str(found[1])
        assert [score.reward for score in found if score is not found[1]] == [0.0, *map(float, range(2, 60))]
        assert pool.num_restarts == 1


@SHARED
async def test_a_reward_that_ends_its_process_fails_alone(pool, patient):
    for completion, said in [("exit 0", "exit code 0"), ("kill x", "SIGSEGV")]:
        results = await asyncio.gather(
            *(pool.score(task("4"), text) for text in ["4", completion, "4"]), return_exceptions=True
        )
        assert isinstance(results[1], RewardFailed), completion
        assert said in str(results[1])
        assert [results[0].reward, results[2].reward] == [1.0, 1.0], completion


@SHARED
async def test_a_caller_that_gives_up_leaves_the_others_alone(pool):
    calls = [asyncio.create_task(pool.score(task("4"), "sleep 0.2" if i % 2 else "4")) for i in range(6)]
    await asyncio.sleep(0.05)
    for call in calls[1::2]:
        call.cancel()
    assert [(await call).reward for call in calls[::2]] == [1.0] * 3


async def noted(file, word, number):
    while not file.exists() or file.read_text().split().count(word) < number:
        await asyncio.sleep(0.01)


async def test_what_is_given_up_is_cancelled_and_its_place_is_free(tmp_path):
    """As the groups that `training.overprovision` gives up: coroutines beyond those that may run at once, too."""
    few = config(timeout_s=600.0).model_copy(update={"reward_concurrency": 3})
    file = tmp_path / "notes"
    async with asyncio.timeout(120), ScorerPool(few) as pool:
        await pool.score(task(), "wait 0 1")
        slow = [asyncio.create_task(pool.score(task(), f"until {file}")) for _ in range(8)]
        await noted(file, "begun", 3)
        for each in slow[:-1]:
            each.cancel()
        await noted(file, "begun", 4)  # the one that is still wanted
        found = await asyncio.gather(*(pool.score(task(), f"wait 0 {number}") for number in range(12)))
        assert [score.reward for score in found] == [float(number) for number in range(12)]
        assert (await pool.score(task("4"), "4")).reward == 1.0
        words = file.read_text().split()
        assert words.count("cancelled") == words.count("begun") - 1 >= 3
        assert pool.num_restarts == 0
        assert not slow[-1].done()
    with pytest.raises(EnvironmentFault):
        await slow[-1]
    assert words.count("cancelled") + 1 == file.read_text().split().count("cancelled"), "at the end of a run, too"


@SHARED
async def test_large_completions_pass(pool):
    text = "x" * 3_000_000
    results = await asyncio.gather(*(pool.score(task(text), text) for _ in range(4)))
    assert {result.metrics["length"] for result in results} == {3_000_000.0}


@pytest.mark.parametrize("fresh_worker", [False, True])
async def test_a_worker_is_set_up_before_its_first_call(fresh_worker):
    given = config().model_copy(update={"fresh_worker": fresh_worker})
    async with ScorerPool(given) as pool:
        assert (await pool.score(task(), "ready")).reward == 1.0


async def test_two_workers_share_the_work(tmp_path):
    """Two rewards that wait for each other are at work at once."""
    async with ScorerPool(of_workers(2)) as pool:
        calls = [pool.score(task(), text) for text in [f"meet {tmp_path}", f"meet {tmp_path}", "pid x", "pid x"]]
        results = await asyncio.gather(*calls)
        assert [result.reward for result in results[:2]] == [1.0, 1.0]
        assert len(results) == 4


async def test_leaving_ends_the_workers_and_the_waiting_calls():
    async with ScorerPool(config(timeout_s=30.0)) as pool:
        pid = int((await pool.score(task(), "pid x")).reward)
        hanging = [asyncio.create_task(pool.score(task(), "hang x")) for _ in range(100)]
        await asyncio.sleep(0.1)
    assert not is_there(pid)
    results = await asyncio.wait_for(asyncio.gather(*hanging, return_exceptions=True), 60.0)
    assert all(isinstance(result, EnvironmentFault) for result in results)
    with pytest.raises(EnvironmentFault, match="were stopped"):
        await pool.score(task(), "4")


async def test_a_pool_that_is_left_at_once_leaves_no_worker():
    async with ScorerPool(config()) as pool:
        worker = pool._rewards._slots[0].worker
    assert not worker.alive
    assert not is_there(worker._process.pid)


async def test_an_environment_that_cannot_be_made_is_a_fault_at_the_start(tmp_path, patient, monkeypatch):
    with pytest.raises(EnvironmentFault, match="has no class 'Missing'"):
        await ScorerPool(config("Missing")).__aenter__()
    (tmp_path / "dies.py").write_text("import os; os._exit(9)")
    dies = config().model_copy(update={"name": str(tmp_path / "dies.py")})
    with pytest.raises(EnvironmentFault, match="ended with exit code 9"):
        await ScorerPool(dies).__aenter__()
    (tmp_path / "hangs.py").write_text("import time; print('loading'); time.sleep(60)")
    hangs = config().model_copy(update={"name": str(tmp_path / "hangs.py")})
    monkeypatch.setattr(workers, "START_TIMEOUT_S", 1.0)
    with pytest.raises(EnvironmentFault, match="was not ready after 1 s"):
        await ScorerPool(hangs).__aenter__()


async def test_a_worker_that_cannot_be_replaced_ends_every_call(tmp_path):
    path = tmp_path / "once.py"
    path.write_text((Path(__file__).parent / "environments.py").read_text())
    async with ScorerPool(config().model_copy(update={"name": f"{path}:Behaving"})) as pool:
        path.write_text("raise ImportError('gone')")
        results = await asyncio.gather(
            *(pool.score(task("4"), text) for text in ["4", "exit 1", "4"]), return_exceptions=True
        )
        assert isinstance(results[1], RewardFailed)
        assert isinstance(results[2], EnvironmentFault)
        assert "gone" in str(results[2])
        with pytest.raises(EnvironmentFault, match="gone"):
            await pool.score(task("4"), "4")


async def test_the_only_worker_gets_its_next_requests_before_it_has_answered(monkeypatch):
    """One by one, each would wait for the answer to the one before. Several go in one write."""
    ahead, writes = [], []
    send, receive = Worker.send, Worker.receive

    async def received(self, *given):
        sent, _ = ahead[-1]
        ahead.append((sent - 1, sent))
        return await receive(self, *given)

    def sent(self, *data):
        ahead.append((ahead[-1][0] + len(data), 0))
        writes.append(len(data))
        send(self, *data)

    async with ScorerPool(config()) as pool:
        ahead.append((0, 0))
        monkeypatch.setattr(Worker, "send", sent)
        monkeypatch.setattr(Worker, "receive", received)
        await asyncio.gather(*(pool.score(task("4"), "4") for _ in range(100)))
    assert max(open_ones for _, open_ones in ahead) == workers._MAX_NOT_BEGUN
    assert sum(writes) == 100
    assert len(writes) <= 100 / (workers._MAX_NOT_BEGUN // 2) + workers._MAX_NOT_BEGUN


def test_a_reward_has_no_second_way_to_the_answers():
    """uvloop leaves its children further descriptors of their own pipes."""

    async def main():
        async with ScorerPool(config()) as pool:
            asked = ["fork writes", *(f"number {number}" for number in range(20))]
            for _ in range(2):
                found = await asyncio.gather(*(pool.score(task(), text) for text in asked))
                assert [score.reward for score in found] == [0.5, *map(float, range(20))]
                await asyncio.sleep(0.3)  # for the child's answer
            assert pool.num_restarts == 0

    uvloop.run(main())


@pytest.mark.parametrize("error", [ConnectionResetError("pipe"), ValueError("unforeseen")])
async def test_whatever_breaks_the_grading_nobody_waits_for_ever(monkeypatch, error):
    monkeypatch.setattr("slipstream.processes.guarded._OUTPUT_WAIT_S", 0.2)  # which passes in full
    async with ScorerPool(config()) as pool:

        async def broken(self, count):
            raise error

        monkeypatch.setattr(asyncio.StreamReader, "read", broken)
        calls = asyncio.gather(*(pool.score(task("4"), "4") for _ in range(3)), return_exceptions=True)
        found = await asyncio.wait_for(calls, 60.0)
    assert all(isinstance(each, EnvironmentFault) for each in found)
    assert isinstance(error, ConnectionError) or "unforeseen" in str(found[0])


async def test_a_worker_has_no_keys_but_those_that_are_named(monkeypatch):
    for name in ("OPENAI_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "JUDGE_KEY", "HF_HOME", "LC_TIME", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    named = config().model_copy(update={"variables": ("JUDGE_KEY",)})
    async with ScorerPool(named) as pool:
        asked = ["OPENAI_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "JUDGE_KEY", "HF_HOME", "LC_TIME", "OMP_NUM_THREADS"]
        found = await asyncio.gather(*(pool.score(task(), f"variable {name}") for name in [*asked, "PATH", "HOME"]))
    assert [score.reward for score in found] == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match="JUDGE_KEY is not set"):
        load_environment(named)


async def test_more_coroutines_than_may_run_at_once_wait_their_turn():
    few = config().model_copy(update={"reward_concurrency": 3})
    async with ScorerPool(few) as pool:
        found = await asyncio.gather(*(pool.score(task(), "wait_beside 3") for _ in range(12)))
        assert max(score.reward for score in found) == 3.0


@pytest.mark.parametrize(
    ("text", "kind", "details"),
    [
        ("wait 60 3", RewardTimeout, "in _wait"),
        ("in_coroutine sleep 60", RewardTimeout, ""),
        ("in_coroutine exit 3", RewardFailed, ""),
    ],
)
@pytest.mark.quick("wait*", "*exit*")
async def test_a_coroutine_that_hangs_or_takes_its_worker_along_is_alone_to_blame(text, kind, details):
    async with ScorerPool(config(timeout_s=1.5 if kind is RewardTimeout else 60.0)) as pool:
        asked = [f"wait 0.25 {number}" for number in range(4)]
        asked[2:2] = [text]
        found = await asyncio.gather(*(pool.score(task(), text) for text in asked), return_exceptions=True)
        blamed = found.pop(2)
        assert type(blamed) is kind
        assert details in blamed.details
        assert [score.reward for score in found] == [0.0, 1.0, 2.0, 3.0]


@SHARED
async def test_a_plain_reward_among_coroutines_may_have_a_loop_of_its_own(pool):
    asked = [text for number in range(5) for text in (f"wait 0.2 {number}", f"own_loop {number}")]
    found = await asyncio.gather(*(pool.score(task(), text) for text in asked))
    assert [score.reward for score in found] == [float(number) for number in range(5) for _ in (0, 1)]


async def test_what_a_fresh_worker_changes_is_gone_at_the_next_call(patient):
    fresh = config(timeout_s=1.0).model_copy(update={"fresh_worker": True})
    async with ScorerPool(fresh) as pool:
        asked = [
            "change 5",
            "changed x",
            "exit 3",
            "wait 0 7",
            "number 8",
            "raise boom",
            "hang x",
            "changed x",
            "fork x",
        ]
        found = await asyncio.gather(*(pool.score(task(), text) for text in asked), return_exceptions=True)
        kinds = [type(each) if isinstance(each, Exception) else each.reward for each in found]
        assert kinds == [5.0, 0.0, RewardFailed, 7.0, 8.0, RewardFailed, RewardTimeout, 0.0, 0.5]
        assert "exit code 3" in str(found[2])
        assert "in _hang" in found[6].details
        assert pool.num_restarts == 1


async def test_metrics_beyond_what_a_run_can_keep_are_counted():
    warnings = []
    async with ScorerPool(config(), warn=warnings.append) as pool:
        found = [(await pool.score(task(), f"metrics {MAX_METRICS} of{number}")).metrics for number in range(6)]
        with pytest.raises(RewardFailed, match="at most"):
            await pool.score(task(), f"metrics {MAX_METRICS + 1} x")
    assert [len(metrics) for metrics in found] == [64, 64, 64, 64, 1, 1]
    assert found[5] == {"metrics_left_out": 64.0}
    assert len(warnings) == 1


async def test_further_workers_start_only_where_rewards_wait(monkeypatch):
    monkeypatch.setattr(workers, "_PATIENCE_S", 20.0)  # for none of them, however busy the machine is
    async with ScorerPool(of_workers(3)) as pool:
        found = await asyncio.gather(*(pool.score(task(), "pid x") for _ in range(200)))
        assert len({score.reward for score in found}) == 1
