"""How far engine and trainer are apart in GRPO runs of one model, setting by setting, and what a step takes.

    python benchmarks/closeness.py MODEL [--variants default "model.fp32_head=false model.fp32_residual=false"]
                                   [--steps 8] [--tokens 128] [--length 512] [--images] [--json FILE]

Each variant is `slipstream train` in a process of its own: 32 prompts, 8 completions of up to 128 tokens each at
temperature 1, one update a step, bridge `single_copy`; its settings are separated by spaces. With `--images` each
prompt has a drawn picture, for models that read them (`vision_shapes.py`). Prints a Markdown table: the mean absolute
difference of a trained token's log-probability (the median of the steps, smallest and largest), the KL divergence, the
importance ratio's first and last percent, and seconds a step, without the first two steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu import WARM_UP, run_file

ENVIRONMENT = '''\
"""Beginnings of texts; the reward is the part of the completion's words with an `e` or an even digit."""
import random

from PIL import Image, ImageDraw

IMAGES = False

WHAT = ["The history of the city began when", "In mathematics, a function is", "She opened the door and", "The recipe",
        "Scientists have found that", "The law says that every", "During the war, the", "My favourite book is about"]


def tasks(split, num_tasks, seed):
    draw = random.Random(f"{split}-{seed}")
    texts = [f"{draw.choice(WHAT)} ({number})" for number in range(num_tasks)]
    return [{"prompt": pictured(text, draw) if IMAGES else text} for text in texts]


def pictured(text, draw):
    image = Image.new("RGB", (64, 48), "white")
    pen = ImageDraw.Draw(image)
    for colour in ("red", "green", "blue"):
        left, top = draw.randint(0, 40), draw.randint(0, 30)
        pen.rectangle((left, top, left + draw.randint(4, 20), top + draw.randint(4, 16)), fill=colour)
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}]


def reward(task, completion):
    words = completion.split()
    return sum(any(sign in "e2468" for sign in word) for word in words) / max(1, len(words))
'''
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


def measure(variant: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run one variant and read its run folder."""
    from slipstream.runlog import read_metrics

    (folder / "environment.py").write_text(ENVIRONMENT.replace("IMAGES = False", f"IMAGES = {options.images}"))
    file, run = folder / "run.toml", folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    size = {"steps": options.steps, "tokens": options.tokens}
    places = options.model.absolute(), folder / "environment.py"
    file.write_text(run_file(*places, lora=False, placement="auto", evaluates=False, **size))
    command = [sys.executable, "-m", "slipstream.cli", "train", "--plain", str(file), "--run.folder", str(run)]
    settings = [f"inference.max_model_len={options.length}", "weights.bridge=single_copy"]
    for setting in settings + (variant.split() if variant != "default" else []):
        key, _, value = setting.partition("=")
        command += [f"--{key}", value]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False
    )
    if done.returncode:
        logs = {log.name: log.read_text(errors="replace")[-3000:] for log in sorted((run / "logs").glob("*.log"))}
        return {"variant": variant, "error": done.stdout[-2500:], "logs": logs}
    rows = list(read_metrics(run))
    names = [name for name in rows[-1] if name.startswith(("mismatch/", "probe/", "memory/", "train/", "time/"))]
    seconds = [row["time"] - before["time"] for before, row in itertools.pairwise(rows)][WARM_UP - 1 :]
    kept = {name: [row[name] for row in rows if row["step"] > WARM_UP and name in row] for name in names}
    return {"variant": variant, "seconds": seconds, "metrics": kept, "settings": (run / "resolved.toml").read_text()}


def row_of(result: dict[str, Any]) -> str:
    """A line of the table."""
    if "error" in result:
        return f"| {result['variant']} | failed |"
    own = result["metrics"]

    def spread(values: list[float], form: str) -> str:
        return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"

    low, high = (statistics.median(own[f"mismatch/ratio_p{which}"]) for which in ("01", "99"))
    columns = [spread(own["mismatch/abs_logprob_diff"], ".5f"), spread(own["mismatch/kl"], ".1e")]
    columns += [f"{low:.3f}, {high:.3f}", spread(result["seconds"], ".2f")]
    return f"| {result['variant']} | {' | '.join(columns)} |"


def main() -> int:
    """Measure all variants and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--variants", nargs="+", default=["default", "model.fp32_head=false model.fp32_residual=false"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--images", action="store_true", help="a picture in each prompt")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    template = options.model / "chat_template.jinja"
    if not template.exists():
        template.write_text(TEMPLATE)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for variant in options.variants:
            results.append(measure(variant, options, Path(folder)))
            print(json.dumps(results[-1])[:6000] if "error" in results[-1] else row_of(results[-1]), file=sys.stderr)
    print("| settings | mean difference | KL | ratio, 1st and 99th percent | s a step |\n|---|---|---|---|---|")
    print("\n".join(map(row_of, results)))
    if options.json:
        options.json.write_text(json.dumps(results))
    return int(any("error" in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
