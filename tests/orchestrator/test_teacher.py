"""What a teacher is asked, on an engine of the run and on a server, and how long a server in trouble is waited for."""

import asyncio
import contextlib

import pytest
from aiohttp import web
from benchmarks.scripted_engine import ScriptedEngine

from slipstream import openai_client
from slipstream.errors import ConfigError, DeadlineError, EngineError
from slipstream.orchestrator import teacher
from slipstream.orchestrator.teacher import EngineSource, Refused, Scored, ServerSource, score
from slipstream.records import Completion, Likeliest, Rollout, SamplingParams, Sequence, Stream

from ..web_server import serving


def engine_of(on_request=lambda request: None, **options):
    engine = ScriptedEngine(lambda prompt, seed: [0], lambda folder, request, tokens: [-0.5] * len(tokens), **options)
    engine.on_request = on_request
    return engine


async def test_an_engine_scores_prompts_at_the_runs_temperature():
    requests = []
    source = EngineSource(engine_of(requests.append), temperature=0.7, timeout_s=9.0)
    assert await source.scores([4, 5, 6]) == ([0.0, -0.5, -0.5], None)
    await source.scores([4, 5])
    assert [request.prompt_ids for request in requests] == [[4, 5, 6], [4, 5]]
    assert len({request.id for request in requests}) == 2
    for request in requests:
        assert request.sampling == SamplingParams(max_tokens=1, temperature=0.7)
        assert (request.timeout_s, request.scores_prompt) == (9.0, True)


async def test_an_engine_is_asked_for_its_likeliest_tokens():
    async def generate(request):
        asked.append(request)
        likeliest = Likeliest.of([None, {7: -0.1, 5: -3.0}, {4: -2.0, 3: -0.2}], 2)
        return Completion(request.id, [], None, "length", prompt_logprobs=[0.0, -3.0, -2.0], likeliest=likeliest)

    asked, engine = [], engine_of()
    engine.generate = generate
    rollout = Rollout("a", "t", "g", [Sequence([1, 5, 4], [False, False, True])], 1.0, "done")
    await score(EngineSource(engine, temperature=1.0, timeout_s=1.0, top_k=2), rollout)
    assert asked[0].num_likeliest == 2
    streams = rollout.sequences[0].streams
    assert streams["teacher_top_ids"] == Stream.of([3, 4], "int64", 2)
    assert streams["teacher_top_logprobs"] == Stream.of([-0.2, -2.0], "float32", 2)
    assert rollout.sequences[0].values("teacher_logprobs") == [-2.0]


async def test_an_engine_that_dies_is_asked_again_and_one_that_is_gone_is_named():
    engine = engine_of(lambda request: engine.kill() if engine.num_requests == 1 else None, max_restarts=1)
    assert await EngineSource(engine, temperature=1.0, timeout_s=1.0).scores([4, 5]) == ([0.0, -0.5], None)
    engine = engine_of()
    source = EngineSource(engine, temperature=1.0, timeout_s=0.02)
    engine.kill()
    with pytest.raises(EngineError, match=r"^the teacher's engine: the engine died"):
        await source.scores([4])
    engine.is_alive = engine.is_hanging = True
    with pytest.raises(DeadlineError, match=r"^the teacher's engine: the engine did not answer"):
        await source.scores([4])


@pytest.mark.parametrize(("error", "says"), [("is too long", "is too long"), ("", "returned no log-probabilities")])
async def test_tokens_that_an_engine_does_not_score_are_refused(error, says):
    async def generate(request):
        return Completion(request.id, [], None, "abort", error=error)

    engine = engine_of()
    engine.generate = generate
    with pytest.raises(Refused, match=f"^{says}$"):
        await EngineSource(engine, temperature=1.0, timeout_s=1.0).scores([4])


class Asked:
    def __init__(self):
        self.asked = []

    async def scores(self, token_ids):
        self.asked.append(token_ids)
        return Scored([-1.0 - number for number in range(len(token_ids))])


