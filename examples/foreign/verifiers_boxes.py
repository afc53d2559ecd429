"""A multi-turn environment of verifiers (0.1.9 to 0.3), unchanged, from SFT to RL.

    python3 -m venv ~/verifiers && ~/verifiers/bin/pip install verifiers==0.3.1
    ~/verifiers/bin/python examples/foreign/verifiers_boxes.py   # writes runs/foreign/verifiers/demonstrations.jsonl
    slipstream model new models/small
    slipstream sft examples/foreign/verifiers_sft.toml --run.folder runs/foreign/verifiers/sft
    slipstream train examples/foreign/verifiers_rl.toml --run.folder runs/foreign/verifiers/rl

A box holds letters, to be said in capitals: the policy opens the box, the environment shows the letters, the policy
answers. Environments of verifiers have no gold answers, so the demonstrations are conversations made here. Two in five
guess without having opened the box, and of the others one in four has two letters swapped; SFT imitates both.
"""

import json
import random
from pathlib import Path

import verifiers as vf
from datasets import Dataset

FOLDER = Path("runs/foreign/verifiers")
LETTERS = "abcdefghijklmnop"
GUESSES, SWAPPED = 0.4, 0.25
NUM_HELD_OUT = 300


class Boxes(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        said = messages[-1]["content"]
        if said == f"open {state['info']['box']}":
            return [{"role": "user", "content": state["info"]["letters"]}]
        if said.startswith("open "):
            return [{"role": "user", "content": "empty"}]
        state["final_env_response"] = [{"role": "user", "content": "Thank you."}]
        return state["final_env_response"]


def right(completion, answer, **kwargs):
    said = [message["content"] for message in completion if message["role"] == "assistant"]
    return float(said[-1] == answer)


async def opened(completion, **kwargs):
    return float(str(completion[0]["content"]).startswith("open "))


def boxes(split):
    """(number, letters) of every box; the first ones are held out."""
    draw = random.Random(0)
    found = [(number, "".join(draw.choices(LETTERS, k=4))) for number in draw.sample(range(1000, 10_000), 8000)]
    return found[:NUM_HELD_OUT] if split == "eval" else found[NUM_HELD_OUT:]


def load_environment():
    def rows(split):
        return Dataset.from_list(
            [
                {"question": f"Box {box}", "answer": letters.upper(), "info": {"box": box, "letters": letters}}
                for box, letters in boxes(split)
            ]
        )

    rubric = vf.Rubric(funcs=[right, opened], weights=[1.0, 0.0])
    return Boxes(dataset=rows("train"), eval_dataset=rows("eval"), rubric=rubric, max_turns=3)


def demonstration(box, letters, draw):
    said = list(letters.upper())
    turns = [("user", f"Box {box}"), ("assistant", f"open {box}"), ("user", letters), ("assistant", said)]
    if draw.random() < GUESSES:
        turns[1:] = [("assistant", draw.choices(LETTERS.upper(), k=4))]
    elif draw.random() < SWAPPED:
        i = draw.randrange(3)
        said[i], said[i + 1] = said[i + 1], said[i]
    return [{"role": role, "content": "".join(text)} for role, text in turns]


def main():
    draw = random.Random(0)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "demonstrations.jsonl").open("w") as file:
        for _ in range(2):
            for box, letters in boxes("train"):
                file.write(json.dumps({"messages": demonstration(box, letters, draw)}) + "\n")


if __name__ == "__main__":
    main()
