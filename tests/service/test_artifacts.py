"""Artifacts of real small runs in a store: uploaded, killed, resumed from elsewhere, taken as a model."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import fsspec
import psutil
import pytest

from slipstream.artifacts.facts import read_facts
from slipstream.artifacts.outgoing import has_state
from slipstream.artifacts.store import RunStore
from slipstream.cli import main
from slipstream.commands.push import push
from slipstream.config import load_config
from slipstream.errors import ConfigError
from slipstream.plan.deployable import find_deployable, local_path, with_weights_folder
from slipstream.runlog import read_events, read_metrics, read_settings
from slipstream.service.client import RemoteRuns
from slipstream.trainer.checkpoints.checkpoint import damage
from tests.s3_server import KEY, SECRET, TOKEN, Server, give_credentials
from tests.service.hub import Hub
from tests.waiting import ends, until

from .conftest import GRPO, Place

pytestmark = pytest.mark.real_start
FAULTS = Path(__file__).with_name("faults")
LORA = "checkpoint_every = {every}\n[lora]\nrank = 2\n"
EVERY = "checkpoint_every = {every}\n"


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("moto"))
    yield server
    server.end()


@pytest.fixture
def bucket(request, monkeypatch):
    pytest.importorskip("s3fs", reason="needs s3fs: the extra `dev` brings it")
    give_credentials(monkeypatch, request.getfixturevalue("server").url)
    name = f"bucket-{secrets.token_hex(4)}"
    fsspec.filesystem("s3", use_listings_cache=False).mkdir(name)
    return f"s3://{name}/runs"


@pytest.fixture
def fault(tmp_path, monkeypatch):
    def set_(point):
        monkeypatch.setenv("FAULT", point)
        monkeypatch.setenv("FAULT_MARK", str(tmp_path / "mark"))
        monkeypatch.setenv("PYTHONPATH", f"{FAULTS}{os.pathsep}{os.environ['PYTHONPATH']}")

    return set_


@pytest.fixture
def other(place, monkeypatch):
    """Another machine: another state folder, and another folder of runs. From its making on commands are there."""
    made = []

    def make():
        folder = place.folder / "other"
        folder.mkdir()
        monkeypatch.setenv("SLIPSTREAM_STATE", str(folder / "state"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        made.append(Place(folder, place.model))
        return made[0]

    yield make
    for each in made:
        each.end()


def check_store(address, name, steps=None):
    """`DONE` is there, and all that it names, with these steps; the last alone can be resumed from."""
    there = RunStore(address, name)
    done, found, files = there.done(), there.steps(), there._files.sizes(name)
    assert done is not None
    assert steps is None or [*found] == steps
    for step, manifest in found.items():
        for file, facts in manifest.files.items():
            assert files[f"checkpoints/step-{step:06d}/{file}"] == facts.size_bytes
        assert any(file.startswith("weights/") for file in manifest.files)
        assert ("state/learner.safetensors" in manifest.files) == (step == max(found))
    assert {file: files[file] for file in done.files} == {n: each.size_bytes for n, each in done.files.items()}
    assert done.step == max(found)
    return found


def nothing_runs(place):
    def is_of_it(process):
        try:
            return any(str(place.folder) in part for part in process.cmdline())
        except psutil.Error:
            return False

    return not [each for each in psutil.process_iter() if each.pid != os.getpid() and is_of_it(each)]


def losses(folder):
    return {row["step"]: row["train/loss"] for row in read_metrics(folder) if "train/loss" in row}


def test_a_run_leaves_its_artifacts_and_is_a_model(place, tmp_path, capsys, monkeypatch, other):
    """In a folder as the store; `checkpoints` lists them, and from another machine they are models."""
    store = str(tmp_path / "store")
    monkeypatch.setenv("SLIPSTREAM_STORE", store)
    with pytest.raises(SystemExit):
        main(["submit", str(place.run_file(6, more=LORA.format(every=2))), "--to", "local", "--json"])
    name = json.loads(capsys.readouterr().out)["id"]
    place.until(name, "done")
    check_store(store, name, [2, 4, 6])
    assert [*(place.folder_of(name) / "service/outgoing").iterdir()] == []
    with pytest.raises(SystemExit):
        main(["checkpoints", name, "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["weights"]) for row in rows] == [(f"run:{name}/step-{n}", "adapter") for n in (2, 4, 6)]
    assert [len(row["places"]) for row in rows] == [1, 2, 2]
    assert [row["can_resume"] for row in rows][::2] == [False, True]
    here = find_deployable(f"run:{name}/step-4", str(place.model))
    assert (here.name, here.adapter.parent.name) == (f"run:{name}/step-4", "step-000004")
    with pytest.raises(ConfigError, match="has a run"):  # of this name, from another folder
        other().submit("x", 6, store=store, more=f'folder = "{tmp_path}/elsewhere/{name}"\n')

    with pytest.raises(SystemExit):
        main(["checkpoints", name, "--json"])
    assert [len(row["places"]) for row in json.loads(capsys.readouterr().out)] == [1, 1, 1]
    monkeypatch.delenv("SLIPSTREAM_STORE")
    with pytest.raises(ConfigError, match="SLIPSTREAM_STORE"):
        local_path(f"run:{name}/step-4")
    monkeypatch.setenv("SLIPSTREAM_STORE", store)
    for text in (f"run:{name}/step-4", f"run:{name}"):
        assert find_deployable(text, str(place.model)).adapter.is_relative_to(place.folder / "other/cache")
    for text in (f"run:{name}/step-5", "run:nothing", "run:../x", "run:"):
        with pytest.raises(ConfigError):
            local_path(text)


@pytest.mark.service
@pytest.mark.parametrize("kind", ["stopped", "complete"])
def test_another_machine_continues_from_s3_with_the_same_losses(place, other, bucket, kind):
    whole = place.submit("whole", 6000)
    place.until(whole, "done")
    more = f'folder = "{{}}/moved"\n{EVERY.format(every=1500)}'
    name = place.submit("moved", 6000, store=bucket, more=more.format(place.folder / "runs"))
    folder = place.folder_of(name)
    if kind == "stopped":
        until(lambda: place.runs.keep_going() or read_facts(folder).steps)
        check_no_secret(place)
        record = place.record(name)
        os.kill(record.handle.pid, signal.SIGKILL)
        assert ends(record.worker.pid)
        until(lambda: nothing_runs(place))
        assert not (folder / "exit.json").exists()
    else:
        place.until(name, "done")
        check_store(bucket, name)
    check_no_secret(place)
    shutil.rmtree(folder)
    there = other()
    again = there.submit("moved", 6000, store=bucket, resume=True, more=more.format(there.folder / "runs"))
    there.until(again, "done")
    new = there.folder_of(again)
    assert new != folder
    expected = losses(place.folder_of(whole))
    assert losses(new) == expected
    check_store(bucket, again)
    opened = [event["kind"] for event in read_events(new)].count("opened")
    resumed = [event["step"] for event in read_events(new, kinds=("resume",))]
    assert (len(resumed), resumed[:1] > [0]) == ((1, True) if kind == "stopped" else (0, False))
    assert opened == (2 if kind == "stopped" else 1), "a complete run is not run again"
    assert damage(new / "checkpoints/step-006000", whole="") is None


@pytest.mark.service
@pytest.mark.engine
def test_another_machine_continues_reinforcement_learning_with_the_same_losses(place, other, bucket):
    """With real vLLM. The ledger of groups stays on the lost machine."""
    place.template = GRPO
    whole = place.submit("whole", 200)
    place.until(whole, "done")
    more = f'folder = "{{}}/moved"\n{EVERY.format(every=40)}'
    name = place.submit("moved", 200, store=bucket, more=more.format(place.folder / "runs"))
    folder = place.folder_of(name)
    place.until(name, "running")
    uploaded = RunStore(bucket, name)
    until(lambda: read_facts(folder).steps and any(map(has_state, uploaded.steps().values())), 240)
    record = place.record(name)
    os.kill(record.handle.pid, signal.SIGKILL)
    assert ends(record.worker.pid)
    until(lambda: nothing_runs(place))
    before = losses(folder)
    assert len(before) < 200
    shutil.rmtree(folder)
    there = other()
    there.template = GRPO
    again = there.submit("moved", 200, store=bucket, resume=True, more=more.format(there.folder / "runs"))
    there.until(again, "done")
    (resumed,) = [event["step"] for event in read_events(there.folder_of(again), kinds=("resume",))]
    assert resumed in range(40, 200, 40)
    assert losses(there.folder_of(again)) == losses(place.folder_of(whole))
    check_store(bucket, again)


def check_no_secret(place):
    for process in psutil.process_iter(["cmdline"]):
        assert not any(secret in part for part in process.info["cmdline"] or () for secret in (KEY, SECRET, TOKEN))
    for folder, _, names in os.walk(place.folder):
        for path in (Path(folder, name) for name in names):
            with contextlib.suppress(FileNotFoundError):  # a run under way removes files
                data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
                assert not any(secret.encode() in data for secret in (KEY, SECRET, TOKEN)), path


POINTS = (
    *("before owner.json", "before adapter_model.safetensors", "before manifest.json", "after manifest.json"),
    *("before events.jsonl", "before DONE", "after DONE"),
)


@pytest.mark.service
@pytest.mark.parametrize("whom", ["", " with its supervisor"])
@pytest.mark.parametrize("point", POINTS)
def test_uploads_are_killed_at_a_named_point(place, fault, tmp_path, point, whom):
    fault(f"{point}{whom}")
    store = str(tmp_path / "store")
    name = place.submit("run", 300, store=store, more=LORA.format(every=100))
    until(lambda: place.runs.keep_going() or (place.folder / "mark").exists(), 120)
    place.until(name, "done")
    record, folder = place.record(name), place.folder_of(name)
    found = check_store(store, name)
    assert max(found) == 300
    assert {*read_facts(folder).steps} == {*found}
    assert all("weights/adapter_model.safetensors" in manifest.files for manifest in found.values())
    lost = [each.kind for each in record.attempts[:-1]]
    assert lost in ([], ["infrastructure"])
    rows = [row["step"] for row in read_metrics(folder)]
    assert rows == sorted({*rows}) == [*range(1, 301)]
    opened = [event["kind"] for event in read_events(folder)].count("opened")
    assert opened <= 1 + len(lost)
    until(lambda: nothing_runs(place))


@pytest.mark.service
def test_uploads_outlive_the_service(place, tmp_path):
    store = str(tmp_path / "store")
    with place.serve(SLIPSTREAM_STORE=store) as service:
        settings = place.run_file(600, more=LORA.format(every=100)).read_text()
        answer = service.client.post("/v1/runs", json={"name": "run", "settings": settings})
        assert answer.status_code == 201, answer.text
        name = answer.json()["id"]
        place.until(name, "running", ticks=False)
        service.kill()
    place.until(name, "done", ticks=False)
    check_store(store, name)
    with place.serve() as service:
        rows = RemoteRuns(service.url, "").checkpoints(name)
        assert rows[-1].name == f"run:{name}/step-600"


@pytest.mark.service
def test_a_store_without_room_is_said_and_nothing_is_lost(place, fault, tmp_path, monkeypatch):
    """Uploads cannot write files of more than 6,000 bytes."""
    with monkeypatch.context():
        fault("no room")
        store = str(tmp_path / "store")
        name = place.submit("run", 5, store=store, more=LORA.format(every=100))
        found = place.until(name, "failed")
    assert [each.kind for each in found.attempts] == ["infrastructure"] * 4
    assert "uploads" in found.reason
    assert "File too large" in found.reason
    assert RunStore(store, name).done() is None
    assert RunStore(store, name).steps() == {}
    monkeypatch.setenv("FAULT", "")
    folder = place.folder_of(name)
    more = f'folder = "{folder}"\n{LORA.format(every=100)}'
    assert place.submit("run", 5, store=store, resume=True, more=more) == name
    place.until(name, "done")
    check_store(store, name, [5])
    assert [event["kind"] for event in read_events(folder)].count("opened") == 1


@pytest.mark.service
def test_a_run_that_continues_in_another_folder_ends_here(place, tmp_path):
    store = str(tmp_path / "store")
    name = place.submit("run", 100_000, store=store, more=LORA.format(every=50))
    folder = place.folder_of(name)
    until(lambda: place.runs.keep_going() or read_facts(folder).steps)
    (tmp_path / "elsewhere").mkdir()
    RunStore(store, name).claim(tmp_path / "elsewhere")
    found = place.until(name, "failed")
    assert "another run folder" in found.reason
    assert [each.kind for each in found.attempts] == ["user"]


@pytest.mark.service
def test_a_run_starts_from_another_ones_checkpoint_and_a_changed_file_is_refused(place, other, tmp_path, monkeypatch):
    store = str(tmp_path / "store")
    monkeypatch.setenv("SLIPSTREAM_STORE", store)
    name = place.submit("run", 5, store=store)
    place.until(name, "done")
    there = other()
    file = there.run_file(5)
    file.write_text(file.read_text().replace(f'path = "{place.model}"', f'path = "run:{name}/step-5"'))
    loaded = load_config(file)
    folder = Path(with_weights_folder(loaded).config.model.path)
    assert folder.is_relative_to(there.folder / "cache"), "it came from the store"
    with pytest.raises(SystemExit) as ended:
        main(["train", str(file), "--run.folder", str(there.folder / "next"), "--plain"])
    assert ended.value.code == 0
    first = losses(there.folder / "next")[1]
    assert first < losses(place.folder_of(name))[1]

    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(
        ConfigError, match=r"model\.safetensors has other contents .*digest [0-9a-f]{12}, not [0-9a-f]{12}"
    ):
        with_weights_folder(loaded)
    shutil.rmtree(there.folder / "cache")
    (changed,) = Path(store).rglob("step-000005/weights/model.safetensors")
    changed.write_bytes(data)
    with pytest.raises(ConfigError, match=r"digest [0-9a-f]{12}, not [0-9a-f]{12}"):
        with_weights_folder(loaded)


@pytest.mark.service
def test_a_run_starts_from_an_adapter_and_a_changed_one_is_refused(place, capsys):
    first = place.submit("first", 4, more=LORA.format(every=2))
    place.until(first, "done")

    def submitted():
        more = f'[lora]\nrank = 2\npath = "run:{first}/step-2"\n'
        with pytest.raises(SystemExit):
            main(["submit", str(place.run_file(2, "next.toml", more)), "--to", "local", "--json"])
        return json.loads(capsys.readouterr().out)

    name = submitted()["id"]
    place.until(name, "done")
    assert f'path = "run:{first}/step-2"' in (place.folder_of(name) / "service/run.toml").read_text()
    weights = place.folder_of(first) / "checkpoints/step-000002/weights"
    assert read_settings(place.folder_of(name))["lora.path"] == str(weights)
    assert losses(place.folder_of(name))[1] < losses(place.folder_of(first))[1]
    file = weights / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    answer = submitted()
    assert answer["error"] == "ConfigError"
    assert "digest" in answer["message"]
    assert {*place.store.all()} == {first, name}


@pytest.mark.service
def test_a_model_is_pushed_with_a_card(place, monkeypatch):
    adapter = place.submit("adapter", 2, more=LORA.format(every=2))
    name = place.submit("run", 5)
    place.until(name, "done")
    with pytest.raises(ConfigError, match="path of this machine"):
        push(adapter, "me/mine")
    command = [sys.executable, "-P", "-m", "slipstream.cli", "push", name, "me/mine", "--step", "5", "--json"]

    def pushed(hub, token="hf_hunter2hunter2"):
        variables = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
        assert token not in done.stdout + done.stderr
        return done.returncode, json.loads(done.stdout), done.stderr

    with Hub() as hub:
        code, answer, errors = pushed(hub)
        assert code == 0, (answer, errors, hub.paths)
        assert (answer["repo"], answer["commit"], answer["step"]) == ("me/mine", "a" * 40, 5)
        assert hub.repos["me/mine"]["visibility"] == "private"
        (files,) = hub.commits
        weights = place.folder_of(name) / "checkpoints/step-000005/weights"
        assert {*files} == {path.name for path in weights.iterdir()} | {"README.md"}
        assert files["model.safetensors"] == (weights / "model.safetensors").read_bytes()
        card = files["README.md"].decode()
        assert "| step | 5 |" in card
        assert "library_name" in card
        assert str(place.folder) not in card
        hub.status = 401
        code, answer, _ = pushed(hub)
        assert (code, answer["error"]) == (2, "ConfigError")
        assert "HF_TOKEN" in answer["message"]
