"""The engine's server by itself, without vLLM: who may be answered, and when."""

import asyncio

import msgspec
import pytest

from slipstream.errors import EngineError
from slipstream.inference.plugin.routes import routes
from slipstream.inference.plugin.server import EngineServer
from slipstream.inference.plugin.service import OutOfService, State
from slipstream.inference.plugin.token_clock import TokenClock
from slipstream.inference.settings import EngineSettings
from slipstream.records import ApplyReport, GenerateRequest, SamplingParams, Ticket, Version

from ..inference.fakes import Host
from .test_conversation import talk


@pytest.fixture
def server():
    made = EngineServer(EngineSettings("", "float32", 8, 8), Host())
    made.host.ends = asyncio.Event()
    made.service.started()
    return made


def complete(server):
    """What ends an update that succeeds."""
    server.service.begin_apply("0.1")
    server.service.proved()


async def test_a_request_waits_through_updates_that_follow_at_once(server):
    await server.fence()
    waiting = asyncio.create_task(server.service.until_serving())
    await asyncio.sleep(0.01)
    for _ in range(5):
        complete(server)
        await server.fence()
        await asyncio.sleep(0.01)
        assert not waiting.done()
    complete(server)
    await waiting


@pytest.mark.parametrize(
    ("in_flight", "refused"), [("recompute", "cannot be answered"), ("keep", "was not begun")], ids=["enters", "waits"]
)
async def test_a_request_waits_for_an_update_and_is_refused_after_its_failure(server, in_flight, refused, monkeypatch):
    monkeypatch.setattr(server, "settings", msgspec.structs.replace(server.settings, in_flight=in_flight))
    await server.fence()
    request = GenerateRequest("a", [1], SamplingParams(1), timeout_s=0.05)
    waiting = asyncio.create_task(server.generate(request))
    await asyncio.sleep(0.2)
    assert not waiting.done(), "the update has a deadline of its own"
    server.service.begin_apply("0.1")
    server.service.fail("applying version 0.1 failed")
    with pytest.raises(OutOfService, match="failed"):
        await server.service.until_serving()
    assert f"{refused}: applying version 0.1 failed" in (await waiting).error


async def test_an_update_waits_for_one_whose_client_gave_up(server, monkeypatch):
    """It is in a collective that another engine's death broke, and ends when that does."""
    begun, broken = [], asyncio.Event()

    async def apply(ticket, *, is_running):
        begun.append(ticket.version.step)
        if ticket.version.step == 1:
            await broken.wait()
            raise RuntimeError("Connection reset by peer")
        return ApplyReport(ticket.version)

    monkeypatch.setattr(server, "_apply", apply)
    first, second = (
        asyncio.create_task(server.apply(Ticket(Version(0, step, "0" * 16), "broadcast", "", ()))) for step in (1, 2)
    )
    await asyncio.sleep(0.01)
    assert (begun, second.done()) == ([1], False)
    broken.set()
    with pytest.raises(RuntimeError, match="reset by peer"):
        await first
    assert (await second).version.step == 2
    assert server.service.is_serving


async def test_a_drained_engine_waits_for_what_runs_and_begins_nothing_new(server):
    server.settings = EngineSettings("", "float32", 8, 8, in_flight="drain")
    server.num_running = 1
    standing = asyncio.create_task(server.fence())
    await asyncio.sleep(0.01)
    begun = asyncio.create_task(server.generate(GenerateRequest("new", [1], SamplingParams(1), timeout_s=0.05)))
    await asyncio.sleep(0.1)
    assert not begun.done()
    assert not standing.done()
    server.num_running = 0
    server._request_ended.set()
    await asyncio.wait_for(standing, 30.0)
    begun.cancel()


