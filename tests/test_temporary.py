"""Temporary folders: gone with their process, or with the next one's start."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from slipstream.runlog.temporary import make_temporary, remove_temporary, temporary

OWNER = """
import sys
from slipstream.runlog.temporary import make_temporary
print(make_temporary("engine"), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_of_a_killed_process_is_removed_by_the_next(folder):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        env={"TMPDIR": str(folder), "PYTHONPATH": ":".join(sys.path)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert owner.stdout is not None
    name = owner.stdout.readline().strip()
    foreign = folder / "slipstream-of-somebody"
    foreign.mkdir()
    with temporary("test") as own:
        assert {path.name for path in folder.iterdir()} == {own.name, foreign.name, name.rpartition("/")[2]}
    owner.kill()
    owner.wait(timeout=60)
    owner.stdout.close()
    assert owner.stdin is not None
    owner.stdin.close()
    with temporary("test") as own:
        assert {path.name for path in folder.iterdir()} == {own.name, foreign.name}
    assert list(folder.iterdir()) == [foreign]


def test_one_process_may_have_several(folder):
    first, second = make_temporary("a"), make_temporary("b")
    assert first.is_dir()
    (second / "file").touch()
    remove_temporary(first)
    remove_temporary(first)
    assert list(folder.iterdir()) == [second]
    remove_temporary(second)


def test_every_temporary_folder_is_such_a_one():
    made = [
        str(path)
        for path in (Path(__file__).parents[1] / "src").rglob("*.py")
        if re.search(r"mkdtemp|TemporaryDirectory", path.read_text(encoding="utf-8"))
    ]
    assert [Path(path).name for path in made] == ["temporary.py"]
