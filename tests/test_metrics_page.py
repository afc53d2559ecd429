"""docs/metrics.md has every metric that a run writes: names in the source here, rows of runs in `tests/system`."""

import re
from pathlib import Path

import slipstream

from .metrics_page import undocumented

GROUPS = (
    "reward|rollout|train|eval|probe|mismatch|staleness|value|idle|update|checkpoint|memory|throughput|tokens|dropped"
    "|dropped_groups|dropped_tokens|retry|task|teacher"
)
SOURCE = Path(slipstream.__file__).parent
ELSEWHERE = {"detection", "matching", "view", "report", "cli", "commands"}
"""Rollout matching has a page of its own (docs/detection.md), which names some in short; the others write none."""


def written():
    """Literals that look like a metric, with a letter for each part that is computed."""
    literal = re.compile(rf'"((?:{GROUPS})/[\w@.{{}}\[\]/ ]*[\w}}])"')
    found = {}
    for path in SOURCE.rglob("*.py"):
        if not ELSEWHERE & set(path.relative_to(SOURCE).parts):
            for name in literal.findall(path.read_text()):
                found[re.sub(r"\{[^}]*\}", "x", name)] = path
    return found


def test_every_metric_in_the_source_is_on_the_page():
    found = written()
    assert len(found) > 80
    is_partly_computed = {name for name in found if re.search(r"(^|[/_@])x", name)}
    assert not {name: found[name] for name in undocumented(found.keys() - is_partly_computed)}
