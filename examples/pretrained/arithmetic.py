"""Sums of reasoning-gym as lines that a pretrained model may have read: `98 + 93 = 191`."""

import reasoning_gym

from slipstream.envs import split_of

SIZES = {
    "chain_sum": {"min_digits": 1, "max_digits": 2},
    "decimal_chain_sum": {"min_digits": 1, "max_digits": 1, "min_decimal_places": 1, "max_decimal_places": 1},
}


def tasks(split, num_tasks, seed, task="chain_sum"):
    """Distinct sums of two numbers."""
    rows = reasoning_gym.create_dataset(
        task, size=40 * num_tasks + 1000, seed=seed, min_terms=2, max_terms=2, **SIZES[task]
    )
    found = {}
    for row in rows:
        question = row["question"].rpartition(": ")[2]
        if split_of(question) == split:
            found[question] = {"prompt": question, "answer": row["answer"]}
            if len(found) == num_tasks:
                break
    return list(found.values())


def reward(task, completion):
    """1 for the answer, 0 for anything else."""
    return float(completion.strip() == task.answer)
