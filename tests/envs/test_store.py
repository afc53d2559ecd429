"""Environments by digest: pushed, pulled, found by a run, and whatever is wrong with an archive or a folder refused."""

import io
import os
import sys
import tarfile
from pathlib import Path

import pytest

from slipstream.config.schema import EnvironmentConfig
from slipstream.envs.registry import load_environment
from slipstream.envs.store import content
from slipstream.envs.store.content import digest_of_folder, files_in, unpack
from slipstream.envs.store.registry import located, pull, push, reference_of
from slipstream.errors import ConfigError, DataError

ENVIRONMENT = """
from pathlib import Path
from helper import LETTER
class Letters:
    pass
def tasks(split, num_tasks, seed):
    return [{"prompt": line, "answer": LETTER} for line in Path(__file__).with_name("rows.txt").read_text().split()]
def reward(task, completion):
    return 0.0
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sys.modules.pop("helper", None)
    return tmp_path / "cache" / "slipstream" / "environments"


@pytest.fixture
def working(tmp_path):
    folder = tmp_path / "letters"
    for name, text in {
        "environment.py": ENVIRONMENT,
        "helper.py": "LETTER = 'a'\n",
        "rows.txt": "x y\n",
        "deep/er/note.txt": "",
        "__pycache__/helper.cpython-311.pyc": "compiled",
        ".env": "KEY=hunter2",
        "runs/one/events.jsonl": "{}",
        "models/new/config.json": "{}",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def archive_of(path, *members, text=b"text"):
    """An archive of members as an attacker makes them."""
    with tarfile.open(path, "w") as tar:
        for member in members:
            if isinstance(member, str):
                member = tarfile.TarInfo(member)
            member.size = len(text) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(text))
    return path


def link(kind, name="environment.py", target="/etc/passwd"):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def test_what_is_pushed_is_what_is_pulled(working, tmp_path):
    pushed = push(working, str(tmp_path / "registry"))
    name, _, digest = pushed.reference.partition("@")
    assert (name, len(digest), pushed.num_files, pushed.num_left_out, pushed.is_new) == ("letters", 64, 4, 4, True)
    assert not push(working, str(tmp_path / "registry")).is_new
    os.utime(working / "rows.txt", (1, 1))
    (working / "helper.py").chmod(0o700)
    assert push(working, str(tmp_path / "registry"), "other").reference == f"other@{digest}", "by content alone"
    folder = pull(pushed.reference, str(tmp_path / "registry"), tmp_path / "new" / "pulled")
    assert {*files_in(folder)[0]} == {"environment.py", "helper.py", "rows.txt", "deep/er/note.txt"}
    assert "helper" not in sys.modules
    (folder / "helper.py").write_text("LETTER = 'b'\n")
    assert push(folder, str(tmp_path / "registry"), "letters").reference != pushed.reference
    left = [path for path in (tmp_path / "registry").rglob("*") if path.suffix != ".tar" and path.is_file()]
    assert left == []
    with pytest.raises(ConfigError, match=r"is not an empty folder"):
        pull(pushed.reference, str(tmp_path / "registry"), folder)


def test_a_run_finds_it_by_digest_and_verifies_it_before_it_imports(working, tmp_path, cache):
    registry = str(tmp_path / "registry")
    pushed = push(working, registry)
    given = EnvironmentConfig(name=pushed.reference[: len("letters@") + 12], registry=registry)
    section = located(given)
    assert section.name == str(cache / pushed.reference / "environment.py")
    assert load_environment(section).tasks("train", 2)[0].answer == "a"
    assert located(given.model_copy(update={"name": f"{given.name}:Letters"})).name == f"{section.name}:Letters"
    Path(pushed.archive).unlink()
    assert located(given).name == section.name, "what is on this machine needs no registry"
    helper = cache / pushed.reference / "helper.py"
    helper.chmod(0o600)
    helper.write_text("raise SystemExit('imported')\n")
    with pytest.raises(DataError, match=r"was changed since it was unpacked"):
        located(given)
    assert (cache / pushed.reference).stat().st_mode & 0o077 == 0


def test_a_replaced_archive_is_refused(working, tmp_path, cache):
    registry = str(tmp_path / "registry")
    pushed = push(working, registry)
    (working / "helper.py").write_text("raise SystemExit('imported')\n")
    Path(push(working, registry).archive).replace(pushed.archive)
    given = EnvironmentConfig(name=pushed.reference, registry=registry)
    with pytest.raises(DataError, match=r"it was damaged or replaced, push the environment again"):
        located(given)
    with pytest.raises(DataError, match=r"it was damaged or replaced"):
        pull(pushed.reference, registry, tmp_path / "pulled")
    assert not (tmp_path / "pulled").exists()
    assert list(cache.iterdir()) == []
    (working / "helper.py").write_text("LETTER = 'a'\n")
    assert push(working, registry).is_new, "a push repairs it"
    assert located(given)


@pytest.mark.parametrize(
    ("member", "problem"),
    [
        ("../out.py", "leads out of the folder"),
        ("/tmp/out.py", "leads out of the folder"),
        ("a/../../out.py", "leads out of the folder"),
        ("./environment.py", "leads out of the folder"),
        ("a\\..\\out.py", "a character that no file"),
        ("__pycache__/environment.cpython-311.pyc", "is compiled Python"),
        (link(tarfile.SYMTYPE), "is a link"),
        (link(tarfile.LNKTYPE, target="../out.py"), "is a link"),
        (link(tarfile.DIRTYPE, "sub"), "is a link, a folder or a special file"),
        (link(tarfile.FIFOTYPE), "a special file"),
        (link(tarfile.CHRTYPE), "a special file"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.type.decode(),
)
def test_an_archive_with_anything_but_plain_files_is_refused(tmp_path, member, problem):
    folder = tmp_path / "into"
    folder.mkdir()
    with pytest.raises(DataError, match=rf"cannot be unpacked: .* {problem}"):
        unpack(archive_of(tmp_path / "a.tar", member), folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "into"]


def test_other_archives_that_cannot_be(tmp_path, monkeypatch):
    def refused(archive, problem):
        folder = tmp_path / f"into-{archive.stem}"
        folder.mkdir()
        with pytest.raises(DataError, match=problem):
            unpack(archive, folder)

    refused(archive_of(tmp_path / "twice.tar", "a.py", "a.py"), "is there twice")
    refused(archive_of(tmp_path / "both.tar", "a", "a/b"), "cannot be unpacked into")
    whole = archive_of(tmp_path / "cut.tar", "a.py", text=b"x" * 5000).read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[:2000])
    refused(tmp_path / "cut.tar", "is no whole archive")
    with tarfile.open(tmp_path / "packed.tar", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("a.py"))
    refused(tmp_path / "packed.tar", "is no whole archive")
    monkeypatch.setattr(content, "MAX_BYTES", 6)
    refused(archive_of(tmp_path / "large.tar", "a.py", "b.py"), "goes beyond 10000 files or 6 bytes")


def test_archives_that_are_made_to_fail(tmp_path):
    """Of a path that is thousands of folders deep, and of headers about headers; a FIFO, and one without an end."""
    deep = archive_of(tmp_path / "deep.tar", f"{'a/' * 2000}a.py")
    header = tarfile.TarInfo("x")
    header.type = tarfile.XHDTYPE
    (tmp_path / "nested.tar").write_bytes(header.tobuf() * 3000)
    os.mkfifo(tmp_path / "fifo.tar")
    with (tmp_path / "endless.tar").open("wb") as file:
        file.truncate(1 << 40)
    for number, archive in enumerate((deep, *(tmp_path / f"{name}.tar" for name in ("nested", "fifo", "endless")))):
        folder = tmp_path / f"into-{number}"
        folder.mkdir()
        with pytest.raises(DataError, match=archive.name):
            unpack(archive, folder)
        assert not [*folder.iterdir()]


def test_folders_that_cannot_be_pushed(working, tmp_path, monkeypatch):
    (working / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match=r"passwd is a link, which no environment may hold"):
        push(working, str(tmp_path / "registry"))
    (working / "passwd").unlink()
    with pytest.raises(ConfigError, match=r"cannot be an environment's name"):
        push(working, str(tmp_path / "registry"), "../up")
    monkeypatch.setattr(content, "MAX_FILES", 3)
    with pytest.raises(ConfigError, match=r"holds 4 files .* and an environment at most 3"):
        push(working, str(tmp_path / "registry"))
    (working / "environment.py").unlink()
    with pytest.raises(ConfigError, match=r"has no environment.py"):
        push(working, str(tmp_path / "registry"))
    assert not (tmp_path / "registry").exists()


def test_names_that_lead_to_nothing(working, tmp_path):
    registry = str(tmp_path / "registry")
    pushed = push(working, registry)
    for name in ("letters@abc", "letters@" + "g" * 12, "@" + "0" * 12):
        with pytest.raises(ConfigError, match=r"names no environment by digest: write name@digest"):
            located(EnvironmentConfig(name=name))
    missing = EnvironmentConfig(name="letters@" + "0" * 12)
    with pytest.raises(ConfigError, match=r"is not on this machine: set environment.registry"):
        located(missing)
    with pytest.raises(ConfigError, match=rf"has no environment letters@0+: its newest is {pushed.reference[:20]}"):
        located(missing.model_copy(update={"registry": registry}))
    with pytest.raises(ConfigError, match=r"environment.registry has no effect"):
        located(EnvironmentConfig(name="rows", registry="x"))
    assert reference_of("a@" + "0" * 64 + ":B").attribute == "B"
    assert digest_of_folder(pull(pushed.reference, registry, tmp_path / "p")) == Path(pushed.archive).stem
