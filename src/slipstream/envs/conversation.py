"""The conversation of environments without a `run` of their own: one turn, or turns with tool calls between them."""

from __future__ import annotations

import asyncio

from slipstream.envs.base import Environment, Episode, Policy
from slipstream.records import Message, Stop, Task


async def converse(environment: Environment, task: Task, policy: Policy) -> Episode:
    """Plays turns until the policy answers without calling a tool, or meets a limit: of the turn's tokens, of turns, of
    tool calls. The calls of one turn run side by side. The last turn's text is graded."""
    messages = list(task.prompt)
    num_turns = num_calls = 0
    while True:
        reply = await policy.chat(messages)
        messages.append(reply.message)
        num_turns += 1
        num_calls += len(reply.tool_calls)
        stop: Stop | None = None
        if reply.finish_reason == "length":
            stop = "length"
        elif not reply.tool_calls:
            stop = "answer"
        elif num_calls > environment.max_tool_calls:
            stop = "tool_limit"
        elif num_turns == environment.max_turns:
            stop = "turn_limit"
        if stop is not None:
            whole = environment.grades_special_tokens and reply.whole
            return Episode(
                whole or reply.text,
                "truncated" if stop == "length" else "done",
                num_turns,
                stop=stop,
                messages=tuple(messages[len(task.prompt) :]),
            )
        results = await asyncio.gather(*(policy.call_tool(call) for call in reply.tool_calls))
        messages += [
            Message("tool", result.content, tool_call_id=call.id, extra={"name": call.name})
            for call, result in zip(reply.tool_calls, results, strict=True)
        ]
