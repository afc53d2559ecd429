"""Where calls begin and end in each way to write them, and what is wrong with those that cannot be read."""

# ruff: noqa: RUF001 (the bars of DeepSeek's tags)

import pytest

from slipstream.inference.plugin.tools.call_records import MAX_CALLS, Found, Parsed, as_records, read_calls
from slipstream.inference.plugin.tools.formats import FORMATS, Format, answer_start, excerpt
from slipstream.records import ToolCall

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


@pytest.mark.parametrize(
    ("name", "text", "alone", "called"),
    [
        (
            "deepseek_v31",
            "x<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            None,
        ),
        (
            "deepseek_v32",
            'x<｜DSML｜invoke name="now">\n</｜DSML｜invoke>',
            '<｜DSML｜function_calls><｜DSML｜invoke name="now">\n</｜DSML｜invoke></｜DSML｜function_calls>',
            "now",
        ),
        (
            "kimi_k2",
            "x<|tool_call_begin|>functions.now:0<|tool_call_end|>",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_end|><|tool_calls_section_end|>",
            "now",
        ),
        (
            "minimax_m2",
            'x<invoke name="now">\n</invoke>',
            '<minimax:tool_call><invoke name="now">\n</invoke></minimax:tool_call>',
            "now",
        ),
        (
            "minimax_m2",
            "x<minimax:tool_call><invoke name='now'>\n</invoke>",
            "<minimax:tool_call><invoke name='now'>\n</invoke>",
            "now",
        ),
        ("mistral", "x[TOOL_CALLS]now[ARGS]{}", "[TOOL_CALLS]now[ARGS]{}", "now"),
        ("mistral", 'x[TOOL_CALLS] [{"name": "now"}]', '[TOOL_CALLS] [{"name": "now"}]', "now"),
        ("qwen3_coder", "x<tool_call>\n<function=now></tool_call>", "<tool_call>\n<function=now></tool_call>", "now"),
        ("seed_oss", "<seed:tool_call><function=now>", "<seed:tool_call><function=now>", "now"),
        ("glm45", "<tool_call> now\n</tool_call>", "<tool_call> now\n</tool_call>", "now"),
        ("pythonic", "[now(a=1", "[now(a=1", "now"),
        ("lfm2", "<|tool_call_start|>[now(", "<|tool_call_start|>[now(", "now"),
        ("functiongemma", "<start_function_call>call:now{", "<start_function_call>call:now{", "now"),
        ("gemma4", "<|tool_call>call:now.then{", "<|tool_call>call:now.then{", "now.then"),
        ("hermes", "<tool_call>[]", "<tool_call>[]", ""),
    ],
)
def test_a_call_by_itself_has_what_stands_around_all_of_them_and_the_name_that_can_be_seen(name, text, alone, called):
    format_ = FORMATS[name]
    (region,) = format_.regions(text)
    assert format_.alone(region) == alone
    if called is not None:
        assert format_.name_of(region) == called


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("glm45", "<tool_call>now", "the call has no end, </tool_call> is missing: '<tool_call>now'"),
        ("qwen3_xml", "<tool_call>now", "the call has no end, </function> is missing: '<tool_call>now'"),
        (
            "kimi_k2",
            "<|tool_call_begin|>f",
            "the call has no end, <|tool_call_end|> is missing: '<|tool_call_begin|>f'",
        ),
        ("granite", "<tool_call>[{", "the call has no end: '<tool_call>[{'"),
        (
            "glm45",
            "<tool_call> a\nb</tool_call>",
            "the call is not in the model's format: '<tool_call> a b</tool_call>'",
        ),
        ("longcat", "<longcat_tool_call>[]", "the call is not a JSON object: '[]'"),
        (
            *("hermes", '<tool_call>{"name": "f", "arguments": 1}</tool_call>'),
            """the call is not in the model's format: '<tool_call>{"name": "f", "arguments": 1}</tool_call>'""",
        ),
    ],
)
def test_what_is_wrong_with_a_call_is_told(name, text, complaint):
    (region,) = FORMATS[name].regions(text)
    assert FORMATS[name].complaint(region) == complaint


def test_an_excerpt_is_short_and_on_one_line():
    assert excerpt(" a\n\tb ") == "'a b'"
    assert excerpt("x" * 80) == f"'{'x' * 80}'"
    assert excerpt("x" * 81) == f"'{'x' * 77}...'"


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


def test_without_a_format_the_parsers_word_is_final():
    assert read_calls("F", parse, None) == ([Found("F", "{}")], "rest")


def test_as_many_calls_as_may_be_are_all_taken():
    assert not any(call.error for call in as_records([Found("f", "{}")] * MAX_CALLS, "", [1]))
    found, _ = read_calls("<c>1</c>" * (MAX_CALLS + 5), parse, SPLIT)
    assert len(found) == MAX_CALLS + 1
    assert isinstance(found[0], ToolCall)
