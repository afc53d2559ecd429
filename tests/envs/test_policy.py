import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.orchestrator.test_orchestrator import END
from tests.orchestrator.test_orchestrator import Letters as Plain

from slipstream.commands.small_models.tiny_qwen3 import new_tokenizer
from slipstream.data.chat_template import ChatTokenizer
from slipstream.envs.base import Episode
from slipstream.envs.policy import Prompts, RecordingPolicy, following, num_thinking, record_turn
from slipstream.envs.single_turn import SingleTurn
from slipstream.errors import EngineError, IntegrityError
from slipstream.records import Completion, ExpertChoices, Media, Message, Task, VersionSpan


class Letters(Plain):
    """A turn is its text, then END."""

    def render(self, messages):
        return [token for message in messages for token in [*map(ord, message.content), END]]


def script(*turns, finish="stop", logprobs=True):
    """A generate function that says `turns`, one after another, and the prompts it was given."""
    prompts = []

    async def generate(prompt_ids, *_):
        ids = [*map(ord, turns[len(prompts)]), END]
        prompts.append(prompt_ids)
        version = VersionSpan(0, f"0.{len(prompts)}")
        return Completion("r", ids, [-0.5] * len(ids) if logprobs else None, finish, [version])

    return generate, prompts


def recording(generate, tokenizer, **options):
    return RecordingPolicy(generate, tokenizer, call_tool=None, **options)


def policy_of(*turns, **how):
    return recording(script(*turns, **how)[0], Letters())


def user(text):
    return Message("user", text)


def assistant(text):
    return Message("assistant", text)


async def test_turns_that_extend_each_other_are_one_sequence():
    generate, prompts = script("bc", "e")
    policy = recording(generate, Letters())
    reply = await policy.chat([user("a")])
    assert (reply.text, reply.finish_reason) == ("bc", "stop")
    await policy.chat([user("a"), assistant("bc"), user("d")])
    (sequence,) = policy.sequences
    assert sequence.token_ids == [*b"a\0bc\0d\0e\0"] == prompts[1] + [*b"e\0"]
    assert sequence.mask == [False, False, True, True, True, False, False, True, True]
    assert sequence.logprobs == [0, 0, -0.5, -0.5, -0.5, 0, 0, -0.5, -0.5]
    assert sequence.versions == [VersionSpan(2, "0.1"), VersionSpan(7, "0.2")]
    assert policy.num_turns == 2
    assert policy.conversation == [user("a"), assistant("bc"), user("d"), assistant("e")]
    assert not policy.truncated


async def test_experts_of_earlier_turns_stay_as_they_were_sampled():
    """Engines compute an earlier turn's tokens again, perhaps with newer weights."""
    turns = iter([b"\x01\x02\x03", b"\x09\x09\x09\x09\x05\x06\x07", None, b"\x08" * 9])

    async def generate(prompt_ids, *_):
        given = next(turns)
        experts = None if given is None else ExpertChoices(given, 1, 1)
        return Completion("r", [ord("b"), END], [-0.5] * 2, "stop", experts=experts)

    policy = recording(generate, Letters())
    await policy.chat([user("a")])
    await policy.chat([user("a"), assistant("b"), user("d")])
    (sequence,) = policy.sequences
    assert sequence.experts == ExpertChoices(b"\x01\x02\x03\x09\x05\x06\x07", 1, 1)
    await policy.chat([user("a"), assistant("b"), user("d"), assistant("b"), user("e")])
    assert (len(sequence.experts), len(sequence)) == (7, 12), "the last turn's are missing"
    await policy.chat([user("x")])
    assert policy.sequences[1].experts == ExpertChoices(b"\x08" * 9, 1, 1), "another conversation has its own"


async def test_a_prompt_that_changes_the_past_begins_a_new_sequence():
    policy = policy_of("<t>b", "e")
    await policy.chat([user("a")])
    await policy.chat([user("a"), assistant("b"), user("d")])  # the thinking was dropped
    first, second = policy.sequences
    assert first.token_ids == [*b"a\0<t>b\0"]
    assert second.token_ids == [*b"a\0b\0d\0e\0"]
    assert second.mask == [False] * 6 + [True] * 2
    assert second.versions == [VersionSpan(6, "0.2")]


@pytest.mark.parametrize(
    ("turns", "prompts", "sequences"),
    [
        ("byd", (("a",), ("x",), ("a", "b", "c")), [b"a\0b\0c\0d\0", b"x\0y\0"]),
        ("bc", (("a",), ("a",)), [b"a\0b\0", b"a\0c\0"]),  # the same prompt twice
    ],
)
async def test_conversations_held_in_turns_keep_apart(turns, prompts, sequences):
    policy = policy_of(*turns)
    for prompt in prompts:
        await policy.chat([(user, assistant)[place % 2](text) for place, text in enumerate(prompt)])
    assert [bytes(s.token_ids) for s in policy.sequences] == sequences