async def test_a_teacher_is_asked_for_what_was_sampled_and_what_is_before_it():
    masks = ([False, True, False, True, False], [False, False], [True], [False, True])
    sequences = [Sequence(list(range(len(mask))), mask) for mask in masks]
    rollout, source = Rollout("a", "t", "g", sequences, 1.0, "done"), Asked()
    await score(source, rollout)
    assert source.asked == [[0, 1, 2, 3], [0], [0, 1]]
    scores = [sequence.values("teacher_logprobs") for sequence in sequences]
    assert scores == [[-2.0, -4.0], [], [-1.0], [-2.0]]
    assert (rollout.outcome, rollout.error) == ("done", "")


@pytest.mark.parametrize("answer", [Refused("says no"), [float("-inf"), 0.0], [0.0, float("nan")]])
async def test_a_rollout_that_is_refused_is_not_trained_on(answer):
    class Says:
        async def scores(self, token_ids):
            if isinstance(answer, Exception):
                raise answer
            return Scored(answer)

    rollout = Rollout("a", "t", "g", [Sequence([1, 2, 3], [True, True, False], [0.0] * 3)], 1.0, "done")
    await score(Says(), rollout)
    assert rollout.outcome == "engine_error"
    assert rollout.error.startswith("the teacher ")


class Server:
    """Answers each request as `respond` has it: a status, an answer, or both with headers."""

    def __init__(self, respond):
        self.respond, self.asked, self.num_open, self.most_open = respond, [], 0, 0

    async def handle(self, request):
        body = await request.json() if request.can_read_body else None
        self.asked.append((request.method, request.path, body, request.headers.get("Authorization")))
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            found = self.respond(request.path, len(self.asked))
            found = await found if asyncio.iscoroutine(found) else found
        finally:
            self.num_open -= 1
        if isinstance(found, int):
            return web.json_response({"error": "trouble"}, status=found)
        return found if isinstance(found, web.Response) else web.json_response(found)


@contextlib.asynccontextmanager
async def source_of(respond, *, name="big", key="", timeout_s=60.0, slash="", user="", top_k=0):
    server = Server(respond)
    async with serving(server.handle) as address:
        source = ServerSource(f"http://{user}{address}/v1{slash}", name, key, timeout_s=timeout_s, top_k=top_k)
        try:
            yield source, server
        finally:
            await source.close()
            await source.close()


MODELS = {"data": [{"id": "small"}, {"id": "big"}]}


def scores_of(*entries):
    return {"choices": [{"prompt_logprobs": list(entries)}]}


def well(path, number):
    if path == "/v1/models":
        return MODELS
    return {"tokens": [5, 6]} if path == "/tokenize" else scores_of(None, {"4": {"logprob": -2}, "9": {"logprob": -1}})


@pytest.mark.parametrize(("key", "slash"), [("", ""), ("secret", "/")])
async def test_what_a_server_is_asked(key, slash):
    async with source_of(well, key=key, slash=slash) as (source, server):
        await source.connect("text", [5, 6])
        assert await source.scores([3, 4]) == ([0.0, -2.0], None)
    told = f"Bearer {key}" if key else None
    assert server.asked == [
        ("GET", "/v1/models", None, told),
        ("POST", "/tokenize", {"model": "big", "prompt": "text", "add_special_tokens": False}, told),
        ("POST", "/v1/completions", {"model": "big", "prompt": [3, 4], "max_tokens": 1, "prompt_logprobs": 0}, told),
    ]


@pytest.mark.parametrize(
    ("models", "name", "error"),
    [
        ({"data": [{"id": "only"}]}, "", None),
        ({"data": [{"id": "only"}]}, "big", r'teacher\.name = "big" is not served .* which has only: name one'),
        (MODELS, "", r'teacher\.name = "" is not served .* which has small, big: name one'),
        ({}, "big", r"which has none: name one"),
    ],
)
async def test_a_server_with_one_model_needs_no_name(models, name, error):
    def respond(path, number):
        return models if path == "/v1/models" else well(path, number)

    async with source_of(respond, name=name) as (source, server):
        if error is None:
            await source.connect("text", [5, 6])
            assert server.asked[1][2]["model"] == "only"
        else:
            with pytest.raises(ConfigError, match=error):
                await source.connect("text", [5, 6])


