"""Word problems of reasoning-gym's `gsm_symbolic`. The solution is the data set's own: sentences, then `#### 42`."""

import re

import reasoning_gym

from slipstream.envs import split_of


def tasks(split, num_tasks, seed):
    """Distinct problems. Both splits come from the same hundred templates, with other numbers and names."""
    found = {}
    for row in reasoning_gym.create_dataset("gsm_symbolic", size=20 * num_tasks + 100, seed=seed):
        question = row["question"].partition(" Give the result as")[0]
        if split_of(question) == split:
            found[question] = {"prompt": question, "answer": " ".join(row["metadata"]["answer_cot"].split())}
            if len(found) == num_tasks:
                break
    return list(found.values())


def reward(task, completion):
    """1 for the solution's number after `####`, 0 for anything else."""
    return float(number(completion) == number(task.answer) is not None)


def number(text):
    """The number after the last `####`, if there is one."""
    found = re.fullmatch(r"-?\d+(\.\d+)?", text.rpartition("####")[2].strip())
    return float(found[0]) if found and "####" in text else None
