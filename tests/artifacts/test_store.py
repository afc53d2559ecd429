"""Artifacts in a store, without runs: interrupted at any file, damaged, an hour without the store. S3 is moto's."""

import json
import secrets
import shutil
import subprocess

import fsspec
import msgspec
import pytest
import torch
from safetensors.torch import save_file

from slipstream.artifacts import facts, references
from slipstream.artifacts.facts import read_facts
from slipstream.artifacts.outgoing import Outgoing, has_state
from slipstream.artifacts.store import RunStore, TakenOver, noted
from slipstream.config.addresses import run_reference
from slipstream.errors import ConfigError, DataError
from slipstream.remote_files import RemoteFolder, Unavailable
from slipstream.service.uploads import LONGEST_WAIT_S, Uploads
from slipstream.trainer.checkpoints.manifest import MANIFEST, Manifest, difference, facts_of
from tests.s3_server import Server, give_credentials
from tests.waiting import Clock


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("moto"))
    yield server
    server.end()


@pytest.fixture(params=["folder", "s3"])
def address(request, tmp_path, monkeypatch):
    if request.param == "folder":
        return str(tmp_path / "store")
    pytest.importorskip("s3fs", reason="needs s3fs: the extra `dev` brings it")
    give_credentials(monkeypatch, request.getfixturevalue("server").url)
    name = f"bucket-{secrets.token_hex(4)}"
    fsspec.filesystem("s3", use_listings_cache=False).mkdir(name)
    return f"s3://{name}/runs"


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("events.jsonl", "metrics.jsonl"):
        (folder / name).write_text("{}\n{}\n{tor")
    (folder / "resolved.toml").write_text("[model]\n")
    (folder / "exit.json").write_text("{}")
    return folder


