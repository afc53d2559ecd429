"""What the documents show is what the repository holds."""

import re
from pathlib import Path

import pytest

from slipstream.config import load_config
from slipstream.config.parse.keys import all_keys
from slipstream.config.parse.suggestions import OTHER_NAMES
from slipstream.report.series import GROUPS

from .metrics_page import undocumented

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("dev/**/*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md")]
)
RUN_FILES = [path for path in sorted((ROOT / "examples").rglob("*.toml")) if path.parent.name != "plugin"]
"""Without those of a package: tests/config/test_plugins.py."""


def test_the_readme_shows_the_example():
    (shown,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert shown == (ROOT / "examples/python/reverse.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_shipped_run_file_is_valid(path):
    load_config(path)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert missing == []


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives a document's headings."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_anchors_are_headings(path):
    links = re.findall(r"\]\(([^):]*)#([^)]+)\)", path.read_text(encoding="utf-8"))
    missing = [
        f"{file}#{anchor}" for file, anchor in links if anchor not in anchors(path.parent / file if file else path)
    ]
    assert missing == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_named_modules_exist(path):
    """Code that a document names by its path below `src/slipstream`, or below the root, is there."""
    names = re.findall(r"`([a-z_/]+/[a-z_/]+\.py)`", path.read_text(encoding="utf-8"))
    missing = [name for name in names if not ((ROOT / "src/slipstream" / name).exists() or (ROOT / name).exists())]
    assert missing == []


def test_every_plotted_metric_is_explained():
    lines = [line for group in GROUPS for panel in group.panels for line in panel.lines]
    assert undocumented({name for line in lines for name in line.metrics if name}) == set()


def test_settings_of_other_tools_have_a_counterpart():
    page = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
    rows = [line.split("|")[4] for line in page.splitlines() if line.startswith("|")][2:]
    ours = set(re.findall(r"`([a-z]+\.\w+)", " ".join(rows)))
    assert ours <= set(all_keys())
    assert set(OTHER_NAMES.values()) <= set(all_keys())
    both = set(OTHER_NAMES) & {key.name for key in all_keys().values()}
    assert both == {"beta"}, "TRL's name for the KL term of GRPO, and for that of DPO"
