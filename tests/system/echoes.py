"""An episode of two turns: the environment says the answer back, and a mark."""

from slipstream.envs import Environment, Episode, Message, Score, Task


class Echoes(Environment):
    max_turns = 2

    def tasks(self, split, num_tasks):
        return [Task(f"{split}{n}", (Message("user", f"{split} {n}"),), "a") for n in range(min(64, num_tasks))]

    async def run(self, task, policy):
        messages = list(task.prompt)
        reply = await policy.chat(messages)
        if reply.finish_reason != "length":
            reply = await policy.chat([*messages, reply.message, Message("user", f"{reply.text}?")])
        outcome = "truncated" if reply.finish_reason == "length" else "done"
        return Episode(reply.text, outcome, num_turns=2)

    def score(self, task, completion):
        return Score(float(sum(map(ord, completion)) % 2))
