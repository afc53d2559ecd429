"""Temporary folders: gone with their process, or with the next one's start."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from slipstream.processes.temporary import make_temporary, note_shared, remove_left, remove_temporary, temporary
from tests.other_user import as_other_user, needs_root
from tests.other_user import shared_folder as shared_folder  # a fixture

OWNER = """
import sys
from slipstream.processes.temporary import make_temporary
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


@needs_root
def test_another_user_cannot_have_files_removed(shared_folder, tmp_path):
    """Neither by a lock of ours in a folder of theirs, nor by a link to one of our folders, nor by notes."""
    precious = tmp_path / "precious"
    precious.write_text("x")
    lock = shared_folder / "uv-0.lock"  # as uv leaves them, so that the other user may link it
    lock.touch()
    lock.chmod(0o666)
    ours = shared_folder / "ours"
    ours.mkdir(mode=0o700)
    (ours / "owner.lock").touch()
    note = f"{precious.stat().st_ino} {precious}"
    as_other_user(
        f"""mkdir -m 700 slipstream-x; chmod 755 slipstream-x
        ln uv-0.lock slipstream-x/owner.lock || cp uv-0.lock slipstream-x/owner.lock
        echo '{note}' > slipstream-x/shared; ln -s ours slipstream-y""",
        shared_folder,
    )
    with temporary("any", shared_folder):
        pass
    assert precious.exists()
    assert (ours / "owner.lock").exists()
    assert (shared_folder / "slipstream-x" / "shared").exists()


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777])
def test_a_folder_that_others_may_use_is_not_swept(folder, mode):
    left = folder / "slipstream-left"
    left.mkdir()
    (left / "owner.lock").touch()
    left.chmod(mode)
    remove_left(folder)
    assert left.exists()
    left.chmod(0o700)
    remove_left(folder)
    assert not left.exists()


def test_notes_name_files_in_shared_memory_alone(folder, tmp_path):
    kept, segment = tmp_path / "kept", Path("/dev/shm") / f"slipstream-test-{os.getpid()}"
    linked = segment.with_name(f"{segment.name}-link")
    kept.touch()
    segment.touch()
    linked.symlink_to(kept)
    own = make_temporary("notes")
    for path in (kept, segment, linked):
        note_shared(own, str(path))
    with (own / "shared").open("a") as notes:
        notes.write(f"junk\n{kept.stat().st_ino} /dev/shm/../{kept}\n{10**30} /dev/shm\n")
    remove_temporary(own)
    assert kept.exists()
    assert not segment.exists()
    assert linked.is_symlink()
    linked.unlink()
