"""Chooses vLLM's tool parser by the model's chat template: it shows calls in the model's format."""

# ruff: noqa: RUF001 (the bars of DeepSeek's tags)

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from slipstream.config.parse.suggestions import closest
from slipstream.errors import ConfigError
from slipstream.plan.builder import PlanBuilder
from slipstream.plan.facts import ToolFacts

NONE = "none"
_SETTING = "inference.tool_parser"
_STUBS = frozenset({"openai"})
"""Parsers of vLLM for tokens or streams only, and no finished text."""


@dataclass(frozen=True)
class _Rule:
    """`parsers` (the first one of the installed vLLM) read the calls of templates with all `marks`."""

    parsers: tuple[str, ...]
    marks: tuple[str, ...]
    shown: str
    """How a call looks, for the reason."""
    model_type: str = ""
    """Required beginning of `model_type` in the model's configuration."""


_RULES = (
    _Rule(("seed_oss",), ("<seed:tool_call>",), "<seed:tool_call>"),
    _Rule(("mimo",), ("<function=",), "<function=name>", "mimo"),
    _Rule(("step3p5",), ("<function=",), "<function=name>", "step3p5"),
    _Rule(("qwen3_coder", "qwen3_xml"), ("<function=",), "<function=name>"),
    _Rule(("glm47", "glm45"), ("<arg_key>", "<tool_call>"), "<tool_call>name<arg_key>"),
    _Rule(("deepseek_v32",), ("｜DSML｜", "function_calls"), "<｜DSML｜function_calls>"),
    _Rule(("deepseek_v4",), ("｜DSML｜", "tool_calls"), "<｜DSML｜tool_calls>"),
    _Rule(("deepseek_v3",), ("<｜tool▁calls▁begin｜>", "```json"), "<｜tool▁calls▁begin｜> and ```json"),
    _Rule(("deepseek_v31",), ("<｜tool▁calls▁begin｜>",), "<｜tool▁calls▁begin｜>"),
    _Rule(("kimi_k2",), ("<|tool_calls_section_begin|>",), "<|tool_calls_section_begin|>"),
    _Rule(("minimax_m2",), ("<minimax:tool_call>",), "<minimax:tool_call>"),
    _Rule(("functiongemma",), ("<start_function_call>",), "<start_function_call>"),
    _Rule(("gemma4",), ("<|tool_call>", "<tool_call|>"), "<|tool_call>call:name{...}"),
    _Rule(("lfm2",), ("<|tool_call_start|>",), "<|tool_call_start|>[name(...)]"),
    _Rule(("lfm2",), ("<|tool_list_start|>",), "<|tool_call_start|>[name(...)]"),
    _Rule(("mistral",), ("[TOOL_CALLS]",), "[TOOL_CALLS]"),
    _Rule(("longcat",), ("<longcat_tool_call>",), "<longcat_tool_call>"),
    _Rule(("internlm",), ("<|action_start|>", "<|plugin|>"), "<|action_start|><|plugin|>"),
    _Rule(("granite",), ("<|tool_call|>",), "<|tool_call|>[...]", "granite"),
    _Rule(("hermes",), ("<tool_call>", "name", "arguments"), '<tool_call>{"name": ..., "arguments": ...}'),
    _Rule(("olmo3",), ("<function_calls>",), "<function_calls>name(...)", "olmo"),
    _Rule(("llama4_pythonic",), ("<|python_start|>",), "<|python_start|>[name(...)]"),
    _Rule(("pythonic",), ("[func_name1(",), "[name(...)]"),
    _Rule(("llama3_json",), ('{"name": function name, "parameters":',), '{"name": ..., "parameters": ...}'),
    _Rule(("llama3_json",), ("<|python_tag|>",), '{"name": ..., "parameters": ...}'),
)
"""In the order of their trials: a template may hold the marks of several."""


def find_parser(tools: ToolFacts, known: Collection[str]) -> tuple[str, str] | None:
    """The parser for a chat template, and why; None if no rule fits. `known`: the installed vLLM's parsers; empty if
    they cannot be listed."""
    for rule in _RULES:
        if tools.model_type.startswith(rule.model_type) and all(mark in tools.template for mark in rule.marks):
            for name in rule.parsers:
                if not known or name in known:
                    return name, f"the model's chat template shows calls as {rule.shown}"
    return None


def check_template(builder: PlanBuilder) -> None:
    """Raises ConfigError if an environment has tools and the chat template does not render them."""
    tools = builder.facts.tools
    if tools is not None and not tools.is_rendered:
        raise ConfigError(
            f"the environment has tools, which the chat template of {builder.original.model.path} does not render, so "
            "the model would never see them: use a model whose template does"
        )


def plan_tool_parser(builder: PlanBuilder) -> None:
    """Derive `inference.tool_parser`. Raises ConfigError if the environment has tools and nothing can read calls."""
    tools, engine = builder.facts.tools, builder.facts.engine
    known = sorted({*(engine.tool_parsers if engine else ())} - _STUBS)
    asked = builder.original.inference.tool_parser
    choices = ", ".join(known) or "vLLM's tool parsers"
    if asked not in ("auto", NONE) and (asked in _STUBS or (known and asked not in known)):
        near = closest(asked, known)
        remedy = f"did you mean {near}?" if near else f"use one of {choices}"
        raise ConfigError(
            f'{_SETTING} = "{asked}" is no parser of the installed vLLM that reads a finished text: {remedy}'
        )
    if tools is None:
        builder.derive_auto(_SETTING, NONE, "the environment has no tools")
        return
    if asked == NONE:
        raise ConfigError(
            f'{_SETTING} = "{NONE}", and the environment has tools: leave it out, or use one of {choices}'
        )
    found = find_parser(tools, known)
    if asked == "auto" and found is None:
        raise ConfigError(
            f"the environment has tools, and in which format {builder.original.model.path} writes calls is not seen in "
            f"its chat template: set {_SETTING} to one of {choices}"
        )
    if found is not None:
        builder.derive_auto(_SETTING, *found)
        if asked not in ("auto", found[0]):
            builder.warnings.append(f'{_SETTING} = "{asked}" and not {found[0]}, although {found[1]}: check it')
