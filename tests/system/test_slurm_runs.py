"""Runs as jobs of a real Slurm with two nodes: `slipstream submit` and what follows."""

import itertools
import json
import time

import pytest

from slipstream.runlog import checkpoints_of, read_events, read_exit
from slipstream.service.store import record_of
from slipstream.weights.fingerprint import describe, digest
from slipstream.weights.model_files import read_model_folder
from tests.clusters.slurm_cluster import TIMEOUT_S, cluster, needs_slurm
from tests.waiting import until

from .test_node_runs import finish, numbers, options_of, start
from .test_real_runs import num_steps, sft_file

pytestmark = [pytest.mark.real_start, needs_slurm]
LONG_S = 300.0


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with cluster() as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("SLIPSTREAM_STATE", str(tmp_path_factory.mktemp("state")))
        yield made


class Submitted:
    """A run of SFT over two nodes as a job."""

    def __init__(self, slurm, run_file, folder, steps, *options, nodes=2):
        self.slurm, self.folder, self.file, self.steps = slurm, folder, sft_file(run_file), steps
        self.given, self.num_cancelled = ("--nodes", nodes, "--cpus-per-task", 1, "--to", "slurm", "--json"), 0
        self.submit(*options)

    def submit(self, *options):
        self.printed = self.slurm.slipstream("submit", self.file, *self.settings(self.folder), *self.given, *options)
        self.job = json.loads(self.printed.splitlines()[0])["job"]
        assert self.job

    def cancel_and_go_on(self, more):
        """The run has so many more steps, in another job."""
        assert self.slurm.slipstream("cancel", self.folder).startswith("cancelled: ")
        until(lambda: self.has_ended, LONG_S)
        until(lambda: not self.slurm.ours())
        self.steps, self.num_cancelled = num_steps(self.folder) + more, lineages(self.folder)
        self.submit("--resume")

    def settings(self, folder):
        return ("--algorithm.kind", "sft", "--training.steps", self.steps, *options_of("", folder, nodes=1))

    def until(self, *states, restarts=0):
        until(lambda: self.slurm.state(self.job) in [(state, restarts) for state in states], LONG_S)

    def until_step(self, step):
        """Slurm is asked once a second: many steps pass during its answer."""
        looks = itertools.count(1)
        until(lambda: num_steps(self.folder) >= step or (next(looks) % 100 == 0 and self.has_ended), LONG_S)
        assert num_steps(self.folder) >= step, self.output

    @property
    def has_ended(self):
        return self.slurm.state(self.job)[0] in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")

    @property
    def output(self):
        logs = [self.folder / "service" / name for name in ("output.log", "supervisor.log")]
        return "".join(path.read_text() for path in logs if path.exists())

    @property
    def record(self):
        return record_of(self.folder)

    def check_whole(self, tmp_path, restarts, attempts=0):
        """It has ended with the losses and weights of an undisturbed run on one host, and nothing is left of it."""
        until(lambda: self.has_ended, LONG_S)
        assert self.slurm.state(self.job) == ("COMPLETED", restarts), self.output
        assert (self.record.state, len(self.record.attempts)) == ("done", attempts or restarts + 1)
        until(lambda: not self.slurm.ours())
        finish(start((), "train", self.file, *self.settings(tmp_path / "one")))
        assert numbers(self.folder) == numbers(tmp_path / "one")
        assert len(numbers(self.folder)) == self.steps
        assert final_weights(self.folder) == final_weights(tmp_path / "one")
        assert lineages(self.folder) == self.num_cancelled + (attempts or restarts + 1)


def lineages(folder):
    return sum(event["kind"] == "opened" for event in read_events(folder))


def final_weights(folder):
    """The step of the last checkpoint, and the digest of its weights, over every bit."""
    last = checkpoints_of(folder)[-1]
    return last.name, digest(describe(read_model_folder(last / "weights")))


