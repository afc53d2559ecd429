"""The form of tool calls in a completion's text, by the name of vLLM's parser; knows nothing of vLLM.

vLLM's parsers return an unreadable call as plain text, or guess its missing end. To tell the policy its
fault, one has to see that a call was meant: `FORMATS` has the beginnings and ends of calls.
"""

# ruff: noqa: RUF001 (the bars of DeepSeek's tags)

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property

_THINKING = (("<think>", "</think>"), ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"))
_MAX_EXCERPT = 80
_JSON_NAME = r'"name"\s*:\s*"([^"\\]+)"'


@dataclass(frozen=True)
class Region:
    """A stretch of text meant as a call, its tags included; several calls if the tags allow it."""

    start: int
    end: int
    text: str
    is_whole: bool
    """False: its end is missing."""


@dataclass(frozen=True)
class Format:
    """One way to write calls; `opening`, `closing` and `name` are regular expressions."""

    opening: str
    closing: str = r"\Z"
    """By default the call ends with the text."""
    ends: str = ""
    """Text to make a call whole, even if `closing` is missing."""
    name: str = _JSON_NAME
    """Finds the name of a call in its first group, for messages."""
    is_json: bool = False
    """Between the tags is one JSON object with `name` and `arguments`; it shows itself whether it is whole."""
    wrapper: tuple[str, str] = ("", "")
    """The text around all calls together; without it the parser sees none."""

    @cached_property
    def _region(self) -> re.Pattern[str]:
        return re.compile(f"(?:{self.opening})(?:.*?(?P<closing>{self.closing})|.*)", re.DOTALL)

    def regions(self, text: str) -> list[Region]:
        """The calls in a text, readable or not, in order."""
        found: list[Region] = []
        for match in self._region.finditer(text):
            is_whole = self.is_json or match["closing"] is not None or bool(self.ends and self.ends in match[0])
            found.append(Region(match.start(), match.end(), match[0], is_whole))
        return found

    def alone(self, region: Region) -> str:
        """The text of a completion with nothing but this call."""
        before, after = self.wrapper
        return region.text if before and before in region.text else f"{before}{region.text}{after}"

    def name_of(self, region: Region) -> str:
        """The name of an unreadable call, as far as visible."""
        found = re.search(self.name, region.text)
        return next((group.strip() for group in found.groups() if group), "") if found else ""

    def complaint(self, region: Region) -> str:
        """The fault of a call the parser did not read."""
        if not region.is_whole:
            closing = self.ends or self.closing.replace(r"\|", "|")
            missing = "" if re.search(r"[\\()]", closing) else f", {closing} is missing"
            return f"the call has no end{missing}: {excerpt(region.text)}"
        if self.is_json and (why := self._json_complaint(region)):
            return why
        return f"the call is not in the model's format: {excerpt(region.text)}"

    def _json_complaint(self, region: Region) -> str:
        inner = re.sub(self.closing, "", re.sub(self.opening, "", region.text)).strip()
        try:
            value = json.loads(inner)
        except (ValueError, RecursionError) as error:
            return f"the call is not valid JSON ({error}): {excerpt(inner)}"
        if not isinstance(value, dict):
            return f"the call is not a JSON object: {excerpt(inner)}"
        missing = [f'"{key}"' for key in ("name", "arguments") if key not in value]
        return f"the call has no {' and no '.join(missing)}" if missing else ""


_TAGS = Format("<tool_call>", "</tool_call>", is_json=True)
_XML = Format("<tool_call>|<function=", "</tool_call>", ends="</function>", name=r"<function=([^>\n]+)>")
_GLM = Format("<tool_call>", "</tool_call>", name=r"<tool_call>\s*([^<\n]+)")
_LLAMA = Format(r'<\|python_tag\|>|\A\s*\{\s*"(?:name|type|function)"')
_PYTHONIC = Format(r"<\|python_start\|>|<function_calls>|\A\s*\[\s*[A-Za-z_][\w.]*\(", name=r"([A-Za-z_][\w.]*)\(")
_DEEPSEEK = Format(
    "<｜tool▁calls▁begin｜>|<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    name=r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([^<\n]+)",
    wrapper=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)


def _dsml(section: str) -> Format:
    return Format(
        f"<｜DSML｜{section}>|<｜DSML｜invoke",
        "</｜DSML｜invoke>",
        name=r'<｜DSML｜invoke name="([^"]+)"',
        wrapper=(f"<｜DSML｜{section}>", f"</｜DSML｜{section}>"),
    )


FORMATS = {
    "hermes": _TAGS,
    "qwen3_json": _TAGS,
    "longcat": Format("<longcat_tool_call>", "</longcat_tool_call>", is_json=True),
    "granite4": _TAGS,
    "qwen3_coder": _XML,
    "qwen3_xml": _XML,
    "mimo": _XML,
    "seed_oss": Format("<seed:tool_call>", "</seed:tool_call>", ends="</function>", name=r"<function=([^>\n]+)>"),
    "glm45": _GLM,
    "glm47": _GLM,
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "pythonic": _PYTHONIC,
    "llama4_pythonic": _PYTHONIC,
    "olmo3": _PYTHONIC,
    "mistral": Format(
        r"\[TOOL_CALLS\]", r"\}\s*\]?\s*(?:(?=\[TOOL_CALLS\])|\Z)", name=r"\[TOOL_CALLS\]\s*(\w[\w.-]*)|" + _JSON_NAME
    ),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "kimi_k2": Format(
        r"<\|tool_calls_section_begin\|>|<\|tool_call_begin\|>",
        r"<\|tool_call_end\|>",
        name=r"<\|tool_call_begin\|>\s*(?:functions\.)?([^:<\s]+)",
        wrapper=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "minimax_m2": Format(
        "<minimax:tool_call>|<invoke",
        "</invoke>",
        name=r"<invoke name=[\"']?([^\"'>]+)",
        wrapper=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "lfm2": Format(r"<\|tool_call_start\|>", r"<\|tool_call_end\|>", name=r"([A-Za-z_][\w.]*)\("),
    "functiongemma": Format("<start_function_call>", "<end_function_call>", name=r"call:(\w+)"),
    "gemma4": Format(r"<\|tool_call>", r"<tool_call\|>", name=r"call:([\w.-]+)"),
    "granite": Format(r"<\|tool_call\|>|<tool_call>", r"\}\s*\]"),
    "granite-20b-fc": Format("<function_call>", r"(?=<function_call>)|\Z"),
    "phi4_mini_json": Format(r"functools\["),
    "internlm": Format(r"<\|action_start\|>\s*<\|plugin\|>", r"<\|action_end\|>"),
}
"""By the name of vLLM's parser. An unreadable call of the others counts as plain text."""


def answer_start(text: str, format_: Format | None, *, begins_thinking: bool) -> tuple[int, int]:
    """The part of a completion for calls, as (start, end): after the last end of thinking, and before
    unclosed thinking, unless it begins within a call. `begins_thinking`: the prompt ends with the beginning of a
    thought."""
    start = max((text.rfind(close) + len(close) for _, close in _THINKING if close in text), default=0)
    if begins_thinking and not start:
        return len(text), len(text)
    calls = format_.regions(text[start:]) if format_ else []
    ends = [len(text)]
    for opening, _ in _THINKING:
        place = text.find(opening, start)
        while place >= 0 and any(call.start <= place - start < call.end for call in calls):
            place = text.find(opening, place + 1)
        if place >= 0:
            ends.append(place)
    return start, min(ends)


def ends_in_thought(prompt_end: str) -> bool:
    """Whether a prompt with this end has begun a thought for the policy."""
    return prompt_end.rstrip().endswith(tuple(opening for opening, _ in _THINKING))


def excerpt(text: str) -> str:
    """The beginning of a text, quoted, on one line."""
    short = " ".join(text.split())
    return repr(short if len(short) <= _MAX_EXCERPT else f"{short[: _MAX_EXCERPT - 3]}...")
