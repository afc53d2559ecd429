import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import uvloop
from tests.envs.environments import config, task

from slipstream.envs.base import RewardFailed, RewardTimeout, Score
from slipstream.envs.registry import load_environment
from slipstream.envs.scorer import InlineScorer, ScorerPool
from slipstream.envs.scorer_process import Worker
from slipstream.errors import EnvironmentFault


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def gone(pid, within_s=20.0):
    end = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < end:
        await asyncio.sleep(0.02)
    return not alive(pid)


@pytest.fixture(params=["inline", "pool"])
async def scorer(request):
    """Both scorers do the same for rewards that neither hang nor exit."""
    if request.param == "inline":
        yield InlineScorer(load_environment(config()))
    else:
        async with ScorerPool(config()) as pool:
            yield pool


async def test_scores_and_metrics(scorer):
    assert await scorer.score(task("4"), "4") == Score(1.0, {"length": 1.0})
    assert await scorer.score(task("4"), "5") == Score(0.0, {"length": 1.0})
    assert await scorer.score(task("4"), "<think>a\nb</think>\n\n4") == Score(1.0, {"length": 1.0})
    assert await scorer.score(task("4"), "<think>4") == Score(0.0, {"unclosed_thinking": 1.0})
    assert (await scorer.score(task(), "give true")).reward == 1.0


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


async def test_the_traceback_comes_along(scorer):
    with pytest.raises(RewardFailed) as failure:
        await scorer.score(task(), "raise boom")
    assert "raise KeyError(what)" in failure.value.details
    assert "slipstream/envs/base.py" not in failure.value.details, "only the environment's own calls"


async def test_a_hanging_reward_is_killed_and_the_others_are_graded():
    async with ScorerPool(config(timeout_s=1.0)) as pool:
        first = (await pool.score(task(), "pid x")).reward
        started = time.monotonic()
        results = await asyncio.gather(
            *(pool.score(task("4"), text) for text in ["4", "4", "hang x", "4", "5", "hang x", "4"]),
            return_exceptions=True,
        )
        assert time.monotonic() - started < 50, "it would hang for 60 s"
        kinds = [type(result) if isinstance(result, Exception) else result.reward for result in results]
        assert kinds == [1.0, 1.0, RewardTimeout, 1.0, 0.0, RewardTimeout, 1.0]
        assert "killed after 1 s" in str(results[2])
        assert "in _hang" in results[2].details, "where it hung, though it held the interpreter's lock"
        assert pool.num_restarts == 2
        assert (await pool.score(task(), "pid x")).reward != first
        assert not alive(int(first))


async def test_each_reward_has_the_whole_deadline():
    async with ScorerPool(config(timeout_s=1.5)) as pool:
        results = await asyncio.gather(*(pool.score(task(), "sleep 0.5") for _ in range(4)))
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


@pytest.mark.parametrize("how", ["returns", "raises", "writes", "unseen"])
async def test_a_child_that_comes_back_from_a_reward_answers_nothing(how):
    """Neither for its own completion nor, with the pipes that it has from its parent, for those that follow."""
    async with ScorerPool(config(timeout_s=5.0)) as pool:
        await asyncio.gather(*(pool.score(task(), "number 1") for _ in range(60)))  # many are under way at once now
        for _ in range(3):
            asked = [f"fork {how}", *(f"number {number}" for number in range(1, 60))]
            found = await asyncio.gather(*(pool.score(task(), text) for text in asked))
            assert [score.reward for score in found] == [0.5, *map(float, range(1, 60))]
        assert pool.num_restarts == 0


async def test_an_answer_that_the_worker_did_not_give_is_believed_by_nobody():
    async with ScorerPool(config(timeout_s=5.0)) as pool:
        await asyncio.gather(*(pool.score(task(), "number 1") for _ in range(60)))
        asked = ["number 0", "forge x", *(f"number {number}" for number in range(2, 60))]
        found = await asyncio.gather(*(pool.score(task(), text) for text in asked), return_exceptions=True)
        assert isinstance(found[1], RewardFailed)
        assert "had an answer written that is not its own" in str(found[1])
        assert [score.reward for score in found if score is not found[1]] == [0.0, *map(float, range(2, 60))]
        assert pool.num_restarts == 1


@pytest.mark.parametrize(
    ("completion", "said"), [("exit 0", "exit code 0"), ("exit 7", "exit code 7"), ("kill x", "SIGSEGV")]
)
async def test_a_reward_that_ends_its_process_fails_alone(completion, said):
    async with ScorerPool(config()) as pool:
        results = await asyncio.gather(
            *(pool.score(task("4"), text) for text in ["4", completion, "4"]), return_exceptions=True
        )
        assert isinstance(results[1], RewardFailed)
        assert said in str(results[1])
        assert [results[0].reward, results[2].reward] == [1.0, 1.0]


async def test_printing_and_reading_do_not_disturb_the_protocol():
    async with ScorerPool(config()) as pool:
        results = await asyncio.gather(*(pool.score(task("4"), text) for text in ["print ab", "4", "print c", "5"]))
        assert [result.reward for result in results] == [1.0, 1.0, 1.0, 0.0]