def checkpoint(run, step, *, b=1.0, adapter=True, size=3):
    folder = run / f"checkpoints/step-{step:06d}"
    (folder / "weights").mkdir(parents=True)
    (folder / "state").mkdir()
    if adapter:
        (folder / "weights/adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1}))
        tensors = {"base_model.model.x.lora_A.weight": torch.ones(1, size)}
        tensors["base_model.model.x.lora_B.weight"] = torch.full((size, 1), b)
        save_file(tensors, folder / "weights/adapter_model.safetensors")
    else:
        (folder / "weights/model.safetensors").write_bytes(secrets.token_bytes(size))
    (folder / "state/learner.safetensors").write_bytes(secrets.token_bytes(size))
    (folder / "state/state.json").write_text(json.dumps({"step": step}))
    (folder / "fingerprints.json").write_text(json.dumps({"digest": secrets.token_hex(8)}))
    files = {p.relative_to(folder).as_posix(): facts_of(p) for p in sorted(folder.rglob("*")) if p.is_file()}
    (folder / MANIFEST).write_bytes(msgspec.json.encode(Manifest(files, step, 1)))
    return folder


def hold(run):
    outgoing = Outgoing(run)
    outgoing.take(read_facts(run).steps)
    return outgoing


def opened(address, name="run", pauses=None):
    return RunStore(address, name, (pauses if pauses is not None else []).append)


class Stop(BaseException):
    """The end of the process at this moment."""


def check(address, name, tmp_path):
    """Everything that looks whole is whole."""
    there = opened(address, name)
    for step, manifest in there.steps().items():
        here = tmp_path / f"check-{secrets.token_hex(4)}"
        there.fetch(step, here)
        assert not [file for file, each in manifest.files.items() if difference(here / file, each, whole=True)]
    done, files = there.done(), there._files.sizes(name)
    if done is not None:
        assert {file: files.get(file) for file in done.files} == {n: each.size_bytes for n, each in done.files.items()}
        assert sorted(there.steps()) == [2, 4]
    return there


@pytest.mark.quick("folder")
def test_an_upload_that_ends_at_any_file_leaves_nothing_that_looks_whole(run, address, tmp_path, monkeypatch):
    changes = {name: getattr(RemoteFolder, name) for name in ("put", "remove")}
    left = [0]

    def counted(name):
        def change(self, *arguments):
            left[0] -= 1
            if left[0] == 0:
                raise Stop
            return changes[name](self, *arguments)

        return change

    def work(run, name, given):
        """What the processes of one attempt do."""
        store = opened(address, name)
        store.claim(run)
        for step in (2, 4):
            if step not in given:
                checkpoint(run, step)
                given.append(step)
            hold(run)
            store.upload(run)
        store.finish(run, 4)

    for name in changes:
        monkeypatch.setattr(RemoteFolder, name, counted(name))
    is_over, place = False, 0
    while not is_over:
        place += 3 if address.startswith("/") else 5
        here, name, given = tmp_path / f"run-{place}", f"run-{place}", []
        shutil.copytree(run, here)
        left[0] = place
        try:
            work(here, name, given)
            is_over = True
        except Stop:
            left[0] = 0
            there = check(address, name, tmp_path)
            states = [step for step, manifest in there.steps().items() if has_state(manifest)]
            assert states or given != [2, 4], "an old state goes after a newer one has come"
            work(here, name, given)
        left[0] = 0
        there = check(address, name, tmp_path)
        assert there.done() is not None
        assert [has_state(each) for each in there.steps().values()] == [False, True]
    assert place >= 28
    new = tmp_path / "new"
    new.mkdir()
    assert there.restore(new) == 4
    assert (new / "events.jsonl").read_text() == "{}\n{}\n"
    assert (new / "exit.json").is_file()
    assert there.restore(new) == 0, "nothing is newer there"
    there.claim(new)
    with pytest.raises(TakenOver):
        there.check_owner(here)


def test_a_folder_that_comes_back_after_another_one_uploads_nothing_old(run, tmp_path):
    address, other = str(tmp_path / "store"), tmp_path / "other"
    shutil.copytree(run, other)
    here = opened(address)
    here.claim(run)
    checkpoint(run, 2)
    hold(run)
    here.upload(run)
    checkpoint(run, 4)
    hold(run)  # and then its machine is lost
    there = opened(address)
    there.claim(other)
    (other / "events.jsonl").unlink()
    assert there.restore(other) == 2
    for step in (4, 6):
        checkpoint(other, step)
        hold(other)
        there.upload(other)
    expected = opened(address).steps()
    assert [*expected] == [2, 4, 6]
    back = opened(address)
    back.claim(run)
    assert back.restore(run) == 6
    hold(run)
    back.finish(run, 6)
    assert opened(address).steps() == expected
    with pytest.raises(TakenOver):
        there.close(other)


def test_what_was_damaged_there_is_refused(run, tmp_path):
    address = str(tmp_path / "store")
    there = opened(address)
    there.claim(run)
    checkpoint(run, 2, size=1 << 20)
    hold(run)
    there.finish(run, 2)
    for name in ("weights/adapter_model.safetensors", "state/learner.safetensors"):
        file = tmp_path / "store/run/checkpoints/step-000002" / name
        before = file.read_bytes()
        for data in (before[:-1], before[:-1] + bytes([before[-1] ^ 1]), before + b"x", b""):
            file.write_bytes(data)
            with pytest.raises(DataError):
                opened(address).restore(tmp_path / "new")
            assert not (tmp_path / "new/checkpoints").exists()
        file.write_bytes(before)
    (tmp_path / "store/run/metrics.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="DONE names"):
        opened(address).restore(tmp_path / "new")


def test_a_copy_that_comes_to_be_different_is_made_again(run, tmp_path, monkeypatch):
    from slipstream import remote_files

    real, num = remote_files._copy_whole, [0]

    def cut(file, path):
        real(file, path)
        num[0] += 1
        if num[0] in (3, 4):
            path.write_bytes(path.read_bytes()[:-1] + b"?")

    monkeypatch.setattr(remote_files, "_copy_whole", cut)
    pauses = []
    there = opened(str(tmp_path / "store"), pauses=pauses)
    there.claim(run)
    checkpoint(run, 2)
    hold(run)
    there.finish(run, 2)
    assert pauses == [1.0, 2.0]


class Scripted(Uploads):
    """Each pass happens at once, in this process."""

    def __init__(self, run, clock, address):
        super().__init__(run, clock)
        self._run, self._address, self.codes = run, address, []

    def _launch(self, work):
        code = 1 if noted(self._run, lambda: opened(self._address).upload(self._run)) else 0
        self.codes.append(code)
        self._ended(code)
        return True


@pytest.mark.parametrize("adapter", [True, False])
def test_an_hour_without_the_store(run, tmp_path, adapter):
    address = str(tmp_path / "away" / "store")
    opened(address).claim(run)
    shutil.move(tmp_path / "away", tmp_path / "kept")
    (tmp_path / "away").write_text("no folder")
    clock = Clock()
    uploads = Scripted(run, clock, address)
    for second in range(3600):
        if second % 600 == 0:
            checkpoint(run, second // 600 + 1, adapter=adapter)
            hold(run)
            if second >= 1200:
                shutil.rmtree(run / f"checkpoints/step-{second // 600 - 1:06d}")
        uploads.look()
        clock.now += 1.0
    assert {*uploads.codes} == {1}
    assert 10 < len(uploads.codes) < 30, "at growing intervals"
    known = read_facts(run)
    assert "has lost" in known.error
    assert not known.is_taken_over
    waiting = Outgoing(run).waiting()
    assert [*waiting] == ([1, 2, 3, 4, 5, 6] if adapter else [6])
    states = [step for step, path in waiting.items() if (path / "state/learner.safetensors").exists()]
    assert states == [6], "one further copy of the state at most"

    (tmp_path / "away").unlink()
    shutil.move(tmp_path / "kept", tmp_path / "away")
    for _ in range(int(LONGEST_WAIT_S) + 1):
        uploads.look()
        clock.now += 1.0
    assert uploads.codes[-1] == 0
    assert Outgoing(run).waiting() == {}
    assert [*opened(address).steps()] == [*waiting]
    assert read_facts(run).error == ""
    for step in (7, 8):
        checkpoint(run, step)
        hold(run)
    opened(address).upload(run)
    assert [step for step, each in opened(address).steps().items() if has_state(each)] == [8]
    assert not [name for name in opened(address)._files.sizes("run") if "learner" in name and "step-000008" not in name]


def test_the_first_whole_model_in_the_store_can_be_resumed_from(run, tmp_path):
    """Others came while the process of the uploads started."""
    there = opened(str(tmp_path / "store"))
    there.claim(run)
    for step in (2, 4):
        checkpoint(run, step, adapter=False)
        hold(run)
    there.upload(run)
    assert [(step, has_state(each)) for step, each in there.steps().items()] == [(4, True)]
    assert Outgoing(run).waiting() == {}


def test_a_full_disk(run, tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", place], check=False).returncode:
        pytest.skip("needs the right to mount")
    try:
        pauses = []
        there = opened(str(place), pauses=pauses)
        there.claim(run)
        checkpoint(run, 2)
        checkpoint(run, 4, size=1 << 20)
        hold(run)
        assert "No space left on device" in noted(run, lambda: there.upload(run))
        assert pauses == [1.0, 2.0]
        assert [*there.steps()] == [2]
        assert not [path for path in place.rglob("*") if "slipstream-" in path.name], "no part of a file is left"
        assert [*Outgoing(run).waiting()] == [4]
    finally:
        subprocess.run(["umount", place], check=True)


def test_an_adapter_that_changes_nothing_is_no_start(run, tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_STATE", str(tmp_path / "state"))
    (tmp_path / "state/runs").mkdir(parents=True)
    (tmp_path / "state/runs/mine").symlink_to(run)
    checkpoint(run, 2, b=0.0)
    folder = checkpoint(run, 4)
    assert references.located(run_reference("run:mine")) == folder
    with pytest.raises(ConfigError, match="every B"):
        references.located(run_reference("run:mine/step-2"))
    monkeypatch.delenv(facts.STORE_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=facts.STORE_VARIABLE):
        references.located(run_reference("run:mine/step-3"))
    (folder / "weights/adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="adapter_config"):
        references.located(run_reference("run:mine/step-4"))


def test_a_store_that_cannot_be_opened():
    with pytest.raises(ConfigError):
        opened("s3://me:key@bucket/x")
    with pytest.raises(Unavailable):
        RunStore("/proc/nothing/store", "run", lambda _: None)._try(
            lambda: RemoteFolder("/proc/nothing").write("x", b"")
        )
