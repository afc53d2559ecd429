"""What becomes of calls that a parser found, or did not find; without vLLM."""

import json

import pytest

from slipstream.inference.plugin.tools.call_records import (
    MAX_CALLS,
    MAX_DEPTH,
    Found,
    Parsed,
    Unreadable,
    arguments_of,
    as_records,
    read_calls,
)
from slipstream.inference.plugin.tools.formats import FORMATS, Format, answer_start, ends_in_thought
from slipstream.records import Completion, GenerateRequest, SamplingParams, ToolCall, decode, encode

from .fakes import supervised

HERMES = FORMATS["hermes"]
CALL = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'


def hermes(text):
    """As vLLM's parser: one call that cannot be read, and all of it is text."""
    try:
        inner = [json.loads(region.text[11:].removesuffix("</tool_call>")) for region in HERMES.regions(text)]
        found = tuple(Found(each["name"], json.dumps(each["arguments"])) for each in inner)
    except (ValueError, KeyError, TypeError):
        return Parsed((), text)
    return Parsed(found, text.partition("<tool_call>")[0])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"a": 1', "not valid JSON"),
        ("{'a': 1}", "not valid JSON"),
        ('{"a": NaN}', "NaN is no number"),
        ('{"a": -Infinity}', "Infinity is no number"),
        ("[1]", "not a JSON object"),
        ("null", "not a JSON object"),
        ('"{}"', "not a JSON object"),
        ('{"a": 99999999999999999999}', "more than 64 bits"),
        (f'{{"a": {"9" * 5000}}}', "not valid JSON"),
        ('{"a": "\\ud800"}', "surrogate"),
        ('{"\\ud800": 1}', "surrogate"),
        ('{"a": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}", "nested more than"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "not valid JSON"),
    ],
)
def test_arguments_that_cannot_be_read_are_told(text, complaint):
    with pytest.raises(Unreadable, match=complaint):
        arguments_of(text)
    (call,) = as_records([Found("add", text)], "", [1])
    assert call.name == "add"
    assert call.arguments == {}
    assert complaint in call.error
    assert len(call.error) < 300
    assert decode(encode(call), ToolCall) == call


def test_arguments_that_can_be_read():
    assert arguments_of("") == {}
    deep = {"a": 1}
    for _ in range(MAX_DEPTH - 1):
        deep = {"d": deep}
    assert arguments_of(json.dumps(deep)) == deep
    call = ToolCall("f", deep)
    assert decode(encode(call), ToolCall) == call
    assert arguments_of('{"a": 1e3, "b": [true, null, "\\u00e9"]}') == {"a": 1000.0, "b": [True, None, "é"]}


def test_ids_follow_from_the_tokens_unless_the_policy_wrote_them():
    found = [Found("f", "{}", "functions.f:0"), Found("f", "{}", "chatcmpl-tool-1234"), Found("f", "{}", "")]
    text = "... functions.f:0 ..."
    first = as_records(found, text, [1, 2, 3])
    assert first == as_records([*found[:1], Found("f", "{}", "another"), found[2]], text, [1, 2, 3])
    ids = [call.id for call in first]
    assert ids[0] == "functions.f:0"
    assert all(len(id_) == 9 and id_.isalnum() for id_ in ids[1:])
    assert len(set(ids)) == 3
    assert as_records(found, text, [1, 2, 4])[2].id != ids[2]


def test_a_name_is_always_text_that_can_be_sent():
    calls = as_records([Found("", "{}"), Found("\ud800", "{}"), Found("x" * 10_000, "{}")], "", [1])
    assert calls[0].error == "the call has no name"
    assert all(decode(encode(call), ToolCall) == call for call in calls)
    assert max(len(call.name) for call in calls) < 1000


def test_there_is_a_most_of_calls():
    calls = as_records([Found("f", "{}")] * (MAX_CALLS + 5), "", [1])
    assert len(calls) == MAX_CALLS + 1
    assert calls[-1].error
    broken = as_records(read_calls("<tool_call>{</tool_call>" * 10_000, hermes, HERMES)[0], "", [1])
    assert len(broken) == MAX_CALLS + 1


def test_one_broken_call_does_not_take_the_others_with_it():
    text = f'A{CALL}B<tool_call>{{"name": "sub", "arguments": {{</tool_call>C{CALL}D'
    calls, content = read_calls(text, hermes, HERMES)
    assert [type(call) for call in calls] == [Found, ToolCall, Found]
    assert calls[1].name == "sub"
    assert "not valid JSON" in calls[1].error
    assert content == "ABCD"


@pytest.mark.parametrize(
    ("inner", "complaint"),
    [
        ("", "not valid JSON"),
        ("[]", "not a JSON object"),
        ('{"name": "f"}', 'no "arguments"'),
        ('{"arguments": {}}', 'no "name"'),
        ("{}", 'no "name" and no "arguments"'),
    ],
)
def test_what_is_wrong_with_a_call_of_qwen(inner, complaint):
    for text in (f"<tool_call>\n{inner}\n</tool_call>", f"<tool_call>\n{inner}"):
        (call,), _ = read_calls(text, hermes, HERMES)
        assert complaint in call.error


def test_text_without_calls_is_left_alone():
    assert read_calls("It is 3 < 4.", hermes, HERMES) == ([], "It is 3 < 4.")
    assert read_calls("x", lambda text: Parsed((), text), None) == ([], "x")