async def test_truncation_is_remembered_and_missing_logprobs_stay_missing():
    policy = policy_of("b", finish="length", logprobs=False)
    assert (await policy.chat([user("a")])).finish_reason == "length"
    assert policy.truncated
    assert policy.sequences[0].logprobs is None


async def test_aborted_and_inconsistent_completions_are_engine_errors():
    policy = policy_of("b", finish="abort")
    with pytest.raises(EngineError, match="aborted after 2 tokens"):
        await policy.chat([user("a")])
    assert policy.sequences == []
    with pytest.raises(IntegrityError, match="1 log-probabilities for 2 tokens"):
        record_turn([], [1], Completion("r", [2, 3], [-1.0], "stop"))


async def test_thinking_that_the_template_opens_is_part_of_the_reply():
    policy = policy_of("hm</think>4")
    assert (await policy.chat([user("2+2<think>\n")])).text == "<think>hm</think>4"
    assert policy.sequences[0].token_ids[-len("hm</think>4") - 1 :] == [*b"hm</think>4\0"]


turns = st.lists(
    st.tuples(st.lists(st.integers(1, 3), max_size=3), st.lists(st.integers(1, 3), min_size=1, max_size=3)),
    min_size=1,
    max_size=5,
)


@given(turns)
def test_one_conversation_is_one_sequence_and_its_trained_tokens_are_the_sampled_ones(turns):
    sequences, tokens, sampled = [], [9], []
    for given_ids, said in turns:
        prompt = tokens + given_ids
        record_turn(sequences, prompt, Completion("r", said, [-1.0] * len(said), "stop", [VersionSpan(0, "0.0")]))
        tokens = prompt + said
        sampled += said
    (sequence,) = sequences
    assert sequence.token_ids == tokens
    assert [t for t, on in zip(sequence.token_ids, sequence.mask, strict=True) if on] == sampled
    assert [p for p, on in zip(sequence.logprobs, sequence.mask, strict=True) if on] == [-1.0] * len(sampled)
    assert len(sequence.versions) == 1


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 2), max_size=4), st.lists(st.integers(1, 2), max_size=3)), max_size=6)
)
def test_whatever_the_prompts_no_sampled_token_is_lost_or_doubled(turns):
    sequences = []
    for prompt, said in turns:
        record_turn(sequences, prompt, Completion("r", said, [-1.0] * len(said), "stop"))
    assert sum(s.num_trainable for s in sequences) == sum(len(said) for _, said in turns)
    assert all(len(s.token_ids) == len(s.mask) == len(s.logprobs) for s in sequences)


async def test_a_single_turn_asks_once_and_says_how_it_ended():
    class Ask(SingleTurn):
        def tasks(self, split, num_tasks):
            return []

        def reward(self, task, completion):
            return 1.0

    task = Task("t", (user("a"),))
    for finish, outcome, stop in (("stop", "done", "answer"), ("length", "truncated", "length")):
        found = await Ask().run(task, policy_of("b", finish=finish))
        assert found == Episode("b", outcome, stop=stop, messages=(assistant("b"),))


async def test_thinking_that_the_template_opened_and_the_longest_of_several_turns():
    class Opening(Letters):
        def render(self, messages):
            return [*super().render(messages), *map(ord, "<think>\n")]

    policy = recording(script("ab</think>c", "abcd", "a</think>")[0], Opening())
    await policy.chat([user("q")])
    assert policy.num_thinking == len("ab</think>")
    for _ in range(2):
        await policy.chat([user("q")])
    assert policy.num_thinking == len("ab</think>")


class Pieces:
    """Tokens of several characters, those of `</think>` among them, or split."""

    TEXTS = ("", "<think>", "</think>", "</th", "ink>", "a", "</", "think>", "b c")

    def __init__(self):
        self.num_decoded = 0

    def decode(self, token_ids):
        self.num_decoded += len(token_ids)
        return "".join(self.TEXTS[token] for token in token_ids)


@given(st.lists(st.integers(1, len(Pieces.TEXTS) - 1), max_size=300))
def test_thinking_ends_with_the_first_tokens_that_hold_its_last_close(token_ids):
    tokenizer = Pieces()
    text = tokenizer.decode(token_ids)
    _, closed, after = text.rpartition("</think>")
    expected = len(token_ids) if "<think>" in after else 0
    if closed and "<think>" not in after:
        expected = next(
            end
            for end in range(len(token_ids) + 1)
            if tokenizer.decode(token_ids[:end]).count("</think>") == text.count("</think>")
        )
    assert num_thinking(text, token_ids, tokenizer) == expected


