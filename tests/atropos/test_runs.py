"""Runs with real vLLM whose rollouts are made by real programs on `atroposlib` alone, through both directions."""

import contextlib
import json
import re
import urllib.error
import urllib.request

import pytest

from slipstream.runlog import read_events, read_exit, read_metrics, read_samples
from tests.system.conftest import command, model  # noqa: F401 (fixtures)
from tests.system.servers import server, setting_of

from .programs import answers, entrance, programs, until  # noqa: F401 (a fixture)

pytestmark = pytest.mark.engine
RUN = """
evaluation = false
[model]
path = "{model}"
[environment]
name = "atropos"
settings = {{ url = "{url}" }}
[algorithm]
kind = "grpo"
group_size = 4
[training]
steps = {steps}
prompts_per_batch = 8
learning_rate = 3e-3
[weights]
probe_tasks = 2
[run]
threads = 1
"""


class Run:
    """A run, and environments that serve it until its end."""

    def __init__(self, model, programs, command, steps, url=""):  # noqa: F811
        self.folder, self.programs = programs.folder / "run", programs
        file = programs.folder / "run.toml"
        file.write_text(RUN.format(model=model, steps=steps, url=url))
        self.arguments, self._command = ("train", file, "--run.folder", self.folder), command

    def start(self, *overrides):
        self.command = self._command(*self.arguments, *overrides)
        self.command.until(lambda: entrance(self.folder))
        self.where = entrance(self.folder)
        self.command.until(lambda: answers(f"{self.where['models'][0]}/v1/models"))
        return self

    def serve(self, *more, name="environment"):
        return self.programs.environment(self.where["command"], *more, name=name)

    def ok(self):
        self.command.ok()
        assert read_exit(self.folder).status == "finished"
        return read_metrics(self.folder)[1:]


def improves(rows):
    """Whether the reward rose, from the first steps to the last."""
    rewards = [row["reward/mean"] for row in rows]
    part = len(rewards) // 4
    return sum(rewards[-part:]) > 2 * sum(rewards[:part])


def test_a_run_trains_on_groups_that_programs_push(model, programs, command):  # noqa: F811
    run = Run(model, programs, command, steps=3).start()
    environment = run.serve("--env.sizes", "3,5", "--env.group_size", "5")
    rows = run.ok()
    assert environment.wait(30) == 0, programs.log("environment")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["staleness/max"] == 0 and row["probe/abs_logprob_diff"] < 0.001 for row in rows)
    assert {row["rollout/num"] for row in rows} <= set(range(24, 41))
    assert all(row["task/letter_0/drawn_groups"] == 8 for row in rows)
    assert max(row["mismatch/abs_logprob_diff"] for row in rows) < 1e-5, "each token has its own log-probability"
    changes = [event["change"] for event in read_events(run.folder, kinds=("atropos_environment",))]
    assert changes == ["connected"]
    samples = read_samples(run.folder)
    assert all("say " in sample["prompt"] for sample in samples)
    assert any(sample["completion"] for sample in samples), "one that ends at once has no text"


@pytest.mark.servers
def test_an_environment_improves_the_model_through_our_api(model, programs, command):  # noqa: F811
    run = Run(model, programs, command, steps=60).start()
    run.serve("--env.fields", "advantages")
    assert improves(run.ok())


@pytest.mark.servers
def test_an_environment_improves_the_model_through_a_real_run_api(model, programs, command):  # noqa: F811
    run = Run(model, programs, command, steps=60, url=programs.run_api()).start()
    run.serve()
    rows = run.ok()
    assert improves(rows)
    assert all(row["staleness/max"] == 0 for row in rows)


