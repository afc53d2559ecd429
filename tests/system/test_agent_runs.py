"""Runs that train an agent: a function or a command that sends requests of its own, with real vLLM."""

import contextlib
import functools
import json
import sys
import time
from pathlib import Path

import pytest

from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.inference.lending import TOKEN_VARIABLE
from slipstream.runlog import read_events, read_metrics
from slipstream.runlog.batches import read_batch
from tests.nodes.networks import networks
from tests.waiting import until

from .servers import TOKEN, Server, ended, server, setting_of
from .test_node_runs import finish, start
from .test_real_runs import check_run

pytestmark = pytest.mark.engine

AGENTS = Path(__file__).with_name("agents.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return new_model(folder, hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, context_length=256)


def table(**settings):
    return "{" + ", ".join(f"{name} = {json.dumps(value)}" for name, value in settings.items()) + "}"


TASKS = {"tasks": f"{AGENTS}:tasks", "reward": f"{AGENTS}:reward"}
KINDS = {"callable": {"callable": f"{AGENTS}:solve"}, "command": {"command": [sys.executable, str(AGENTS)]}}


@pytest.mark.parametrize("kind", ["callable", pytest.param("command", marks=pytest.mark.servers)])
def test_an_agent_is_trained_on_what_was_sampled(command, run_file, model, tmp_path, kind):
    folder = tmp_path / "run"
    settings = ("--environment.name", "agent", "--environment.settings", table(**TASKS, **KINDS[kind]))
    options = ("--model.path", model, "--sampling.max_tokens", "8", "--evaluation.num_tasks", "4")
    size = ("--training.steps", "2", "--environment.run_timeout_s", "60", "--environment.processes", "2")
    command("train", run_file, *settings, *options, *size, "--run.folder", folder).ok()
    check_run(folder, steps=2)
    told = [event["message"] for event in read_events(folder, kinds=("warning",))]
    told = [text for text in told if "holds instead" in text]
    asked = 'the agent asks for temperature = 0.3, logit_bias, response_format = "json_object", and the run'
    assert [text.partition("'s [")[0] for text in told] == ([asked] if kind == "callable" else [])
    rows = read_metrics(folder)
    for row in rows[1:]:
        assert (row["reward/agent_requests"], row["reward/agent_rows"], row["reward/agent_undelivered"]) == (2, 1, 0)
        assert row["rollout/turns"] == 2
        assert not [name for name in row if name.startswith("dropped/") and row[name]]
    for step in range(2):
        for rollout in read_batch(folder, step)[0].rollouts:
            (sequence,) = rollout.sequences
            assert len(rollout.turn_spans) == 2
            assert sequence.num_trainable == sum(span.end - span.start for span in rollout.turn_spans)
            assert [span.version for span in sequence.versions] == [f"0.{step}"]
            assert all(value < 0 for value, sampled in zip(sequence.logprobs, sequence.mask, strict=True) if sampled)
    sample = json.loads((folder / "samples.jsonl").read_text().splitlines()[-1])
    out = command("trace", folder, sample["id"], "--token", "3").ok()
    assert rows[-1] is not None
    assert sample["sequences"][0]["versions"][0][1] in out


@pytest.mark.parametrize(
    "kind", [pytest.param("callable", marks=pytest.mark.full), pytest.param("command", marks=pytest.mark.servers)]
)
def test_eval_and_env_test_play_an_agent(command, run_file, model, kind):
    settings = {"tasks": TASKS["tasks"], "reward": "exact", **KINDS[kind]}
    options = ("--environment.name", "agent", "--environment.settings", table(**settings), "--model.path", model)
    options += ("--sampling.max_tokens", "8", "--evaluation.num_tasks", "4")
    found = json.loads(command("eval", run_file, *options, "--json").ok())
    assert (found["eval/num_tasks"], found["eval/num_failed"], found["eval/accuracy"]) == (4, 0, 0)
    assert 2 < found["eval/length"] <= 16, "of two answers"
    more = ("--num-tasks", "4", "--model", "--samples", "3", "--json")
    tried = json.loads(command("env", "test", run_file, *options, *more).ok())
    assert tried["verdict"] == "more SFT first"
    assert (tried["model"]["num_groups"], tried["model"]["group_size"], tried["model"]["num_failed"]) == (4, 3, 0)


@pytest.mark.servers
def test_sessions_are_divided_between_two_engines(command, run_file, model, tmp_path):
    folder = tmp_path / "run"
    settings = ("--environment.name", "agent", "--environment.settings", table(**TASKS, **KINDS["callable"]))
    options = (
        "--model.path",
        model,
        "--sampling.max_tokens",
        "8",
        "--evaluation",
        "false",
        "--inference.replicas",
        "2",
    )
    size = ("--training.steps", "2", "--training.staleness", "1", "--weights.bridge", "disk")
    command("train", run_file, *settings, *options, *size, "--run.folder", folder).ok()
    rows = read_metrics(folder)
    for number in (0, 1):
        assert sum(row.get(f"replica_{number}/requests", 0) for row in rows) > 0
    versions = {
        span.version
        for step in range(2)
        for rollout in read_batch(folder, step)[0].rollouts
        for sequence in rollout.sequences
        for span in sequence.versions
    }
    assert versions <= {"0.0", "0.1"}


@contextlib.contextmanager
def at_a_server(run_file, model, **options):
    """A server on a host of its own, and what starts a run with agents beside it, or with an engine of its own."""
    settings = ("--environment.name", "agent", "--environment.settings", table(**TASKS, **KINDS["callable"]))
    sizes = ("--model.path", model, "--sampling.max_tokens", 8, "--training.steps", 3, "--run.threads", 1)

    def train(prefix, folder, *more):
        options = (*settings, *sizes, "--evaluation", "false", "--run.folder", folder, *more)
        return start(prefix, "train", run_file, *options, **{TOKEN_VARIABLE: TOKEN})

    with networks(2) as (((here, _), place), _), server(model, *place, **options) as engine:
        yield engine, functools.partial(train, here)


@pytest.mark.servers
@pytest.mark.real_start
def test_agents_at_a_server_have_the_losses_of_an_engine_on_one_host(run_file, model, tmp_path):
    one, far = tmp_path / "one", tmp_path / "far"
    with at_a_server(run_file, model) as (engine, train):
        finish(train(one, "--weights.bridge", "broadcast"))
        finish(train(far, *setting_of(engine)))
    for folder in (one, far):
        check_run(folder, steps=3)
    names = ("train/loss", "train/grad_norm", "rollout/reward_mean", "reward/agent_rows")
    rows = [[[row.get(name) for name in names] for row in read_metrics(folder)] for folder in (one, far)]
    assert rows[0] == rows[1]
    assert rows[0][-1][-1] == 1


@pytest.mark.servers
@pytest.mark.real_start
def test_agents_wait_for_a_server_that_was_killed(run_file, model, tmp_path):
    folder = tmp_path / "run"
    with at_a_server(run_file, model, dies_in="agent:40") as (dying, train):
        run = train(folder, *setting_of(dying))
        ended(dying.process)
        began = time.monotonic()
        until(lambda: any(dying.url in event["reason"] for event in read_events(folder, kinds=("engine_restart",))))
        assert time.monotonic() - began < 60
        again = Server(*dying.arguments, **dying.options)
        try:
            finish(run)
        finally:
            again.end()
    events = read_events(folder)
    published, applied = ([(e["version"], e["digest"]) for e in events if e["kind"] == k] for k in ("publish", "apply"))
    assert set(applied) == set(published)
    assert [row["step"] for row in read_metrics(folder)] == [0, 1, 2, 3]
