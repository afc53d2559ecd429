"""Which tool parser the plan chooses, by what chat templates show of calls."""

# ruff: noqa: RUF001 (the bars of DeepSeek's tags)

import pytest

from slipstream.commands.small_models.tiny_qwen3 import CHAT_TEMPLATE
from slipstream.plan.facts import EngineFacts, ToolFacts
from slipstream.plan.tool_parser import find_parser
from slipstream.plan.vllm_version import read_engine
from tests.plan.test_plan import SFT, plan, reasons, refusal

QWEN = (
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    'tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>'
)
TEMPLATES = {
    "hermes": QWEN,
    "qwen3_coder": "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>",
    "glm47": "<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>\\n<arg_value>{arg-value-1}</arg_value>",
    "llama3_json": 'in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
    "pythonic": "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
    "llama4_pythonic": "<|python_start|>",
    "mistral": "[TOOL_CALLS] [",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '\\n' + '```json'",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['function']['name']",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>",
    "minimax_m2": "<minimax:tool_call>",
    "functiongemma": "<start_function_call>call:",
    "gemma4": "<|tool_call>call:{{ name }}<tool_call|>",
    "lfm2": "<|tool_call_start|>",
    "seed_oss": "<seed:tool_call>\\n<function=",
}
KNOWN = EngineFacts("0.32", tool_parsers=("glm47", "hermes", "llama3_json", "openai", "pythonic", "qwen3_xml"))
VALUE = "inference.tool_parser"


def tools(template=QWEN, **changes):
    return {"tools": ToolFacts(template, **{"is_rendered": True, **changes})}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_is_seen_in_the_template(name):
    made = plan(**tools(TEMPLATES[name]))
    assert made.config.inference.tool_parser == name
    assert reasons(made)[VALUE].startswith("the model's chat template shows calls as ")


def test_the_small_models_template_shows_qwens_calls_and_the_architecture_decides_between_two_parsers():
    assert plan(**tools(CHAT_TEMPLATE)).config.inference.tool_parser == "hermes"
    assert plan(**tools(TEMPLATES["qwen3_coder"], model_type="mimo")).config.inference.tool_parser == "mimo"


def test_a_parser_that_the_installed_vllm_lacks_is_not_chosen():
    found = find_parser(ToolFacts(TEMPLATES["qwen3_coder"], True), KNOWN.tool_parsers)
    assert found is not None
    assert found[0] == "qwen3_xml"
    assert "set inference.tool_parser to one of glm47, hermes" in refusal(**tools(TEMPLATES["mistral"]), engine=KNOWN)


def test_every_parser_that_may_be_chosen_is_one_of_the_installed_vllm():
    engine = read_engine(on_cpu=True)
    assert engine is not None
    assert {*TEMPLATES, "mimo", "step3p5", "internlm", "granite", "longcat"} <= {*engine.tool_parsers}


def test_without_tools_no_parser_runs():
    made = plan()
    assert made.config.inference.tool_parser == "none"
    assert reasons(made)[VALUE] == "the environment has no tools"


def test_a_template_without_a_known_format_is_refused_for_tools_only():
    why = refusal(**tools("{{ tools }}"), engine=KNOWN)
    assert "the environment has tools, and in which format org/name writes calls is not seen" in why
    assert "set inference.tool_parser to one of glm47, hermes, llama3_json, pythonic, qwen3_xml" in why
    made = plan({VALUE: "pythonic"}, **tools("{{ tools }}"), engine=KNOWN)
    assert made.config.inference.tool_parser == "pythonic"


@pytest.mark.parametrize("config", [None, SFT])
def test_a_template_that_shows_no_tools_is_refused(config):
    given = {} if config is None else {"config": config, "max_sequence_tokens": 90}
    why = refusal(**tools(is_rendered=False), **given)
    assert "has tools, which the chat template of org/name does not render" in why


@pytest.mark.parametrize(
    ("asked", "remedy"),
    [("hermis", "did you mean hermes?"), ("zzz", "use one of glm47"), ("openai", "use one of glm47")],
)
def test_a_parser_that_is_none_is_refused(asked, remedy):
    for given in (tools(), {}):
        assert remedy in refusal({VALUE: asked}, engine=KNOWN, **given)


def test_tools_need_a_parser():
    assert f'{VALUE} = "none", and the environment has tools' in refusal({VALUE: "none"}, **tools())
    assert plan({VALUE: "none"}).config.inference.tool_parser == "none"


def test_another_parser_than_that_of_the_template_is_warned_of():
    made = plan({VALUE: "pythonic"}, **tools())
    assert any("pythonic" in warning and "not hermes" in warning for warning in made.warnings)
