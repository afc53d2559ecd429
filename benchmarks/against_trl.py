"""Slipstream against TRL's GRPOTrainer on this CPU, in one run, with completion lengths that have a long tail.

    .venv/bin/python benchmarks/against_trl.py [--repeats 3] [--steps 8] [--json FILE]

Makes a model of 0.8 million parameters and fits it by SFT to `long_tail.py`, so that it ends its completions after
log-normally distributed lengths. Then both systems train that model by GRPO: the same prompts in the same order, group
size, sampling, reward, loss, optimizer and number of steps, float32, the same number of threads. Each
run is a process of its own, and the systems take turns. Left out of the speeds, and told apart: the start and the first
`--warm-up` steps of each run.

Slipstream runs by its own command as it is, with all its proofs: fingerprints, packed-copy check, probe, every step.
TRL runs with transformers' generation, in every round, and once with transformers' continuous batching. With vLLM
(`--systems trl-vllm`) it fails here: its weight update meets layers whose weights vLLM's CPU kernels have packed away.

Prints Markdown tables; the exit code is 1 when the slower measure of Slipstream is below 1.5 times the fastest TRL, or
the lengths of the two differ.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TASK = HERE / "long_tail.py"
MAX_TOKENS, GROUP_SIZE, LEARNING_RATE = 384, 8, 1e-4
TARGET, LENGTH_TOLERANCE, TIMEOUT_S = 1.5, 0.2, 1800.0

SLIPSTREAM = {
    "slipstream": ("Slipstream", ()),
    "slipstream-ahead": (
        "Slipstream, `staleness = 1`, `broadcast`",
        ("--training.staleness", "1", "--weights.bridge", "broadcast"),
    ),
}
TRL = {
    "trl": ("TRL, transformers", {}),
    "trl-continuous": ("TRL, transformers' continuous batching", {"use_transformers_continuous_batching": True}),
    "trl-vllm": (
        "TRL, vLLM in its process",
        {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_max_model_length": 512,
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": 2.0,
        },
    ),
}
EVERY_ROUND, FIRST_ROUND = ("slipstream", "trl", "slipstream-ahead"), ("trl-continuous",)

SFT_FILE = """
evaluation = false
[model]
path = "{model}"
[environment]
name = "{task}"
[algorithm]
kind = "sft"
[training]
steps = {steps}
prompts_per_batch = 64
learning_rate = 4e-3
schedule = "linear"
warmup_steps = 10
[run]
checkpoint_every = {steps}
threads = {threads}
"""
GRPO_FILE = """
evaluation = false
[model]
path = "{model}"
dtype = "float32"
[environment]
name = "{task}"
num_train_tasks = {num_tasks}
[algorithm]
kind = "grpo"
group_size = {group_size}
[sampling]
max_tokens = {max_tokens}
[training]
steps = {steps}
prompts_per_batch = {prompts}
learning_rate = {learning_rate}
[run]
checkpoint_every = {steps}
save_samples = {num_samples}
threads = {threads}
"""


@dataclass
class Step:
    """One optimizer step, from the end of the one before it to its own end."""

    seconds: float
    generate_s: float
    """Until the batch is graded; in TRL with what it does to bring the weights there."""
    train_s: float
    update_s: float
    """Weights to the engine, with all proofs; in TRL part of the others."""
    reward: float
    lengths: list[int]
    """Generated tokens of each completion, end token included."""


@dataclass
class Run:
    """One process."""

    system: str
    start_s: float
    """From its beginning to the beginning of its first step."""
    steps: list[Step] = field(default_factory=list)


def prompts_in_order(num_steps: int, prompts_per_batch: int) -> list[str]:
    """What Slipstream trains on in these steps, in its order, for the other system."""
    sys.path.insert(0, str(HERE))
    from long_tail import tasks

    from slipstream.data.sampler import DataOrder

    num_tasks = num_steps * prompts_per_batch
    texts = [task["prompt"] for task in tasks("train", num_tasks, 0)]
    return [texts[index] for index in DataOrder(num_tasks, 0).at(0, num_tasks)]


def run_trl(options: argparse.Namespace, out: Path) -> None:
    """A child process: TRL as it is, seen through its reward function and a callback."""
    began = time.time()
    import torch

    torch.set_num_threads(options.threads)
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    texts = prompts_in_order(options.steps, options.prompts)
    from long_tail import share

    run = Run(options.child, 0.0)
    marks: dict[str, float] = {}
    seen: dict[str, Any] = {}

    def reward(prompts: Any, completions: Any, completion_ids: Any, **_: Any) -> list[float]:
        rewards = [share(p[-1]["content"], c[0]["content"]) for p, c in zip(prompts, completions, strict=True)]
        seen.update(reward=statistics.fmean(rewards), lengths=[len(ids) for ids in completion_ids])
        marks["graded"] = time.time()
        return rewards

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            marks["end"] = time.time()
            run.start_s = marks["end"] - began

        def on_step_end(self, *_: Any, **__: Any) -> None:
            before, now = marks["end"], time.time()
            marks["end"] = now
            run.steps.append(Step(now - before, marks["graded"] - before, now - marks["graded"], 0.0, **seen))

    batch_size = options.prompts * GROUP_SIZE
    arguments = GRPOConfig(
        output_dir=str(out.parent / "trl"),
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=batch_size // options.micro_batch,
        num_generations=GROUP_SIZE,
        max_completion_length=MAX_TOKENS,
        temperature=1.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        max_steps=options.steps,
        shuffle_dataset=False,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **TRL[options.child][1],
    )
    trainer = GRPOTrainer(
        model=str(options.model),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in texts]),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        callbacks=[Clock()],
    )
    trainer.train()
    out.write_text(json.dumps(asdict(run)))


def slipstream(log: Path, *arguments: str) -> None:
    """Its own command; its words go to `log`."""
    call(log, "-m", "slipstream.cli", *arguments)


def call(log: Path, *arguments: str) -> None:
    """This Python with `arguments`; ends the benchmark when that fails."""
    with log.open("ab") as file:
        code = subprocess.run([sys.executable, *arguments], stdout=file, stderr=file, timeout=TIMEOUT_S).returncode
    if code:
        sys.exit(f"{' '.join(arguments)} ended with code {code}:\n{log.read_text(errors='replace')[-2000:]}")


def run_slipstream(system: str, options: argparse.Namespace, run_file: Path, folder: Path) -> Run:
    """One run by its own command, read from its run folder."""
    began = time.time()
    slipstream(folder.with_suffix(".log"), "train", str(run_file), "--run.folder", str(folder), *SLIPSTREAM[system][1])
    return read_slipstream(system, folder, began)


def read_slipstream(system: str, folder: Path, began: float) -> Run:
    """What a run folder says."""
    from slipstream.runlog import read_metrics, read_samples

    start, *rows = read_metrics(folder)
    lengths: dict[int, list[int]] = {}
    for sample in read_samples(folder):
        # One token a character, and the end token.
        is_whole = sample["outcome"] == "done"
        lengths.setdefault(sample["step"], []).append(len(sample["completion"]) + is_whole)
    run = Run(system, start["time"] - began)
    before = start["time"]
    for row in rows:
        found = lengths.get(row["step"] - 1, [])
        found += [1] * (round(row["rollout/num"]) - len(found))  # empty ones have no sample
        told, counted = row["rollout/length"], statistics.fmean(found)
        if abs(told - counted) > 0.02 * told:
            sys.exit(f"step {row['step']} of {folder} has a mean length of {told:.1f}, and its samples {counted:.1f}")
        generate, train = row["time/batch_s"], row["time/train_s"]
        update = row["time/update_s"] + row["time/probe_s"]
        run.steps.append(Step(row["time"] - before, generate, train, update, row["reward/mean"], found))
        before = row["time"]
    return run


def prepare(work: Path, options: argparse.Namespace) -> tuple[Path, Path]:
    """The fitted model and Slipstream's run file."""
    from slipstream.commands.small_models.tiny_qwen3 import new_model

    common = {"task": TASK, "threads": options.threads}
    model = options.model
    if model is None:
        new_model(work / "model", context_length=512)
        (work / "sft.toml").write_text(SFT_FILE.format(model=work / "model", steps=options.sft_steps, **common))
        slipstream(work / "sft.log", "sft", str(work / "sft.toml"), "--run.folder", str(work / "sft"))
        (model,) = (work / "sft" / "checkpoints").glob("step-*/weights")
    run_file = work / "grpo.toml"
    text = GRPO_FILE.format(
        model=model,
        num_tasks=options.steps * options.prompts,
        group_size=GROUP_SIZE,
        max_tokens=MAX_TOKENS,
        steps=options.steps,
        prompts=options.prompts,
        learning_rate=LEARNING_RATE,
        num_samples=options.prompts * GROUP_SIZE,
        **common,
    )
    run_file.write_text(text)
    return model, run_file


