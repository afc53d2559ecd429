"""Judges a smoke run by its figures: `python check.py RUN [OTHER_RUN]`. Exit code 1: something is wrong.

Every version was proved by the engines, gradient norms are finite and not zero, and engine and trainer agree on
log-probabilities. With another run, losses must be the same to the last digit; it needs as many ranks, engines and
threads for each.
"""

import math
import sys
from pathlib import Path

from slipstream.runlog import read_events, read_exit, read_metrics

MOST_DIFFERENCE = 0.05
"""Mean difference of log-probabilities: rounding in bfloat16 makes less."""


def problems(run: Path, other: Path | None = None) -> list[str]:
    """Sentences on the faults of a run."""
    report, rows = read_exit(run), trained(run)
    if report is None or report.status != "finished":
        return [f"{run} did not finish: {report.message if report else 'it has no exit record'}"]
    found: list[str] = []
    published, applied = ([e["version"] for e in read_events(run, kinds=(kind,))] for kind in ("publish", "apply"))
    if not published or applied != published:
        found.append(f"versions {published} were published, and {applied} proved")
    for row in rows:
        if not math.isfinite(row["train/grad_norm"]) or row["train/grad_norm"] == 0:
            found.append(f"step {row['step']} has the gradient norm {row['train/grad_norm']}")
        if (difference := row.get("probe/abs_logprob_diff", 0.0)) > MOST_DIFFERENCE:
            found.append(f"step {row['step']}: engine and trainer differ by {difference:g} in log-probabilities")
    if other is not None:
        own, theirs = ([(row["train/loss"], row["train/grad_norm"]) for row in trained(each)] for each in (run, other))
        if own != theirs:
            found.append(f"losses and gradient norms are {own}, and those of {other} {theirs}")
    return found


def trained(run: Path) -> list[dict[str, float]]:
    """The rows of trained steps."""
    return [row for row in read_metrics(run) if "train/loss" in row]


def main() -> int:
    """Print the faults, or that there are none."""
    found = problems(*map(Path, sys.argv[1:3]))
    print("\n".join(found) if found else "ok: versions proved, gradients finite, log-probabilities agree")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