def test_long_thinking_is_not_decoded_again_and_again():
    tokenizer, token_ids = Pieces(), [1] + [5] * 32_000 + [2] + [5] * 100
    text = tokenizer.decode(token_ids)
    tokenizer.num_decoded = 0
    assert num_thinking(text, token_ids, tokenizer) == 32_002
    assert tokenizer.num_decoded < 10_000


def always(token_ids):
    async def generate(prompt_ids, *_):
        return Completion("r", token_ids, [-0.5] * len(token_ids), "stop")

    return generate


async def test_a_turn_whose_call_is_a_special_token_is_extended_by_the_next_prompt(tmp_path):
    made = new_tokenizer("byte")
    made.add_tokens(["[TOOL_CALLS]"], special_tokens=True)
    made.save_pretrained(tmp_path)
    tokenizer = ChatTokenizer(tmp_path)
    sampled = [*tokenizer.plain_tokens(" I ask [TOOL_CALLS]f{}\n"), tokenizer.end_token_id]

    policy = recording(always(sampled), tokenizer)
    reply = await policy.chat([user("q")])
    assert reply.text == policy.last_text == " I ask f{}\n"
    assert reply.message == assistant(" I ask [TOOL_CALLS]f{}\n")
    await policy.chat([user("q"), reply.message, Message("tool", "1")])
    (sequence,) = policy.sequences
    assert sequence.num_trainable == 2 * len(sampled)
    policy.close()


async def test_a_stop_string_stays_in_the_reply_and_the_next_prompt_extends_it(tmp_path):
    new_tokenizer("byte").save_pretrained(tmp_path)
    tokenizer = ChatTokenizer(tmp_path)
    sampled = tokenizer.plain_tokens("<a>ab</a>")  # as vLLM ends at a stop string: without an end token

    policy = recording(always(sampled), tokenizer)
    reply = await policy.chat([user("q")])
    assert (reply.text, reply.content, reply.message) == ("<a>ab</a>", "<a>ab</a>", assistant("<a>ab</a>"))
    await policy.chat([user("q"), reply.message, user("found")])
    (sequence,) = policy.sequences
    assert sequence.num_trainable == 2 * len(sampled)
    policy.close()


async def test_episodes_that_begin_alike_have_their_first_prompt_rendered_once():
    class Counting(Letters):
        num_rendered = 0

        def render(self, messages):
            self.num_rendered += 1
            return super().render(messages)

    tokenizer = Counting()
    prompts = Prompts(tokenizer)
    for answer in ("a", "b"):
        generate, given = script(answer, "c")
        policy = recording(generate, tokenizer, prompts=prompts)
        await policy.chat([user("q")])
        await policy.chat([user("q"), assistant(answer), user("r")])
        policy.close()
        assert given == [[*b"q", END], [*b"q", END, *answer.encode(), END, *b"r", END]]
        assert policy.sequences[0].token_ids == [*given[1], *b"c", END]
    assert tokenizer.num_rendered == 3
    other = recording(script("d")[0], tokenizer, prompts=prompts)
    await other.chat([user("another")])
    assert other.sequences[0].token_ids == [*b"another", END, *b"d", END]


async def test_what_belongs_to_a_message_need_not_be_written_again():
    """Images and fields of the task's messages, and special tokens of the policy's own turns."""

    class Special(Letters):
        def decode_turn(self, token_ids):
            return self.decode(token_ids).replace("#", ""), self.decode(token_ids)

        def place_images(self, messages, token_ids):
            return tuple(image for message in messages for image in message.media)

    picture = Message("user", "look", media=(Media("image", "/a.png", "digest"),))
    named = Message("system", "s", extra={"name": "n"}, tools=({"name": "f"},))
    policy = recording(script("#b", "c", "d")[0], Special(), task_prompt=[named, picture])
    reply = await policy.chat([Message("system", "s"), user("look")])
    assert policy.conversation[:2] == [named, picture]
    await policy.chat([Message("system", "s"), user("look"), assistant("b"), user("on")])
    assert policy.conversation == [named, picture, reply.message, user("on"), assistant("c")]
    assert len(policy.sequences) == 1
    await policy.chat([user("b"), user("look"), Message("system", "t", tools=({"name": "g"},))])
    first, second, third = policy.conversation[:3]
    assert (first.tools, second, third) == (({"name": "g"},), picture, Message("system", "t"))


def test_what_follows_the_task_is_all_that_run_said_itself():
    prompt = [Message("system", "s"), user("q")]
    assert following(prompt, [*prompt, assistant("a")]) == [assistant("a")]
    assert following(prompt, [msgspec.structs.replace(prompt[0], tools=({},)), prompt[1], assistant("a")]) == [
        assistant("a")
    ]
    assert following(prompt, [user("q"), assistant("a")]) == [user("q"), assistant("a")]
    assert following(prompt, [prompt[0], user("other"), assistant("a")]) == [user("other"), assistant("a")]
    assert following(prompt, []) == []