def measure(work: Path, options: argparse.Namespace) -> list[Run]:
    """All runs, the systems taking turns."""
    options.model, run_file = prepare(work, options)
    child = ["--model", str(options.model), "--threads", str(options.threads), "--steps", str(options.steps)]
    child += ["--prompts", str(options.prompts), "--micro-batch", str(options.micro_batch)]
    runs: list[Run] = []
    for repeat in range(options.repeats):
        round_ = options.systems or (*EVERY_ROUND, *(FIRST_ROUND if repeat == 0 else ()))
        for system in round_ if repeat % 2 == 0 else reversed(round_):
            name = work / f"{system}-{repeat}"
            if system in SLIPSTREAM:
                runs.append(run_slipstream(system, options, run_file, name))
            else:
                out = name.with_suffix(".json")
                call(name.with_suffix(".log"), __file__, "--child", system, "--out", str(out), *child)
                told = json.loads(out.read_text())
                runs.append(Run(system, told["start_s"], [Step(**step) for step in told["steps"]]))
            rate = speeds(runs[-1], options.warm_up)
            print(f"{system}: {rate[0]:.3f} steps/s, {rate[1]:.0f} tokens/s", file=sys.stderr, flush=True)
    return runs


def speeds(run: Run, warm_up: int) -> tuple[float, float]:
    """Steps and generated tokens per second, after the warm-up."""
    steps = run.steps[warm_up:]
    seconds = sum(step.seconds for step in steps)
    return len(steps) / seconds, sum(sum(step.lengths) for step in steps) / seconds


