"""What the probe asks of every engine, and the sequences that it makes of the answers."""

import pytest
from benchmarks.scripted_engine import ScriptedEngine

from slipstream.errors import EngineError, IntegrityError
from slipstream.orchestrator.probe import Probe, ProbePrompt
from slipstream.records import Completion, ExpertChoices, Media, SamplingParams, VersionSpan

SAMPLING = SamplingParams(max_tokens=8, temperature=0.7, stop_token_ids=(0,))
IMAGE = Media("image", "/red.png", "red", 0, 3)


class Answers(ScriptedEngine):
    """Says 7 and 0 to everything; `change` is the test's."""

    def __init__(self, change=lambda completion: None):
        super().__init__(lambda prompt, seed: [7, 0])
        self.requests, self.change = [], change

    async def generate(self, request):
        self.requests.append(request)
        experts = ExpertChoices(b"ab", 1, 1)
        made = Completion(request.id, [7, 0], [-0.5, -0.25], "stop", [VersionSpan(0, "0.3")], experts=experts)
        made.prompt_ids = [1, 1, 1, 5] if request.images else None
        self.change(made)
        return made


class Several:
    def __init__(self, *engines):
        self.each = engines


def probe_of(*engines, max_tokens=4, prompts=None):
    prompts = prompts or [ProbePrompt([3, 4]), ProbePrompt([1, 1, 1, 5], (IMAGE,), ([1, 5], (b"png",)))]
    return Probe(Several(*engines), prompts, SAMPLING, max_tokens=max_tokens, seed=9, timeout_s=6.0)


async def test_every_engine_is_asked_the_same_again_and_again():
    engines = Answers(), Answers()
    probe = probe_of(*engines)
    await probe.sample()
    found = await probe.sample()
    assert [sequence.token_ids for sequence in found] == [[3, 4, 7, 0], [1, 1, 1, 5, 7, 0]] * 2
    requests = [request for engine in engines for request in engine.requests]
    assert len({request.id for request in requests}) == 8
    assert [request.prompt_ids for request in requests] == [[3, 4], [1, 5]] * 4
    assert [request.images for request in requests] == [(), (b"png",)] * 4
    seeds = [request.seed for request in requests]
    assert seeds == seeds[:2] * 4
    assert seeds[0] != seeds[1]
    for request in requests:
        assert (request.timeout_s, request.is_urgent) == (6.0, True)
        assert request.sampling == SamplingParams(max_tokens=4, temperature=0.7, stop_token_ids=(0,))


async def test_it_is_no_longer_than_the_runs_completions():
    engine = Answers()
    await probe_of(engine, max_tokens=64).sample()
    assert {request.sampling.max_tokens for request in engine.requests} == {8}


async def test_a_sequence_has_what_the_engine_said_of_its_tokens():
    text, image = await probe_of(Answers()).sample()
    assert (text.mask, text.logprobs) == ([False, False, True, True], [0.0, 0.0, -0.5, -0.25])
    assert (text.versions, text.media) == ([VersionSpan(0, "0.3")], [])
    assert image.mask == [False] * 4 + [True] * 2
    assert image.logprobs == [0.0] * 4 + [-0.5, -0.25]
    assert image.media == [IMAGE]
    assert text.experts == image.experts == ExpertChoices(b"ab", 1, 1)


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"logprobs": None}, EngineError, r"the probe got no log-probabilities: none were returned"),
        ({"finish_reason": "abort", "error": "refused"}, EngineError, r"no log-probabilities: refused"),
        ({"prompt_ids": [1, 1, 5]}, IntegrityError, r"in the probe the engine used 3 tokens"),
    ],
)
async def test_what_is_no_answer_ends_it(fields, error, says):
    def change(completion):
        for name, value in fields.items():
            setattr(completion, name, value)

    with pytest.raises(error, match=says):
        await probe_of(Answers(change), prompts=[ProbePrompt([1, 1, 1, 5], (IMAGE,), ([1, 5], (b"png",)))]).sample()


async def test_of_a_prompt_without_images_the_engine_need_not_repeat_the_tokens():
    def change(completion):
        completion.prompt_ids = [9]

    (found,) = await probe_of(Answers(change), prompts=[ProbePrompt([3, 4])]).sample()
    assert found.token_ids == [3, 4, 7, 0]
