"""Agents for tests: on the client of OpenAI, as a function and as a command; both call a tool in the first turn."""

import json
import os
import sys

import openai

BELL = {"type": "object", "properties": {"bell": {"type": "integer"}}}
TOOL = {"name": "ring", "description": "", "parameters": BELL}


def tasks(split, num_tasks, seed):
    return [{"prompt": f"{split} {number}", "answer": "a"} for number in range(min(num_tasks, 64))]


def reward(task, result, episode):
    """Half of the results get a point, so that there is something to learn."""
    assert [message.role for message in episode.messages][:3] == ["assistant", "tool", "assistant"]
    assert len(episode.conversations) == 1
    return float(sum(map(ord, result)) % 2)


async def solve(task, policy):
    async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
        messages = [{"role": "user", "content": task.prompt[0].content}]
        options = {"model": policy.model, "tools": [{"type": "function", "function": TOOL}], "temperature": 0.3}
        options |= {"response_format": {"type": "json_object"}, "logit_bias": {"7": 1}}
        for _ in range(2):
            reply = await client.chat.completions.create(messages=messages, **options)
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            messages.append({"role": "tool", "tool_call_id": "1", "content": "ding"})
    return message.content


def main():
    task = json.load(sys.stdin)
    with open(os.environ["SLIPSTREAM_TASK"]) as file:
        assert json.load(file) == task
    client = openai.OpenAI()
    messages = [{"role": "user", "content": task["prompt"][0]["content"]}]
    for _ in range(2):
        reply = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        messages.append({"role": "tool", "tool_call_id": "1", "content": "ding"})
    print("thinking aloud")
    print(reply.choices[0].message.content.replace("\n", " "))


if __name__ == "__main__":
    main()