def spread(values: list[float], digits: int = 2) -> str:
    """Median and range."""
    middle, low, high = (f"{v:,.{digits}f}" for v in (statistics.median(values), min(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({low} to {high})"


def percentile(values: list[int], part: float) -> int:
    """The nearest value below which `part` of them lie."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def by_system(runs: list[Run]) -> dict[str, list[Run]]:
    """In the order in which they first ran."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.system, []).append(run)
    return found


def ratios(runs: list[Run], warm_up: int) -> dict[str, tuple[float, float, str]]:
    """Each of Slipstream's systems against the fastest TRL: medians of steps/s and of tokens/s, and whose."""
    medians = {
        system: [statistics.median(values) for values in zip(*(speeds(run, warm_up) for run in group), strict=True)]
        for system, group in by_system(runs).items()
    }
    peers = {system: values for system, values in medians.items() if system in TRL}
    if not peers:
        return {}
    peer = max(peers, key=lambda system: peers[system][1])
    return {
        system: (values[0] / peers[peer][0], values[1] / peers[peer][1], peer)
        for system, values in medians.items()
        if system in SLIPSTREAM
    }


def tables(runs: list[Run], warm_up: int) -> str:
    """Speeds, where the time goes, and lengths, in Markdown."""
    names = {system: told[0] for system, told in (*SLIPSTREAM.items(), *TRL.items())}
    found = ratios(runs, warm_up)
    lines = [
        "| system | runs | start, s | steps/s | generated tokens/s | against the fastest TRL: steps/s, tokens/s |",
        "|---|---|---|---|---|---|",
    ]
    parts = ["| system | generate and grade, s | train, s | weights and their proofs, s |", "|---|---|---|---|"]
    lengths = ["| system | completions | mean | p50 | p95 | max | mean reward, first and last step |"]
    lengths.append("|---|---|---|---|---|---|---|")
    for system, group in by_system(runs).items():
        rates = [speeds(run, warm_up) for run in group]
        against = "{:.2f}, {:.2f}".format(*found[system]) if system in found else ""
        cells = [
            spread([run.start_s for run in group], 0),
            spread([rate[0] for rate in rates], 3),
            spread([rate[1] for rate in rates], 0),
            against,
        ]
        lines.append(f"| {names[system]} | {len(group)} | {' | '.join(cells)} |")
        steps = [step for run in group for step in run.steps[warm_up:]]
        cells = [spread([step.generate_s for step in steps]), spread([step.train_s for step in steps])]
        cells.append(spread([step.update_s for step in steps]) if system in SLIPSTREAM else "in the others")
        parts.append(f"| {names[system]} | {' | '.join(cells)} |")
        all_ = [length for step in steps for length in step.lengths]
        shown = [percentile(all_, 0.5), percentile(all_, 0.95), max(all_)]
        rewards = [statistics.fmean(run.steps[place].reward for run in group) for place in (0, -1)]
        lengths.append(
            f"| {names[system]} | {len(all_):,} | {statistics.fmean(all_):.1f} | {' | '.join(map(str, shown))} "
            f"| {rewards[0]:.3f}, {rewards[1]:.3f} |"
        )
    return "\n".join([*lines, "", *parts, "", *lengths])


def complaints(runs: list[Run], warm_up: int) -> list[str]:
    """What does not hold: nothing, if Slipstream is as far ahead as it should be on the same lengths."""
    found = ratios(runs, warm_up)
    bad = [
        f"{system} is {min(steps, tokens):.2f} times as fast as {peer}, below {TARGET:g}"
        for system, (steps, tokens, peer) in found.items()
        if system == "slipstream" and min(steps, tokens) < TARGET
    ]
    means = {
        system: statistics.fmean(n for run in group for step in run.steps[warm_up:] for n in step.lengths)
        for system, group in by_system(runs).items()
    }
    middle = statistics.median(means.values())
    return bad + [
        f"{system} generated {mean:.1f} tokens a completion and the middle of all is {middle:.1f}: not the same work"
        for system, mean in means.items()
        if abs(mean - middle) > LENGTH_TOLERANCE * middle
    ]


def main() -> int:
    """Measure, print the tables, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of each run, the warm-up included")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=16, help=f"in a batch, with {GROUP_SIZE} completions each")
    parser.add_argument("--micro-batch", type=int, default=32, help="TRL's; must divide the batch's completions")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--sft-steps", type=int, default=300)
    parser.add_argument("--model", type=Path, help="a folder fitted before, instead of a new model")
    parser.add_argument("--systems", nargs="+", choices=[*SLIPSTREAM, *TRL], help="those, in every round")
    parser.add_argument("--json", type=Path, help="also write every step of every run there")
    parser.add_argument("--child", choices=list(TRL), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    # Read when torch is loaded. Slipstream's command also has waiting threads sleep, because engine and trainer share
    # the cores; TRL, which is one process, was seen to be faster as torch comes.
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    if options.child:
        run_trl(options, options.out)
        return 0
    began = time.time()
    with tempfile.TemporaryDirectory(prefix="slipstream-trl-") as temporary:
        runs = measure(Path(temporary), options)
    if options.json:
        options.json.write_text(json.dumps([asdict(run) for run in runs]))
    print(
        f"{options.prompts} prompts of {GROUP_SIZE} completions a step, at most {MAX_TOKENS} tokens; "
        f"{options.steps - options.warm_up} steps of each run measured after {options.warm_up}; {options.threads} "
        f"threads; median (range); {time.time() - began:.0f} s in all\n"
    )
    print(tables(runs, options.warm_up))
    found = complaints(runs, options.warm_up)
    print("".join(f"\n{text}" for text in found), file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
