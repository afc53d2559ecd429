from pathlib import Path

import pytest

MINIMAL = """\
[model]
path = "some/model"

[environment]
name = "reasoning_gym/spell_backward"

[algorithm]
kind = "grpo"

[training]
steps = 20
"""


@pytest.fixture
def run_file(tmp_path):
    """Writes a run file and gives its path."""

    def write(text: str = MINIMAL, name: str = "run.toml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write
