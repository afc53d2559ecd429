"""SFT steps of Slipstream against TRL's SFTTrainer, in one run: the same model, rows, batch, optimizer and precision.

    python benchmarks/sft_against_trl.py [--rows short bare long-tailed] [--rounds 3] [--steps 30] [--json FILE]
                                         [--lora] [--device cuda --model FOLDER] [--set KEY=VALUE ...]

Rows are prompts with completions: `short` as in the quickstart (an instruction, which all have in common, and a word to
spell backward), `bare` without the instruction, `long-tailed` with log-normal completions (median 60 characters, up to
900), `long` with those of a chat (median 400, up to 3,500). On a CPU the model is a Qwen3 of 0.8 million parameters in
float32, with as many threads for both; on a GPU the folder given, in bfloat16.

Slipstream runs by its own command (`sft`, no evaluation) as it is. TRL runs SFTTrainer on prompt and completion with
the loss on the completion; on a CPU padded batches, the whole batch at once and in quarters; on a GPU packing (`bfd`)
with torch's FlashAttention, Liger where installed, layers that keep everything, and about as many tokens a step. The
systems take turns, each run a process of its own; of TRL's ways the fastest is compared, and one that fails is left out
and told. Starts and the first steps (3) are left out.

Prints a Markdown table: seconds a step, tokens a second (tokens of the rows, without padding), losses of the first and
the last step, and ours by TRL's fastest. The exit code is 1 where that is below `--limit`.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WARM_UP = 3
PACKED = 4096
"""Tokens of TRL's packed rows on a GPU."""
TIMEOUT_S = 900.0
RUN_FILE = """
evaluation = false
[model]
path = "{model}"
dtype = "{dtype}"
[data]
path = "{rows}"
[algorithm]
kind = "sft"
[training]
steps = {steps}
prompts_per_batch = {batch}
learning_rate = 1e-3
schedule = "constant"
[run]
checkpoint_every = {steps}
"""


def short_rows(num: int) -> list[dict[str, str]]:
    """A word and its letters backward."""
    draw = random.Random(0)
    words = ("".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(3, 6))) for _ in range(num))
    return [{"prompt": f"Spell this word backward (example: sun -> nus): {w}", "completion": w[::-1]} for w in words]


def long_tailed_rows(num: int) -> list[dict[str, str]]:
    """Completions of log-normal length."""
    draw = random.Random(0)
    rows: list[dict[str, str]] = []
    for number in range(num):
        length = min(900, max(1, round(draw.lognormvariate(4.1, 0.9))))
        text = "".join(draw.choices("abcdef gh", k=length))
        rows.append({"prompt": f"Letters, please ({number}):", "completion": text})
    return rows


def long_rows(num: int) -> list[dict[str, str]]:
    """As in a chat: completions of some hundreds of characters, a few of thousands."""
    draw = random.Random(0)
    rows: list[dict[str, str]] = []
    for number in range(num):
        length = min(3500, max(20, round(draw.lognormvariate(6.0, 0.8))))
        rows.append(
            {"prompt": f"Letters, please ({number}):", "completion": "".join(draw.choices("abcdefgh", k=length))}
        )
    return rows


def bare_rows(num: int) -> list[dict[str, str]]:
    """The same without the instruction: hardly a token is common to two prompts."""
    return [{**row, "prompt": row["prompt"].rpartition(" ")[2]} for row in short_rows(num)]


ROWS = {"short": short_rows, "bare": bare_rows, "long-tailed": long_tailed_rows, "long": long_rows}


def conversations(rows: list[dict[str, str]]) -> list[dict[str, list[dict[str, str]]]]:
    """As TRL's conversational prompt and completion."""
    return [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["completion"]}],
        }
        for row in rows
    ]


