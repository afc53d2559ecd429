"""A task for tests of rollout matching: a described box, asked for after a system prompt, without an image."""

SYSTEM = "You list objects."


def tasks(split, num_tasks, seed, size=8, system=True):
    rows = []
    for i in range(min(num_tasks, size)):
        asked = {"role": "user", "content": f"{split} {i}?"}
        rows.append(
            {
                "prompt": [{"role": "system", "content": SYSTEM}, asked] if system else [asked],
                "answer": "",
                "objects": [{"desc": "red", "bbox_2d": [10 * i, 20, 300 + i, 400]}],
            }
        )
    return rows


def reward(task, completion):
    return 0.0
