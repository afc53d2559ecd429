"""The teacher on a server elsewhere: what it is asked, what is made of its answers and of its troubles."""

import asyncio

import pytest
from aiohttp import web

from slipstream.errors import ConfigError, DeadlineError, EngineError
from slipstream.orchestrator import teaching
from slipstream.orchestrator.teaching import Refused, ServerSource, Teacher
from slipstream.records import Rollout, Sequence


def served(test, *, models=("big",), tokens=(5, 6), troubles=(), hangs=False, key="secret"):
    """Run `test(source)` against a server that says -0.1 times each token; `troubles` are answered first."""
    left = list(troubles)

    async def guarded(request):
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
        if left:
            return web.json_response({"error": "trouble"}, status=left.pop(0))
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
        source = ServerSource(f"http://127.0.0.1:{port}/v1", "", key, timeout_s=2.0)
        try:
            return await test(source)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(teaching, "_PAUSE_S", 0.01)


async def connected(source):
    await source.connect("text", [5, 6])
    return await source.logprobs([3, 4, 5])


def test_it_scores_after_a_server_in_trouble_comes_back():
    assert served(connected) == pytest.approx([0.0, -0.4, -0.5])
    assert served(connected, troubles=(503, 500)) == pytest.approx([0.0, -0.4, -0.5])


def test_its_troubles_end_the_run_in_one_sentence():
    with pytest.raises(EngineError, match=r"cannot be asked \(status 503.*look at that server"):
        served(connected, troubles=(503,) * 9)
    with pytest.raises(EngineError, match="status 401"):
        served(connected, troubles=(401,))
    with pytest.raises(DeadlineError, match="did not answer within 2 s"):
        served(connected, hangs=True)


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
