"""`kill -9` of supervisors and of the service, at named points and at random, with real runs."""

import os
import random
import signal
import stat
import time
from pathlib import Path

import pytest

from slipstream.runlog import read_events, read_exit, read_settings
from slipstream.service.gpus import read_gpus
from slipstream.service.records import ACTIVE, Need
from tests.waiting import ends, until

pytestmark = pytest.mark.real_start
GIB = 1 << 30
FAULTS = Path(__file__).with_name("faults")
COUNTED = {"claimed": 1, "started": 1, "its worker stored": 1, "running": 1, "finalising": 0, "concluded": 0}
"""Points in a supervisor, and how many attempts are lost there."""


@pytest.fixture
def fault(tmp_path, monkeypatch):
    def set_(point):
        monkeypatch.setenv("FAULT", point)
        monkeypatch.setenv("FAULT_MARK", str(tmp_path / "mark"))
        monkeypatch.setenv("PYTHONPATH", f"{FAULTS}{os.pathsep}{os.environ['PYTHONPATH']}")

    return set_


def check_whole(place, name, lost):
    """A run is done, after so many lost attempts, and nothing of it is left."""
    record, folder = place.record(name), place.folder_of(name)
    assert record.state == "done", record
    assert [each.kind for each in record.attempts] == ["infrastructure"] * lost + ["finished"]
    assert read_exit(folder).status == "finished"
    (weights,) = folder.glob("checkpoints/step-*/weights")
    assert (weights / "model.safetensors").stat().st_size > 0
    opened = [event["lineage"] for event in read_events(folder, kinds=("opened",))]
    assert opened == [*range(len(opened))]
    assert 1 <= len(opened) <= lost + 1, "an attempt may be lost before it opens the run"
    until(lambda: not place.provider.poll(folder, record))


@pytest.mark.service
@pytest.mark.parametrize("point", ["before the claim", *COUNTED])
def test_a_supervisor_is_killed_at_a_named_point(place, fault, point):
    fault(point)
    name = place.submit("run", 400)
    until(lambda: place.runs.keep_going() or (place.folder / "mark").exists())
    place.until(name, "done")
    check_whole(place, name, COUNTED.get(point, 0))


