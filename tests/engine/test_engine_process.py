"""The supervised engine process: starting, refusing, cancelling, dying."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from benchmarks.weight_sync.process_memory import pids_of

from slipstream.errors import DeadlineError, EngineError
from slipstream.inference.engine_process import EngineProcess
from slipstream.processes import heartbeat, stacks
from slipstream.processes.child import LocalChild
from slipstream.records import GenerateRequest, SamplingParams, Ticket, Version
from slipstream.weights.model_files import stored_parameters

from .conftest import PROMPTS, settings_for, start, stop

pytestmark = pytest.mark.engine


def long_requests(tag, **changes):
    """Many, because any of them may sample its end token at once."""
    sampling = SamplingParams(max_tokens=200)
    return [GenerateRequest(f"{tag} {i}", PROMPTS[i % len(PROMPTS)], sampling, **changes) for i in range(64)]


def test_its_heartbeat_says_what_it_is_doing(live):
    def beat():
        logs = stacks.prefix_of(live.engine.process.log_path).parent.parent
        name = f"engine-{pids_of(live.engine)[0]}"
        return next(each for each in heartbeat.read_folder(logs / heartbeat.FOLDER) if each.name == name)

    def until(doing, since=0.0):
        deadline = time.monotonic() + 60
        while (found := beat()).doing != doing or found.progress_at <= since:
            assert time.monotonic() < deadline, found
            time.sleep(0.01)
        return found

    idle = until("waiting for requests")
    with live.under_load("heartbeat"):
        busy = until("computing requests", idle.progress_at)
    until("waiting for requests", busy.progress_at)


def test_health_says_what_runs(live):
    health = live.call(live.engine.process.client.health())
    assert health.status == "ready"
    assert health.vllm_version
    assert health.plugin_version
    assert "live_cpu_weights" in health.patches


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(live):
    def sample(tag, seed):
        request = GenerateRequest(f"seed-{tag}", PROMPTS[3], SamplingParams(max_tokens=32), seed=seed)
        return live.generate(request)[0].token_ids

    assert sample("a", 1) == sample("b", 1)
    assert sample("c", 2) != sample("d", 1)


def test_logprobs_are_those_of_the_processed_distribution(live):
    narrow = SamplingParams(max_tokens=16, temperature=0.8, top_k=1)
    completion = live.sample("narrow", narrow)[0]
    assert completion.logprobs == pytest.approx([0.0] * len(completion.token_ids), abs=1e-6)


def test_stop_tokens_end_a_completion_and_are_part_of_it(live):
    # Which of them samples the end token early is chance.
    every = live.sample("free", SamplingParams(max_tokens=32))
    place = max(range(len(every)), key=lambda i: len(every[i].token_ids))
    free = every[place]
    at = free.token_ids[len(free.token_ids) // 2]
    ended = live.sample("ended", SamplingParams(max_tokens=32, stop_token_ids=(at,)))[place]
    assert ended.finish_reason == "stop"
    assert ended.token_ids == free.token_ids[: free.token_ids.index(at) + 1]


def test_a_request_past_its_deadline_is_aborted_inside_the_engine_too(live):
    completions = live.generate(*long_requests("late", timeout_s=0.02))
    late = [completion for completion in completions if completion.finish_reason == "abort"]
    assert late
    assert all("deadline" in completion.error for completion in late)
    assert {completion.cause for completion in late} == {"late"}
    wait_until_idle(live)


def test_a_cancelled_call_frees_the_engine(live):
    async def cancel_soon(attempt):
        requests = long_requests(f"cancelled {attempt}")
        tasks = [asyncio.create_task(live.engine.generate(request)) for request in requests]
        async with asyncio.timeout(60):
            while not ((health := await live.engine.process.client.health()) and health.num_running):
                if all(task.done() for task in tasks):
                    break
                await asyncio.sleep(0.005)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        return any(isinstance(result, asyncio.CancelledError) for result in results)

    # A busy machine may come too late.
    assert any(live.call(cancel_soon(attempt)) for attempt in range(20))
    wait_until_idle(live)


def test_a_call_of_the_worker_that_nobody_waits_for_any_more_harms_nobody(live):
    """As `slipstream verify` that is interrupted."""
    parameters = stored_parameters(live.model, "float32")
    ticket = Ticket(Version(0, 0, ""), "disk", "", parameters)

    async def verify_and_give_up():
        for pause_s in [0.0, *(0.0005 * 1.5**i for i in range(12))]:
            call = asyncio.create_task(live.engine.verify(ticket, 60))
            await asyncio.sleep(pause_s)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    live.call(verify_and_give_up())
    assert len(live.sample("after", SamplingParams(max_tokens=4))) == len(PROMPTS)


def test_a_prompt_that_is_too_long_concerns_its_caller_only(live):
    long = GenerateRequest("long", list(range(1, 90)) * 5, SamplingParams(max_tokens=8))
    short = GenerateRequest("short", PROMPTS[0], SamplingParams(max_tokens=8))
    refused, answered = live.generate(long, short)
    assert (refused.finish_reason, refused.cause) == ("abort", "invalid")
    assert "refused" in refused.error
    assert answered.finish_reason in ("stop", "length")


def test_a_seeded_prompt_may_be_split_over_several_steps(live):
    requests = [GenerateRequest(f"split-{i}", PROMPTS[7] * 4, SamplingParams(max_tokens=4), seed=i) for i in range(60)]
    assert len(live.generate(*requests)) == 60


def wait_until_idle(live, timeout_s=60.0):
    until = time.monotonic() + timeout_s
    while (health := live.call(live.engine.process.client.health())) is None or health.num_running:
        assert time.monotonic() < until, "the engine still runs a request that nobody waits for"
        time.sleep(0.05)


def test_a_process_that_the_kernel_holds_does_not_hold_up_the_end(monkeypatch):
    class Held(SimpleNamespace):
        """As in uninterruptible sleep: no signal ends it."""

        pid = 2**22 + 1

        def poll(self):
            return None

        def send_signal(self, number):
            """It does not hear."""

        def wait(self, timeout_s):
            raise subprocess.TimeoutExpired("engine", timeout_s)

    LocalChild(Held(), socket.socket(), has_session=True).end(0.1)


def test_urgent_requests_are_computed_before_those_that_wait(live):
    """vLLM runs 64 at once here, and as many again wait in it."""

    async def ask(request, ended):
        completion = await live.engine.generate(request)
        assert completion.finish_reason != "abort", completion.error
        ended.append(request.id)

    async def ask_all(attempt):
        ended, sampling = [], SamplingParams(max_tokens=60)
        named = [(f"{attempt}r{i}", PROMPTS[i % len(PROMPTS)], i) for i in range(256)]
        requests = [GenerateRequest(name, prompt, sampling, seed=i) for name, prompt, i in named]
        tasks = [asyncio.create_task(ask(request, ended)) for request in requests]
        await asyncio.sleep(0.2)
        short = SamplingParams(max_tokens=2)
        urgent = [GenerateRequest(f"{attempt}u{i}", PROMPTS[0], short, is_urgent=True) for i in range(8)]
        num_ended = len(ended)
        await asyncio.gather(*(ask(request, ended) for request in urgent))
        num_meanwhile = len(ended) - len(urgent) - num_ended
        await asyncio.gather(*tasks)
        return num_meanwhile

    # Without a word to vLLM they would wait for 64 that run and 64 that are first in its queue, every time. Where this
    # process stands still, others come meanwhile.
    assert any(live.call(ask_all(attempt), 300) < 128 for attempt in range(5))


@pytest.mark.parametrize("kind", ["forked", pytest.param("started", marks=[pytest.mark.full, pytest.mark.real_start])])
def test_an_engine_that_cannot_start_says_why(tmp_path, kind):
    (tmp_path / "empty").mkdir()
    process = EngineProcess(settings_for(tmp_path / "empty"), tmp_path / "engine.log", start_timeout_s=300)
    with pytest.raises(EngineError, match="did not start: engine process ended with code") as raised:
        asyncio.run(process.start())
    assert str(tmp_path / "engine.log") in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not process.is_alive()
    process.remove_files()


@pytest.mark.real_start
def test_a_start_that_takes_too_long_is_given_up(tiny_model, tmp_path):
    process = EngineProcess(settings_for(tiny_model), tmp_path / "engine.log", start_timeout_s=1.0)
    began = time.monotonic()
    with pytest.raises(DeadlineError, match="start_timeout_s"):
        asyncio.run(process.start())
    assert time.monotonic() - began < 200
    assert not process.is_alive()
    process.remove_files()


@pytest.mark.real_start
@pytest.mark.full
def test_a_dead_engine_fails_its_requests_at_once_and_is_revived_on_the_same_weights(tiny_model, tmp_path, monkeypatch):
    short = tempfile.mkdtemp()
    monkeypatch.setenv("TMPDIR", short)
    monkeypatch.setattr(tempfile, "tempdir", None)
    live = start(tiny_model, tmp_path, max_restarts=1)
    try:
        before = live.sample("before", SamplingParams(max_tokens=16))

        async def killed_under_way():
            # At different times, so that each travels on its own connection, as the turns of conversations do.
            tasks, process = [], live.engine.process.process
            for request in long_requests("lost"):
                if len(tasks) == 60:  # it may have ended the others before it is killed
                    process.send_signal(signal.SIGSTOP)
                tasks.append(asyncio.create_task(live.engine.generate(request)))
                await asyncio.sleep(0.001)
            process.kill()
            process.wait(60)
            # The first to notice starts the engine again, which closes the connections of all others.
            await live.engine.revive()
            async with asyncio.timeout(60):
                results = await asyncio.gather(*tasks, return_exceptions=True)
            raise next(result for result in results if isinstance(result, Exception))

        with pytest.raises(EngineError, match=r"died|connections to the engine were closed"):
            live.call(killed_under_way(), 320)
        after = live.sample("after", SamplingParams(max_tokens=16))
        assert [c.logprobs for c in before] == [c.logprobs for c in after]
        assert [kind for kind, _ in live.events] == ["engine_restart"]
        os.kill(live.engine.process.process.pid, signal.SIGKILL)
        live.engine.process.process.wait(60)
        with pytest.raises(EngineError, match="max_restarts"):
            live.sample("third", SamplingParams(max_tokens=4))
    finally:
        stop(live)
    # vLLM removes its files itself only where it ends by itself.
    assert list(Path(short).iterdir()) == []
    shutil.rmtree(short)


@pytest.mark.full
@pytest.mark.real_start
def test_the_engine_and_vllms_processes_live_on_when_all_are_signalled(tiny_model, tmp_path):
    live = start(tiny_model, tmp_path, own_process=True)
    process = psutil.Process(live.engine.process.process.pid)
    family = [process, *process.children(recursive=True)]
    try:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            os.killpg(process.pid, number)
            time.sleep(1.0)
            assert live.sample(f"after {number}", SamplingParams(max_tokens=4))
        assert all(each.is_running() for each in family)
        live.call(live.engine.process.stop(60.0))
        assert live.engine.process.process.poll() == 0, "in order, and not at the deadline"
    finally:
        stop(live)
    assert not psutil.wait_procs(family, timeout=60)[1]
    assert live.events == []
