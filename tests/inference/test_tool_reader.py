"""What is read of a completion, with a scripted parser and tokenizer in the place of vLLM's."""

import json
import logging
import re
from types import SimpleNamespace

import pytest

from slipstream.inference.plugin.tools import reader as reader_module
from slipstream.inference.plugin.tools.reader import Reading, ToolReader
from slipstream.records import GenerateRequest, SamplingParams

from .fakes import put

TOOLS = ({"type": "function", "function": {"name": "add"}},)
CALL = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'
SPECIAL = {900: "<|end|>", 901: "<|call|>", 902: "<think>"}


class Tokenizer:
    """One token for each character, and special ones."""

    all_special_ids = (900,)
    all_special_tokens = ("<|end|>",)

    def __init__(self):
        self.added_tokens_decoder = {id_: Token(text, special=id_ != 902) for id_, text in SPECIAL.items()}
        self.added_tokens_decoder[ord("q")] = "q"
        self.options = []

    def decode(self, ids, skip_special_tokens, **options):
        self.options.append(options)
        return "".join(
            (("" if skip_special_tokens and id_ != 902 else SPECIAL[id_]) if id_ in SPECIAL else chr(id_))
            for id_ in ids
        )


class Token(str):
    def __new__(cls, text, special):
        made = super().__new__(cls, text)
        made.special = special
        return made


class Parser:
    """Reads Hermes' format; raises for the text that it is told to."""

    raises, keeps_special, seen = "\0", False, []

    def __init__(self, tokenizer, tools):
        self.tools = tools

    def adjust_request(self, request):
        request.skip_special_tokens = not self.keeps_special
        return request

    def extract_tool_calls(self, text, request):
        type(self).seen.append(text)
        if self.raises in text:
            raise KeyError("name")
        found = re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)
        try:
            calls = [json.loads(each) for each in found]
        except ValueError:
            calls = []
        made = [
            SimpleNamespace(
                id=c.get("id"), function=SimpleNamespace(name=c["name"], arguments=json.dumps(c["arguments"]))
            )
            for c in calls
        ]
        content = text.partition("<tool_call>")[0] or None
        return SimpleNamespace(tools_called=bool(made), tool_calls=made, content=content if made else "odd")


class Request(SimpleNamespace):
    made = 0

    @classmethod
    def model_validate(cls, given):
        if any("function" not in tool for tool in given["tools"]):
            raise ValueError("no function")
        cls.made += 1
        return cls(**given)

    def model_copy(self):
        return Request(**vars(self))


@pytest.fixture
def parser(monkeypatch):
    kind = type("Fresh", (Parser,), {"seen": []})
    kind.known = {"hermes": kind, "unknown": kind}
    manager = SimpleNamespace(get_tool_parser=kind.known.__getitem__, tool_parsers={"b": 1}, lazy_parsers={"a": 1})
    monkeypatch.setattr(Request, "made", 0)
    put(
        monkeypatch,
        tool_parsers={"ToolParserManager": manager},
        entrypoints__openai__chat_completion__protocol={"ChatCompletionRequest": Request},
    )
    levels = {name: logging.getLogger(name).level for name in ("vllm.tool_parsers", "vllm.parser")}
    yield kind
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def ids(text):
    """Tokens of a text, in which special tokens stand as they are shown."""
    parts = re.split("(" + "|".join(map(re.escape, SPECIAL.values())) + ")", text)
    by_text = {text: id_ for id_, text in SPECIAL.items()}
    return [id_ for part in parts for id_ in ([by_text[part]] if part in by_text else map(ord, part))]


def ask(prompt="Q", tools=TOOLS):
    return GenerateRequest("a", ids(prompt), SamplingParams(4), tools=tools)


def read(text, name="hermes", ended=False, **asked):
    return ToolReader(name, Tokenizer()).read_tokens(ask(**asked), ids(text), ended)


def shown(reading):
    return [(call.name, call.arguments) for call in reading.calls], reading.content, reading.failure


def test_calls_and_the_text_apart_from_them(parser):
    assert shown(read(f"See.{CALL}")) == ([("add", {"a": 1})], "See.", "")
    assert shown(read("It is 3 < 4.<|end|>", ended=True)) == ([], "It is 3 < 4.", "")
    assert read("x") == Reading([], "x")
    assert Reading() == Reading([], "", "")
    assert [logging.getLogger(name).level for name in ("vllm.tool_parsers", "vllm.parser")] == [logging.CRITICAL] * 2


def test_an_id_that_the_policy_wrote_stays(parser):
    with_id = CALL.replace('"name"', '"id":"c7","name"')
    first, second = read(f"quite {CALL}{with_id}").calls
    assert (len(first.id), second.id) == (9, "c7")
    assert read(f"quite {CALL}").content == "quite "


def test_the_last_token_is_left_out_only_where_it_ends_the_completion(parser):
    assert read("abc", ended=True).content == "ab"
    assert read("abc").content == "abc"


def test_special_tokens_are_not_text_but_may_show_a_call(parser):
    assert shown(read(f"<|call|>See.{CALL}<|end|>", ended=True)) == ([("add", {"a": 1})], "See.", "")
    assert parser.seen[-1] == f"See.{CALL}"
    parser.keeps_special = True
    assert shown(read(f"<|call|>See.{CALL}")) == ([("add", {"a": 1})], "See.", "")
    assert parser.seen[-1] == f"<|call|>See.{CALL}"
    assert read("<|call|>See.").content == "See."
    found = shown(read("<|call|>See.", name="unknown"))
    assert (found, parser.seen[-1]) == (([], "See.", ""), "<|call|>See.")