async def test_requests_of_an_engine_whose_core_has_died_fail_at_once(server, tmp_path):
    async def generate(request):
        if request.id == "b":
            raise RuntimeError("the engine died")
        await asyncio.sleep(60)

    server.generate = generate
    async with talk(tmp_path, routes(server), is_alive=lambda: False) as client, asyncio.timeout(30):
        requests = [GenerateRequest(name, [1], SamplingParams(1), timeout_s=60) for name in ("a", "b")]
        found = await asyncio.gather(*map(client.generate, requests), return_exceptions=True)
    assert [type(each) for each in found] == [EngineError, EngineError]
    assert all("died during /generate" in str(each) and "its state" in str(each) for each in found)


async def test_an_engine_that_sleeps_has_nothing_to_verify(server):
    server.service.sleep()
    with pytest.raises(OutOfService, match="asleep"):
        await server.verify(Ticket(Version(0, 0, ""), "disk", "", ()))


async def test_an_engine_is_paused_once_for_each_update_and_never_taken_for_paused_when_it_may_run(monkeypatch):
    wrong = []
    server, host = _answering(monkeypatch, wrong)
    tickets = [Ticket(Version(0, step, ""), "single_copy", "", ()) for step in range(6)]
    await server.fence()
    await server.apply(tickets[0])
    assert host.names.count("pause") == 1, "a fence and what is applied under it"
    await server.fence()
    assert host.names.count("pause") == 2
    wrong.append("weight")
    await server.apply(tickets[1])
    wrong.clear()
    assert "did not verify" in server.service.reason
    await server.apply(tickets[2])
    assert host.names.count("pause") == 2, "it stood still since the fence"
    assert server.service.is_serving
    host.hangs = True
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(server.apply(tickets[3]), 0.05)
    assert not server.service.is_serving, "out of service"
    await server.apply(tickets[4])
    assert host.names.count("pause") == 4, "nobody knows whether it had gone on"


def _answering(monkeypatch, wrong=()) -> tuple[EngineServer, Host]:
    server = EngineServer(EngineSettings("", "float32", 8, 8), host := Host())
    server.service.started()
    host.ends = asyncio.Event()
    monkeypatch.setattr("slipstream.inference.plugin.server.sampling_arguments", lambda request: None)

    async def load(ticket):
        return 0.0, 0

    async def verify(ticket):
        return ApplyReport(ticket.version, mismatched=tuple(wrong))

    server._load, server._verify_applied = load, verify
    return server, host


@pytest.mark.parametrize("outcome", ["proved", "wrong", "died", "another"])
async def test_what_is_made_before_the_proof_is_held_back_until_it(outcome, monkeypatch):
    server, host = _answering(monkeypatch)

    async def verify(ticket):
        if outcome == "died":
            raise RuntimeError("the core died")
        return ApplyReport(ticket.version, mismatched=("weight",) if outcome == "wrong" else ())

    server._verify_applied = verify
    running = asyncio.create_task(server.generate(GenerateRequest("a", [1], SamplingParams(1), timeout_s=30)))
    await asyncio.sleep(0)
    await server.fence()
    await server.go_on(Version(0, 1, ""))
    host.ends.set()
    await asyncio.sleep(0.02)
    assert server.num_running == 1
    assert not running.done()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(server.service.until_serving(), 0.01)
    assert server.service.reason == "proving version 0.1"
    ticket = Ticket(Version(0, 1 + (outcome == "another"), "x"), "single_copy", "", ())
    if outcome == "died":
        with pytest.raises(RuntimeError, match="died"):
            await server.apply(ticket)
    else:
        await server.apply(ticket)
    completion = await running
    assert (completion.finish_reason, server.service.is_serving) == {
        "proved": ("stop", True),
        "wrong": ("abort", False),
        "died": ("abort", False),
        "another": ("abort", True),
    }[outcome]
    assert ("had no proof" in completion.error) == (outcome != "proved")
    assert host.names.count("pause") == 1 + (outcome != "proved")
    assert server.steps.is_paused != server.service.is_serving, "a version without a proof makes nothing more"


