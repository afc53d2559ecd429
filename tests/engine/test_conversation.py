"""The real client and the real server over a socket, with a scripted vLLM: who waits for whom, and what ends a wait."""

import asyncio
import contextlib
import time
from types import SimpleNamespace

import pytest
from aiohttp import web
from vllm.logprobs import FlatLogprobs  # noqa: F401 (its first import takes seconds)

from slipstream import patience
from slipstream.errors import DeadlineError, EngineError, IntegrityError, WeightsError
from slipstream.inference import client as client_module
from slipstream.inference.client import EngineClient
from slipstream.inference.plugin import server as server_module
from slipstream.inference.plugin.routes import errors_as_text, routes
from slipstream.inference.plugin.server import EngineServer
from slipstream.inference.plugin.token_clock import Stillness, TokenClock
from slipstream.inference.settings import EngineSettings
from slipstream.orchestrator.concurrency import retry_on_restart
from slipstream.orchestrator.probe import Probe, ProbePrompt
from slipstream.processes import heartbeat
from slipstream.records import ApplyReport, Completion, GenerateRequest, SamplingParams, Ticket, Version, encode

from ..inference.fakes import Host, until


@contextlib.asynccontextmanager
async def talk(folder, app_routes, **client):
    app = web.Application(client_max_size=1 << 30, middlewares=[errors_as_text])
    app.add_routes(app_routes)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    socket = str(folder / "s")
    await web.UnixSite(runner, socket).start()
    made = EngineClient(socket, **{"is_alive": lambda: True, "describe": lambda: "its state", **client})
    try:
        yield made
    finally:
        await made.close()
        await runner.cleanup()


def serving(host, max_num_seqs=8):
    server = EngineServer(EngineSettings("", "float32", 8, max_num_seqs), host)
    server.service.started()
    return server


def ask(id_, timeout_s=30.0, prompt=(1,), **fields):
    return GenerateRequest(id_, list(prompt), SamplingParams(1), timeout_s=timeout_s, **fields)


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    monkeypatch.setattr(server_module, "sampling_arguments", lambda request: None)
    monkeypatch.setattr(client_module, "_LISTEN_S", 0.05)
    # Deadlines of parts of a second do not count time for which this process stood still either.
    monkeypatch.setattr(patience, "_TICK_S", 0.1)
    monkeypatch.setattr(patience, "_LATE_S", 0.05)


async def test_a_turn_that_waits_for_a_place_longer_than_its_deadline_is_answered(tmp_path):
    async with talk(tmp_path, routes(serving(Host(0.3), max_num_seqs=1)), silence_s=0.6) as client:
        first = [asyncio.create_task(client.generate(ask(f"a{i}", 0.4))) for i in range(8)]
        await asyncio.sleep(0.05)
        later = await client.generate(ask("later", 0.4))
        assert later.finish_reason == "stop"
        assert {completion.finish_reason for completion in await asyncio.gather(*first)} == {"stop"}


async def test_a_probe_does_not_wait_for_rollouts(tmp_path):
    host = Host(60.0, num_places=2)
    async with talk(tmp_path, routes(serving(host, max_num_seqs=2))) as client:
        rollouts = [asyncio.create_task(client.generate(ask(f"r{i}"))) for i in range(24)]
        await until(lambda: len(host.generated) == 2)
        host.seconds = 0.05
        engine = SimpleNamespace(generate=client.generate, num_restarts=0)
        engine.each = (engine,)
        await Probe(engine, [ProbePrompt([1])] * 8, SamplingParams(1), max_tokens=1, seed=0, timeout_s=60).sample()
        assert sum(not each.done() for each in rollouts) > 12
        for each in rollouts:
            each.cancel()


async def test_a_request_stands_through_an_update_that_takes_longer_than_its_deadline(tmp_path):
    server = serving(Host(0.05))

    async def load(ticket):
        await asyncio.sleep(1.5)
        return 1.5, 0

    async def verify(ticket):
        return ApplyReport(ticket.version)

    server._load, server._verify_applied = load, verify
    async with talk(tmp_path, routes(server)) as client:
        server.host.seconds = 0.5
        running = asyncio.create_task(client.generate(ask("running", 0.9)))
        await asyncio.sleep(0.1)
        update = asyncio.create_task(client.apply(Ticket(Version(0, 1, "d"), "disk", "", ()), 20))
        await asyncio.sleep(0.1)
        came = asyncio.create_task(client.generate(ask("came", 0.9)))
        assert [(await each).finish_reason for each in (running, came)] == ["stop", "stop"]
        assert (await update).version == Version(0, 1, "d")