async def test_what_the_reward_started_dies_with_it(tmp_path):
    async with ScorerPool(config(timeout_s=2.0)) as pool:
        with pytest.raises(RewardTimeout):
            await pool.score(task(), f"child {tmp_path / 'pid'}")
        assert await gone(int((tmp_path / "pid").read_text()))


async def test_memory_is_bounded():
    async with ScorerPool(config(), memory_limit_gib=0.5) as pool:
        with pytest.raises(RewardFailed, match="MemoryError"):
            await pool.score(task(), "allocate 2")
        assert (await pool.score(task("4"), "4")).reward == 1.0


async def test_a_caller_that_gives_up_leaves_the_others_alone():
    async with ScorerPool(config()) as pool:
        calls = [asyncio.create_task(pool.score(task("4"), "sleep 0.2" if i % 2 else "4")) for i in range(6)]
        await asyncio.sleep(0.05)
        for call in calls[1::2]:
            call.cancel()
        assert [(await call).reward for call in calls[::2]] == [1.0] * 3


async def test_large_completions_pass():
    text = "x" * 3_000_000
    async with ScorerPool(config()) as pool:
        results = await asyncio.gather(*(pool.score(task(text), text) for _ in range(4)))
        assert {result.metrics["length"] for result in results} == {3_000_000.0}


async def test_two_workers_share_the_work(tmp_path):
    """Two rewards that wait for each other are at work at once."""
    async with ScorerPool(config(timeout_s=60.0), num_workers=2) as pool:
        calls = [pool.score(task(), text) for text in [f"meet {tmp_path}", f"meet {tmp_path}", "pid x", "pid x"]]
        results = await asyncio.gather(*calls)
        assert [result.reward for result in results[:2]] == [1.0, 1.0]
        assert len(results) == 4


async def test_leaving_ends_the_workers_and_the_waiting_calls():
    async with ScorerPool(config(timeout_s=30.0)) as pool:
        pid = int((await pool.score(task(), "pid x")).reward)
        hanging = [asyncio.create_task(pool.score(task(), "hang x")) for _ in range(100)]
        await asyncio.sleep(0.1)
    assert not alive(pid)
    results = await asyncio.wait_for(asyncio.gather(*hanging, return_exceptions=True), 20.0)
    assert all(isinstance(result, EnvironmentFault) for result in results)
    with pytest.raises(EnvironmentFault, match="were stopped"):
        await pool.score(task(), "4")


async def test_an_environment_that_cannot_be_made_is_a_fault_at_the_start(tmp_path):
    with pytest.raises(EnvironmentFault, match="has no class 'Missing'"):
        await ScorerPool(config("Missing")).__aenter__()
    (tmp_path / "dies.py").write_text("import os; os._exit(9)")
    dies = config().model_copy(update={"name": str(tmp_path / "dies.py")})
    with pytest.raises(EnvironmentFault, match="ended with exit code 9"):
        await ScorerPool(dies).__aenter__()
    (tmp_path / "hangs.py").write_text("import time; print('loading'); time.sleep(60)")
    hangs = config().model_copy(update={"name": str(tmp_path / "hangs.py")})
    with pytest.raises(EnvironmentFault, match="was not ready after 1 s"):
        await ScorerPool(hangs, start_timeout_s=1.0).__aenter__()


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


async def test_workers_end_when_the_run_is_killed(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import asyncio, sys
            sys.path.insert(0, {str(Path(__file__).parents[2])!r})
            from slipstream.envs.scorer import ScorerPool
            from tests.envs.environments import config, task
            async def main():
                async with ScorerPool(config(timeout_s=60)) as pool:
                    print(int((await pool.score(task(), "pid x")).reward), flush=True)
                    await pool.score(task(), "hang x")
            asyncio.run(main())
            """
        )
    )
    run = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    pid = int(run.stdout.readline())
    assert alive(pid)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    run.stdout.close()
    assert await gone(pid)


async def test_many_quick_rewards_travel_together(monkeypatch):
    """One by one, each would wait for the answer to the one before."""
    sizes = []
    send = Worker.send
    monkeypatch.setattr(Worker, "send", lambda self, data: sizes.append(len(data)) or send(self, data))
    async with ScorerPool(config()) as pool:
        sizes.clear()
        await asyncio.gather(*(pool.score(task("4"), "4") for _ in range(4000)))
    assert len(sizes) < 4000 / 4


def test_it_works_on_the_orchestrators_event_loop():
    async def main():
        async with ScorerPool(config(timeout_s=1.0), num_workers=2) as pool:
            return await asyncio.gather(
                *(pool.score(task("4"), text) for text in ["4", "hang x", "5", "exit 3", "print a"]),
                return_exceptions=True,
            )

    right, hung, wrong, ended, printed = uvloop.run(main())
    assert (right.reward, wrong.reward, printed.reward) == (1.0, 0.0, 1.0)
    assert isinstance(hung, RewardTimeout)
    assert isinstance(ended, RewardFailed)
