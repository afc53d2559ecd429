"""Rollouts of agents through the gateway, against an engine that a test writes: what each end counts as."""

import asyncio
import contextlib
import json
import socket

import aiohttp
import msgspec
import pytest
from aiohttp import web

from slipstream.envs.base import Environment, Episode, Score
from slipstream.errors import EngineError
from slipstream.inference.addresses import ControlAddress
from slipstream.orchestrator.gateway import REQUEST_HEADER, Gateway
from slipstream.orchestrator.rollouts import RolloutRunner
from slipstream.records import Completion, Message, SamplingParams, SessionTurn, Task, VersionSpan
from tests.inline_scorer import InlineScorer

TASK = Task("1", (Message("user", "go"),), "b")


class Tokenizer:
    def decode(self, token_ids):
        return "".join(map(chr, token_ids))

    def decode_turn(self, token_ids):
        return self.decode(token_ids), self.decode(token_ids)

    def render(self, messages):
        return [ord(letter) for message in messages for letter in message.content]


class Engine:
    """Answers each request with `b`, and records it; `answer` may do something else with the number of a request."""

    num_restarts = 0

    def __init__(self, folder):
        self.socket = str(folder / "inference.sock")
        self.turns, self.openings, self.dies = [], [], False
        self.answer = None

    @property
    def each(self):
        return (self,)

    async def __aenter__(self):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        self.runner = web.AppRunner(app, handler_cancellation=True)
        await self.runner.setup()
        await web.UnixSite(self.runner, self.socket).start()
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()

    async def handle(self, request):
        number = int(request.headers[REQUEST_HEADER])
        assert request.headers["x-api-key"] == self.openings[-1].key
        if self.answer is not None and (found := await self.answer(number)) is not None:
            return found
        body = json.loads(await request.read())
        prompt = [ord(letter) for message in body["messages"] for letter in message["content"]]
        completion = Completion("", [ord("b")], [-0.5], "stop", [VersionSpan(0, "0.1")])
        given = [message for message in body["messages"] if message["role"] != "assistant"][-1:]
        self.turns.append(SessionTurn(number, prompt, completion, given, {"role": "assistant", "content": "b"}))
        return web.json_response({"choices": [{"message": {"content": "b"}}]})

    async def open_session(self, opening, group_id):
        self.openings.append(opening)
        return ControlAddress(f"unix:{self.socket}")

    async def close_session(self, key):
        if self.dies:
            raise EngineError("it died")
        return self.turns

    async def revive(self):
        raise EngineError("it cannot come back")


class Agents(Environment):
    needs_address = True
    max_turns = 2

    def __init__(self, play):
        super().__init__()
        self.play = play

    def tasks(self, split, num_tasks):
        return [TASK]

    async def run(self, task, policy):
        headers = {"authorization": f"Bearer {policy.address.api_key}"}
        async with aiohttp.ClientSession(headers=headers) as http:

            async def ask(text, **headers):
                body = {"messages": [{"role": "user", "content": text}]}
                async with http.post(
                    f"{policy.address.base_url}/chat/completions", json=body, headers=headers
                ) as found:
                    return found.status, await found.json()

            return Episode(await self.play(ask) or "")

    def score_episode(self, task, episode):
        return Score(float(episode.completion == task.answer), {"turns": float(episode.num_turns)})


@pytest.fixture
async def rolled_out(tmp_path):
    """A rollout of an agent that `play`s."""

    async with Engine(tmp_path) as engine:

        async def roll_out(play, **how):
            environment, gateway = Agents(play), Gateway(request_timeout_s=5, max_requests=2)
            runner = RolloutRunner(
                environment, InlineScorer(environment), Tokenizer(), engine, request_timeout_s=5, gateway=gateway, **how
            )
            try:
                return await runner.run(TASK, rollout_id="0.0.0", group_id="0.0", sampling=SamplingParams(8), seed=3)
            finally:
                await gateway.close()

        roll_out.engine = engine
        yield roll_out


