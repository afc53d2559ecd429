"""Unfinished libraries of torch's compile cache."""

import fcntl
import subprocess

import pytest

from slipstream.processes.libraries import is_whole, remove_unfinished


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library")
    (folder / "a.c").write_text("int f(int a) { return a + 1; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "a.so", folder / "a.c"], check=True)
    return (folder / "a.so").read_bytes()


@pytest.mark.parametrize("part", [0.0, 0.001, 0.5, 0.999])
def test_an_unfinished_library_is_removed(library, tmp_path, part):
    (tmp_path / "locks").mkdir()
    (tmp_path / "73").mkdir()
    whole, unfinished, zeros = (tmp_path / "73" / f"{name}.main.so" for name in ("c1", "c2", "c3"))
    whole.write_bytes(library)
    unfinished.write_bytes(library[: int(len(library) * part)])
    zeros.write_bytes(bytes(4096))
    with (tmp_path / "locks/c2.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_unfinished(tmp_path)
        assert [each.exists() for each in (whole, unfinished, zeros)] == [True, True, False]
    remove_unfinished(tmp_path)
    assert [each.exists() for each in (whole, unfinished)] == [True, False]
    remove_unfinished(tmp_path / "none")


def test_other_files_are_whole(library, tmp_path):
    path = tmp_path / "a.so"
    path.write_bytes(b"\xcf\xfa\xed\xfe" + bytes(100))
    assert is_whole(path)
