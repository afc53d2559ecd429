"""What the engine's server answers to requests, and when it may sleep or hangs; with a scripted vLLM."""

import asyncio
import contextlib
from types import SimpleNamespace

import msgspec
import pytest

from slipstream.inference.plugin import server as server_module
from slipstream.inference.plugin import token_clock
from slipstream.inference.plugin.server import HUNG_S
from slipstream.inference.plugin.service import OutOfService, State
from slipstream.inference.plugin.tools.reader import Reading
from slipstream.records import SamplingParams, ToolCall, VersionSpan

from .fakes import put
from .scripted_host import SECOND, ask, made, serving, until


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    monkeypatch.setattr(server_module, "sampling_arguments", lambda request: f"params of {request.id}")
    put(monkeypatch, exceptions={}, logprobs={"FlatLogprobs": tuple}).__version__ = "1.2.3"


async def test_it_sleeps_only_in_service_and_without_requests():
    server = made()
    with pytest.raises(OutOfService, match="starting"):
        await server.sleep()
    server = serving()
    server.num_running = 2
    with pytest.raises(OutOfService, match="2 requests are running"):
        await server.sleep()
    server.num_running = 0
    await server.wake()
    assert server.host.calls == []
    for _ in range(2):
        await server.sleep()
    assert server.service.state is State.ASLEEP
    assert (await server.generate(ask())).cause == "refused"
    for _ in range(2):
        await server.wake()
    assert (server.host.names, server.service.is_serving) == (["sleep", "wake"], True)


async def test_an_answer_names_the_versions_of_its_tokens_and_requests_are_counted(monkeypatch):
    server = serving()
    ticks = []
    monkeypatch.setattr(server.host.clock, "tick", lambda: ticks.append(server.num_running))
    assert server.doing == "waiting for requests"
    server.host.gate = asyncio.Event()
    asked = [asyncio.create_task(server.generate(ask(id_, is_urgent=id_ == "a"))) for id_ in "ab"]
    await until(lambda: len(server.host.generated) == 2)
    assert (server.doing, server.health().num_running, ticks) == ("computing requests", 2, [0])
    server.host.gate.set()
    answers = await asyncio.gather(*asked)
    assert [(each.id, each.token_ids, each.logprobs, each.versions) for each in answers] == [
        (id_, [5], [-1.0], [VersionSpan(0, "0.7")]) for id_ in "ab"
    ]
    assert server.host.generated == [
        (id_, {"prompt_token_ids": [1, 2]}, f"params of {id_}", None, id_ == "a") for id_ in "ab"
    ]
    assert (server.num_running, await server._queue.acquire()) == (0, True)
    await server.fence()
    assert server.doing == "in the state fenced"


@pytest.mark.parametrize("is_dead", [True, False])
@pytest.mark.parametrize("error", [ValueError("too long"), KeyError("odd"), OutOfService("later"), TimeoutError()])
async def test_an_error_of_a_request_is_told_unless_vllm_has_died(error, is_dead):
    server = serving()
    server.host.is_dead, server.host.error = is_dead, error
    if is_dead and isinstance(error, (ValueError, KeyError)):
        with pytest.raises(type(error)):
            await server.generate(ask())
        assert server.num_running == 0
        return
    answer = await server.generate(ask())
    wanted = {
        ValueError: ("invalid", "was refused by vLLM: too long"),
        KeyError: ("", "contradicted itself: KeyError: 'odd'"),
        OutOfService: ("refused", "cannot be answered: later"),
        TimeoutError: ("late", "passed its deadline of 30 s: raise inference.request_timeout_s"),
    }[type(error)]
    assert (answer.finish_reason, answer.cause, answer.error[: len(wanted[1])]) == ("abort", *wanted)
    assert (answer.token_ids, answer.logprobs, server.num_running) == ([], None, 0)
    assert server.service.is_serving == (not isinstance(error, KeyError))
    if isinstance(error, KeyError):
        assert answer.contradiction == "KeyError: 'odd'"
        assert server.service.reason == "the answer to request a contradicted itself: KeyError: 'odd'"