@pytest.mark.parametrize("step", ["reset_prefix_cache", "set_version", "resume"])
@pytest.mark.parametrize("how", ["cancelled", "raises"])
async def test_going_on_that_was_cut_short_is_not_taken_for_done(step, how, monkeypatch):
    server, host = _answering(monkeypatch)
    running = asyncio.create_task(server.generate(GenerateRequest("a", [1], SamplingParams(1), timeout_s=30)))
    await asyncio.sleep(0)
    await server.fence()
    whole, resumed = getattr(host, step), []

    async def cut(*args):
        if how == "raises":
            raise RuntimeError("vLLM refused")
        await asyncio.sleep(60)

    setattr(host, step, cut)
    with pytest.raises(TimeoutError if how == "cancelled" else RuntimeError):
        await asyncio.wait_for(server.go_on(Version(0, 1, "")), 0.05)
    setattr(host, step, whole)
    assert "resuming with version 0.1 failed" in server.service.reason
    resume = host.resume

    async def noted():
        resumed.append(1)
        await resume()

    host.resume = noted
    host.ends.set()
    completion = await asyncio.wait_for(running, 60)
    assert completion.finish_reason == "abort"
    await server.apply(Ticket(Version(0, 1, "x"), "single_copy", "", ()))
    assert resumed
    assert (server.service.state, server.steps.is_paused) == (State.SERVING, False)


@pytest.mark.parametrize("between", ["another", "fence", "other bridge"])
async def test_a_proof_is_of_what_ran_and_of_nothing_else(between, monkeypatch):
    server, host = _answering(monkeypatch)
    running = asyncio.create_task(server.generate(GenerateRequest("a", [1], SamplingParams(1), timeout_s=30)))
    await asyncio.sleep(0)
    await server.fence()
    await server.go_on(Version(0, 1, ""))
    host.ends.set()
    await asyncio.sleep(0.01)
    step, bridge = 1, "single_copy"
    if between != "other bridge":
        await server.fence()
    else:
        bridge = "disk"
    if between == "another":
        await server.go_on(Version(0, step := 2, ""))
    await server.apply(Ticket(Version(0, step, "x"), bridge, "", ()))
    completion = await asyncio.wait_for(running, 60)
    assert (completion.finish_reason, "had no proof" in completion.error) == ("abort", True)
    assert (server.service.state, server.steps.is_paused) == (State.SERVING, False)


async def test_an_adapter_does_not_wait_for_an_engine_that_runs(monkeypatch):
    """But sets one that stands, or may stand, going."""
    server, host = _answering(monkeypatch)
    calls: list[str] = []

    async def load(ticket):
        return 0.0, 0

    async def resume():
        calls.append("resume")

    server._load_adapter, host.resume = load, resume
    tickets = [Ticket(Version(0, step, "x"), "lora", "", ()) for step in range(4)]
    await server.apply(tickets[0])
    assert calls == []
    await server.fence()
    await server.apply(tickets[1])
    await server.apply(tickets[2])
    assert calls == ["resume"]
    await server.fence()
    host.resume = lambda: asyncio.sleep(60)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(server.apply(tickets[2]), 0.05)
    host.resume = resume
    await server.apply(tickets[3])
    assert calls == ["resume", "resume"]
    assert server.service.is_serving


async def test_the_trainer_waits_for_the_first_token_after_its_writing_but_not_for_long(monkeypatch):
    server, host = _answering(monkeypatch)
    host.clock = TokenClock()
    monkeypatch.setattr("slipstream.inference.plugin.server._FIRST_TOKEN_S", 600.0)
    running = asyncio.create_task(server.generate(GenerateRequest("a", [1], SamplingParams(1), timeout_s=30)))
    await asyncio.sleep(0)
    await server.fence()
    going_on = asyncio.create_task(server.go_on(Version(0, 1, "")))
    await asyncio.sleep(0.05)
    assert not going_on.done()
    host.clock.tick()
    await asyncio.wait_for(going_on, 60)
    monkeypatch.setattr("slipstream.inference.plugin.server._FIRST_TOKEN_S", 0.01)
    await asyncio.wait_for(server.go_on(Version(0, 2, "")), 60)
    running.cancel()