def test_a_job_over_two_nodes_has_the_losses_of_one_host(slurm, run_file, tmp_path):
    run = Submitted(slurm, run_file, tmp_path / "run", 4, "--follow")
    assert "is node-1 of" in run.printed
    run.check_whole(tmp_path, restarts=0)


def test_a_job_that_could_never_start_is_refused(slurm, run_file, tmp_path):
    common = (
        "submit",
        sft_file(run_file),
        "--to",
        "slurm",
        "--algorithm.kind",
        "sft",
        *options_of("", tmp_path / "run", nodes=1),
    )
    common += ("--training.ranks", 3, "--cpus-per-task", 1)
    before = slurm.slipstream("status", "--json")
    printed = slurm.slipstream(*common, "--nodes", 3, code=2)
    assert "sbatch refuses the job" in printed
    assert not (tmp_path / "run").exists()
    assert "#SBATCH --nodes=3" in slurm.slipstream(*common, "--nodes", 3, "--dry-run")
    assert "contradicts --nodes 3" in slurm.slipstream(*common, "--nodes", 3, "--cluster.nodes", 2, code=2)
    assert slurm.run("squeue", "--noheader") == ""
    assert slurm.slipstream("status", "--json") == before


@pytest.mark.full
def test_a_requeue_by_the_signal_changes_no_loss(slurm, run_file, tmp_path):
    run = Submitted(slurm, run_file, tmp_path / "run", 100_000)
    run.until_step(5)
    again = ("submit", run.file, *run.settings(run.folder), "--to", "slurm", "--resume")
    assert "is running: wait for its end" in slurm.slipstream(*again, code=2)
    (shown,) = json.loads(slurm.slipstream("status", run.folder, "--json"))
    assert (shown["job"], shown["state"]) == (run.job, "running")
    slurm.run("scancel", "--signal=USR1", "--batch", run.job)
    until(lambda: lineages(run.folder) == 2, LONG_S)
    run.until_step(num_steps(run.folder) + 5)
    assert slurm.state(run.job) == ("RUNNING", 1)
    assert "the job is requeued: the job's time is over" in run.output
    (resumed,) = (event["step"] for event in read_events(run.folder) if event["kind"] == "resume")
    assert resumed >= 5
    run.cancel_and_go_on(5)
    run.check_whole(tmp_path, restarts=0)


@pytest.mark.cluster
def test_the_time_limit_requeues_until_the_run_is_whole(slurm, run_file, tmp_path):
    """Slurm signals 70 s before three minutes are over. A busy machine may need several starts: each is one more."""
    run = Submitted(slurm, run_file, tmp_path / "run", 100_000, "--time", "3:00", "--run.grace_s", 10)
    run.until("PENDING", "RUNNING", restarts=1)
    run.until_step(num_steps(run.folder) + 5)
    assert "the job is requeued: the job's time is over" in run.output
    job = run.job
    run.cancel_and_go_on(5)
    assert 2 <= run.num_cancelled <= slurm.state(job)[1] + 1
    run.check_whole(tmp_path, restarts=0)


@pytest.mark.full
def test_cancel_leaves_a_checkpoint_and_no_process(slurm, run_file, tmp_path):
    run = Submitted(slurm, run_file, tmp_path / "run", 100_000)
    run.until_step(5)
    assert json.loads(slurm.slipstream("cancel", run.folder, "--json"))["cancelled"]
    until(lambda: run.has_ended, LONG_S)
    until(lambda: not slurm.ours())
    assert (slurm.state(run.job), run.record.state) == (("FAILED", 0), "cancelled")
    report = read_exit(run.folder)
    assert (report.status, report.exit_code) == ("interrupted", 130)
    assert (run.folder / f"checkpoints/step-{report.step:06d}").is_dir()
    assert "has ended already: cancelled" in slurm.slipstream("cancel", run.folder)


