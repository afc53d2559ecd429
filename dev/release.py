"""Makes a release: checks changelog and tree, sets the version, commits and tags. `make release VERSION=0.2.0`."""

import re
import subprocess
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def git(*arguments: str) -> str:
    """The output of a git command in the repository."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def replaced(name: str, pattern: str, text: str) -> None:
    """Replaces the one match of a pattern in a file; ends with a sentence if there is none."""
    path = ROOT / name
    before = path.read_text(encoding="utf-8")
    after, num = re.subn(pattern, text, before, count=1, flags=re.MULTILINE)
    if num == 0:
        sys.exit(f"{name} has no line {pattern!r}: correct it")
    path.write_text(after, encoding="utf-8")


def main(version: str) -> None:
    """Release a version."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        sys.exit(f"VERSION={version!r} is no version: write MAJOR.MINOR.PATCH")
    if git("status", "--porcelain"):
        sys.exit("the working tree has changes: commit them first")
    if git("tag", "--list", f"v{version}"):
        sys.exit(f"the tag v{version} exists: choose the next version")
    replaced("CHANGELOG.md", rf"^## {re.escape(version)}, unreleased$", f"## {version}, {date.today().isoformat()}")
    replaced("pyproject.toml", r'^version = ".*"$', f'version = "{version}"')
    replaced("CITATION.cff", r"^version: .*$", f"version: {version}")
    git("commit", "--all", "--message", f"release: {version}")
    git("tag", "--annotate", f"v{version}", "--message", version)
    print(f"tagged v{version}: push it with `git push --follow-tags`")


if __name__ == "__main__":
    main(*sys.argv[1:2] or [""])
