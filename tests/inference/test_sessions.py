"""Which recorded turn a request continues, and what a response's bytes hold."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.inference.plugin.sessions import (
    MARK,
    Conversation,
    Match,
    Session,
    marked,
    overridden,
    plain,
    rest_after,
)
from slipstream.inference.plugin.wire_answers import Answer, answers_in, message_answer
from slipstream.records import Completion, SamplingParams, SessionOpening

END = 0
SAMPLING = SamplingParams(16, temperature=0.7, stop_token_ids=(END,))
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
THOUGHT = Answer("4", (("add", '{"a": 1, "b": 2}'),), "two and two")


def session(seed=1):
    return Session(SessionOpening("key", SAMPLING, seed))


def ids(text):
    return [ord(letter) for letter in text]


def text(token_ids):
    return "".join(map(chr, token_ids))


def user(content):
    return {"role": "user", "content": content}


def recorded(of, conversation, answer, prompt="p", tokens="a", **how):
    completion = Completion("", [*ids(tokens), END], [0.0] * (len(tokens) + 1), "stop")
    of.record(len(of.turns), ids(prompt), completion, answer, conversation, **how)


def test_an_answer_is_found_again_however_it_is_sent_back():
    one = session()
    recorded(one, Conversation([user("2+2?")]), THOUGHT)
    for changed in (
        {"content": " 4\n", "reasoning": "two and two"},
        {"content": [{"type": "text", "text": "4"}]},
        {"content": "4", "tool_calls": [{"function": {"name": "add", "arguments": {"b": 2, "a": 1}}}]},
    ):
        message = {"role": "assistant", "tool_calls": [CALL], **changed}
        then = Conversation([user("2+2?"), message, user("sure?")])
        assert one.find(then) == Match(0, 1)


@pytest.mark.parametrize(
    "changed",
    [
        {"content": "5"},
        {"tool_calls": []},
        {"tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]},
        {"reasoning_content": "three"},
        {"role": "user"},
    ],
)
def test_another_answer_is_not(changed):
    one = session()
    recorded(one, Conversation([user("2+2?")]), THOUGHT)
    message = {**THOUGHT.message, **changed}
    assert one.find(Conversation([user("2+2?"), message, user("sure?")])) is None


def test_other_tools_or_another_history_are_no_continuation():
    one = session()
    recorded(one, Conversation([user("2+2?")], "tools"), THOUGHT)
    assert one.find(Conversation([user("2+2?"), THOUGHT.message], "others")) is None
    assert one.find(Conversation([user("2+3?"), THOUGHT.message], "tools")) is None
    assert one.find(Conversation([user("2+2?"), THOUGHT.message], "tools")) == Match(0, 1)


def test_thinking_that_is_changed_later_forks():
    one = session()
    first = Conversation([user("a")])
    recorded(one, first, Answer("1", thinking="why"))
    second = Conversation([user("a"), Answer("1", thinking="why").message, user("b")])
    recorded(one, second, Answer("2"), match=one.find(second))
    history = [*second.messages, Answer("2").message, user("c")]
    assert one.find(Conversation(history)) == Match(1, 3)
    history[1] = Answer("1").message
    assert one.find(Conversation(history)) == Match(1, 3), "a client may leave thinking out"
    history[1] = Answer("1", thinking="because").message
    assert one.find(Conversation(history)) is None
    assert one.turns[1].given == [user("b")]
    assert one.turns[1].continues == 0


MESSAGES = st.lists(st.sampled_from(["x", "y", "z"]), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(MESSAGES, st.sampled_from(["A", "B"])), max_size=5), MESSAGES, st.data())
def test_a_match_is_the_longest_recorded_beginning(turns, asked, data):
    """Whatever was recorded: a match has exactly the recorded messages and answer before it, and no longer one has."""
    one = session()
    for said, answer in turns:
        recorded(one, Conversation([user(each) for each in said]), Answer(answer))
    said, answer = data.draw(st.sampled_from(turns)) if turns else (asked, "A")
    history = [*(user(each) for each in said), Answer(answer).message, *(user(each) for each in asked)]
    found = one.find(Conversation(history))
    matching = [n for n, each in enumerate(turns) if each == (said, answer)]
    assert (found is None) == (not matching)
    if found:
        assert found == Match(matching[-1], len(said))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4), st.text("abc", max_size=4))
def test_a_text_that_goes_on_keeps_the_recorded_tokens(parts, more):
    """Tokens of two letters stand for one text too; whichever were recorded stay."""
    one = session()
    for part in parts:
        completion = Completion("", [1000 + ord(part[0]), *ids(part[1:])], None, "length")
        one.record(0, [], completion, Answer(part))

    def decode(token_ids):
        return "".join(chr(each - 1000 if each >= 1000 else each) for each in token_ids)

    prompt = ids(parts[0] + more)
    found = one.retokenized(prompt, decode, ids)
    assert decode(found) == parts[0] + more
    if more:
        assert any(found[: len(one.tokens_of(turn))] == one.tokens_of(turn) for turn in range(len(parts)))
    known = [*one.tokens_of(0), *ids(more)]
    assert one.retokenized(known, decode, ids) is known or decode(known) == decode(found)


def test_only_the_rest_is_rendered():
    history = [user("a"), {**THOUGHT.message, "tool_calls": [CALL]}, {"role": "tool", "content": "3"}]
    first, second = marked(history, 1)
    assert first[1]["content"] == MARK
    assert MARK in second[1]["tool_calls"][0]["function"]["arguments"]
    assert [first[0], first[2]] == [second[0], second[2]] == [history[0], history[2]]
    assert rest_after(f"<u>a<e><a><think></think>{MARK}<call><e>\n<t>3<e><a>", "<e>") == "\n<t>3<e><a>"
    assert rest_after(f"<a>{MARK}<e><a>", "") == "<e><a>"
    assert rest_after("<a>4<e>", "<e>") is None
    assert rest_after(f"{MARK}{MARK}<e>", "<e>") is None
    assert rest_after(f"{MARK} without an end", "<e>") is None


def test_seeds_follow_from_the_prompt_and_differ_for_each_time():
    one, same, other = session(), session(), session(2)
    asked = [[1, 2], [3], [1, 2]]
    seeds = [one.seed(prompt) for prompt in asked]
    assert len(set(seeds)) == 3
    assert {same.seed(prompt) for prompt in reversed(asked)} == set(seeds), "whatever their order"
    assert other.seed([3]) != seeds[1]


def test_what_the_run_overrides():
    body = {
        "temperature": 0.2,
        "top_p": 1.0,
        "top_k": -1,
        "frequency_penalty": 0.5,
        "text": {"format": {"type": "text"}},
    }
    assert overridden(body, SAMPLING) == {"temperature": 0.2, "frequency_penalty": 0.5}
    formats = {"response_format": {"type": "json_object"}, "logit_bias": {"7": 1}, "text": {"format": {"type": "text"}}}
    assert overridden(formats, SAMPLING) == {"response_format": "json_object", "logit_bias": ""}


def test_messages_are_copied_out_of_iterators():
    calls = iter([CALL])
    assert plain([{"role": "assistant", "content": None, "tool_calls": calls, "name": None}]) == [
        {"role": "assistant", "content": None, "tool_calls": [CALL]}
    ]


CHAT = {
    "choices": [
        {
            "index": 0,
            "message": {"content": "4", "reasoning": "two and two", "tool_calls": [CALL]},
            "finish_reason": "x",
        }
    ]
}
RESPONSES = {
    "output": [
        {"type": "reasoning", "content": [{"text": "two and two"}]},
        {"type": "message", "content": [{"type": "output_text", "text": "4"}]},
        {"type": "function_call", "call_id": "1", "name": "add", "arguments": '{"b": 2, "a": 1}'},
    ]
}
MESSAGES_BODY = {
    "content": [
        {"type": "thinking", "thinking": "two and two"},
        {"type": "text", "text": "4"},
        {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1, "b": 2}},
    ]
}


def chunk(delta, finish=None):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


STREAMS = {
    "/v1/chat/completions": [
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning_content": "two "}),
        chunk({"reasoning": "and two"}),
        chunk({"content": "4"}),
        chunk({"tool_calls": [{"index": 0, "id": "1", "function": {"name": "add", "arguments": ""}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"b": 2,'}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": ' "a": 1}'}}]}),
        chunk({}, "tool_calls"),
        {"choices": [], "usage": {}},
    ],
    "/v1/responses": [{"type": "response.created"}, {"type": "response.completed", "response": RESPONSES}],
    "/v1/messages": [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "two and two"}},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "4"}},
        {
            "type": "content_block_start",
            "index": 2,
            "content_block": {"type": "tool_use", "id": "1", "name": "add", "input": {}},
        },
        {"type": "content_block_delta", "index": 2, "delta": {"partial_json": '{"a": 1,'}},
        {"type": "content_block_delta", "index": 2, "delta": {"partial_json": '"b": 2}'}},
        {"type": "message_stop"},
    ],
}


def stream(events):
    return b": keep-alive\n\n" + b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/responses", RESPONSES), ("/v1/messages", MESSAGES_BODY)],
)
def test_a_stream_holds_what_a_whole_body_does(path, body):
    assert answers_in(path, json.dumps(body).encode(), is_stream=False) == [THOUGHT]
    events = STREAMS[path]
    assert answers_in(path, stream(events), is_stream=True) == [THOUGHT]
    assert message_answer(answers_in(path, stream(events), is_stream=True)[0].message) == THOUGHT
    last = next(n for n in range(len(events), 0, -1) if not _is_whole(path, events[:n]))
    assert last < len(events), "cut off anywhere, it holds none"
    with pytest.raises(ValueError, match="error"):
        answers_in(path, stream([*events, {"error": {"message": "x"}}]), is_stream=True)


def _is_whole(path, events):
    try:
        return bool(answers_in(path, stream(events), is_stream=True))
    except ValueError:
        return False


def test_completions_and_routes_of_tokens():
    body = json.dumps({"choices": [{"index": 0, "text": "abc"}]}).encode()
    assert answers_in("/v1/completions", body, is_stream=False) == [Answer("abc")]
    assert answers_in("/inference/v1/generate", b"{}", is_stream=False) == []
    with pytest.raises(ValueError, match="without its fields"):
        answers_in("/v1/completions", b"{}", is_stream=False)