class Reader(SimpleNamespace):
    """In the place of `ToolReader`."""

    num_failures = 2

    def __init__(self, name, tokenizer):
        super().__init__(name=name, tokenizer=tokenizer, read_ids=[])

    def check(self, tools):
        if tools[0].get("bad"):
            raise ValueError("no name")

    async def read(self, request, output):
        self.read_ids.append((request.id, output.outputs[0].token_ids))
        return Reading([ToolCall("f")], "rest", "odd")


async def test_calls_are_read_where_there_are_tools_and_a_parser(monkeypatch):
    tools = ({"type": "function"},)
    answer = await serving().generate(ask(tools=tools))
    assert (answer.cause, "without a tool parser" in answer.error) == ("invalid", True)
    monkeypatch.setattr(server_module, "ToolReader", Reader)
    server = made(tool_parser="hermes")
    await server.start()
    assert server.health().info == {"tool_parser": "hermes", "tool_parser_failures": 2}
    assert server._tool_reader.tokenizer == "theirs"
    answer = await server.generate(ask(tools=tools))
    assert (answer.tool_calls, answer.content, answer.parser_failure) == ([ToolCall("f")], "rest", "odd")
    plain = await server.generate(ask("b"))
    assert (plain.tool_calls, plain.content) == ([], None)
    assert server._tool_reader.read_ids == [("a", [5])]
    refused = await server.generate(ask("c", tools=({"bad": 1},)))
    assert refused.error == "was refused by vLLM: its tools are not what vLLM takes (no name): correct their schemas"


async def test_what_cannot_be_scored_is_refused_and_what_can_has_no_calls(monkeypatch):
    monkeypatch.setattr(server_module, "ToolReader", Reader)
    server = made(tool_parser="hermes")
    await server.start()
    cold = msgspec.structs.replace(ask(), sampling=SamplingParams(1, temperature=0.7))
    assert (await server.generate(cold)).finish_reason == "stop"
    refused = await server.generate(msgspec.structs.replace(cold, scores_prompt=True))
    assert (refused.cause, "at temperature 1 only" in refused.error) == ("invalid", True)
    server.host.scores = [None, {2: SimpleNamespace(logprob=-0.5)}]
    scored = await server.generate(ask(scores_prompt=True, tools=({"type": "function"},)))
    assert (scored.prompt_logprobs, scored.content) == ([0.0, -0.5], None)


def test_only_an_engine_in_service_that_has_requests_hangs(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(token_clock.time, "perf_counter", lambda: now[0])
    server = serving()

    def look(seconds):
        found = False
        for _ in range(2 * seconds):
            now[0] += 0.5
            found = server.is_hung()
        return found

    assert not look(int(HUNG_S) + 1)
    server.num_running = 1
    assert not look(int(HUNG_S))
    assert look(1)
    server.service.fence()
    assert not look(int(HUNG_S) + 1)


async def test_the_time_of_a_request_counts_unless_an_update_keeps_vllm_from_stepping(monkeypatch):
    noted = []

    class Noting(contextlib.nullcontext):
        def __init__(self, limit_s, is_counting):
            super().__init__()
            noted.append((limit_s, is_counting))

    monkeypatch.setattr(server_module, "Patience", Noting)
    server = serving()
    server.host.gate = asyncio.Event()
    running = asyncio.create_task(server.generate(ask()))
    await until(lambda: server.host.generated)
    ((limit_s, is_counting),) = noted
    monkeypatch.setattr(server.host.clock, "next", lambda is_busy, timeout_s: asyncio.sleep(0))
    assert (limit_s, is_counting()) == (30.0, True)
    await server.fence()
    assert not is_counting()
    await server.go_on(SECOND)
    assert is_counting(), "it steps with what is not verified yet"
    await server.fence()
    server.service.fail("the trainer is gone")
    assert is_counting(), "no update is under way any more"
    server.host.gate.set()
    assert (await running).cause == "refused"
