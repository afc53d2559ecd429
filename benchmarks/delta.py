"""What `weights.delta` saves in real GRPO runs: bytes moved against whole versions, at several learning rates.

Each run is `slipstream train` on the quickstart's GRPO file, from the quickstart's SFT model (`make quickstart` makes
it), in bfloat16, without evaluation. Every version's fingerprints are verified in the engine, as always: a run that
finishes proved each delta exact. The first version of a run always travels whole and is left out; the others are
compared with its bytes.

    .venv/bin/python benchmarks/delta.py [--rates 1e-6 1e-5] [--bridges broadcast disk] [--steps 50] [--out FOLDER]
    .venv/bin/python benchmarks/delta.py --runs RUN_FOLDER ...      # the same table from runs that were made elsewhere

Prints a Markdown table of medians and ranges; the exit code is 1 when a run failed.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from slipstream.runlog import read_events, read_exit, read_metrics, read_settings

HERE = Path(__file__).resolve().parent
RUN_FILE = HERE.parent / "examples" / "quickstart" / "grpo.toml"
MODEL = HERE.parent / "runs" / "quickstart" / "sft" / "checkpoints" / "step-000330" / "weights"


def train(folder: Path, model: Path, bridge: str, rate: str, options: argparse.Namespace) -> bool:
    """One run; whether it finished."""
    arguments = {
        "model.path": model,
        "model.dtype": "bfloat16",
        "weights.bridge": bridge,
        "weights.delta": "true",
        "training.learning-rate": rate,
        "training.schedule": "constant",
        "training.warmup-steps": 0,
        "training.steps": options.steps,
        "evaluation": "false",
        "run.folder": folder,
    }
    command = [sys.executable, "-m", "slipstream.cli", "train", str(RUN_FILE)]
    command += [str(part) for name, value in arguments.items() for part in (f"--{name}", value)] + options.settings
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        return subprocess.run(command, stdout=log, stderr=log, check=False).returncode == 0


def spread(values: Iterable[float], form: str) -> str:
    """Median (smallest to largest)."""
    values = list(values)
    if not values:
        return ""
    median, low, high = (format(value, form) for value in (statistics.median(values), min(values), max(values)))
    return f"{median} ({low} to {high})"


def row(folder: Path) -> str:
    """A run's line of the table."""
    settings = read_settings(folder)
    rows = [row for row in read_metrics(folder) if "update/bytes" in row]
    first, later = rows[0], rows[1:]
    whole = first["update/bytes"]
    published = [event for event in read_events(folder) if event["kind"] == "publish"]
    applied = [event for event in read_events(folder) if event["kind"] == "apply"]
    assert [e["digest"] for e in applied] == [e["digest"] for e in published], "not every version was proved"
    changed = [100 * row["update/changed_fraction"] for row in later if "update/changed_fraction" in row]
    sent = [row["update/bytes"] for row in later]
    cells = [
        settings["weights.bridge"],
        f"{settings['training.learning_rate']:g}",
        str(len(later)),
        str(sum("delta_of" not in event for event in published[1:])),
        spread(changed, ".2f"),
        spread((value / 1000 for value in sent), ",.1f"),
        f"{whole / 1000:,.0f}",
        f"{100 * sum(sent) / (whole * len(sent)):.2f} %",
        spread((row["time/update_s"] for row in later), ".3f"),
        format(max(row["probe/abs_logprob_diff"] for row in rows), ".4f"),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Make the runs, or take those that are named, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["1e-6", "1e-5"])
    parser.add_argument("--bridges", nargs="+", default=["broadcast", "disk"], choices=["broadcast", "disk"])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--out", type=Path, help="where the run folders go and stay")
    parser.add_argument("--runs", type=Path, nargs="+", help="run folders to tell of instead of making some")
    parser.add_argument("settings", nargs="*", help="further settings of every run, after --")
    options = parser.parse_args()
    folders, failed = options.runs or [], []
    if not folders:
        if not options.model.is_dir():
            sys.exit(f"{options.model} is not there: run make quickstart first, or give --model")
        out = options.out or Path(tempfile.mkdtemp(prefix="slipstream-delta-"))
        out.mkdir(parents=True, exist_ok=True)
        for rate in options.rates:
            for bridge in options.bridges:
                folder = out / f"{bridge}-{rate}"
                print(f"{folder} ...", file=sys.stderr, flush=True)
                finished = train(folder, options.model, bridge, rate, options)
                (folders if finished else failed).append(folder)
    print(
        "| carrier | learning rate | versions | of them whole | changed elements, % | KB a version | KB whole "
        "| bytes in all against whole | update, s | largest mean probe difference |\n"
        f"|{'---|' * 10}"
    )
    for folder in folders:
        print(row(folder))
    for folder in failed:
        report = read_exit(folder) if folder.is_dir() else None
        print(f"{folder} failed: {report.message if report else f'see {folder}.log'}", file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
