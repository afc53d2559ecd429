"""Tasks and reward of the agents in this folder, and demonstrations for their model (`python arithmetic.py > FILE`).
Half of the demonstrations do not call the tool, so RL has something to find out."""

import json
import random

PARAMETERS = {
    "type": "object",
    "properties": {"x": {"type": "string"}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "calc", "description": "Computes x.", "parameters": PARAMETERS}}


def calc(x: str) -> str:
    """Computes x."""
    if not x or len(x) > 40 or not set(x) <= set("0123456789+-*"):
        return "no expression"
    try:
        return str(eval(x))  # nothing but digits and signs
    except SyntaxError:
        return "no expression"


def tasks(split, num_tasks, seed):
    from slipstream.envs import split_of  # separate programs do without

    draw, found = random.Random(seed), {}
    for _ in range(20 * num_tasks):
        a, b, c = (draw.randint(10, 99) for _ in range(3))
        expression = f"{a}*{b}{draw.choice('+-')}{c}"
        if split_of(expression) == split:
            found[expression] = {"id": expression, "prompt": f"{expression}=?", "answer": calc(expression)}
    return list(found.values())[:num_tasks]


def reward(task, result):
    return float(result.strip() == task.answer)


def demonstrations(number):
    for place, task in enumerate(tasks("train", number, seed=0)):
        expression, answer, question = task["id"], task["answer"], {"role": "user", "content": task["prompt"]}
        said = {"role": "assistant", "content": answer}
        arguments = json.dumps({"x": expression}, separators=(",", ":"))
        call = {"id": "1", "type": "function", "function": {"name": "calc", "arguments": arguments}}
        called = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": answer}]
        yield {"messages": [question, *(called if place % 2 else []), said], "tools": [TOOL]}
        # compacting.py asks this, too.
        if place % 4 == 0:
            yield {"messages": [{"role": "user", "content": f"Read: {answer}"}, said]}
            yield {"messages": [{"role": "user", "content": f"{task['prompt']} Found: {answer}"}, said]}


if __name__ == "__main__":
    for row in demonstrations(8000):
        print(json.dumps(row))