SAYS = '<tool_call>{"name":"say","arguments":{"text":"<think>"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (CALL, CALL),
        (f"<think>hm {CALL}</think>{CALL}", CALL),
        (f"hm {CALL}</think>x", "x"),
        (f"<think>a</think>{CALL}<think>b</think>5", "5"),
        (f"<think>{CALL}", ""),
        (f"x{CALL}<think>{CALL}", f"x{CALL}"),
        (f"[THINK]{CALL}[/THINK]5", "5"),
        (SAYS, None),
        (f'<tool_call>{{"name":"say","arguments":{{"text":"<think>"}}}}</tool_call><think>{CALL}', 68),
        (f"<think>a</think>{SAYS}", SAYS),
    ],
)
def test_calls_within_thinking_do_not_count(text, part):
    start, end = answer_start(text, HERMES, begins_thinking=False)
    expected = text if part is None else text[:part] if isinstance(part, int) else part
    assert text[start:end] == expected


def test_a_template_may_begin_the_thought():
    assert ends_in_thought("assistant\n<think>\n")
    assert not ends_in_thought("<think>\n\n</think>\n\n")
    assert answer_start(CALL, HERMES, begins_thinking=True) == (len(CALL), len(CALL))
    text = f"{CALL}</think>{CALL}"
    start, end = answer_start(text, HERMES, begins_thinking=True)
    assert text[start:end] == CALL


async def test_what_a_parser_raised_is_told_once_and_counted(tmp_path, monkeypatch):
    events = []
    engine = supervised(
        tmp_path, "hermes", max_restarts=0, on_event=lambda kind, **fields: events.append((kind, fields))
    )

    async def generate(request):
        return Completion(request.id, [1], [0.0], "stop", parser_failure="KeyError: 'name'")

    monkeypatch.setattr(engine.process, "is_alive", lambda: True)
    monkeypatch.setattr(engine.process.client, "generate", generate)
    assert engine.take_metrics() == {}
    for number in range(3):
        await engine.generate(GenerateRequest(str(number), [1], SamplingParams(1)))
    assert [kind for kind, _ in events] == ["warning"]
    assert "hermes raised (KeyError: 'name')" in events[0][1]["message"]
    assert engine.take_metrics() == {"rollout/parser_failures": 3.0}
    assert engine.take_metrics() == {"rollout/parser_failures": 0.0}


SPLIT = Format("<c>", "</c>", name=r"<c>(\w*)")


@pytest.mark.parametrize(
    ("format_", "text", "found"),
    [
        (SPLIT, "a<c>f</c>b<c>g</c>", [(1, 9, True), (10, 18, True)]),
        (SPLIT, "<c>f</c><c>g", [(0, 8, True), (8, 12, False)]),
        (Format("<c>", "</c>", ends="!"), "<c>f!", [(0, 5, True)]),
        (Format("<c>", "</c>", ends="!"), "<c>f", [(0, 4, False)]),
        (Format("<c>", "</c>", ends="!"), "<c>f</c>", [(0, 8, True)]),
        (Format("<c>", "</c>", is_json=True), "<c>f", [(0, 4, True)]),
        (Format("<c>"), "a<c>f", [(1, 5, True)]),
        (Format("<c>"), "a", []),
    ],
)
def test_a_call_is_whole_by_its_closing_or_by_what_ends_it(format_, text, found):
    assert [(each.start, each.end, each.is_whole) for each in format_.regions(text)] == found
    assert [each.text for each in format_.regions(text)] == [text[start:end] for start, end, _ in found]


def test_a_thought_begins_at_the_first_sign_of_it_that_no_call_holds():
    call = "<c><think></c>"
    assert answer_start(f"<think>{call}", SPLIT, begins_thinking=False) == (0, 0)
    assert answer_start(f"{call}<think>", SPLIT, begins_thinking=False) == (0, len(call))
    assert answer_start(f"<c></c><think>{call}", SPLIT, begins_thinking=False) == (0, 7)
    starts = Format("<think>", "</c>")
    assert answer_start("<think>a</c>", starts, begins_thinking=False) == (0, 12), "which is where a call begins"
    assert answer_start("<think>a</c><think>", None, begins_thinking=False) == (0, 0)


def parse(text):
    """One call for each letter in upper case, of texts without a number."""
    calls = () if any(each.isdigit() for each in text) else tuple(Found(each, "{}") for each in text if each.isupper())
    return Parsed(calls, "rest")


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ("a<c>F</c><c>G</c>b", ["F", "G"], "rest"),
        ("a<c>FG</c>b", ["F", "G"], "rest"),
        ("a<c>F</c><c>1</c>b", ["F", "1 is odd"], "ab"),
        ("a<c>F</c>b<c>G", ["F", "G is odd"], "ab"),
        ("a<c>FG</c>b<c>1</c>", ["F", "G", "1 is odd"], "ab"),
    ],
)
def test_calls_are_parsed_together_where_all_are_found_and_else_each_by_itself(text, calls, content):
    read, rest = read_calls(text, parse, SPLIT)
    assert [each.name if isinstance(each, Found) else f"{each.name} is odd" for each in read] == calls
    assert all(isinstance(each, Found) or each.error for each in read)
    assert rest == content