def run_slipstream(options: argparse.Namespace, rows: Path, folder: Path) -> dict[str, Any]:
    """One run by its own command, read from its run folder."""
    from slipstream.runlog import read_metrics

    file, run = folder / "sft.toml", folder / "run"
    dtype = "float32" if options.device == "cpu" else "bfloat16"
    steps = options.steps + WARM_UP
    text = RUN_FILE.format(model=options.model, dtype=dtype, rows=rows, steps=steps, batch=options.batch)
    if options.lora:
        text += "[lora]\nrank = 16\nalpha = 32\n"
    file.write_text(text)
    command = [sys.executable, "-m", "slipstream.cli", "sft", "--plain", str(file), "--run.folder", str(run)]
    for setting in options.set:
        key, _, value = setting.partition("=")
        command += [f"--{key}", value]
    _run(command)
    every = list(read_metrics(run))
    seconds = [row["time"] - before["time"] for before, row in itertools.pairwise(every) if row["step"] > WARM_UP]
    found = [row for row in every if row["step"] > WARM_UP]
    return {
        "seconds": seconds,
        "train_s": [row["time/train_s"] for row in found],
        "losses": [found[0]["train/loss"], found[-1]["train/loss"]],
        "targets": [row["train/num_tokens"] for row in found],
        "memory": {name: value for name, value in found[-1].items() if name.startswith("memory/")},
    }


def run_trl(options: argparse.Namespace, rows: Path, folder: Path, way: dict[str, Any]) -> dict[str, Any]:
    """TRL in a process of its own."""
    out = folder / "trl.json"
    command = [sys.executable, __file__, "--child", json.dumps(way), "--out", str(out), "--child-rows", str(rows)]
    command += ["--model", str(options.model), "--device", options.device, "--steps", str(options.steps)]
    command += ["--batch", str(options.batch), *(["--lora"] if options.lora else [])]
    _run(command)
    return json.loads(out.read_text())


