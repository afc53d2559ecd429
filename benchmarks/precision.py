"""Does the type of the numbers matter for learning? One SFT model, GRPO in each type with several seeds.

    python benchmarks/precision.py [--variants float32 float16 bfloat16 "float32 sums" shared exact] [--seeds 0 1 2]
                                   [--steps 40] [--at-once 6] [--out FOLDER]

A small Qwen3 is made from scratch and imitates demonstrations of a task (a string of letters, backwards), four in ten
with a mistake. From that one model each variant is trained with each seed: 96 prompts of 8 completions and two updates
a step. `bfloat16`: with logits and residual stream in bfloat16 too; `float32 sums`: these two in float32
(`model.fp32_head`, `model.fp32_residual`); `shared`: the same kernels in trainer and engine (`model.shared_kernels`);
`exact`: `run.exact`. The last two need a GPU of compute capability 9. `--at-once` runs share the GPU.

Prints a Markdown table, over the seeds: accuracy on 500 held-out tasks before and after, and of the steps the means of
the difference between engine and trainer, of their KL divergence, of tokens outside of the clip range, of the effective
sample size, and the median and largest of the gradient norm. The exit code is 1 when a run failed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ENVIRONMENT = '''\
"""Strings of letters, to be written backwards."""
import random


def tasks(split, num_tasks, seed):
    draw = random.Random(f"{split}-{seed}")
    held_out = split != "train"
    drawn = range((12 if held_out else 2) * num_tasks)
    words = {"".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(3, 6))) for _ in drawn}
    kept = [word for word in sorted(words) if (sum(map(ord, word)) % 7 == 0) == held_out]
    draw.shuffle(kept)
    return [{"prompt": f"Backwards: {word}", "answer": word[::-1]} for word in kept[:num_tasks]]


def reward(task, completion):
    return float(completion.strip() == task.answer)
'''
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {"model.dtype": "float32"},
    "float16": {"model.dtype": "float16"},
    "bfloat16": {"model.dtype": "bfloat16", "model.fp32_head": "false", "model.fp32_residual": "false"},
    "float32 sums": {"model.dtype": "bfloat16", "model.shared_kernels": "false"},
    "shared": {"model.dtype": "bfloat16", "model.shared_kernels": "true"},
    "exact": {"model.dtype": "bfloat16", "run.exact": "true"},
}
COMMON = {
    "evaluation.num_tasks": 500,
    "environment.num_train_tasks": 20_000,
    "inference.kv_cache_gib": 1,
    "run.checkpoint_every": 1000,
    "evaluation.every": 20,
}
ALPHABET = 64
"""The engine pads vocabularies to a multiple of it."""


def slipstream(log: Path, *arguments: object) -> bool:
    """Run a command, its output into `log`; whether it went well."""
    command = [sys.executable, "-m", "slipstream.cli", *map(str, arguments)]
    with log.open("w") as file:
        return subprocess.run(command, stdout=file, stderr=file, check=False, timeout=1800).returncode == 0


def settings(values: dict[str, Any]) -> list[str]:
    """As options of a command."""
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


def start_model(folder: Path, steps: int) -> Path:
    """The model that every run begins with. Raises SystemExit when it could not be made."""
    import random

    from transformers import AutoModelForCausalLM

    environment, model = folder / "backwards.py", folder / "model"
    environment.write_text(ENVIRONMENT)
    shape = {"hidden-size": 256, "num-heads": 4, "num-kv-heads": 2, "head-dim": 64, "context-length": 128}
    if not slipstream(folder / "model.log", "model", "new", model, *settings(shape)):
        raise SystemExit((folder / "model.log").read_text())
    network: Any = AutoModelForCausalLM.from_pretrained(model)
    network.resize_token_embeddings(pad_to_multiple_of=ALPHABET, mean_resizing=False)
    network.save_pretrained(model)
    namespace: dict[str, Any] = {}
    exec(ENVIRONMENT, namespace)  # the text above
    draws, rows = random.Random(0), []
    for task in namespace["tasks"]("train", 20_000, 1):
        letters = list(task["answer"])
        if draws.random() < 0.4:
            place = draws.randrange(len(letters) - 1)
            letters[place], letters[place + 1] = letters[place + 1], letters[place]
        rows.append(json.dumps({"prompt": task["prompt"], "completion": "".join(letters)}))
    (folder / "rows.jsonl").write_text("\n".join(rows))
    training = {"training.steps": steps, "training.prompts_per_batch": 64, "training.learning_rate": 2e-3}
    places = {"model.path": model, "data.path": folder / "rows.jsonl", "run.folder": folder / "sft"}
    (folder / "sft.toml").write_text('evaluation = false\n[algorithm]\nkind = "sft"\n')
    found = {"training.warmup_steps": min(20, steps - 1), "model.dtype": "float32"}
    if not slipstream(folder / "sft.log", "sft", folder / "sft.toml", *settings(places | training | found), "--plain"):
        raise SystemExit((folder / "sft.log").read_text()[-3000:])
    return max((folder / "sft" / "checkpoints").glob("step-*/weights"))


def train(folder: Path, model: Path, variant: str, seed: int, steps: int) -> dict[str, Any]:
    """One run, and what its metrics say."""
    from slipstream.runlog import read_metrics

    run = folder / f"{variant.replace(' ', '_')}-{seed}"
    file = folder / f"{run.name}.toml"
    file.write_text('[algorithm]\nkind = "grpo"\ngroup_size = 8\n')
    training = {"training.steps": steps, "training.prompts_per_batch": 96, "training.updates_per_batch": 2}
    rates = {"training.learning_rate": 1e-3, "training.schedule": "linear", "training.warmup_steps": min(10, steps)}
    places = {"model.path": model, "environment.name": folder / "backwards.py", "run.folder": run, "run.seed": seed}
    given = settings(places | training | rates | COMMON | VARIANTS[variant])
    log = folder / f"{run.name}.log"
    if not slipstream(log, "train", file, *given, "--plain"):
        return {"variant": variant, "seed": seed, "error": log.read_text()[-1500:]}
    rows = list(read_metrics(run))
    accuracies = [row["eval/accuracy"] for row in rows if row.get("eval/accuracy") is not None]

    def all_of(name: str) -> list[float]:
        return [row[name] for row in rows if row.get(name) is not None]

    return {
        "variant": variant,
        "seed": seed,
        "before": 100 * accuracies[0],
        "after": 100 * accuracies[-1],
        "difference": statistics.mean(all_of("mismatch/abs_logprob_diff")),
        "kl": statistics.mean(all_of("mismatch/kl")),
        "clipped": statistics.mean(
            map(sum, zip(all_of("train/clip_fraction_low"), all_of("train/clip_fraction_high"), strict=True))
        ),
        "sample size": statistics.mean(all_of("train/effective_sample_size")),
        "norms": all_of("train/grad_norm"),
        "warnings": log.read_text().count("warning"),
    }


def row_of(variant: str, runs: list[dict[str, Any]]) -> str:
    """A line of the table."""
    runs = [run for run in runs if "error" not in run]
    if not runs:
        return f"| {variant} | failed |"

    def mean(name: str) -> float:
        return statistics.mean(run[name] for run in runs)

    after = ", ".join(f"{run['after']:.1f}" for run in runs)
    norms = [norm for run in runs for norm in run["norms"]]
    columns = [f"{mean('before'):.1f} %", f"{mean('after'):.1f} % ({after})", f"{mean('difference'):.1e}"]
    columns += [f"{mean('kl'):.1e}", f"{100 * mean('clipped'):.2f} %", f"{mean('sample size'):.4f}"]
    columns += [f"{statistics.median(norms):.3f}, {max(norms):.2f}"]
    return f"| {variant} | {' | '.join(columns)} |"


def main() -> int:
    """Train all of them and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sft-steps", type=int, default=300)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.at_once) as pool:
        folder = options.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        model = start_model(folder, options.sft_steps)
        runs = [
            pool.submit(train, folder, model, variant, seed, options.steps)
            for seed in options.seeds
            for variant in options.variants
        ]
        results = []
        for each in runs:
            results.append(each.result())
            told = {name: value for name, value in results[-1].items() if name != "norms"}
            print(json.dumps(told), file=sys.stderr, flush=True)
    columns = ("numbers", "before", "after: mean, each seed", "difference", "KL", "clipped", "effective sample size")
    print(f"| {' | '.join(columns)} | gradient norm |\n|{'---|' * (len(columns) + 1)}")
    for variant in options.variants:
        print(row_of(variant, [run for run in results if run["variant"] == variant]))
    return int(any("error" in run for run in results))


if __name__ == "__main__":
    sys.exit(main())
