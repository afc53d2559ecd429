"""Time from process start to a held-out accuracy: pretrained models, Slipstream beside TRL.

    python examples/pretrained/model.py smollm2 models/smollm2
    python benchmarks/time_to_accuracy.py --models models --gpus 2 --out runs/accuracy [--cases smollm2-sums ...]
                                          [--systems slipstream trl] [--seeds 0 1 2] [--figure docs/accuracy.svg]

A case is a run file of `examples/pretrained/` and a target: the part of 512 held-out tasks that is right, sampled at
temperature 1. A task with a file `_sft.toml` begins from the model of this SFT, which no column counts. Both systems
get the same tasks, prompt tokens (compared), reward, batch, group size, learning rate and clipping, as the run file
resolves on this machine. TRL has vLLM in its process, and weights of 32 bits. Each evaluates every few steps with its
own engine, and ends at `--stop-at` or after `--max-steps`. Each run has one GPU.

Columns: start-up, from the process's start to the first step; training, from there to the end of the step that reached
the target; evaluations count in neither. If the first evaluation took longer than the others, the rest is start-up.
With several GPUs, each has one run at a time. Results in the folder are kept: their runs are not repeated.

Prints Markdown tables. The exit code is 1 when a run failed. It is 1, too, when the medians of a case reached by both
are above the limits: half of TRL's training time, 70 % of its time from the start.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

HERE = Path(__file__).resolve().parent
RUN_FILES = HERE.parent / "examples" / "pretrained"
SYSTEMS = ("slipstream", "trl")
NUM_HELD_OUT, EVERY = 512, 5
MOST_TRAINING, MOST_WHOLE = 0.5, 0.7
Item = TypeVar("Item")


@dataclass(frozen=True)
class Case:
    """A model and a task."""

    model: str
    task: str
    target: float
    constant: float
    """Accuracy of the best constant answer."""

    @property
    def file(self) -> Path:
        """The run file of GRPO."""
        return RUN_FILES / f"{self.task}.toml"

    @property
    def sft_file(self) -> Path | None:
        """The run file of the SFT before it, if there is one."""
        path = RUN_FILES / f"{self.task}_sft.toml"
        return path if path.exists() else None


CASES = {
    "smollm2-sums": Case("smollm2", "sums", 0.3, 0.02),
    "smollm2-decimals": Case("smollm2", "decimals", 0.3, 0.02),
    "smollm2-chains": Case("smollm2", "chains", 0.4, 0.02),
    "smollm2-word_problems": Case("smollm2", "word_problems", 0.15, 0.02),
    "gemma3-sums": Case("gemma3", "sums", 0.3, 0.02),
    "gemma3-decimals": Case("gemma3", "decimals", 0.3, 0.02),
    "gemma3-chains": Case("gemma3", "chains", 0.35, 0.02),
    "gemma3-word_problems": Case("gemma3", "word_problems", 0.15, 0.02),
}


def model_of(name: str, options: argparse.Namespace) -> Path:
    """The folder of the weights that the runs of a case begin from."""
    case = CASES[name]
    if case.sft_file is None:
        return options.models / case.model
    return sorted((options.out / f"{name}-sft" / "run" / "checkpoints").glob("step-*/weights"))[-1]


def sft(name: str, gpu: str | None, options: argparse.Namespace) -> None:
    """The SFT before a case, unless it is there or not needed."""
    case, folder = CASES[name], options.out / f"{name}-sft"
    if case.sft_file is None or (folder / "run").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / "rows.jsonl"
    subprocess.run([sys.executable, str(RUN_FILES / "demonstrations.py"), case.task, str(rows)], check=True)
    given = {"model.path": options.models / case.model, "data.path": rows, "run.folder": folder / "run"}
    settings = [part for key, value in given.items() for part in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "slipstream.cli", "sft", str(case.sft_file), "--plain", *settings]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu is not None else {})
    with (folder / "log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, timeout=300, check=True)


def settings_of(name: str, seed: int, options: argparse.Namespace, folder: Path) -> list[str]:
    """Settings on the command line, beside the run file."""
    case = CASES[name]
    given = {
        "model.path": model_of(name, options),
        "run.folder": folder / "run",
        "run.seed": seed,
        "training.steps": options.max_steps,
        "evaluation.num_tasks": NUM_HELD_OUT,
        "evaluation.every": EVERY,
        "evaluation.stop_at": options.stop_at,
        # At 2e-5 Gemma loses what it has learned, in both systems.
        **({"training.learning_rate": 5e-6} if case.model == "gemma3" else {}),
        # A base model ends a line, not a turn, before SFT.
        **({"sampling.stop": '["\\n"]'} if case.model == "gemma3" and case.sft_file is None else {}),
    } | dict(pair.split("=", 1) for pair in options.set)
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


def command_of(name: str, system: str, seed: int, options: argparse.Namespace, folder: Path) -> list[str]:
    """The process of one run."""
    case = CASES[name]
    if system == "slipstream":
        given = settings_of(name, seed, options, folder)
        return [sys.executable, "-m", "slipstream.cli", "train", str(case.file), "--plain", *given]
    prepared = options.out / name / f"{case.task}.json"
    given = {
        "child": prepared,
        "folder": folder,
        "model": model_of(name, options),
        "seed": seed,
        "stop-at": options.stop_at,
        "max-steps": options.max_steps,
        "micro-batch": options.micro_batch,
    }
    return [sys.executable, __file__, *(str(part) for pair in given.items() for part in (f"--{pair[0]}", pair[1]))]


def run(name: str, system: str, seed: int, gpu: str | None, options: argparse.Namespace) -> dict[str, Any]:
    """One run in a separate process, unless its result is there."""
    folder = options.out / f"{name}-{system}-{seed}"
    result = folder / "result.json"
    if result.exists():
        return json.loads(result.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu is not None else {})
    command = command_of(name, system, seed, options, folder)
    began = time.time()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code = process.wait(options.timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    found = timeline(folder, system, began) if (folder / "run").exists() else {}
    if code or not found.get("accuracy"):
        return {"error": f"code {code}: {(folder / 'log').read_text(errors='replace')[-1500:]}"}
    result.write_text(json.dumps(found))
    return found


def timeline(folder: Path, system: str, began: float) -> dict[str, Any]:
    """Start-up, and by step: accuracy, and seconds of training up to its end."""
    if system == "slipstream":
        from slipstream.runlog import read_metrics

        rows = [
            {"step": row["step"], "end": row["time"], "evaluate_s": row.get("time/evaluate_s", 0.0)}
            | ({"accuracy": row["eval/accuracy"]} if "eval/accuracy" in row else {})
            for row in read_metrics(folder / "run")
        ]
    else:
        rows = [json.loads(line) for line in (folder / "run" / "rows.jsonl").read_text().splitlines()]
    if not rows:
        return {}
    evaluated, training, accuracy = 0.0, {}, {}
    for row in rows:
        if row["step"] > 0:
            evaluated += row["evaluate_s"]
            training[row["step"]] = row["end"] - rows[0]["end"] - evaluated
        if "accuracy" in row:
            accuracy[row["step"]] = row["accuracy"]
    # The trainer may prepare its steps during the first evaluation. Longer completions of the start model count, too.
    usual = statistics.median([row["evaluate_s"] for row in rows[1:] if "accuracy" in row] or [rows[0]["evaluate_s"]])
    startup = rows[0]["end"] - min(usual, rows[0]["evaluate_s"]) - began
    return {
        "startup_s": startup,
        "training_s": {"0": 0.0, **{str(step): seconds for step, seconds in training.items()}},
        "accuracy": {str(step): value for step, value in accuracy.items()},
    }


def prepare_case(options: argparse.Namespace) -> None:
    """Write resolved settings, tasks and prompt tokens of the run file, for TRL."""
    from slipstream.config import load_config
    from slipstream.launch.prepare import prepare

    prepared = prepare(load_config(options.prepare, options.settings))
    config, tokenizer = prepared.config, prepared.tokenizer
    assert config.environment is not None
    found = {
        "settings": config.model_dump(
            mode="json", include={"algorithm", "training", "sampling", "environment", "model"}
        ),
        "max_model_len": config.inference.max_model_len,
        "tokens": {task.id: tokenizer.render(task.prompt) for task in [*prepared.train_tasks, *prepared.eval_tasks]},
        **{
            name: [msgspec.json.encode(task).decode() for task in tasks]
            for name, tasks in (("train", prepared.train_tasks), ("eval", prepared.eval_tasks))
        },
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{options.prepare.stem}.json").write_text(json.dumps(found))


def trl_child(options: argparse.Namespace) -> None:
    """TRL in this process."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from slipstream.config.environment import EnvironmentConfig
    from slipstream.envs.base import Episode, as_score
    from slipstream.envs.registry import load_environment
    from slipstream.records import Task

    case = json.loads(options.child.read_text())
    algorithm, training, sampling = (case["settings"][name] for name in ("algorithm", "training", "sampling"))
    environment = load_environment(EnvironmentConfig(**case["settings"]["environment"]))
    train, held_out = ([msgspec.json.decode(text, type=Task) for text in case[name]] for name in ("train", "eval"))
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    messages = [[{"role": each.role, "content": each.content} for each in task.prompt] for task in train]
    for task, prompt in zip(train[:100], messages, strict=False):
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        assert ids == case["tokens"][task.id], f"other tokens for {task.id}"
    folder = options.folder / "run"
    folder.mkdir(exist_ok=True)
    on_gpu = torch.cuda.is_available()

    def graded(task: Task, text: str) -> float:
        return as_score(environment.score_episode(task, Episode(text))).reward

    def reward(completions: Any, place: list[int], **_: Any) -> list[float]:
        return [graded(train[number], each[0]["content"]) for number, each in zip(place, completions, strict=True)]

    class Evaluate(TrainerCallback):
        def evaluate(self, step: int) -> bool:
            began = time.time()
            texts = self.sampled([case["tokens"][task.id] for task in held_out])
            right = sum(graded(task, text) >= 1.0 for task, text in zip(held_out, texts, strict=True))
            self.write(step, accuracy=right / len(held_out), evaluate_s=time.time() - began)
            return right / len(held_out) >= options.stop_at

        def sampled(self, prompts: list[list[int]]) -> list[str]:
            if not on_gpu:  # a trial of this file
                return ["" for _ in prompts]
            from vllm import SamplingParams

            trainer.vllm_generation.sync_weights()
            how = SamplingParams(
                temperature=sampling["temperature"],
                max_tokens=sampling["max_tokens"],
                stop=sampling["stop"] or None,
                include_stop_str_in_output=True,
            )
            asked = [{"prompt_token_ids": ids} for ids in prompts]
            return [each.outputs[0].text for each in trainer.vllm_generation.llm.generate(asked, how, use_tqdm=False)]

        def write(self, step: int, evaluate_s: float = 0.0, **values: float) -> None:
            with (folder / "rows.jsonl").open("a") as file:
                row = {"step": step, "end": time.time(), "evaluate_s": evaluate_s, **values}
                file.write(json.dumps(row) + "\n")

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.evaluate(0)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            if state.global_step % EVERY:
                self.write(state.global_step)
            elif self.evaluate(state.global_step):
                control.should_training_stop = True

    batch = training["prompts_per_batch"] * algorithm["group_size"]
    micro = min(options.micro_batch, batch)
    engine: dict[str, Any] = {
        "generation_kwargs": {"stop": sampling["stop"], "include_stop_str_in_output": True}
        if sampling["stop"]
        else None,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_max_model_length": case["max_model_len"],
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": algorithm["arguments"]["importance_cap"],
    }
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        seed=options.seed,
        use_cpu=not on_gpu,
        bf16=on_gpu,
        # Weights of 32 bits, as ours has beside those of 16; updates of this size vanish in bfloat16.
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=batch // micro,
        steps_per_generation=batch // micro * training["updates_per_batch"],
        num_generations=algorithm["group_size"],
        max_completion_length=sampling["max_tokens"],
        temperature=sampling["temperature"],
        learning_rate=training["learning_rate"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=training["warmup_steps"],
        adam_beta1=training["adam_beta1"],
        adam_beta2=training["adam_beta2"],
        weight_decay=training["weight_decay"],
        max_grad_norm=training["max_grad_norm"],
        epsilon=algorithm["clip_low"],
        epsilon_high=algorithm["clip_high"],
        beta=algorithm["kl_coef"],
        loss_type="dapo",
        scale_rewards="group",
        gradient_checkpointing=False,
        max_steps=options.max_steps,
        save_strategy="no",
        report_to=[],
        logging_steps=EVERY,
        disable_tqdm=True,
        **(engine if on_gpu else {}),
    )
    trainer: Any = GRPOTrainer(
        model=str(options.model),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": each, "place": place} for place, each in enumerate(messages)]),
        processing_class=tokenizer,
        callbacks=[Evaluate()],
    )
    trainer.train()