@pytest.mark.service
@pytest.mark.parametrize("point", ["decided", "launched"])
def test_the_service_is_killed_while_it_starts_a_run(place, fault, point):
    name = place.submit("run", 5, ticks=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULT", point)
        patch.setenv("FAULT_MARK", str(place.folder / "mark"))
        patch.setenv("PYTHONPATH", f"{FAULTS}{os.pathsep}{os.environ['PYTHONPATH']}")
        with place.serve() as service:
            assert service.process.wait(60) == -signal.SIGKILL
    with place.serve():
        place.until(name, "done", ticks=False)
    check_whole(place, name, 0)


@pytest.mark.service
def test_services_and_supervisors_are_killed_at_random(place):
    chance = random.Random(0)
    names = [place.submit(f"r{number}", 600, ticks=False) for number in range(4)]
    num_kills = lost = 0
    while num_kills < 12:
        with place.serve():
            time.sleep(chance.uniform(0.5, 4))
            active = [r for _, r in place.store.records() if r.state in ACTIVE and r.handle is not None]
            if active and len(active[0].attempts) < 3 and chance.random() < 0.4:
                os.kill(active[0].handle.pid, signal.SIGKILL)
                ends(active[0].worker.pid) if active[0].worker else None
                lost += 1
            num_kills += 1
    with place.serve() as service:
        for name in names:
            place.until(name, "done", ticks=False)
        rows = service.client.get("/v1/runs").json()
        assert [(row["id"], row["state"]) for row in rows] == [(name, "done") for name in names]
    assert sum(len(place.record(name).attempts) - 1 for name in names) <= lost
    for name in names:
        check_whole(place, name, len(place.record(name).attempts) - 1)


@pytest.mark.service
@pytest.mark.parametrize("state", ["queued", "preparing", "running"])
def test_cancel_wins_in_each_state(place, state):
    first = place.submit("first", 100_000)
    name = place.submit("second", 5) if state == "queued" else first
    place.until(name, state, ticks=False)
    place.runs.cancel(name)
    place.until(name, "cancelled")
    place.runs.cancel(first)
    place.until(first, "cancelled")
    folder, record = place.store.find(first)
    until(lambda: not place.provider.poll(folder, record))
    if state == "running":
        assert read_exit(folder).status == "interrupted"
        assert [*folder.glob("checkpoints/step-*/state")], "it saved a checkpoint"


@pytest.mark.service
def test_a_cancelled_run_whose_supervisor_is_killed_stays_cancelled(place):
    name = place.submit("run", 100_000)
    record = place.until(name, "running")
    place.runs.cancel(name)
    os.kill(record.handle.pid, signal.SIGKILL)
    found = place.until(name, "cancelled")
    assert len(found.attempts) == 1


@pytest.mark.service
def test_out_of_memory_is_tried_again_with_a_smaller_plan(place, fault):
    fault("memory")
    name = place.submit("run", 5)
    found = place.until(name, "done")
    assert [each.kind for each in found.attempts] == ["memory", "finished"]
    assert found.attempts[0].failure_class == "memory"
    assert "planned smaller" in found.attempts[0].decision
    rows = [e["row_tokens"] for e in read_events(place.folder_of(name)) if e["kind"] == "out_of_memory"]
    assert read_settings(place.folder_of(name))["training.micro_batch_tokens"] < rows[0]


class Driver:
    """A scripted `nvidia-smi`: two GPUs of 80 GiB."""

    def __init__(self, folder, monkeypatch):
        self._folder = folder
        program = folder / "bin/nvidia-smi"
        program.parent.mkdir()
        program.write_text(
            f"#!/bin/sh\ncase $1 in *compute-apps*) cat {folder}/apps;; *compute_cap*) echo 'NVIDIA H100, 9.0';; "
            f"*) cat {folder}/gpus;; esac\n"
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        self._program = program
        self.use(0, 0)

    def hang(self):
        self._program.write_text(f"#!/bin/sh\ntouch {self._folder}/asked\nexec sleep 600\n")

    def use(self, first, second, apps=""):
        rows = [f"GPU-{name}, 81920, {used * 1024}, NVIDIA H100\n" for name, used in (("a", first), ("b", second))]
        (self._folder / "gpus").write_text("".join(rows))
        (self._folder / "apps").write_text(apps, errors="surrogateescape")


@pytest.fixture
def driver(place, monkeypatch):
    return Driver(place.folder, monkeypatch)


def test_foreign_programs_are_seen_and_hidden_gpus_are_not_used(place, driver, monkeypatch):
    driver.use(30, 0, "GPU-a, 77, 30720, /usr/bin/caf\udce9\n")
    first, second = place.runs.places()
    assert (first.total_gib, first.free_gib, first.others) == (80, 50, ("caf\ufffd (process 77)",))
    assert (second.free_gib, second.others) == (80, ())
    name = place.submit("big", 5, Need(2, 60 * GIB, 55 * GIB))
    assert place.record(name).reason == "waits for 2 x 55.00 GiB of GPU memory; free: 50.00 GiB, 80.00 GiB"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.uuid for gpu in read_gpus()] == ["GPU-b"]


@pytest.mark.service
def test_a_driver_that_never_answers_holds_up_no_run(place, driver):
    name = place.submit("run", 2_000, Need(1, 20 * GIB, 10 * GIB))
    place.until(name, "running")
    driver.hang()
    until((place.folder / "asked").exists, 60)
    place.runs.cancel(name)
    begun = time.monotonic()
    place.until(name, "cancelled")
    assert time.monotonic() - begun < 15, "the answer is given up after 20 s"


@pytest.mark.service
def test_eight_runs_on_two_simulated_gpus(place, driver):
    large, small, both = Need(1, 60 * GIB, 50 * GIB), Need(1, 20 * GIB, 10 * GIB), Need(2, 30 * GIB, 30 * GIB)
    needs = [large, both, large, small, small, large, both, small]
    names = [place.submit(f"r{number}", 300, need, ticks=False) for number, need in enumerate(needs)]
    place.runs.keep_going()
    placed = {name: [each.place for each in place.record(name).leases] for name in names}
    assert placed == dict(zip(names, [["GPU-a"], [], ["GPU-b"], ["GPU-a"], ["GPU-b"], [], [], []], strict=True))
    record = place.until(names[0], "running")
    variables = Path(f"/proc/{record.worker.pid}/environ").read_bytes().decode().split("\0")
    assert "CUDA_VISIBLE_DEVICES=GPU-a" in variables
    assert any(each.startswith("SLIPSTREAM_GPUS_IN_USE=") and "GPU-a, 81920, 0" in each for each in variables)
    are_shared = {name: place.record(name).estimate.is_shared for name in names}
    assert are_shared == dict(zip(names, [True, False, True, True, True, False, False, False], strict=True))
    used = "".join(f"GPU-a, {pid}, {5 * 1024}, python3\n" for pid in (record.worker.pid, 999_999))
    driver.use(10, 0, used)
    most = 0

    def all_done():
        nonlocal most
        place.runs.keep_going()
        records = [record for _, record in place.store.records()]
        for gpu in ("GPU-a", "GPU-b"):
            held = sum(lease.bytes for r in records for lease in r.leases if lease.place == gpu)
            assert held <= 80 * GIB
            most = max(most, held)
        return all(record.state == "done" for record in records)

    until(all_done, 500)
    assert most == 80 * GIB
    starts = sorted(names, key=lambda name: place.record(name).attempts[0].started)
    for position, name in enumerate(starts):
        assert sum(later > name for later in starts[:position]) <= 4
    assert place.record(names[0]).actual.peaks_gib["gpu"] == 5, "its own processes alone"
    for name in names:
        check_whole(place, name, 0)
