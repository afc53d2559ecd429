"""The policy's replies in the form of OpenAI's chat completions, which every generation of `verifiers` reads."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

MODEL = "policy"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
OVERLONG = "This model's maximum context length is exceeded"
"""What OpenAI-compatible servers say, and environments look for, where a conversation is too long."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {"n": (None, 1), "tool_choice": (None, "auto", "none")}


def unsupported(body: dict[str, Any]) -> str:
    """The name of a field that asks for what the policy does not do; empty if there is none."""
    extra: Any = body.get("extra_body") or {}
    for name, value in {**body, **extra}.items():
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                return f"{name} = {value!r:.60}"
        elif name in ("response_format", "stop", "logit_bias", "continue_final_message") and value:
            return f"{name} = {value!r:.60}"
    return ""


def max_tokens_of(body: dict[str, Any]) -> int | None:
    """The request's own limit of tokens, if it has one."""
    found = body.get("max_completion_tokens") or body.get("max_tokens")
    return int(found) if found else None


def completion(reply: dict[str, Any], *, split_thinking: bool) -> dict[str, Any]:
    """A chat completion. With `split_thinking`, thinking is in `reasoning_content`, as servers with a reasoning parser
    give it; otherwise in the content."""
    content, reasoning = reply["content"], None
    if split_thinking:
        content, reasoning = split(content)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if reply["tool_calls"]:
        message["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in reply["tool_calls"]
        ]
    finish = reply["finish_reason"]
    prompt, sampled = reply["num_prompt_tokens"], reply["num_tokens"]
    return {
        "id": reply["name"],
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": message,
                "logprobs": None,
                "finish_reason": "tool_calls" if finish == "stop" and reply["tool_calls"] else finish,
            }
        ],
        "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
    }


def split(content: str) -> tuple[str, str | None]:
    """Text after the thinking, and the thinking; all is thinking where it does not end."""
    before, closed, after = content.rpartition(THINK_CLOSE)
    if closed:
        return after.lstrip("\n"), before.partition(THINK_OPEN)[2] if THINK_OPEN in before else before
    if THINK_OPEN in content:
        return "", content.partition(THINK_OPEN)[2]
    return content, None


def module_id(setup: dict[str, Any]) -> str:
    """The name that `verifiers` imports the environment by; one that is given as a file is imported here."""
    if not setup["file"]:
        return setup["id"]
    path = Path(setup["file"])
    name = path.stem if path.suffix == ".py" else path.name
    if name not in sys.modules:
        if path.is_dir():
            sys.path.insert(0, str(path.parent))
            importlib.import_module(name)
        else:
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            sys.path.append(str(path.parent))  # for files beside it, behind all that is installed
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    return name
