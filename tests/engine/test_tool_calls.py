"""Tool calls: vLLM's own parsers on written samples of each format, and an engine whose model has learned to call."""

# ruff: noqa: RUF001 (the bars of DeepSeek's tags)

import asyncio
import time
from types import SimpleNamespace

import pytest
import torch

from slipstream.commands.small_models.tiny_qwen3 import new_model, new_tokenizer
from slipstream.data.chat_template import ChatTokenizer
from slipstream.inference.plugin.tools.formats import FORMATS
from slipstream.inference.plugin.tools.reader import ToolReader
from slipstream.records import GenerateRequest, Message, SamplingParams, ToolCall
from tests.engine.conftest import start


def schema(name, **properties):
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


TOOLS = (schema("get_weather", city="string", days="integer"), schema("now"))
EXPECTED = [ToolCall("get_weather", {"city": "Oslo", "days": 2}), ToolCall("now")]
_ARGS, _FIRST = '{"city": "Oslo", "days": 2}', '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}'
_SECOND = '{"name": "now", "arguments": {}}'
_DSML = (
    'See.<｜DSML｜SECTION>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
    '</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜SECTION>'
)
_V3, _V31 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "<｜tool▁call▁begin｜>"
_TAGS = f"See.\n<tool_call>\n{_FIRST}\n</tool_call>\n<tool_call>\n{_SECOND}\n</tool_call>"
_LLAMA = '{"name": "get_weather", "parameters": {"city": "Oslo", "days": 2}}; {"name": "now", "parameters": {}}'
_XML = (
    "See.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
)
_FLAT_XML = (
    "See.\n<tool_call>\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n<parameter=days>2</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
)
_GLM = (
    "See.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>"
)
SAMPLES = {
    "hermes": _TAGS,
    "qwen3_json": _TAGS,
    "granite4": _TAGS,
    "longcat": _TAGS.replace("tool_call>", "longcat_tool_call>"),
    "qwen3_coder": _XML,
    "qwen3_xml": _XML,
    "mimo": _FLAT_XML,
    "seed_oss": _FLAT_XML.replace("tool_call>", "seed:tool_call>"),
    "glm45": _GLM,
    "glm47": _GLM,
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "pythonic": '[get_weather(city="Oslo", days=2), now()]',
    "llama4_pythonic": '<|python_start|>[get_weather(city="Oslo", days=2), now()]<|python_end|>',
    "olmo3": '<function_calls>get_weather(city="Oslo", days=2)\nnow()</function_calls>',
    "mistral": f"[TOOL_CALLS]get_weather[ARGS]{_ARGS}[TOOL_CALLS]now[ARGS]{{}}",
    "deepseek_v3": (
        f"See.<｜tool▁calls▁begin｜>{_V3}get_weather\n```json\n{_ARGS}\n```<｜tool▁call▁end｜>\n"
        f"{_V3}now\n```json\n{{}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": (
        f"See.<｜tool▁calls▁begin｜>{_V31}get_weather<｜tool▁sep｜>{_ARGS}<｜tool▁call▁end｜>"
        f"{_V31}now<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v32": _DSML.replace("SECTION", "function_calls"),
    "deepseek_v4": _DSML.replace("SECTION", "tool_calls"),
    "kimi_k2": (
        f"See.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{_ARGS}"
        "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ),
    "minimax_m2": (
        'See.<minimax:tool_call><invoke name="get_weather">\n<parameter name="city">Oslo</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke><invoke name="now">\n</invoke></minimax:tool_call>'
    ),
    "lfm2": '<|tool_call_start|>[get_weather(city="Oslo", days=2), now()]<|tool_call_end|>',
    "functiongemma": (
        "<start_function_call>call:get_weather{city:<escape>Oslo<escape>,days:<escape>2<escape>}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call>"
    ),
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|><|tool_call>call:now{}<tool_call|>',
    "granite": f"<|tool_call|>[{_FIRST}, {_SECOND}]",
    "granite-20b-fc": f"<function_call> {_FIRST}\n<function_call> {_SECOND}",
    "phi4_mini_json": f"functools[{_FIRST}, {_SECOND}]",
    "internlm": f"See.<|action_start|><|plugin|>{_FIRST}<|action_end|>",
}
SPECIAL = (
    *("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<|tool_calls_section_begin|>"),
    *("<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"),
    *("<|tool_call_start|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<start_function_call>"),
    *("<end_function_call>", "<escape>", "<|tool_call|>", "<|channel>", "<channel|>", "<function_call>"),
    *("<|action_start|>", "<|plugin|>", "<|action_end|>", "<|python_start|>", "<|python_end|>", "｜DSML｜"),
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<seed:tool_call>", "</seed:tool_call>"),
    *("<seed:think>", "</seed:think>", "<minimax:tool_call>", "</minimax:tool_call>", "<longcat_tool_call>"),
    *("</longcat_tool_call>", "<function_calls>", "</function_calls>"),
)
PROMPT = [1, 2, 3]
END = "<|im_end|>"


@pytest.fixture(scope="module", params=["special", "plain"])
def tokenizer(request):
    """Every byte a token; the tags of all formats are tokens of their own, marked as special or not."""
    from vllm.tokenizers.hf import get_cached_tokenizer

    made = new_tokenizer("byte", context_length=100_000)
    made.add_tokens(list(SPECIAL), special_tokens=request.param == "special")
    return get_cached_tokenizer(made)


@pytest.fixture(scope="module")
def readers(tokenizer):
    made = {}

    def get(name):
        try:
            if name not in made:
                made[name] = ToolReader(name, tokenizer)
        except RuntimeError as error:
            if "has no tool parser" in str(error):  # an older vLLM
                pytest.skip(str(error))
            raise
        return made[name]

    return get


def read(reader, text, *, prompt=PROMPT, ends=True, tools=TOOLS):
    request = GenerateRequest("a", prompt, SamplingParams(10), tools=tools)
    token_ids = reader._tokenizer.encode(text + (END if ends else ""))
    return reader.read_tokens(request, token_ids, ends)


def bare(calls):
    return [ToolCall(call.name, call.arguments, error=call.error) for call in calls]


def test_every_format_has_a_sample():
    assert SAMPLES.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", SAMPLES)
def test_calls_of_every_format(name, readers):
    reader, text = readers(name), SAMPLES[name]
    found = read(reader, text)
    assert bare(found.calls) == (EXPECTED[:1] if name == "internlm" else EXPECTED)
    assert found.content.strip() == ("See." if text.startswith("See.") else "")
    assert not found.failure
    assert read(reader, text) == found
    thinking = f"<think>{text}</think>"
    assert read(reader, f"{thinking}5").calls == []
    assert bare(read(reader, thinking + text).calls) == bare(found.calls)
    assert read(reader, f"<think>{text}").calls == []
    plain = read(reader, "It is 5.")
    assert (plain.calls, plain.content, plain.failure) == ([], "It is 5.", "")


@pytest.mark.parametrize("name", SAMPLES)
def test_a_call_that_is_cut_off_is_never_a_call_nor_silence(name, readers):
    """At every place of the text: the calls that are whole, and one with an error once a call is seen to begin."""
    reader, text = readers(name), SAMPLES[name]
    expected = EXPECTED[:1] if name == "internlm" else EXPECTED
    seen = set()
    for end in range(1, len(text)):
        calls = bare(read(reader, text[:end], ends=False).calls)
        whole = [call for call in calls if not call.error]
        assert whole == expected[: len(whole)], text[:end]
        assert all(call.error for call in calls[len(whole) :])
        assert len(calls) <= len(whole) + 1
        seen |= {call.error.partition(":")[0] for call in calls if call.error}
    assert seen


def test_thinking_that_the_template_begins(readers, tokenizer):
    begun = tokenizer.encode("hi\n<think>\n")
    assert read(readers("hermes"), SAMPLES["hermes"], prompt=begun).calls == []
    assert len(read(readers("hermes"), f"ok</think>{SAMPLES['hermes']}", prompt=begun).calls) == 2


def test_a_stop_string_ends_the_text(readers, tokenizer):
    request = GenerateRequest("a", PROMPT, SamplingParams(10, stop=("</tool_call>",)), tools=TOOLS)
    text = SAMPLES["hermes"].partition("</tool_call>")[0]
    ended = {"finish_reason": "stop", "stop_reason": "</tool_call>"}
    out = SimpleNamespace(token_ids=tokenizer.encode(f"{text}</tool_call>"), **ended)
    found = asyncio.run(readers("hermes").read(request, SimpleNamespace(outputs=[out])))
    assert bare(found.calls) == EXPECTED[:1]


def test_a_parser_that_raises_is_counted_and_ends_nothing(readers, tokenizer, monkeypatch, caplog):
    reader = ToolReader("hermes", tokenizer)

    def extract_tool_calls(self, text, request):
        raise RuntimeError("a bug of the parser")

    monkeypatch.setattr(reader._class, "extract_tool_calls", extract_tool_calls)
    found = read(reader, "hello")
    assert (found.calls, found.content, found.failure) == ([], "hello", "RuntimeError: a bug of the parser")
    for _ in range(30):
        found = read(reader, SAMPLES["hermes"])
    assert "RuntimeError" in found.failure
    assert all(call.error for call in found.calls), "what is seen to be a call is told to the policy"
    assert reader.num_failures == 31
    assert len(caplog.records) == 2


def test_parsers_that_cannot_work_are_refused(tokenizer):
    with pytest.raises(RuntimeError, match=r"has no tool parser hermis: use one of .*hermes"):
        ToolReader("hermis", tokenizer)
    with pytest.raises(RuntimeError, match="openai does not work with this model"):
        ToolReader("openai", tokenizer)
    with pytest.raises(RuntimeError, match=r"llama3_json does not work with this model .*python_tag"):
        ToolReader("llama3_json", new_tokenizer("char"))


def test_hostile_text_takes_no_time(readers):
    texts = (
        "<tool_call>" * 3000,
        "<tool_call>{" * 3000,
        "<tool_call>{}</tool_call>" * 1500,
        "<think>" * 3000,
        "{" * 30_000,
        '<tool_call>{"name":"f","arguments":' + "[" * 30_000,
        "<function=a>" * 3000,
        "<tool_call><function=a></function></tool_call>" * 500,
    )
    for name in ("hermes", "qwen3_coder"):
        for text in texts:
            began = time.thread_time()
            found = read(readers(name), text)
            assert time.thread_time() - began < 10, (name, text[:20])
            assert not found.failure


TURNS = {
    "a": 'See.<tool_call>{"name":"add","arguments":{"a":1,"b":2}}</tool_call>',
    "b": '<tool_call>{"name":"add","arguments":{"a":1,}</tool_call>',
    "c": '<think><tool_call>{"name":"add","arguments":{}}</tool_call></think>5',
}
ADD = (schema("add", a="integer", b="integer"),)


def conversation(question):
    return Message("user", question, tools=ADD)


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A small model that knows `TURNS` by heart."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine two of them wait for one another
    try:
        return teach(tmp_path_factory.mktemp("taught"))
    finally:
        torch.set_num_threads(threads)


def teach(parent):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = new_model(parent / "model", hidden_size=64, num_layers=2, seed=3)
    chat = ChatTokenizer(folder)
    rows = [chat.training_tokens([conversation(q), Message("assistant", text)]) for q, text in TURNS.items()]
    longest = max(map(len, rows))
    ids = torch.tensor([row.token_ids + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([row.mask + [False] * (longest - len(row)) for row in rows])
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(600):
        logits = model(input_ids=ids).logits[:, :-1]
        right = torch.where(mask, ids, -100)[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), right.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 0.03:
            break
    assert loss < 0.03
    made = parent / "learned"
    model.save_pretrained(made)
    AutoTokenizer.from_pretrained(folder).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def calling(taught, tmp_path_factory):
    with start(taught, tmp_path_factory.mktemp("calling"), tool_parser="hermes") as live:
        yield live


def request(chat, question, **changes):
    sampling = SamplingParams(changes.pop("max_tokens", 100), temperature=0.0, stop_token_ids=chat.stop_token_ids)
    tag = f"{question}-{sorted(changes)}-{sampling.max_tokens}"
    return GenerateRequest(tag, chat.render([conversation(question)]), sampling, **changes)


@pytest.mark.full
def test_an_engine_answers_with_the_calls_that_its_model_makes(calling, taught):
    chat = ChatTokenizer(taught)
    with_tools = calling.generate(*(request(chat, question, tools=ADD) for question in TURNS))
    without = calling.generate(*(request(chat, question) for question in TURNS))
    for turn, bare_turn, text in zip(with_tools, without, TURNS.values(), strict=True):
        assert chat.decode(turn.token_ids) == text
        assert turn.finish_reason == "stop"
        assert (turn.token_ids, turn.logprobs) == (bare_turn.token_ids, bare_turn.logprobs)
        assert (bare_turn.tool_calls, bare_turn.content) == ([], None)
    good, broken, thinking = with_tools
    assert bare(good.tool_calls) == [ToolCall("add", {"a": 1, "b": 2})]
    assert good.content == "See."
    (call,) = broken.tool_calls
    assert call.name == "add"
    assert "not valid JSON" in call.error
    assert (thinking.tool_calls, thinking.content) == ([], TURNS["c"])
    (cut,) = calling.generate(request(chat, "a", tools=ADD, max_tokens=30))
    assert cut.finish_reason == "length"
    assert [bool(call.error) for call in cut.tool_calls] == [True]
    health = calling.call(calling.engine.process.client.health())
    assert health.info == {"tool_parser": "hermes", "tool_parser_failures": 0}
    assert calling.engine.take_metrics() == {}


def test_tools_that_are_none_are_refused(calling, taught):
    (refused,) = calling.generate(request(ChatTokenizer(taught), "a", tools=({"type": "function"},)))
    assert (refused.finish_reason, refused.cause) == ("abort", "invalid")
    assert "its tools are not what vLLM takes" in refused.error


def test_an_engine_without_a_parser_refuses_tools(live):
    (refused,) = live.generate(GenerateRequest("tools", [1, 2, 3], SamplingParams(4), tools=ADD))
    assert (refused.finish_reason, refused.cause) == ("abort", "invalid")
    assert "set inference.tool_parser" in refused.error
