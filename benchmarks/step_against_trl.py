"""A whole GRPO step of Slipstream against TRL's, in one run on one GPU: the same shape, prompts' length and batch.

    python benchmarks/step_against_trl.py [--shape 1.5b] [--steps 5] [--tokens 512] [--set KEY=VALUE ...] [--json FILE]
                                          [--systems slipstream trl ...] [--micro-batch 32 16] [--profile]

32 prompts of about 110 tokens, 8 completions of up to 512 tokens each, a Qwen2 of the named shape with random weights
(whose completions hardly ever end by themselves), bfloat16, full fine-tuning, one update a step, the generating and the
training side on one card. Slipstream runs by its own command, `single_copy`, with all its proofs. TRL runs GRPOTrainer
with vLLM in its process, weights of importance sampling as Slipstream has them, Liger kernels where they are installed
(`trl-plain`: without), and layers that keep everything; where that runs out of memory, layers that are computed again.
Of the micro-batches the fastest is shown. Each run is a process of its own. The first steps (2) are left out; so are
the starts.

A shape with `-vl` (`4b-vl`) is a Qwen3-VL (`vision_shapes.py`) with a picture of 448 pixels a side in each prompt; both
leave its tower as it is.

Prints a Markdown table: seconds a step and its phases, memory at the peak (of the whole card, and of the trainer's
torch). The exit code is 1 when a run failed or the median step is above `--limit` times TRL's fastest. `--profile` adds
the kernels of one training step of ours (`learner.py --data grpo`).
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu import ENDLESS, ENVIRONMENT, PHASES, WARM_UP, PeakMemory, run_file, run_until

TRL = {"trl": True, "trl-plain": False}
PROMPTS, GROUP_SIZE = 32, 8
PICTURES = f'''\
"""A question on a picture of its own; the reward is the part of the completion's words that end with a 7."""
import sys

sys.path.append({str(Path(__file__).parent)!r})
from vision_shapes import draw


def tasks(split, num_tasks, seed):
    first = 0 if split == "train" else 10**6
    pictures = [draw(first + number, 448)[0] for number in range(num_tasks)]
    ask = {{"type": "text", "text": "Describe what you see."}}
    contents = [[{{"type": "image", "image": each}}, ask] for each in pictures]
    return [{{"prompt": [{{"role": "user", "content": content}}]}} for content in contents]


def reward(task, completion):
    words = completion.split()
    return sum(word.endswith("7") for word in words) / max(1, len(words))
