"""What the documents tell people to type is typed here, in the documents' order.

A fenced block whose first line is `# NAME.py` or `# NAME.toml` is a file; a block `sh` is run. The tutorial runs as it
stands, with real vLLM; only RL is shorter, by settings that the `slipstream` on this test's PATH adds to it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from slipstream.config import load_config
from slipstream.runlog import read_metrics

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs/tutorial.md", ROOT / "docs/one-gpu.md"]
INSTALLATION = ("make ", "python3 scripts/install.py", "source ", "mkdir ")
SLIPSTREAM = """#!/bin/sh
case "$1" in
    sft) set -- "$@" --run.threads 1;;
    train) set -- "$@" --run.threads 1 --training.steps 3 --training.prompts_per_batch 16 --training.warmup_steps 1;;
esac
exec {python} -m slipstream.cli "$@"
"""


@dataclass(frozen=True)
class Block:
    language: str
    text: str

    @property
    def file(self):
        """The name of the file that this is; empty for anything else."""
        found = re.match(r"# (\S+\.(?:py|toml))\n", self.text)
        return found[1] if found else ""

    @property
    def is_installation(self):
        return all(line.startswith(INSTALLATION) for line in self.text.splitlines())


def blocks(page):
    found = re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [Block(language, text) for language, text in found]


def commands():
    """(page, arguments) of every `slipstream ...` that the documents show, in a block, indented or in the text.

    A bare name of a command is no call of it, nor is one with `PLACEHOLDERS`.
    """
    for page in (ROOT / "README.md", *PAGES):
        text = re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8"))
        shown = r"^(?: {4})?(slipstream .*)$|`(?:echo [^`|]*\| )?(slipstream [^`]*)`"
        for line in re.findall(shown, text, re.MULTILINE):
            arguments = shlex.split("".join(line), comments=True)[1:]
            if all(word.isalpha() and word.islower() for word in arguments):
                continue
            if not any(re.fullmatch(r"\[?[A-Z]{3,}(\.\w+)?", word) for word in arguments):
                yield page.name, arguments


def write_file(block, folder):
    (folder / block.file).write_text(block.text, encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_a_file_a_command_or_what_is_seen(page):
    for block in blocks(page):
        assert block.language in ("sh", "python", "toml", "text")
        assert bool(block.file) == (block.language in ("python", "toml")), block.text
    installs = [block.text for block in blocks(page) if block.language == "sh" and block.is_installation]
    assert len(installs) == 1
    for target in re.findall(r"^make (\w+)", installs[0], re.MULTILINE):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_run_files_are_valid(page, tmp_path):
    files = [block for block in blocks(page) if block.file]
    for block in files:
        write_file(block, tmp_path)
    for block in files:
        if block.language == "toml":
            load_config(tmp_path / block.file)


@pytest.mark.parametrize(("page", "arguments"), [pytest.param(*c, id=" ".join([c[0], *c[1]])) for c in commands()])
def test_commands_and_their_settings_exist(page, arguments, tmp_path):
    """Parsed as they would be, with the run files that the page shows, the repository has, or `init` writes."""
    from slipstream.cli.app import app
    from slipstream.cli.init_files import FILES, write_files

    _, bound, unused, _ = app.parse_known_args(arguments)
    assert not unused
    if "run_file" not in bound.arguments:
        return
    for name in (name for name in PAGES if name.name == page):
        for block in (block for block in blocks(name) if block.file):
            write_file(block, tmp_path)
    folder = ROOT if (ROOT / bound.arguments["run_file"]).exists() else tmp_path
    if page == "README.md" and folder == tmp_path:
        folder = write_files(tmp_path / "first", FILES)
    algorithm = "sft" if arguments[0] == "sft" else None
    load_config(folder / bound.arguments["run_file"], bound.arguments.get("overrides", ()), algorithm=algorithm)


@pytest.mark.full
@pytest.mark.engine
def test_the_tutorial(tmp_path):
    folder, programs = tmp_path / "tutorial", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    program = programs / "slipstream"
    program.write_text(SLIPSTREAM.format(python=shlex.quote(sys.executable)))
    program.chmod(0o755)
    environment = dict(os.environ, PATH=f"{programs}:{os.environ['PATH']}", OMP_NUM_THREADS="1")
    page, said = ROOT / "docs/tutorial.md", {}
    transcript = next(block.text for block in blocks(page) if block.language == "text")
    questions = "".join(line.removeprefix("> ") + "\n" for line in transcript.splitlines() if line.startswith("> "))
    for block in blocks(page):
        if block.file:
            write_file(block, folder)
        elif block.language == "sh" and not block.is_installation:
            done = subprocess.run(
                ["bash", "-eu", "-o", "pipefail", "-c", block.text],
                cwd=folder, env=environment, input=questions, capture_output=True, text=True, timeout=300, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
            said[block.text.split()[1]] = done.stdout
    for promised in ("models/new", "models/after-sft", "models/sorter"):
        assert (folder / promised / "model.safetensors").is_file()
        assert (folder / promised / "tokenizer.json").is_file()
    for run, step in (("sft", 45), ("rl", 3)):
        assert (folder / f"runs/{run}/checkpoints/step-{step:06d}/weights/model.safetensors").is_file()
        assert run in said["runs"]
    before, after = (row["eval/accuracy"] for row in read_metrics(folder / "runs/sft") if "eval/accuracy" in row)
    assert before < 0.05
    assert after > 0.15, "SFT leaves RL too little to begin with"
    assert "</html>" in (folder / "report.html").read_text(encoding="utf-8")
    assert said["chat"].count("\n") == questions.count("\n") == 1
    assert re.search(r"passed: the rewards of environment", said["env"])