async def test_an_answer_that_contradicts_itself_ends_everything(tmp_path, caplog):
    host = Host(0.0)
    host.output = {"token_ids": [5, 6], "logprobs": [{5: SimpleNamespace(logprob=-1.0)}, {9: SimpleNamespace()}]}
    server = serving(host)
    async with talk(tmp_path, routes(server)) as client:
        with pytest.raises(IntegrityError, match=r"contradicted itself in request a .*KeyError: 6") as raised:
            await client.generate(ask("a"))
        assert raised.value.exit_code == WeightsError.exit_code
        with pytest.raises(EngineError, match=r"503.*contradicted itself"):
            await client.generate(ask("b"))
    assert "Traceback" in caplog.text
    assert server.health().status == "out_of_service"


async def test_requests_that_are_given_up_while_they_are_on_their_way_are_not_computed(tmp_path):
    host, taken_back = Host(0.0), []
    host.ends = asyncio.Event()
    async with talk(tmp_path, routes(serving(host, max_num_seqs=20))) as client:
        long, cancel = range(200_000), client._cancel

        async def noted(id_):
            await cancel(id_)
            taken_back.append(id_)

        client._cancel = noted
        calls = [asyncio.create_task(client.generate(ask(f"q{i}", prompt=long))) for i in range(20)]
        await asyncio.sleep(0.02)
        for call in calls[:10]:
            call.cancel()
        await until(lambda: len(taken_back) == 10)
        host.ends.set()
        await asyncio.gather(*calls, return_exceptions=True)
    computed = {id_ for id_, *_ in host.generated} - {call[1] for call in host.calls if call[0] == "abort"}
    assert computed == {f"q{i}" for i in range(10, 20)}


async def test_a_request_that_is_given_up_before_it_is_sent_is_not_sent(tmp_path):
    host = Host(0.1)
    async with talk(tmp_path, routes(serving(host))) as client:
        calls = [asyncio.create_task(client.generate(ask(id_))) for id_ in "ab"]
        asyncio.get_running_loop().call_soon(calls[0].cancel)
        await asyncio.gather(*calls, return_exceptions=True)
        assert [id_ for id_, *_ in host.generated] == ["b"]


@pytest.mark.parametrize(
    "frame", [b"\xc1garbage", encode(Completion("unknown", [1], [0.0], "stop"))], ids=["undecodable", "unknown id"]
)
async def test_an_odd_frame_fails_all_who_wait(frame, tmp_path):
    async def generate(request):
        await request.read()
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(len(frame).to_bytes(4, "big") + frame)
        await asyncio.sleep(300)
        return response

    async with talk(tmp_path, [web.post("/generate", generate), *routes(serving(Host(0)))]) as client:
        async with asyncio.timeout(60):
            found = await asyncio.gather(*(client.generate(ask(id_)) for id_ in "ab"), return_exceptions=True)
    assert all(isinstance(each, EngineError) and "cannot be read" in str(each) for each in found)


async def test_two_requests_of_one_id_at_a_time_are_refused(tmp_path):
    async with talk(tmp_path, routes(serving(Host(0.05)))) as client:
        first, second = await asyncio.gather(
            client.generate(ask("a")), client.generate(ask("a")), return_exceptions=True
        )
        assert first.finish_reason == "stop"
        assert isinstance(second, ValueError)
        assert (await client.generate(ask("a"))).finish_reason == "stop"


def silent(num_answers=0):
    """An engine that is stopped: its kernel takes what is sent."""
    left = [1] * num_answers

    async def answer(request):
        if request.path == "/health" and left and left.pop():
            return web.json_response({"status": "ready"})
        await asyncio.sleep(300)
        return web.Response()

    return [web.get("/{path:.*}", answer), web.post("/{path:.*}", answer)]


@pytest.mark.parametrize("num_turns", range(8))
async def test_whoever_waits_while_the_connections_are_closed_is_told_or_asks_again(num_turns, tmp_path):
    """Whatever has become of the request: also where its task had not begun, and was cancelled before."""
    async with talk(tmp_path, routes(serving(Host(0.05)))) as client:
        asked = asyncio.create_task(client.generate(ask("one")))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await client.close()
        async with asyncio.timeout(60):
            (answer,) = await asyncio.gather(asked, return_exceptions=True)
        if isinstance(answer, Completion):
            assert answer.id == "one"
        else:
            assert "connections to the engine were closed" in str(answer)
        assert (await client.generate(ask("two"))).id == "two"


