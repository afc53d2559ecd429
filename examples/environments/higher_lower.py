"""Guess a number in a few turns: an environment that talks."""

import random

from slipstream.envs import Environment, Episode, Message, Score, Task, split_of


class HigherLower(Environment):
    max_turns = 4

    def __init__(self, seed=0, size=15):
        super().__init__(seed)
        self.size = size

    def tasks(self, split, num_tasks):
        draw = random.Random(self.seed)
        secrets = {}
        while len(secrets) < num_tasks:
            low = draw.randrange(1_000_000)
            prompt = f"Guess my number from {low} to {low + self.size - 1}."
            if split_of(prompt) == split:
                secrets.setdefault(prompt, str(draw.randrange(low, low + self.size)))
        return [Task(prompt, (Message("user", prompt),), answer) for prompt, answer in secrets.items()]

    async def run(self, task, policy):
        messages = list(task.prompt)
        for turn in range(1, self.max_turns + 1):
            reply = await policy.chat(messages)
            if reply.text == task.answer or reply.finish_reason == "length" or turn == self.max_turns:
                break
            messages += [reply.message, Message("user", hint(reply.text, int(task.answer)))]
        outcome = "truncated" if reply.finish_reason == "length" else "done"
        return Episode(reply.text, outcome, num_turns=turn, metrics={"turns": turn})

    def score(self, task, completion):
        return Score(float(completion == task.answer))


def hint(guess, secret):
    if not guess.isdecimal():
        return "A number, please."
    return "Higher." if int(guess) < secret else "Lower."
