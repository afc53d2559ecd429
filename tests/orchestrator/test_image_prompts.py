"""Prompts with images: what the engine is asked, what is recorded, and prompts that it expands otherwise."""

from benchmarks.scripted_engine import ScriptedEngine

from slipstream.envs import SingleTurn, Task
from slipstream.envs.base import Episode
from slipstream.envs.policy import record_turn
from slipstream.orchestrator.rollouts import RolloutRunner
from slipstream.records import Completion, Media, Message, SamplingParams
from tests.inline_scorer import InlineScorer

END, PAD = 0, 1
SAMPLING = SamplingParams(max_tokens=4, stop_token_ids=(END,))
RED, BLUE = (Media("image", f"/{name}.png", name) for name in ("red", "blue"))
TASK = Task("t", (Message("user", "<image>q", (RED,)),), "b")


class Pictures:
    """One token for a letter; an image has three placeholders."""

    def render(self, messages):
        return [
            token
            for message in messages
            for letter in message.content.replace("<image>", "\1" * 3 if message.media else "<image>")
            for token in [ord(letter)]
        ]

    def place_images(self, messages, token_ids):
        starts = [place for place, token in enumerate(token_ids) if token == PAD][::3]
        images = [image for message in messages for image in message.media]
        return tuple(
            Media("image", image.uri, image.sha256, start, 3, grid=(1, 1, 3))
            for image, start in zip(images, starts, strict=True)
        )

    def request(self, token_ids, media):
        places = {image.start + more for image in media for more in (1, 2)}
        kept = [token for place, token in enumerate(token_ids) if place not in places]
        return kept, tuple(image.sha256.encode() for image in media)

    def decode(self, token_ids):
        return "".join(chr(token) for token in token_ids if token not in (END, PAD))

    def decode_turn(self, token_ids):
        return self.decode(token_ids), self.decode(token_ids)


class Asks(SingleTurn):
    """Shows a second picture in a second turn."""

    def tasks(self, split, num_tasks):
        return [TASK]

    async def run(self, task, policy):
        first = await policy.chat(task.prompt)
        talk = [*task.prompt, Message("assistant", first.text + "\0"), Message("user", "<image>?", (BLUE,))]
        last = await policy.chat(talk)
        return Episode(last.text)

    def reward(self, task, completion):
        return float(completion == task.answer)


class Expanding(ScriptedEngine):
    """Makes a placeholder `size` tokens, and says "b"."""

    def __init__(self, size):
        super().__init__(lambda prompt_ids, seed: [ord("b"), END])
        self.size = size
        self.asked = []

    async def generate(self, request):
        self.asked.append(request)
        completion = await super().generate(request)
        completion.prompt_ids = [t for each in request.prompt_ids for t in [each] * (self.size if each == PAD else 1)]
        return completion


def runner_of(expand=3):
    """A runner whose engine makes a placeholder `expand` tokens, and the requests that it was asked."""
    environment, engine = Asks(), Expanding(expand)
    runner = RolloutRunner(environment, InlineScorer(environment), Pictures(), engine, request_timeout_s=5.0)
    return runner, engine.asked


async def run(runner):
    return await runner.run(TASK, rollout_id="r", group_id="g", sampling=SAMPLING, seed=0)


async def test_the_engine_is_asked_with_one_placeholder_and_the_sequence_has_all():
    runner, asked = runner_of()
    rollout = await run(runner)
    assert rollout.outcome == "done", rollout.error
    assert rollout.reward == 1.0
    first, second = asked
    assert first.prompt_ids == [PAD, ord("q")]
    assert (first.images, second.images) == ((b"red",), (b"red", b"blue"))
    (sequence,) = rollout.sequences
    assert sequence.token_ids == [PAD, PAD, PAD, ord("q"), ord("b"), END, PAD, PAD, PAD, ord("?"), ord("b"), END]
    assert [(image.sha256, image.start) for image in sequence.media] == [("red", 0), ("blue", 6)]
    assert sequence.mask == [False] * 4 + [True] * 2 + [False] * 4 + [True] * 2


async def test_a_prompt_that_the_engine_expands_otherwise_is_dropped_and_named():
    runner, _ = runner_of(expand=4)
    rollout = await run(runner)
    assert rollout.outcome == "prompt_mismatch"
    assert "the engine used 5 tokens for the prompt of request r.0-0 and the trainer counts 4" in rollout.error
    assert "the first difference at token 3" in rollout.error


def test_equal_tokens_with_another_image_are_another_sequence():
    sequences = []
    for image in (RED, BLUE, BLUE):
        end = [9] if sequences and sequences[-1].media[0].sha256 == image.sha256 else []
        prompt = [PAD, 7, *([8, END] if end else []), *end]
        record_turn(sequences, prompt, Completion("r", [8, END], [-1.0] * 2, "stop"), [image])
    assert [each.media[0].sha256 for each in sequences] == ["red", "blue"]
    assert [len(each) for each in sequences] == [4, 7]