@pytest.mark.servers
def test_process_and_evaluate_work_against_the_engine(model, programs, command):  # noqa: F811
    run = Run(model, programs, command, steps=2).start()
    printed = run.where["command"].replace("--env.total_steps 2", "--env.total_steps 3")
    processed = programs.folder / "data/groups.jsonl"
    more = ("--env.data_path_to_save_groups", processed, "--env.use_wandb", "False")
    process = programs.environment(printed, *more, name="process", verb="process")
    results = programs.folder / "evaluated"
    more = ("--env.data_dir_to_save_evals", results, "--env.use_wandb", "False")
    evaluation = programs.environment(printed, *more, name="evaluate", verb="evaluate")
    assert process.wait(120) == 0, programs.log("process")
    assert evaluation.wait(120) == 0, programs.log("evaluate")
    groups = [json.loads(line) for line in processed.read_text().splitlines()]
    assert len(groups) == 3
    assert processed.with_suffix(".html").exists()
    assert {len(group["tokens"]) for group in groups} == {4}
    assert 0 <= json.loads((results / "metrics.json").read_text())["results"]["all"]["score"] <= 1
    run.serve()
    run.ok()


@pytest.mark.servers
def test_a_killed_environment_is_lost_and_others_go_on(model, programs, command):  # noqa: F811
    run = Run(model, programs, command, steps=12).start("--training.staleness", "1")
    killed = run.serve("--env.max_batches_offpolicy", "2", name="killed")
    run.command.until(lambda: len(read_metrics(run.folder)) > 3)
    killed.kill()
    run.serve("--env.max_batches_offpolicy", "2", name="other")
    rows = run.ok()
    assert max(row["staleness/max"] for row in rows) <= 1
    assert rows[-1]["task/letter_1/drawn_groups"] == 8


@pytest.mark.servers
def test_a_run_without_environments_ends_with_the_reason(model, programs, command):  # noqa: F811
    run = Run(model, programs, command, steps=2).start("--environment.run_timeout_s", "3")
    code, _, error = run.command.wait()
    assert code == 4
    assert "no group of rollouts came for 3 s (environment.run_timeout_s)" in error


@pytest.mark.servers
def test_an_engine_that_is_killed_is_started_again(model, programs, command):  # noqa: F811
    run = Run(model, programs, command, steps=12).start("--weights.bridge", "disk")
    environment = run.serve()
    run.command.until(lambda: len(read_metrics(run.folder)) > 4)
    run.command.engines()[0].kill()
    run.command.until(lambda: read_events(run.folder, kinds=("engine_restart",)), 30)
    rows = run.ok()
    assert environment.wait(30) == 0, programs.log("environment")
    assert [row["step"] for row in rows] == [*range(1, 13)]
    assert max(row["mismatch/abs_logprob_diff"] for row in rows) < 1e-5


def status(url):
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.servers
@pytest.mark.parametrize("number", [1, 2])
def test_a_server_that_is_killed_gives_no_tokens_of_its_files(model, programs, command, number):  # noqa: F811
    """The same log-probabilities in trainer and engine say that all tokens are of the run's versions."""
    run = Run(model, programs, command, steps=16)
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(server(model, socket=programs.folder / f"{each}.sock")) for each in range(number)
        ]
        engine = started[0]
        port = int(re.search(r":(\d+)/", engine.inference)[1])
        until(lambda: all(answers(f"{each.inference}/models") for each in started))
        run.start(*setting_of(*started))
        assert run.where["models"][0].startswith(f"{engine.inference.removesuffix('/v1')}/runs/")
        environment = run.serve()
        run.command.until(lambda: len(read_metrics(run.folder)) > 4)
        engine.process.kill()
        run.command.until(lambda: read_events(run.folder, kinds=("engine_restart",)))
        with server(model, socket=programs.folder / "0.sock", inference_port=port) as again:
            rows = run.ok()
            assert status(f"{again.inference}/models") == 200
            assert status(f"{run.where['models'][0]}/v1/models") == 503, "the run has ended"
    assert environment.wait(30) == 0, programs.log("environment")
    assert [row["step"] for row in rows] == [*range(1, 17)]
    assert all(row["staleness/max"] == 0 for row in rows)
    assert max(row["mismatch/abs_logprob_diff"] for row in rows) < 1e-5
