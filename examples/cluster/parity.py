"""Prompts without a meaning. The reward follows from the completion alone, so it is the same on any node."""


def tasks(split, num_tasks, seed):
    return [{"prompt": f"{split} {number}"} for number in range(min(num_tasks, 64))]


def reward(task, completion):
    return float(sum(map(ord, completion)) % 2)
