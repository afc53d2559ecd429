"""The repository's own tools and files: prose, commit subjects, releases, workflow, containers."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from dev import prose, subject

ROOT = Path(__file__).parents[1]
WORSE = (
    "\nThis is what shows that a check which reads those words sees what that is, where it stands and who wrote it.\n"
)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A copy of two documents and one module, with the repository's baseline."""
    names = ("README.md", "docs/bridges.md", "src/slipstream/errors.py")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["README.md", "docs/bridges.md", "src/slipstream/errors.py"])
def test_a_file_whose_prose_gets_worse_is_refused(tree, name):
    baseline = json.loads(prose.BASELINE.read_text())
    assert prose.complaints(baseline) == []
    path = tree / name
    text = path.read_text()
    path.write_text(text.replace('"""', f'"""{WORSE.strip()}\n\n', 1) if name.endswith(".py") else text + WORSE * 4)
    assert [line.partition(":")[0] for line in prose.complaints(baseline)] == [name]


def test_a_new_file_is_plain_and_its_cells_are_short(tree):
    (tree / "docs/new.md").write_text(f"# New\n{WORSE}\n| a |\n|---|\n| {'long ' * 50} |\n")
    found = prose.complaints(json.loads(prose.BASELINE.read_text()))
    assert [line.partition(":")[0] for line in found] == ["docs/new.md"] * 2


def test_sentences_that_have_to_be_read_twice():
    assert prose.reasons("Where it stands", is_heading=False) == ["begins with 'Where'"]
    assert prose.reasons("Where it stands", is_heading=True) == []
    assert prose.reasons("What is it?", is_heading=False) == []


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("config: refuse NaN", True),
        ("docs/data.md: a row", True),
        ("Merge branch 'a'", True),
        ("Fixes things", False),
        ("config:x", False),
        (f"config: {'x' * 80}", False),
    ],
)
def test_commit_subjects(text, is_right):
    assert (subject.complaint(text) == "") == is_right


@pytest.fixture
def release(tmp_path):
    """Runs dev/release.py in a repository of the files that it changes."""
    for name in ("CHANGELOG.md", "pyproject.toml", "CITATION.cff", "dev/release.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)

    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", *identity, *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    def run(version):
        command = [sys.executable, str(tmp_path / "dev/release.py"), version]
        return subprocess.run(command, capture_output=True, text=True)

    git("init", "--quiet")
    git("config", "user.name", "a")
    git("config", "user.email", "a@b")
    git("add", ".")
    git("commit", "--quiet", "--message", "all: begin")
    return tmp_path, git, run


def test_a_release_sets_the_version_and_tags(release):
    folder, git, run = release
    (version,) = re.findall(r"^## (\S+), unreleased$", (folder / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert run(version).returncode == 0
    assert git("tag", "--list").split() == [f"v{version}"]
    assert git("log", "-1", "--format=%s").strip() == f"release: {version}"
    assert f'version = "{version}"' in (folder / "pyproject.toml").read_text()
    assert "unreleased" not in (folder / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("version", ["", "1.2", "9.9.9"])
def test_a_release_without_a_changelog_changes_nothing(release, version):
    _, git, run = release
    assert run(version).returncode == 1
    assert git("status", "--porcelain") + git("tag", "--list") == ""


def test_a_release_of_a_changed_tree_is_refused(release):
    folder, git, run = release
    (folder / "CITATION.cff").write_text("")
    assert "commit" in run("0.2.0").stderr
    assert git("tag", "--list") == ""


def test_the_workflow_runs_what_ci_runs():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    steps = workflow["jobs"]["test"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == ["bash .ci/run"]
    assert workflow["permissions"] == {"contents": "read"}


def test_hooks_and_containers_call_what_is_there():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    scripts = {word for hook in hooks for word in hook["entry"].split() if word.startswith("dev/")}
    assert all((ROOT / script).exists() for script in scripts)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in (ROOT / "containers").glob("*.Dockerfile"):
        steps = [line.split() for line in path.read_text().splitlines() if line.startswith("RUN ")]
        assert {step[2] for step in steps if step[1] == "make"} <= targets
        assert all((ROOT / step[2]).exists() for step in steps if step[1] == "python3")