def tables(results: dict[str, dict[str, list[dict[str, Any]]]]) -> tuple[list[str], bool]:
    """The results in Markdown, and whether every claim holds."""
    lines = [
        "| case | accuracy at the start | target (best constant) | system | reached | start-up, s | training, s | "
        "from the start, s | steps |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    holds = True
    for name, systems in results.items():
        case, medians = CASES[name], {}
        for system, runs in systems.items():
            good = [each for each in runs if "error" not in each]
            begins = [each["accuracy"]["0"] for each in good]
            ends = [(each, step) for each in good if (step := reached_at(each["accuracy"], case.target)) is not None]
            training = [each["training_s"][step] for each, step in ends]
            whole = [each["startup_s"] + each["training_s"][step] for each, step in ends]
            medians[system] = (statistics.median(training), statistics.median(whole)) if ends else None
            cells = [
                spread([each["startup_s"] for each in good]),
                spread(training),
                spread(whole),
                spread([int(step) for _, step in ends], "g"),
            ]
            lines.append(
                f"| {name} | {spread([100 * each for each in begins])} % | {100 * case.target:g} % "
                f"({100 * case.constant:g} %) | {system} | {len(ends)} of {len(runs)} | {' | '.join(cells)} |"
            )
            holds &= len(good) == len(runs)
        ours, theirs = medians.get("slipstream"), medians.get("trl")
        if ours and theirs:
            parts = ours[0] / theirs[0], ours[1] / theirs[1]
            lines.append(f"| {name} | | | ours / TRL | | | {100 * parts[0]:.0f} % | {100 * parts[1]:.0f} % | |")
            holds &= parts[0] <= MOST_TRAINING and parts[1] <= MOST_WHOLE
    return lines, holds


def reached_at(accuracy: dict[str, float], target: float) -> str | None:
    """The first step whose weights have the accuracy, and which the next evaluation confirms, if there is one: a single
    evaluation is off by two points."""
    steps = list(accuracy)
    for number, step in enumerate(steps):
        if all(accuracy[each] >= target for each in steps[number : number + 2]):
            return step
    return None


def spread(values: list[Any], form: str = ".1f") -> str:
    """Median and range."""
    if not values:
        return "-"
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def draw(path: Path, results: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    """One panel a case: accuracy over seconds since the process's start, a line a run."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "slipstream"
    from matplotlib import pyplot

    columns = min(2, len(results))
    rows = -(-len(results) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4.6 * columns, 3.2 * rows), squeeze=False)
    for axis, (name, systems) in zip(axes.flat, results.items(), strict=False):
        for (system, runs), color in zip(systems.items(), ("tab:blue", "tab:orange"), strict=False):
            for number, each in enumerate(each for each in runs if "error" not in each):
                seconds = [each["startup_s"] + each["training_s"][step] for step in each["accuracy"]]
                label = None if number else {"slipstream": "Slipstream", "trl": "TRL"}[system]
                values = [100 * value for value in each["accuracy"].values()]
                axis.plot(seconds, values, marker="o", markersize=3, color=color, label=label, alpha=0.8)
        axis.axhline(100 * CASES[name].target, color="gray", linewidth=0.8, linestyle="--")
        axis.set_title(name)
        axis.set_xlabel("seconds since the process's start, without evaluations")
        axis.grid(alpha=0.25)
    for axis in axes[:, 0]:
        axis.set_ylabel(f"accuracy on {NUM_HELD_OUT} held-out tasks, %")
    axes[0][0].legend(loc="lower right", frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def on_gpus(gpus: Sequence[str | None], items: Sequence[Item], do: Callable[[Item, str | None], None]) -> None:
    """Do each item in turn on the first GPU that is free."""
    free: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    for gpu in gpus:
        free.put(gpu)

    def with_gpu(item: Item) -> None:
        gpu = free.get()
        try:
            do(item, gpu)
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(len(gpus)) as pool:
        list(pool.map(with_gpu, items))


def main() -> int:
    """Run what is not there yet, each GPU one run at a time; print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--gpus", type=int, default=1, help="0: on the CPU, a trial of this file")
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--stop-at", type=float, default=0.9, help="accuracy at which a run ends")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for a run")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE, settings of the run, TRL's too")
    parser.add_argument("--micro-batch", type=int, default=256, help="TRL's")
    parser.add_argument("--out", type=Path, default=Path("runs/accuracy"))
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--prepare", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    for name, kind in (("folder", Path), ("model", Path), ("seed", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    parser.add_argument("settings", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child or options.prepare:
        (trl_child if options.child else prepare_case)(options)
        return 0
    options.models, options.out = options.models.resolve(), options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")
    gpus = visible[: options.gpus] or [None]
    on_gpus(gpus, options.cases, lambda name, gpu: sft(name, gpu, options))
    for name in options.cases if "trl" in options.systems else ():
        out = options.out / name
        if not out.exists():
            command = [sys.executable, __file__, "--prepare", str(CASES[name].file), "--out", str(out), "--"]
            subprocess.run([*command, *settings_of(name, 0, options, out)], check=True)
    found: dict[tuple[str, str, int], dict[str, Any]] = {}

    def one(item: tuple[str, str, int], gpu: str | None) -> None:
        found[item] = run(*item, gpu, options)
        print(json.dumps({"-".join(map(str, item)): found[item]}), file=sys.stderr, flush=True)

    on_gpus(gpus, [(c, y, s) for s in options.seeds for c in options.cases for y in options.systems], one)
    results = {c: {y: [found[c, y, s] for s in options.seeds] for y in options.systems} for c in options.cases}
    lines, holds = tables(results)
    print("\n".join(lines))
    if options.figure is not None:
        draw(options.figure, results)
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main())