def test_a_call_that_only_special_tokens_show_is_seen(parser, monkeypatch):
    format_ = reader_module.FORMATS["hermes"]
    monkeypatch.setitem(reader_module.FORMATS, "hermes", type(format_)(r"<\|call\|>", r"\Z"))
    reading = read("<|call|>nothing that is read")
    assert parser.seen[-1] == "<|call|>nothing that is read"
    assert ([bool(call.error) for call in reading.calls], reading.content) == ([True], "")


def test_calls_within_thoughts_do_not_count_also_where_the_prompt_begins_one(parser):
    assert shown(read(f"<think>{CALL}</think>so {CALL}")) == (
        [("add", {"a": 1})],
        f"<think>{CALL}</think>so ",
        "",
    )
    assert shown(read(f"{CALL}</think>5", prompt="Q<think>\n")) == ([], f"{CALL}</think>5", "")
    assert shown(read(CALL, prompt="<think>" + "\n" * 15))[0] == []
    assert shown(read(CALL, prompt="<think>" + "\n" * 16))[0] != [], "further back nobody looks"


def test_an_error_of_the_parser_is_told_and_the_other_calls_stay(parser, caplog):
    reader = ToolReader("hermes", Tokenizer())
    assert reader.num_failures == 0
    parser.raises = "boom"
    text = f'{CALL}<tool_call>{{"name":"boom","arguments":{{}}}}</tool_call>{CALL}'
    reading = reader.read_tokens(ask(), ids(text), False)
    assert [(call.name, bool(call.error)) for call in reading.calls] == [("add", False), ("boom", True), ("add", False)]
    assert (reading.failure, reader.num_failures) == ("KeyError: 'name'", 1)
    for _ in range(10):
        assert reader.read_tokens(ask(), ids("boom"), False) == Reading([], "boom", "KeyError: 'name'")
    assert reader.num_failures == 11
    said = [record for record in caplog.records if record.name == "slipstream.engine"]
    assert [(record.args, record.exc_info is not None) for record in said] == [
        (("hermes", 1), True),
        (("hermes", 10), True),
    ]
    reader.num_failures = 1998
    for _ in range(3):
        reader.read_tokens(ask(), ids("boom"), False)
    assert [record.args[1] for record in caplog.records if record.name == "slipstream.engine"] == [1, 10, 2000]


def test_whatever_else_fails_is_a_completion_without_calls(parser):
    reader = ToolReader("hermes", Tokenizer())
    reading = reader.read_tokens(ask(tools=({"bad": 1},)), ids("abc"), False)
    assert reading == Reading([], "", "ValueError: no function")
    reader._tokenizer.decode = lambda *given, **options: 1 / 0
    assert reader.read_tokens(ask(), ids("abc"), False).failure == "ZeroDivisionError: division by zero"
    with pytest.raises(ValueError, match="no function"):
        reader.check(({"bad": 1},))
    reader.check(TOOLS)


async def test_an_output_of_vllm_says_how_it_ended(parser):
    reader = ToolReader("hermes", Tokenizer())
    given = []
    reader.read_tokens = lambda *arguments: given.append(arguments)
    request = ask()
    for reason, stop in (("stop", None), ("stop", 900), ("stop", "##"), ("length", None)):
        out = SimpleNamespace(token_ids=(1, 2), finish_reason=reason, stop_reason=stop)
        await reader.read(request, SimpleNamespace(outputs=[out]))
    await reader.read(request, SimpleNamespace(outputs=[SimpleNamespace(token_ids=(1,), finish_reason="stop")]))
    assert given == [
        (request, [1, 2], True),
        (request, [1, 2], True),
        (request, [1, 2], False),
        (request, [1, 2], False),
        (request, [1], True),
    ]


def test_tools_are_read_once_and_not_remembered_for_ever(parser):
    reader = ToolReader("hermes", Tokenizer())
    before = Request.made
    for _ in range(3):
        reader.check(TOOLS)
    assert Request.made == before + 1
    for number in range(200):
        reader.check(({"function": number},))
        assert len(reader._known) <= 64
    reader.check(TOOLS)
    assert Request.made == before + 202


def test_a_parser_that_does_not_work_or_is_not_there_is_told_at_the_start(parser, monkeypatch):
    parser.raises = "an answer"
    with pytest.raises(RuntimeError, match=r"parser hermes does not work with this model \(KeyError: 'name'\)"):
        ToolReader("hermes", Tokenizer())
    with pytest.raises(RuntimeError, match="no tool parser nobody: use one of a, b"):
        ToolReader("nobody", Tokenizer())
    put(monkeypatch, tool_parsers={})
    with pytest.raises(RuntimeError, match="has no tool parsers that Slipstream knows"):
        ToolReader("hermes", Tokenizer())


def test_parsers_of_older_versions_take_no_tools_and_tokenizers_may_clean_up(parser):
    made = []

    class Older(parser):
        def __init__(self, tokenizer):
            made.append(tokenizer)

    parser.known["hermes"] = Older
    tokenizer = Tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    reading = ToolReader("hermes", tokenizer).read_tokens(ask(), ids(CALL), False)
    assert (len(reading.calls), set(made)) == (1, {tokenizer})
    assert tokenizer.options == [{"clean_up_tokenization_spaces": False}] * len(tokenizer.options) != []
    parser.known["hermes"] = parser
    plain = Tokenizer()
    ToolReader("hermes", plain).read_tokens(ask(), ids(CALL), False)
    assert plain.options == [{}] * len(plain.options) != []
