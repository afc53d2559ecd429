"""Say a number's digits in reverse order. Run it with `environment.name = "examples/environments/reverse.py"`."""

import random

from slipstream.envs import split_of


def tasks(split, num_tasks, seed, num_digits=6):
    random_numbers = random.Random(seed)
    numbers = {str(random_numbers.randrange(10**num_digits)): None for _ in range(20 * num_tasks)}
    mine = [number for number in numbers if split_of(number) == split]
    return [{"prompt": f"Reverse: {number}", "answer": number[::-1]} for number in mine[:num_tasks]]


def reward(task, completion):
    right = sum(a == b for a, b in zip(task.answer, completion, strict=False))
    return {"reward": float(completion == task.answer), "digits_right": right / len(task.answer)}
