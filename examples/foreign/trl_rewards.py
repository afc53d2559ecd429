"""A TRL reward function, from SFT to RL.

    python examples/foreign/trl_rewards.py                 # writes runs/foreign/trl/{demonstrations,prompts}.jsonl
    slipstream model new models/small
    slipstream sft examples/foreign/trl_sft.toml --run.folder runs/foreign/trl/sft
    slipstream train examples/foreign/trl_rl.toml --run.folder runs/foreign/trl/rl

The task: words that begin with the given letters, none of them twice. Many answers are right, so rows for RL have no
answer, only the column `letters`, which the function gets as in TRL. A quarter of the words in the demonstrations begin
with another letter or come again, which SFT imitates.
"""

import json
import random
from pathlib import Path

FOLDER = Path("runs/foreign/trl")
LIST = "ant arm axe bat bee bus cat cow cup dog dot duo eel egg elf fan fig fox gap gem gum hat hen hut"
WORDS = LIST.split(" ")
CARELESS = 0.25


def acrostic(completions, letters, log_metric=None, **kwargs):
    """TRL's signature: lists in, a list of rewards out."""
    rewards, repeats = [], 0
    for completion, wanted in zip(completions, letters, strict=True):
        words = completion[0]["content"].split(" ")
        repeats += len(words) - len(set(words))
        is_right = [word[:1] for word in words] == list(wanted) and set(words) <= set(WORDS)
        rewards.append(1.0 if is_right and len(set(words)) == len(words) else 0.0)
    if log_metric:
        log_metric("repeats", repeats / len(completions))
    return rewards


def demonstration(letters, draw):
    said = []
    for letter in letters:
        free = [word for word in WORDS if word[0] == letter and word not in said]
        said.append(draw.choice(WORDS if draw.random() < CARELESS else free or WORDS))
    return " ".join(said)


def main():
    draw = random.Random(0)
    tasks = sorted({"".join(draw.choices("abcdefgh", k=4)) for _ in range(20_000)})
    draw.shuffle(tasks)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "prompts.jsonl").open("w") as prompts, (FOLDER / "demonstrations.jsonl").open("w") as demonstrations:
        for letters in tasks:
            prompt = [{"role": "user", "content": f"Words: {letters}"}]
            if max(map(letters.count, letters)) > 3:
                continue  # there are three words for each letter
            prompts.write(json.dumps({"prompt": prompt, "letters": letters}) + "\n")
            completion = [{"role": "assistant", "content": demonstration(letters, draw)}]
            demonstrations.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")


if __name__ == "__main__":
    main()