@pytest.mark.parametrize("deadline_s", [30.0, 0.3], ids=["long", "short"])
@pytest.mark.parametrize("call", ["generate", "apply", "fence", "sleep"])
async def test_a_silent_engine_is_given_up_and_then_dead(call, deadline_s, tmp_path):
    given_up = []

    async def give_up():
        given_up.append(1)

    state = {"is_alive": lambda: not given_up, "give_up": give_up, "silence_s": 0.6}
    async with talk(tmp_path, silent(3), **state) as client:
        calls = {
            "generate": lambda: client.generate(ask("a", deadline_s)),
            "apply": lambda: client.apply(Ticket(Version(0, 1, "d"), "disk", "", ()), deadline_s),
            "fence": lambda: client.fence(deadline_s),
            "sleep": lambda: client.sleep(deadline_s),
        }
        with pytest.raises(EngineError, match=r"said nothing for \d s after /.* and was killed") as raised:
            await asyncio.wait_for(calls[call](), 60)
    assert not isinstance(raised.value, DeadlineError), "which is not outlived"
    assert given_up == [1]


async def test_an_engine_that_is_slow_and_lives_is_not_given_up(tmp_path):
    given_up = []

    async def give_up():
        given_up.append(1)

    server = serving(Host(1.5))

    async def load(ticket):
        await asyncio.sleep(300)

    server._load = load
    async with talk(tmp_path, routes(server), give_up=give_up, silence_s=0.5) as client:
        assert (await client.generate(ask("a"))).finish_reason == "stop"
        with pytest.raises(DeadlineError, match="did not answer /apply within 1 s"):
            await client.apply(Ticket(Version(0, 1, "d"), "disk", "", ()), 0.7)
    assert given_up == []


async def test_a_silent_engine_that_comes_back_is_asked_again(tmp_path):
    state = SimpleNamespace(is_frozen=True, is_alive=True, num_restarts=0)

    async def give_up():
        state.is_alive = False

    (health, generate, cancel, *_) = routes(serving(Host(0.0)))

    async def maybe(request):
        if state.is_frozen:
            await asyncio.sleep(300)
        return await (health if request.path == "/health" else generate).handler(request)

    frozen = [web.get("/health", maybe), web.post("/generate", maybe), cancel]
    how = {"is_alive": lambda: state.is_alive, "give_up": give_up, "silence_s": 0.3}
    async with talk(tmp_path, frozen, **how) as client:

        async def revive():
            state.is_frozen, state.is_alive = False, True
            state.num_restarts += 1
            await client.close()

        state.revive = revive
        completion = await asyncio.wait_for(retry_on_restart(state, lambda: client.generate(ask("a"))), 60)
    assert completion.finish_reason == "stop"


async def test_a_connection_that_breaks_is_no_silence(tmp_path):
    """Of the one by which the engine is asked whether it is there."""
    num_asked, host = 0, Host(0.0)
    host.ends = asyncio.Event()
    (health, *others) = routes(serving(host))

    async def breaking(request):
        nonlocal num_asked
        num_asked += 1
        if num_asked % 3:
            request.transport.abort()
        return await health.handler(request)

    async with talk(tmp_path, [web.get("/health", breaking), *others], silence_s=0.5) as client:
        asked = asyncio.create_task(client.generate(ask("a")))
        await asyncio.sleep(1.0)
        await until(lambda: num_asked > 4)
        host.ends.set()
        assert (await asked).finish_reason == "stop"


def test_a_vllm_that_makes_no_step_hangs_but_one_that_is_idle_or_was_not_looked_at_does_not(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("slipstream.inference.plugin.token_clock.time.perf_counter", lambda: now[0])
    stillness = Stillness(clock := TokenClock())

    def look(is_computing=True, after_s=0.5):
        now[0] += after_s
        return stillness.lasts_s(is_computing)

    assert [look() for _ in range(3)] == [0.5, 1.0, 1.5]
    assert look(after_s=1000.0) == 2.5, "the process was stopped"
    clock.tick()
    assert look() == 0.0
    assert look() == 0.5
    assert look(is_computing=False) == 0.0
    assert look() == 0.5


def test_an_engine_gets_on_with_each_token(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.05)
    heartbeat.begin(tmp_path, "engine")
    try:
        time.sleep(0.01)
        begun = time.time() - 0.001  # a heartbeat rounds to milliseconds
        TokenClock().tick()
        deadline = time.monotonic() + 60
        while not (found := heartbeat.read_folder(tmp_path)) or found[0].progress_at < begun:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        heartbeat.end()


async def test_a_vllm_that_hangs_is_noticed_by_one_request_and_an_idle_one_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "HUNG_S", 0.2)
    server = serving(host := Host(0.0))
    host.ends = asyncio.Event()

    async def looks():
        found = []
        for _ in range(8):
            found.append(server.is_hung())
            await asyncio.sleep(0.05)
        return found

    assert not any(await looks())
    async with talk(tmp_path, routes(server)) as client:
        asked = asyncio.create_task(client.generate(ask("alone")))
        await until(server.is_hung)
        host.ends.set()
        await asked
    assert not any(await looks())
