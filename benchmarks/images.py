"""Training on images, on one GPU: what steps of SFT and of channel A take, and the memory that was planned.

    python benchmarks/images.py [--shape 4b] [--side 448] [--rows 32] [--steps 6] [--iterations 1 2 4]
                                [--set KEY=VALUE ...] [--json FILE]

A Qwen3-VL of the named shape with random weights (`vision_shapes.py`), bfloat16, full training with the tower frozen;
each row has a picture of `--side` pixels with four boxes. `sft` is plain SFT on the answers; `A, n` is channel A of
rollout matching, whose rows are computed n times (`matching.softctx_iterations`). Each run is `slipstream sft` in a
process of its own, which is ended when it has made its steps. Prints a Markdown table: images and tokens a second (by
the time of whole steps, without the first two), and memory of the trainer as it was planned and at the peak. A GRPO
step with images against TRL's: `step_against_trl.py --shape 4b-vl`. The exit code is 1 when a run failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu import ENDLESS, WARM_UP, run_until, spread
from vision_shapes import shaped_vision_model, write_rows

RUN_FILE = """
evaluation = false
[model]
path = "{model}"
dtype = "bfloat16"
[environment]
name = "detection"
settings = {{ path = "{rows}", prompt = "Detect." }}
[algorithm]
kind = "sft"
{matching}
[training]
steps = {steps}
prompts_per_batch = {prompts}
learning_rate = 1e-6
[run]
checkpoint_every = 1_000_000
"""


def measure(name: str, matching: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run one variant and read its run folder."""
    from slipstream.runlog import read_metrics

    file, run = folder / "run.toml", folder / f"run-{name.replace(' ', '')}"
    places = {"model": options.model, "rows": folder / "rows.jsonl", "matching": matching}
    file.write_text(RUN_FILE.format(**places, steps=ENDLESS, prompts=options.rows))
    command = [sys.executable, "-m", "slipstream.cli", "sft", "--plain", str(file), "--run.folder", str(run)]
    for setting in options.set:
        key, _, value = setting.partition("=")
        command += [f"--{key}", value]
    problem, printed = run_until(command, options.timeout, run=run, steps=options.steps + WARM_UP)
    if problem:
        return {"name": name, "error": f"{problem}: {printed[-1500:]}"}
    rows = list(read_metrics(run))
    shutil.rmtree(run)
    seconds = [row["time"] - before["time"] for before, row in itertools.pairwise(rows)][WARM_UP - 1 :]
    tokens = [row["train/num_tokens"] for row in rows[WARM_UP:] if "train/num_tokens" in row]
    return {"name": name, "seconds": seconds, "tokens": tokens, "last": rows[-1]}


def table(results: list[dict[str, Any]], num_rows: int) -> str:
    """The results in Markdown."""
    lines = [
        "| step | s, median (range) | images/s | tokens/s | planned GiB | peak GiB |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        if "error" in result:
            lines.append(f"| {result['name']} | failed: {result['error'][-200:]!r} |")
            continue
        middle, low, high = spread(result["seconds"])
        tokens = statistics.median(result["tokens"]) / middle if result["tokens"] else float("nan")
        planned, peak = (result["last"].get(f"memory/trainer_{name}_gib", float("nan")) for name in ("planned", "peak"))
        cells = f"{middle:.2f} ({low:.2f} to {high:.2f}) | {num_rows / middle:.1f} | {tokens:,.0f}"
        lines.append(f"| {result['name']} | {cells} | {planned:.1f} | {peak:.1f} |")
    return "\n".join(lines)


def main() -> int:
    """Measure all, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4b")
    parser.add_argument("--model", type=Path, help="a folder; made, of that shape, when it is not there")
    parser.add_argument("--side", type=int, default=448, help="pixels of a picture's side")
    parser.add_argument("--rows", type=int, default=32, help="in a batch")
    parser.add_argument("--steps", type=int, default=6, help=f"measured, after {WARM_UP}")
    parser.add_argument("--iterations", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--set", action="append", default=[], help="further settings of the runs")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for a run")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slipstream-images-") as temporary:
        folder = Path(temporary)
        options.model = (options.model or folder / "model").absolute()
        if not options.model.exists():
            shaped_vision_model(options.model, options.shape)
        write_rows(folder, options.rows * (options.steps + WARM_UP), options.side)
        variants = [("sft", "")]
        for number in options.iterations:
            variants.append((f"A, {number}", f'[matching]\npattern = ["A"]\nsoftctx_iterations = {number}'))
        results = []
        for name, matching in variants:
            results.append(measure(name, matching, options, folder))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
            if options.json:
                options.json.write_text(json.dumps(results))
    print(table(results, options.rows))
    return int(any("error" in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