def _run(command: list[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"code {done.returncode}: {' '.join(command)}\n{(done.stdout + done.stderr)[-3000:]}")


def trl_child(options: argparse.Namespace) -> None:
    """A child process: SFTTrainer as it is, seen through a callback."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    way = json.loads(options.child)
    if way.get("attention") == "varlen":
        use_varlen_attention()
    rows = [json.loads(line) for line in options.child_rows.read_text().splitlines()]
    marks: list[float] = []
    losses: list[float] = []
    seen: list[float] = []
    on_gpu = options.device == "cuda"

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            marks.append(time.monotonic())

        def on_log(self, _: Any, __: Any, ___: Any, logs: dict[str, float] | None = None, **____: Any) -> None:
            if logs and "loss" in logs:
                losses.append(float(logs["loss"]))
                seen.append(float(logs["num_tokens"]))

    extra: dict[str, Any] = {}
    if on_gpu:
        extra = {"packing": True, "max_length": PACKED, "bf16": True}
        extra["use_liger_kernel"] = importlib.util.find_spec("liger_kernel") is not None
    kwargs = {"dtype": "bfloat16" if on_gpu else "float32", "attn_implementation": way.get("attention", "sdpa")}
    micro = way["micro"]
    arguments = SFTConfig(
        output_dir=str(options.out.parent / "trl"),
        use_cpu=not on_gpu,
        model_init_kwargs=kwargs,
        max_steps=options.steps + WARM_UP,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=way["accumulate"],
        gradient_checkpointing=False,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        completion_only_loss=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=0,
        seed=0,
        **({"max_length": None} | extra),
    )
    lora: dict[str, Any] = {}
    if options.lora:
        from peft import LoraConfig

        lora = {"peft_config": LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")}
    trainer = SFTTrainer(
        model=str(options.model),
        args=arguments,
        train_dataset=Dataset.from_list(conversations(rows)),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        callbacks=[Clock()],
        **lora,
    )
    trainer.train()
    seconds = [after - before for before, after in itertools.pairwise(marks)][WARM_UP - 1 :]
    memory = {"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if on_gpu else {}
    result = {"seconds": seconds, "losses": [losses[WARM_UP], losses[-1]], "memory": memory, "way": way}
    if on_gpu:
        result["tokens"] = (seen[-1] - seen[WARM_UP - 1]) / (len(seen) - WARM_UP)
    options.out.write_text(json.dumps(result))


def num_tokens(model: str, rows: list[dict[str, str]]) -> float:
    """Mean number of tokens of a row, with the chat template."""
    from slipstream.data.chat_template import ChatTokenizer
    from slipstream.records import Message

    tokenizer = ChatTokenizer(model)
    each = (
        tokenizer.training_tokens([Message("user", row["prompt"]), Message("assistant", row["completion"])])
        for row in rows[:500]
    )
    return statistics.fmean(len(sequence.token_ids) for sequence in each)


def use_varlen_attention() -> None:
    """Register torch's own FlashAttention for packed rows with Transformers as `varlen`: flash-attn has no wheel."""
    from torch.nn.attention.varlen import varlen_attn
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    accepted = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"is_causal": True} if "is_causal" in accepted else {"window_size": (-1, 0)}
    grouped = {"enable_gqa": True} if "enable_gqa" in accepted else {}

    def attention(module: Any, q: Any, k: Any, v: Any, mask: Any, **given: Any) -> Any:
        bounds, longest = given["cu_seq_lens_q"], given["max_length_q"]
        queries, keys, values = (x[0].transpose(0, 1) for x in (q, k, v))
        if not grouped:
            keys, values = (x.repeat_interleave(queries.shape[1] // keys.shape[1], 1) for x in (keys, values))
        out = varlen_attn(queries, keys, values, bounds, bounds, longest, longest, **causal, **grouped)
        return out[None], None

    AttentionInterface.register("varlen", attention)
    AttentionMaskInterface.register("varlen", lambda *_, **__: None)


def compare(kind: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All rounds on one kind of rows."""
    rows = ROWS[kind]((options.steps + WARM_UP) * options.batch)
    file = folder / f"{kind}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokens = num_tokens(options.model, rows) * options.batch
    ways = [{"micro": options.batch, "accumulate": 1}, {"micro": options.batch // 4, "accumulate": 4}]
    if options.device == "cuda":  # packed rows, about as many tokens a step as ours have
        packed = max(1, round(tokens / PACKED))
        ways = [
            {"micro": n, "accumulate": max(1, round(packed / n)), "attention": attention}
            for n, attention in itertools.product(options.micro, options.attention)
        ]
    found: dict[str, list[dict[str, Any]]] = {"slipstream": []} | {json.dumps(way): [] for way in ways}
    failed: set[str] = set()
    for number in range(options.rounds):
        for name, results in found.items():
            if name in failed:
                continue
            place = folder / f"{kind}-{number}-{len(list(folder.iterdir()))}"
            place.mkdir()
            try:
                result = (
                    run_slipstream(options, file, place)
                    if name == "slipstream"
                    else run_trl(options, file, place, json.loads(name))
                )
            except RuntimeError as error:
                if name == "slipstream":
                    raise
                print(f"{kind} {name} fails and is left out: {error}", file=sys.stderr)
                failed.add(name)
                continue
            results.append(result)
            print(f"{kind} round {number} {name}: {statistics.median(result['seconds']):.4f} s", file=sys.stderr)
    return {"tokens": tokens, "runs": {name: results for name, results in found.items() if name not in failed}}


def table(kind: str, compared: dict[str, Any], options: argparse.Namespace) -> float:
    """Print the rows of a table; ours by TRL's fastest."""
    medians = {name: [statistics.median(run["seconds"]) for run in runs] for name, runs in compared["runs"].items()}
    best = {name: statistics.median(values) for name, values in medians.items()}
    print(f"\n{kind} rows, {compared['tokens'] / options.batch:.0f} tokens each, {options.batch} a step\n")
    print("| system | s a step: median of each run | tokens a second | loss, first and last |\n|---|---|---|---|")
    speeds: dict[str, float] = {}
    for name, runs in compared["runs"].items():
        each = ", ".join(f"{value:.3f}" for value in medians[name])
        first, last = runs[0]["losses"]
        speeds[name] = runs[0].get("tokens", compared["tokens"]) / best[name]
        print(f"| {name} | {each} | {speeds[name]:,.0f} | {first:.3f}, {last:.3f} |")
    ratio = speeds["slipstream"] / max(speed for name, speed in speeds.items() if name != "slipstream")
    print(f"\nSlipstream: {ratio:.2f} times the fastest of TRL's.")
    return ratio


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=["short", "bare", "long-tailed"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", default="")
    parser.add_argument("--attention", nargs="+", default=["varlen"], help="TRL's on a GPU, as Transformers names them")
    parser.add_argument("--micro", nargs="+", type=int, default=[4, 2])
    parser.add_argument("--set", nargs="*", default=[])
    parser.add_argument("--limit", type=float, default=1.3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--child-rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        trl_child(options)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not options.model:
            from slipstream.commands.small_models.tiny_qwen3 import new_model

            options.model = str(new_model(folder / "model", context_length=2048))
        results = {kind: compare(kind, options, folder) for kind in options.rows}
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    ratios = [table(kind, compared, options) for kind, compared in results.items()]
    sys.exit(min(ratios) < options.limit)


if __name__ == "__main__":
    main()