@pytest.mark.cluster
def test_a_failure_of_the_run_is_one_more_attempt_in_the_job(slurm, run_file, tmp_path):
    run = Submitted(slurm, run_file, tmp_path / "run", 60, "--run.checkpoint_every", 1)
    run.until_step(5)
    (rank,) = (each for each in slurm.ours() if "slipstream.launch.ranks.child" in each.cmdline())
    rank.kill()
    run.check_whole(tmp_path, restarts=0, attempts=2)
    (restart,) = (event for event in read_events(run.folder) if event["kind"] == "restart")
    assert "trainer process 1" in restart["reason"]
    assert run.record.attempts[0].message == restart["reason"]
    assert run.record.attempts[0].decision.startswith("retry 1 of 3")


@pytest.mark.cluster
def test_a_signal_in_the_first_seconds_is_one_requeue(slurm, run_file, tmp_path):
    run = Submitted(slurm, run_file, tmp_path / "run", 20)
    until((run.folder / "service/start").exists)
    slurm.run("scancel", "--signal=USR1", "--batch", run.job)
    assert not (run.folder / "run.lock").exists(), "the run does not listen yet"
    run.check_whole(tmp_path, restarts=1)


@pytest.mark.cluster
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_run_that_is_killed_is_one_more_attempt_in_the_job(slurm, run_file, tmp_path, nodes):
    run = Submitted(slurm, run_file, tmp_path / "run", 60, "--run.checkpoint_every", 1, nodes=nodes)
    run.until_step(5)
    slurm.rank_0().kill()
    run.check_whole(tmp_path, restarts=0, attempts=2)
    assert [each.kind for each in run.record.attempts] == ["infrastructure", "finished"]


@pytest.mark.cluster
def test_a_node_that_is_down_is_one_requeue(slurm, run_file, tmp_path):
    run = Submitted(slurm, run_file, tmp_path / "run", 200, "--run.checkpoint_every", 1)
    run.until_step(5)
    slurm.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    run.until("PENDING", restarts=1)
    until(lambda: not slurm.ours())
    slurm.run("scontrol", "update", "NodeName=n2", "State=RESUME", code=None)  # it may be back already
    run.check_whole(tmp_path, restarts=1)


@pytest.mark.cluster
@pytest.mark.parametrize(("nodes", "node"), [(2, "n2"), (2, "n1"), (1, "n1")])
def test_a_killed_slurmd_is_one_requeue_and_the_earlier_start_ends(slurm, run_file, tmp_path, nodes, node):
    run = Submitted(slurm, run_file, tmp_path / "run", 100_000, "--run.checkpoint_every", 100, nodes=nodes)
    run.until_step(5)
    first = {each.pid for each in slurm.ours()}
    slurm.kill_slurmd(node)
    began = time.monotonic()
    try:
        run.until("PENDING", "RUNNING", restarts=1)
        noticed_s = time.monotonic() - began
        if nodes == 1:  # the other node has the job now
            run.until("RUNNING", restarts=1)
        until(lambda: not first & {each.pid for each in slurm.ours()}, LONG_S)
        assert time.monotonic() - began < noticed_s + 40  # KillWait, and a little
        if nodes == 1:
            until(lambda: lineages(run.folder) == 2, LONG_S)
    finally:
        slurm.start_slurmd(node)
    assert noticed_s > TIMEOUT_S / 2
    until(lambda: lineages(run.folder) == 2, LONG_S)
    run.until_step(num_steps(run.folder) + 5)
    assert slurm.state(run.job) == ("RUNNING", 1)
    run.cancel_and_go_on(5)
    assert run.num_cancelled == 2
    run.check_whole(tmp_path, restarts=0)


@pytest.mark.cluster
def test_one_node_is_a_job_too(slurm, run_file, tmp_path):
    run = Submitted(slurm, run_file, tmp_path / "run", 4, "--follow", nodes=1)
    assert "is node-" not in run.printed
    run.check_whole(tmp_path, restarts=0)
