"""The same run in this machine's queue, in a job of a real Slurm, and on a real Ray cluster."""

import json

import msgspec
import pytest

from slipstream.cli import main
from slipstream.runlog import read_metrics
from slipstream.service.store import update
from tests.clusters.ray_clusters import two_nodes
from tests.clusters.slurm_cluster import cluster, needs_slurm
from tests.waiting import until

pytestmark = pytest.mark.real_start
LONG_S = 300.0


@pytest.fixture(scope="module")
def slurm():
    with cluster() as made:
        yield made


def losses(folder):
    return [(row["step"], row["train/loss"]) for row in read_metrics(folder)]


def submit(slurm, place, name, *options, steps=5, code=0):
    file, folder = place.run_file(steps, f"{name}.toml"), place.folder / name
    given = (*options, "--to", "slurm", "--cpus-per-task", 1, "--json", "--run.folder", folder)
    return json.loads(slurm.slipstream("submit", file, *given, code=code).splitlines()[-1])


def status(slurm, name):
    return json.loads(slurm.slipstream("status", name, "--json"))[0]


def until_state(slurm, name, *states):
    def is_there():
        found = status(slurm, name)
        return found if found["state"] in states else None

    return until(is_there, LONG_S)


@pytest.mark.service
@needs_slurm
def test_one_option_makes_a_run_a_job_of_slurm_with_equal_losses(slurm, place):
    here = place.submit("here")
    run = submit(slurm, place, "there", "--store", place.folder / "store", "--follow")
    assert run["state"] == "done"
    record = place.record("there")
    assert [each.kind for each in record.attempts] == ["finished"]
    assert record.attempts[0].places in (("n1",), ("n2",))
    assert record.estimate.memory_gib > 0
    assert (place.folder / "store/there/DONE").exists()
    assert "made all 5 steps" in slurm.slipstream("logs", "there")
    place.until(here, "done")
    assert losses(place.folder / "there") == losses(place.folder_of(here))
    assert len(losses(place.folder / "there")) == 5
    until(lambda: not slurm.ours())


@pytest.mark.service
@needs_slurm
def test_a_job_over_two_nodes_is_requeued_by_the_warning_of_its_time_limit(slurm, place):
    run = submit(slurm, place, "two", "--nodes", 2, "--training.ranks", 2, steps=400)
    assert slurm.slipstream("status").splitlines()[0].split()[:4] == ["run", "state", "step", "to"]
    until(lambda: len(losses(place.folder / "two")) > 5, LONG_S)
    slurm.run("scancel", "--signal=USR1", "--batch", run["job"])
    found = until_state(slurm, "two", "done", "failed", "cancelled")
    assert found["state"] == "done"
    assert [each["kind"] for each in found["attempts"]] == ["stopped", "finished"]
    assert found["attempts"][0]["decision"].startswith("the next start continues from step")
    assert slurm.state(run["job"]) == ("COMPLETED", 1)
    assert [step for step, _ in losses(place.folder / "two")] == list(range(1, 401))


@pytest.mark.service
@needs_slurm
def test_a_lost_pass_makes_no_second_job_and_a_killed_run_no_second_one_either(slurm, place):
    run = submit(slurm, place, "lost", "--sbatch-options=--hold", steps=100_000)
    job = place.record("lost").job
    # As after a kill between sbatch and the note of its number, twice.
    for _ in range(2):
        update(place.folder / "lost", lambda r: msgspec.structs.replace(r, job=msgspec.structs.replace(r.job, id="")))
        slurm.slipstream("status")
        assert place.record("lost").job == job
    assert len(slurm.run("squeue", "--noheader").splitlines()) == 1
    slurm.run("scontrol", "release", run["job"])
    until_state(slurm, "lost", "running")
    slurm.rank_0().kill()
    until(lambda: len(place.record("lost").attempts) == 2, LONG_S)
    until_state(slurm, "lost", "running")
    until(lambda: losses(place.folder / "lost"), LONG_S)
    assert json.loads(slurm.slipstream("cancel", "lost", "--json"))["cancelled"]
    found = until_state(slurm, "lost", "cancelled")
    assert found["attempts"][0]["kind"] == "infrastructure"
    assert found["job"] == run["job"]
    assert [*(place.folder / "lost").glob("checkpoints/step-*/state")]
    until(lambda: not slurm.ours())


