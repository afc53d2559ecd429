"""The teacher on a server elsewhere: what it is asked, what is made of its answers and of its troubles."""

import asyncio
import time
from email.utils import formatdate

import pytest
from aiohttp import web

from slipstream.errors import ConfigError, DeadlineError, EngineError
from slipstream.orchestrator import teacher
from slipstream.orchestrator.teacher import Refused, ServerSource, Teacher
from slipstream.records import Rollout, Sequence


def served(
    test,
    *,
    models=("big",),
    tokens=(5, 6),
    troubles=(),
    hangs=False,
    key="secret",
    user="",
    headers=None,
    timeout_s=60.0,
):
    """Run `test(source)` against a server that says -0.1 times each token; `troubles` are answered first."""
    left, connections = list(troubles), set()

    async def guarded(request):
        if not user:
            assert request.headers["Authorization"] == f"Bearer {key}"
        return await request.json() if request.can_read_body else None

    async def list_models(request):
        await guarded(request)
        return web.json_response({"data": [{"id": name} for name in models]})

    async def tokenize(request):
        await guarded(request)
        return web.json_response({"tokens": list(tokens)})

    async def complete(request):
        body = await guarded(request)
        assert (body["model"], body["max_tokens"], body["prompt_logprobs"]) == (models[0], 1, 0)
        if hangs:
            await asyncio.sleep(30)
        connections.add(request.transport)
        if left:
            return web.json_response({"error": "trouble"}, status=left.pop(0), headers=headers)
        entries = [None, *({str(token): {"logprob": -0.1 * token}} for token in body["prompt"][1:])]
        return web.json_response({"choices": [{"prompt_logprobs": entries}]})

    async def run():
        app = web.Application()
        app.add_routes([web.get("/v1/models", list_models), web.post("/tokenize", tokenize),
                        web.post("/v1/completions", complete)])  # fmt: skip
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        source = ServerSource(f"http://{user}127.0.0.1:{port}/v1", "", key, timeout_s=timeout_s)
        try:
            return await test(source)
        finally:
            assert len(connections) <= 1, "one connection serves all"
            await source.close()
            await runner.cleanup()

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(teacher, "_PAUSE_S", 0.01)
    for name in ("_PATIENCE_S", "_FIRST_PATIENCE_S"):
        monkeypatch.setattr(teacher, name, 60.0)


@pytest.fixture
def impatient(monkeypatch):
    for name in ("_PATIENCE_S", "_FIRST_PATIENCE_S"):
        monkeypatch.setattr(teacher, name, 0.5)


async def connected(source):
    await source.connect("text", [5, 6])
    return await source.logprobs([3, 4, 5])


def test_it_scores_after_a_server_in_trouble_comes_back():
    assert served(connected) == pytest.approx([0.0, -0.4, -0.5])
    assert served(connected, troubles=(503, 500)) == pytest.approx([0.0, -0.4, -0.5])


@pytest.mark.parametrize("status", [408, 425, 429, 502])
def test_a_server_that_is_busy_is_asked_again(status):
    assert served(connected, troubles=[status] * 4) == pytest.approx([0.0, -0.4, -0.5])


def test_it_is_asked_again_when_it_says(monkeypatch):
    began = time.monotonic()
    served(connected, troubles=[429], headers={"Retry-After": "0.3"})
    assert time.monotonic() - began >= 0.3
    monkeypatch.setattr(teacher, "_PATIENCE_S", 0.5)
    with pytest.raises(EngineError, match="status 429"):  # longer than there is patience
        served(connected, troubles=[429], headers={"Retry-After": formatdate(time.time() + 60, usegmt=True)})


def test_its_password_is_told_nowhere(impatient):
    for troubles, key in (((503,) * 99, ""), ((404,), ""), ((), "and a key")):
        with pytest.raises(EngineError) as ended:
            served(connected, troubles=troubles, key=key, user="me:hunter2@")
        assert "hunter2" not in str(ended.value)
    with pytest.raises(ConfigError) as refused:
        served(connected, tokens=(5, 7), key="", user="me:hunter2@")
    assert "hunter2" not in str(refused.value)


def test_its_troubles_end_the_run_in_one_sentence(impatient):
    with pytest.raises(EngineError, match=r"cannot be asked \(status 503.*look at that server"):
        served(connected, troubles=(503,) * 99)
    with pytest.raises(EngineError, match="status 401"):
        served(connected, troubles=(401,))
    with pytest.raises(DeadlineError, match="did not answer within 2 s"):
        served(connected, hangs=True, timeout_s=2.0)


def test_another_model_or_tokenizer_is_refused_before_the_start():
    with pytest.raises(ConfigError, match=r"has another tokenizer than model\.path"):
        served(connected, tokens=(5, 7))
    with pytest.raises(ConfigError, match=r'teacher.name = "" is not served .* which has a, b: name one'):
        served(connected, models=("a", "b"))


class Says:
    def __init__(self, *answers):
        self.answers = list(answers)

    async def logprobs(self, token_ids):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def scored(*answers):
    sequence = Sequence([1, 2, 3, 4, 5], [False, True, False, True, False], [0.0] * 5)
    rollout = Rollout("a", "t", "g", [sequence], 1.0, "done")
    asyncio.run(Teacher(Says(*answers)).score(rollout))
    return rollout


def test_only_sampled_tokens_keep_their_scores():
    assert scored([0.0, -1.0, -2.0, -3.0]).sequences[0].teacher_logprobs == [0.0, -1.0, 0.0, -3.0, 0.0]


@pytest.mark.parametrize("answer", [Refused("says no"), [0.0, float("-inf"), 0.0, 0.0], [0.0, -1.0, 0.0, float("nan")]])
def test_what_is_refused_is_not_trained_on(answer):
    rollout = scored(answer)
    assert rollout.outcome == "engine_error"
    assert rollout.error.startswith("the teacher ")