'''


def run_slipstream(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run by its own command, read from its run folder."""
    from slipstream.runlog import read_events, read_metrics

    (folder / "environment.py").write_text(PICTURES if options.shape.endswith("-vl") else ENVIRONMENT)
    file, run = folder / "slipstream.toml", folder / "run-slipstream"
    placement = "auto" if options.device == "cpu" else "shared"
    text = run_file(
        options.model,
        folder / "environment.py",
        lora=False,
        placement=placement,
        steps=ENDLESS,
        tokens=options.tokens,
        evaluates=False,
    )
    num_tasks = options.prompts * (options.steps + WARM_UP)
    text = text.replace("prompts_per_batch = 32", f"prompts_per_batch = {options.prompts}")
    file.write_text(text.replace("num_train_tasks = 2000", f"num_train_tasks = {num_tasks}"))
    command = [sys.executable, "-m", "slipstream.cli", "train", "--plain", str(file), "--run.folder", str(run)]
    for setting in ("weights.bridge=single_copy", *(options.set or ["training.compile=true"])):
        key, _, value = setting.partition("=")
        command += [f"--{key}", value]
    result, done = watched(command, options, run)
    if "error" in result:
        logs = sorted((run / "logs").glob("*.log"))
        return result | {"logs": {log.name: log.read_text(errors="replace")[-2000:] for log in logs}}
    every = list(read_metrics(run))
    rows = [row for row in every if row["step"] > WARM_UP]
    # By the clock, as TRL's: what lies between the phases counts.
    seconds = [row["time"] - before["time"] for before, row in itertools.pairwise(every) if row["step"] > WARM_UP]
    tokens = [row["rollout/num"] * row["rollout/length"] for row in rows]
    events = [event for event in read_events(run) if event["kind"] in ("memory", "warning")]
    phases = {phase: [row.get(f"time/{phase}_s", 0.0) for row in rows] for phase in PHASES}
    memory = {name: value for name, value in rows[-1].items() if name.startswith("memory/")}
    differences = [row["probe/abs_logprob_diff"] for row in rows]
    return result | {
        "seconds": seconds,
        "tokens": tokens,
        "phases": phases,
        "events": events,
        "memory": memory,
        "probe_diff": max(differences),
        "settings": (run / "resolved.toml").read_text(),
        "output": done[-1000:],
    }


def run_trl(system: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """TRL at the fastest of the micro-batches, each in a process of its own; where none of them has enough memory for
    layers that keep everything, with half of the smallest, and then with layers that are computed again."""
    tried: list[dict[str, Any]] = []
    smallest, given = min(options.micro_batch), len(options.micro_batch)
    ways = [*((micro, False) for micro in options.micro_batch), (smallest // 2, False), (smallest, True)]
    for micro, checkpointing in ways:
        if len(tried) >= given and any("seconds" in result for result in tried):
            break
        out = folder / f"{system}-{micro}-{checkpointing}.json"
        command = [sys.executable, __file__, "--child", system, "--out", str(out), "--model", str(options.model)]
        command += ["--micro-batch", str(micro), *(["--checkpointing"] if checkpointing else [])]
        for name in ("shape", "steps", "tokens", "prompts", "device", "vllm-part", "trl-engine"):
            command += [f"--{name}", str(getattr(options, name.replace("-", "_")))]
        result, output = watched(command, options)
        result |= {"micro_batch": micro, "checkpointing": checkpointing}
        if "error" not in result:
            result |= json.loads(out.read_text())
        elif "out of memory" not in output.lower():
            return result
        tried.append(result)
    good = [result for result in tried if "seconds" in result]
    if not good:
        return {"error": f"out of memory every way: {tried[-1]['error'][-200:]}"}
    return min(good, key=lambda result: statistics.median(result["seconds"])) | {
        "tried": {str(r["micro_batch"]): r.get("seconds", "out of memory") for r in tried}
    }


def watched(command: list[str], options: argparse.Namespace, run: Path | None = None) -> tuple[dict[str, Any], str]:
    """What the card's memory came to while a command ran, and what it printed. A run of ours is ended when it has made
    its steps."""
    begun = time.monotonic()
    with PeakMemory() as memory:
        problem, printed = run_until(command, options.timeout, run=run, steps=options.steps + WARM_UP)
    result: dict[str, Any] = {"whole_s": time.monotonic() - begun, "card_mib": memory.peaks}
    return (result | {"error": f"{problem}: {printed[-1500:]}"} if problem else result), printed


def trl_child(options: argparse.Namespace) -> None:
    """A child process: TRL as it is, seen through its reward function and a callback."""
    import random

    import torch
    from datasets import Dataset
    from transformers import AutoProcessor, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    names: dict[str, Any] = {}
    reads_images = options.shape.endswith("-vl")
    exec(PICTURES if reads_images else ENVIRONMENT, names)
    asked = [task["prompt"] for task in names["tasks"]("train", (options.steps + WARM_UP) * options.prompts, 0)]
    random.Random(0).shuffle(asked)
    if reads_images:
        parts = [prompt[0]["content"] for prompt in asked]
        rows = [
            {"prompt": [{"role": "user", "content": text["text"]}], "image": image["image"]} for image, text in parts
        ]
    else:
        rows = [{"prompt": [{"role": "user", "content": text}]} for text in asked]
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    marks: dict[str, float] = {}
    found: dict[str, list[float]] = {"seconds": [], "generate_s": [], "train_s": [], "tokens": []}
    seen: dict[str, float] = {}

    def reward(prompts: Any, completions: Any, completion_ids: Any, **_: Any) -> list[float]:
        marks["graded"] = time.time()
        seen["tokens"] = seen.get("tokens", 0.0) + sum(len(ids) for ids in completion_ids)
        return [names["reward"](None, completion[0]["content"]) for completion in completions]

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            marks["end"] = time.time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            before, now = marks["end"], time.time()
            marks["end"] = now
            found["seconds"].append(now - before)
            found["generate_s"].append(marks["graded"] - before)
            found["train_s"].append(now - marks["graded"])
            found["tokens"].append(seen.pop("tokens", 0.0))

    on_gpu = options.device == "cuda"
    has_liger = importlib.util.find_spec("liger_kernel") is not None
    batch = options.prompts * GROUP_SIZE
    micro = min(*options.micro_batch, batch)
    engine: dict[str, Any] = {}
    if reads_images:
        # TRL takes a sampled placeholder for another image, and ends.
        placeholders = [tokenizer.convert_tokens_to_ids(f"<|{kind}_pad|>") for kind in ("image", "video")]
        engine["generation_kwargs"] = {"logit_bias": dict.fromkeys(placeholders, -100.0)}
    if options.trl_engine == "vllm":
        engine |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": options.vllm_part,
            "vllm_max_model_length": (512 if reads_images else 256) + options.tokens,
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": 2.0,
        }
    arguments = GRPOConfig(
        output_dir=str(options.out.parent / "trl"),
        use_cpu=not on_gpu,
        bf16=on_gpu,
        model_init_kwargs={"dtype": "bfloat16" if on_gpu else "float32"},
        use_liger_kernel=TRL[options.child] and has_liger and on_gpu,
        gradient_checkpointing=options.checkpointing,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=batch // micro,
        num_generations=GROUP_SIZE,
        max_completion_length=options.tokens,
        temperature=1.0,
        learning_rate=1e-6,
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
        max_steps=options.steps + WARM_UP,
        shuffle_dataset=False,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        **engine,
    )
    trainer = GRPOTrainer(
        model=str(options.model),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoProcessor.from_pretrained(options.model) if reads_images else tokenizer,
        callbacks=[Clock()],
    )
    if reads_images:
        trainer.model.base_model.visual.requires_grad_(False)
    trainer.train()
    result: dict[str, Any] = {name: values[WARM_UP:] for name, values in found.items()}
    if on_gpu:
        result["torch_peak_gib"] = torch.cuda.max_memory_allocated() / (1 << 30)
    rows = [row for row in trainer.state.log_history if "sampling/sampling_logp_difference/mean" in row]
    result["probe_diff"] = max((row["sampling/sampling_logp_difference/mean"] for row in rows), default=None)
    result["liger"] = arguments.use_liger_kernel
    options.out.write_text(json.dumps(result))


def spread(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def tables(results: dict[str, dict[str, Any]]) -> str:
    """The results in Markdown."""
    good = {system: r for system, r in results.items() if "seconds" in r}
    peers = [statistics.median(r["seconds"]) for system, r in good.items() if system in TRL]
    lines = [
        "| system | s a step | tokens/s | against the fastest TRL's time | generate and grade, s | train, s | weights "
        "and their proofs, s | card, GiB | trainer, GiB | largest mean logprob difference |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for system, r in results.items():
        if system not in good:
            lines.append(f"| {system} | failed: {r['error'][:200]} |")
            continue
        middle = statistics.median(r["seconds"])
        part = f"{100 * middle / min(peers):.0f} %" if peers else ""
        if system in TRL:
            parts = [spread(r["generate_s"]), spread(r["train_s"]), "in the others"]
            trainer = r.get("torch_peak_gib")
        else:
            phases = r["phases"]
            update = [a + b for a, b in zip(phases["update"], phases["probe"], strict=True)]
            parts = [spread(phases["batch"]), spread(phases["train"]), spread(update)]
            trainer = r["memory"].get("memory/trainer_peak_gib")
        rate = [tokens / seconds for tokens, seconds in zip(r["tokens"], r["seconds"], strict=True)]
        card = ", ".join(f"{mib / 1024:.0f}" for mib in r["card_mib"])
        difference = "" if r["probe_diff"] is None else f"{r['probe_diff']:.4f}"
        name = system
        if system in TRL:
            kept = "again" if r["checkpointing"] else "kept"
            name += f" ({'Liger' if r['liger'] else 'no Liger'}, layers {kept}, micro-batches of {r['micro_batch']})"
        cells = [spread(r["seconds"]), f"{statistics.median(rate):,.0f}", part, *parts, card]
        cells += ["" if trainer is None else f"{trainer:.1f}", difference]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1.5b")
    parser.add_argument("--systems", nargs="+", choices=["slipstream", *TRL], default=["slipstream", "trl"])
    parser.add_argument("--steps", type=int, default=5, help=f"measured, after {WARM_UP}")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=PROMPTS, help=f"in a batch, with {GROUP_SIZE} completions each")
    parser.add_argument(
        "--micro-batch", type=int, nargs="+", default=[32], help="TRL's, to try; each must divide the completions"
    )
    parser.add_argument("--vllm-part", type=float, default=0.3, help="of the card, that TRL's vLLM may have")
    parser.add_argument("--trl-engine", choices=["vllm", "transformers"], default="vllm")
    parser.add_argument("--set", action="append", help="settings of ours, instead of training.compile=true")
    parser.add_argument("--limit", type=float, default=0.55)
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for a run")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--model", type=Path, help="a model's folder; made, of that shape, when it is not there")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=list(TRL), help=argparse.SUPPRESS)
    parser.add_argument("--checkpointing", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        trl_child(options)
        return 0
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="slipstream-step-") as temporary:
        folder = Path(temporary)
        options.model = options.model or folder / "model"
        if not options.model.exists():
            from shapes import shaped_model
            from vision_shapes import shaped_vision_model

            size = options.shape.removesuffix("-vl")
            (shaped_vision_model if "-vl" in options.shape else shaped_model)(options.model, size)
        for system in options.systems:
            results[system] = run_trl(system, options, folder) if system in TRL else run_slipstream(options, folder)
            print(json.dumps({system: results[system]}), file=sys.stderr, flush=True)
            if options.json:
                options.json.write_text(json.dumps(results))
    print(tables(results))
    if options.profile:
        learner = [sys.executable, str(Path(__file__).with_name("learner.py")), "--shapes", options.shape, "--profile"]
        learner += ["--data", "grpo", "--systems", "compiled", "--device", options.device, "--tokens", "16384"]
        print(subprocess.run([*learner, "--steps", "3"], stdout=subprocess.PIPE, text=True, check=False).stdout)
    medians = {system: statistics.median(r["seconds"]) for system, r in results.items() if "seconds" in r}
    peers = [seconds for system, seconds in medians.items() if system in TRL]
    slow = bool(peers) and "slipstream" in medians and medians["slipstream"] > options.limit * min(peers)
    return int(slow or len(medians) < len(results))


if __name__ == "__main__":
    sys.exit(main())
