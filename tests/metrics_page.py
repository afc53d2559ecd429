"""The names of metrics that docs/metrics.md and the pages that it names for some of them explain."""

import re
from functools import cache
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("metrics.md", "one-gpu.md", "mixtures.md", "detection.md", "distillation.md", "preferences.md")
_NAMES = re.compile(r"`([a-z_0-9<>]+/[^`\s]+)`")
_ANY = re.compile(r"\\\.\\\.\\\.|<\w+>|NAME")
_NUMBER = re.compile(r"(?<=@)[nk]\b")


@cache
def documented():
    """A pattern for each name; `...`, NAME and what stands in <> may be anything."""
    text = "".join((DOCS / page).read_text() for page in PAGES)
    return [re.compile(_NUMBER.sub(r"\\d+", _ANY.sub(".+", re.escape(name)))) for name in set(_NAMES.findall(text))]


def undocumented(names):
    """Those that no pattern fits; the ends of an interval are explained with its middle."""
    plain = {name: re.sub(r"_(low|high)$", "", name) if "@" in name else name for name in names if "/" in name}
    return {name for name, base in plain.items() if not any(each.fullmatch(base) for each in documented())}