@pytest.mark.service
@needs_slurm
def test_what_happens_to_jobs_outside_is_seen(slurm, place):
    """A waiting job is cancelled by scancel. A killed supervisor's job is followed by another. A job that Slurm has
    forgotten without a start is a failure."""
    held = "--sbatch-options=--hold"
    first, second = (submit(slurm, place, name, held, steps=5) for name in ("first", "second"))
    assert until_state(slurm, "first", "queued")["reason"].startswith(f"job {first['job']} of Slurm: PENDING")
    slurm.run("scancel", first["job"])
    until_state(slurm, "first", "cancelled")
    forgotten = msgspec.structs.replace(place.record("second").job, name="no-such", id="99999", submitted=1.0)
    slurm.slipstream("cancel", "second")
    assert second["job"] not in slurm.run("squeue", "--noheader", "--format=%i")
    third = submit(slurm, place, "third", held, steps=5)
    update(place.folder / "third", lambda r: msgspec.structs.replace(r, job=forgotten))
    assert "no longer knows job 99999" in until_state(slurm, "third", "failed")["reason"]
    slurm.run("scancel", third["job"])
    fourth = submit(slurm, place, "fourth", steps=400)
    until_state(slurm, "fourth", "running")
    (supervisor,) = (each for each in slurm.ours() if "slipstream.service.slurm_job" in each.cmdline())
    supervisor.kill()
    found = until_state(slurm, "fourth", "done", "failed")
    assert (found["state"], [each["kind"] for each in found["attempts"]]) == ("done", ["infrastructure", "finished"])
    assert found["job"] != fourth["job"]
    until(lambda: not slurm.ours())


@pytest.fixture(scope="module")
def ray():
    with two_nodes() as made:
        yield made


@pytest.fixture
def slipstream(capsys):
    """Runs a command here; the last line of its JSON."""

    def run(*arguments, code=0):
        with pytest.raises(SystemExit) as ended:
            main([*map(str, arguments), "--json"])
        out = capsys.readouterr().out
        assert ended.value.code == code, out
        return json.loads(out.splitlines()[-1])

    return run


@pytest.mark.service
def test_one_option_makes_a_run_an_actor_of_ray_with_equal_losses(ray, place, slipstream):
    here = place.submit("here")
    given = ("--to", "ray", "--ray-address", ray.address, "--run.folder", place.folder / "there")
    run = slipstream("submit", place.run_file(5, "there.toml"), *given, "--store", place.folder / "store", "--follow")
    assert run["state"] == "done"
    (attempt,) = place.record("there").attempts
    assert (attempt.kind, len(attempt.places)) == ("finished", 1)
    assert (place.folder / "store/there/DONE").exists()
    place.until(here, "done")
    assert losses(place.folder / "there") == losses(place.folder_of(here))
    ray.check_as_before()
    large = slipstream("submit", place.run_file(), *given[:4], "--nodes", 3, "--training.ranks", 3, code=2)
    assert "CPUs and 0 GPUs are asked for, and Ray has 1 CPUs, 0 GPUs; 1 CPUs, 0 GPUs" in large["message"]
    lost = slipstream("submit", place.run_file(), "--to", "ray", "--ray-address", "127.0.0.1:1", code=2)
    assert "no Ray cluster answers at 127.0.0.1:1" in lost["message"]


@pytest.mark.service
def test_a_killed_actor_is_one_more_job_and_cancel_saves_a_checkpoint(ray, place, slipstream):
    folder = place.folder / "there"
    given = ("--to", "ray", "--ray-address", ray.address, "--run.folder", folder, "--run.checkpoint_every", 100)
    slipstream("submit", place.run_file(100_000, "there.toml"), *given)
    place.until("there", "running")
    first = place.record("there").job
    ray.kill_job(first.name)
    until(lambda: place.runs.keep_going() or place.record("there").job.number == 2, LONG_S)
    place.until("there", "running")
    assert [each.kind for each in place.record("there").attempts] == ["infrastructure", None]
    until(lambda: losses(folder), LONG_S)
    place.runs.cancel("there")
    place.until("there", "cancelled")
    assert [*folder.glob("checkpoints/step-*/state")]
    ray.check_as_before()
