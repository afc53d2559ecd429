"""Rows as verl has them, of two tasks with a reward each, from SFT to RL.

    python examples/foreign/verl_rows.py                   # writes runs/foreign/verl/{train,test}.parquet
    slipstream model new models/small
    slipstream sft examples/foreign/verl_sft.toml --run.folder runs/foreign/verl/sft
    slipstream train examples/foreign/verl_rl.toml --run.folder runs/foreign/verl/rl

`words/backward` is graded by a named reward, `words/sorted` by `compute_score` below, as verl would call it; the run
files say so in a table by `data_source`. Demonstrations for SFT are in `extra_info.answer`, as in verl's own scripts.
Two in five of them have two neighbouring letters swapped, which SFT imitates; RL sees `ground_truth` only.
"""

import random
from pathlib import Path

import pyarrow
import pyarrow.parquet

FOLDER = Path("runs/foreign/verl")
LETTERS = "abcdefghijklmnop"
SOURCES = {"words/backward": ("Backward", reversed), "words/sorted": ("Sorted", sorted)}
CARELESS = 0.4


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl's signature: `score` is trained on, the rest is logged."""
    is_in_order = list(solution_str) == sorted(solution_str)
    return {"score": float(solution_str == ground_truth), "in_order": float(is_in_order)}


def rows(split, number, seed):
    draw = random.Random(seed)
    for index in range(number):
        source = draw.choice(list(SOURCES))
        name, change = SOURCES[source]
        word = "".join(draw.choices(LETTERS, k=draw.randint(3, 6)))
        answer = list(change(word))
        truth = "".join(answer)
        if draw.random() < CARELESS:
            i = draw.randrange(len(answer) - 1)
            answer[i], answer[i + 1] = answer[i + 1], answer[i]
        yield {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"{name}: {word}"}],
            "ability": "words",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"split": split, "index": index, "answer": "".join(answer)},
        }


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    for split, number, seed in (("train", 12_000, 0), ("test", 300, 1)):
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(list(rows(split, number, seed))), FOLDER / f"{split}.parquet"
        )


if __name__ == "__main__":
    main()