@pytest.mark.parametrize(("answer", "size"), [({"tokens": [5, 7, 6]}, 3), ({}, 0)])
async def test_a_tokenizer_that_differs_is_refused_with_the_numbers_of_tokens(answer, size):
    def respond(path, number):
        return answer if path == "/tokenize" else MODELS

    async with source_of(respond, user="me:hunter2@") as (source, _):
        with pytest.raises(ConfigError, match=rf"\(a text of 2 tokens has {size} there\)") as caught:
            await source.connect("text", [5, 6])
    assert "hunter2" not in str(caught.value)


async def test_a_server_is_asked_for_its_likeliest_tokens_and_tried_at_the_start():
    entries = scores_of(None, {"6": {"logprob": -2}, "9": {"logprob": -1}, "8": {"logprob": -3}})

    def respond(path, number):
        return entries if path == "/v1/completions" else well(path, number)

    async with source_of(respond, top_k=2) as (source, server):
        await source.connect("text", [5, 6])
        assert server.asked[-1][2]["prompt_logprobs"] == 2
        assert await source.scores([5, 6]) == ([0.0, -2.0], Likeliest.of([None, {9: -1.0, 6: -2.0}], 2))
    async with source_of(lambda *at: 400 if at[0] == "/v1/completions" else well(*at), top_k=64) as (source, _):
        with pytest.raises(ConfigError, match=r"teacher\.top_k = 64: .*status 400.*--max-logprobs 64"):
            await source.connect("text", [5, 6])
    async with source_of(respond, top_k=4) as (source, _):
        with pytest.raises(EngineError, match="3 of the 4 likeliest"):
            await source.connect("text", [5, 6])


async def test_a_refusal_while_connecting_is_a_wrong_setting():
    async with source_of(lambda path, number: 400) as (source, _):
        with pytest.raises(ConfigError, match=r"status 400: .*trouble.*teacher\.url"):
            await source.connect("text", [5, 6])
        with pytest.raises(Refused, match="status 400"):
            await source.scores([3, 4])


@pytest.mark.parametrize(
    "answer",
    [{}, {"choices": []}, scores_of(None), scores_of(None, {"5": {"logprob": -1}}), scores_of(None, {"4": {}})],
)
async def test_answers_without_the_scores_of_all_tokens_name_the_server(answer):
    async with source_of(lambda path, number: answer) as (source, _):
        with pytest.raises(EngineError, match=r"returned no prompt_logprobs \(.*\): serve it with vLLM"):
            await source.scores([3, 4])


async def test_a_server_in_trouble_is_asked_again_until_patience_ends(monkeypatch):
    monkeypatch.setattr(openai_client, "_FIRST_WAIT_S", 0.02)
    monkeypatch.setattr(teacher, "_FIRST_PATIENCE_S", 0.3)
    says = [503, 429]
    async with source_of(lambda path, number: says.pop(0) if says else well(path, number)) as (source, _server):
        await source.connect("text", [5, 6])
        says += [502] * 8  # for longer than a run that connects for the first time waits
        assert await source.scores([3, 4]) == ([0.0, -2.0], None)
    async with source_of(lambda path, number: 503) as (source, _server):
        with pytest.raises(EngineError, match="status 503"):
            await source.connect("text", [5, 6])


@pytest.mark.parametrize("status", [401, 404, 422])
async def test_an_error_that_waiting_does_not_change_ends_the_run_at_once(status):
    async with source_of(lambda path, number: status) as (source, server):
        with pytest.raises(EngineError, match=f"status {status}"):
            await source.scores([3, 4])
    assert len(server.asked) == 1


async def test_no_more_than_so_many_requests_are_open_at_once(monkeypatch):
    monkeypatch.setattr(teacher, "_MAX_CONCURRENT", 2)

    async def later(path):
        await asyncio.sleep(0.01)
        return well(path, 0)

    async with source_of(lambda path, number: later(path)) as (source, server):
        await asyncio.gather(*(source.scores([3, 4]) for _ in range(6)))
    assert (server.most_open, len(server.asked)) == (2, 6)


async def test_a_server_that_does_not_answer_in_time_is_not_asked_again(monkeypatch):
    async def never(path):
        await asyncio.sleep(30)

    monkeypatch.setattr(teacher, "_FIRST_PATIENCE_S", 0.05)
    async with source_of(lambda path, number: never(path), timeout_s=0.05) as (source, server):
        with pytest.raises(DeadlineError, match="the teacher at http"):
            await source.scores([3, 4])
    assert len(server.asked) <= 1
