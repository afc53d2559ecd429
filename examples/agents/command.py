"""An agent that is a program of its own, on the package `anthropic`: the task on standard input, the answer on standard
output, address and key in the variables that the package reads."""

import json
import os
import sys

import anthropic
from arithmetic import TOOL, calc

function = TOOL["function"]
tool = {"name": function["name"], "description": "", "input_schema": function["parameters"]}
question = json.load(sys.stdin)["prompt"][-1]["content"]
client = anthropic.Anthropic()
messages = [{"role": "user", "content": question}]
for _ in range(4):
    reply = client.messages.create(model=os.environ["ANTHROPIC_MODEL"], max_tokens=100, messages=messages, tools=[tool])
    messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in reply.content]})
    calls = [block for block in reply.content if block.type == "tool_use"]
    if not calls:
        break
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": calc(str(call.input.get("x", "")))} for call in calls
    ]
    messages.append({"role": "user", "content": results})
print("".join(block.text for block in reply.content if block.type == "text"))
