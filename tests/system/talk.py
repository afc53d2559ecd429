"""Two turns with an environment's words between them; every reward is the same."""

from slipstream.envs import Environment, Episode, Message, Score, Task


class Talk(Environment):
    max_turns = 2

    def tasks(self, split, num_tasks):
        return [Task(f"{split} {i}", (Message("user", str(i)),)) for i in range(num_tasks)]

    async def run(self, task, policy):
        first = await policy.chat(list(task.prompt))
        last = await policy.chat([*task.prompt, first.message, Message("user", "cab")])
        return Episode(last.text, "done", num_turns=2)

    def score(self, task, completion):
        return Score(1.0)