async def test_what_was_recorded_is_trained(rolled_out):
    async def play(ask):
        await ask("go")
        return (await ask("gobmore"))[1]["choices"][0]["message"]["content"]

    found = await rolled_out(play)
    assert (found.outcome, found.reward, found.num_turns) == ("done", 1.0, 2)
    (row,) = found.sequences
    assert "".join(map(chr, row.token_ids)) == "gobmoreb"
    assert row.mask == [letter == "b" for letter in "gobmoreb"]
    assert row.versions == [VersionSpan(2, "0.1")]
    assert found.metrics == {"agent_requests": 2, "agent_rows": 1, "agent_undelivered": 0, "turns": 2}
    assert rolled_out.engine.openings[0].seed == 3


@pytest.mark.parametrize(
    ("how", "outcome", "stop"),
    [
        ("silent", "no_tokens", "answer"),
        ("raises", "environment_error", "error"),
        ("late", "environment_error", "timeout"),
    ],
)
async def test_an_episode_that_fails_is_counted(rolled_out, how, outcome, stop):
    async def play(ask):
        if how == "silent":
            return "b"
        await ask("go")
        if how == "raises":
            raise ValueError("no tool of this name")
        await asyncio.sleep(20)
        return ""

    found = await rolled_out(play, run_timeout_s=0.3)
    assert (found.outcome, found.stop) == (outcome, stop)
    if how == "raises":
        assert "no tool of this name" in found.error
        assert len(found.sequences) == 1, "what it said is kept for people"


async def test_the_engine_dies(rolled_out):
    async def play(ask):
        await ask("go")
        rolled_out.engine.dies = True
        return "b"

    found = await rolled_out(play)
    assert (found.outcome, found.sequences) == ("engine_error", [])
    assert "it died" in found.error


async def test_requests_are_bounded(rolled_out):
    async def play(ask):
        for _ in range(2):
            await ask("go")
        status, body = await ask("go")
        return f"{status} {'max_turns' in body['error']['message']}"

    found = await rolled_out(play)
    assert (found.completion, found.stop, found.num_turns) == ("400 True", "turn_limit", 2)


async def test_a_full_context_ends_the_episode_truncated(rolled_out):
    async def answer(number):
        if number:
            return web.json_response({"error": "This model's maximum context length is 8 tokens"}, status=400)
        return None

    async def play(ask):
        await ask("go")
        if (await ask("more"))[0] == 400:
            raise RuntimeError("the client raises")

    rolled_out.engine.answer = answer
    found = await rolled_out(play)
    assert (found.outcome, found.stop, found.completion) == ("truncated", "context_full", "b")


async def test_a_repetition_takes_the_place_of_the_answer_before(rolled_out):
    async def play(ask):
        await ask("go")
        await ask("go", **{"x-stainless-retry-count": "1"})
        return "b"

    found = await rolled_out(play)
    assert found.num_turns == 1
    assert found.metrics["agent_undelivered"] == 1


async def test_requests_that_nobody_waits_for_end_with_the_episode(rolled_out):
    cancelled = asyncio.Event()

    async def answer(number):
        if number:
            with contextlib.suppress(asyncio.TimeoutError):
                try:
                    await asyncio.sleep(20)
                except asyncio.CancelledError:
                    cancelled.set()
                    raise

    async def play(ask):
        await ask("go")
        task = asyncio.create_task(ask("more"))
        await asyncio.sleep(0.2)
        task.cancel()
        return "b"

    rolled_out.engine.answer = answer
    found = await rolled_out(play)
    assert (found.num_turns, found.reward) == (1, 1.0)
    async with asyncio.timeout(5):
        await cancelled.wait()


async def test_many_agents_connect_before_the_first_is_accepted(tmp_path):
    gateway = Gateway(request_timeout_s=5, max_requests=2)
    async with Engine(tmp_path) as engine:
        async with gateway.session(engine, SamplingParams(8), 3, "0.0") as session:
            port = int(session.address.base_url.rpartition(":")[2].removesuffix("/v1"))
            with contextlib.ExitStack() as stack:
                for _ in range(400):  # the event loop stands still
                    stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
        await gateway.close()


def test_a_turn_survives_the_wire():
    turn = SessionTurn(
        1, [1], Completion("", [2], [0.0], "stop"), [{"role": "user"}], {"content": None}, 0, {"top_p": 0.5}
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(turn), type=SessionTurn) == turn
