"""Arithmetic of reasoning-gym as lines that a pretrained model may have read: `98 + 93 = 191`."""

import operator

import reasoning_gym

from slipstream.envs import split_of

ONE_DIGIT = {"min_digits": 1, "max_digits": 1}
SMALL = {"min_digits": 1, "max_digits": 2}
TASKS = {
    "sums": ("chain_sum", {"min_terms": 2, "max_terms": 2, **SMALL}),
    "decimals": (
        "decimal_chain_sum",
        {"min_terms": 2, "max_terms": 2, **ONE_DIGIT, "min_decimal_places": 1, "max_decimal_places": 1},
    ),
    "chains": ("chain_sum", {"min_terms": 4, "max_terms": 4, **SMALL}),
}


def tasks(split, num_tasks, seed, task="sums"):
    """Distinct sums; those of `chains` have their steps as the solution."""
    name, settings = TASKS[task]
    found = {}
    for row in reasoning_gym.create_dataset(name, size=40 * num_tasks + 1000, seed=seed, **settings):
        question = row["question"].rpartition(": ")[2]
        if split_of(question) == split:
            found[question] = {"prompt": question, "answer": steps(question) if task == "chains" else row["answer"]}
            if len(found) == num_tasks:
                break
    return list(found.values())


def steps(question):
    """`4 + 9 - 7 =` as `4 + 9 = 13, 13 - 7 = 6`."""
    first, *rest = question.removesuffix("=").split()
    total, parts = int(first), []
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        before, total = total, {"+": operator.add, "-": operator.sub}[sign](total, int(number))
        parts.append(f"{before} {sign} {number} = {total}")
    return ", ".join(parts)


def reward(task, completion):
    """1 for the number at the solution's end, 0 for anything else."""
    return float(completion.rpartition("=")[2].strip() == task.answer.rpartition("=")[2].strip())
