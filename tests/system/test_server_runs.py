"""Runs on engines that are servers: real vLLM and gloo, each server on a host of its own."""

import asyncio
import contextlib
import json
import signal
import time
import urllib.error
import urllib.request

import aiohttp
import psutil
import pytest

from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.errors import EngineError
from slipstream.inference.lending import TOKEN_VARIABLE
from slipstream.runlog import read_events, read_exit, read_metrics
from tests.nodes.networks import networks
from tests.waiting import is_there, until

from .servers import TOKEN, Server, ended, server, setting_of
from .test_node_runs import PARITY, finish, start
from .test_real_runs import check_run, num_steps

pytestmark = pytest.mark.real_start
TOKENS = {TOKEN_VARIABLE: TOKEN}


def train(prefix, run_file, folder, *options, **variables):
    given = ("--run.folder", folder, "--run.threads", 1, *PARITY)
    return start(prefix, "train", run_file, *given, *options, **TOKENS, **variables)


def figures(folder):
    names = ("train/loss", "train/grad_norm", "rollout/reward_mean", "probe/abs_logprob_diff")
    return [[row.get(name) for name in names] for row in read_metrics(folder)]


async def ask(socket, path):
    session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket)))
    async with session, session.get(f"http://engine{path}") as response:
        return response.status, await response.json(content_type=None)


async def test_a_server_serves_a_run_and_says_whose_weights_it_has(model, run_file, tmp_path):
    one, other, socket = tmp_path / "one", tmp_path / "other", tmp_path / "engine.sock"
    steps = ("--training.steps", 2)
    with server(model, socket=socket) as engine:
        inference = engine.inference.removesuffix("/v1")
        with pytest.raises(urllib.error.HTTPError) as busy:  # while it loads
            urllib.request.urlopen(f"{inference}/health", timeout=10)
        assert busy.value.code == 503
        finish(train((), run_file, one, *steps, *setting_of(engine)))
        assert await ask(socket, "/get_world_size") == (200, {"world_size": 1})
        assert await ask(socket, "/get_engine_type") == (200, {"engine_type": "vllm"})
        status, health = await ask(socket, "/health")
        assert (status, health["info"]["run"], health["info"]["weights_of"]) == (200, "", "one")
        applied = read_events(one, kinds=("apply",))
        assert health["version"]["digest"] == applied[-1]["digest"]
        with urllib.request.urlopen(f"{inference}/v1/models", timeout=10) as answer:
            assert [each["id"] for each in json.load(answer)["data"]] == [model.name]
        assert engine.end() == 0
    check_run(one, steps=2)
    assert not socket.exists()
    finish(train((), run_file, other, *steps, "--weights.bridge", "broadcast"))
    assert figures(one) == figures(other)


@pytest.mark.servers
def test_merged_adapters_and_files_reach_a_server(model, run_file, tmp_path):
    more = ("--training.steps", 2, "--lora.rank", 4)
    with server(model, socket=tmp_path / "engine.sock") as engine:
        for bridge in ("broadcast", "disk"):
            finish(train((), run_file, tmp_path / bridge, *more, "--weights.bridge", bridge, *setting_of(engine)))
    for folder in (tmp_path / "broadcast", tmp_path / "disk"):
        assert read_exit(folder).status == "finished"
        assert [event["version"] for event in read_events(folder, kinds=("apply",))] == ["0.0", "0.1", "0.2"]
    assert figures(tmp_path / "broadcast") == figures(tmp_path / "disk")


@contextlib.contextmanager
def servers(number, model, **options):
    """The run's host, and so many servers on others."""
    with networks(number + 1) as (places, _), contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(server(model, *place, port=29511 + each, **options))
            for each, place in enumerate(places[1:])
        ]
        yield places, started


@pytest.mark.servers
@pytest.mark.parametrize("number", [1, 3])
def test_servers_have_the_losses_of_as_many_engines_on_one_host(model, run_file, tmp_path, number):
    one, several = tmp_path / "one", tmp_path / "several"
    bridge = ("--weights.bridge", "broadcast")
    finish(train((), run_file, one, *bridge, "--inference.replicas", number))
    with servers(number, model) as (((here, _), *_), started):
        finish(train(here, run_file, several, *setting_of(*started)))
    for folder in (one, several):
        check_run(folder, steps=3)
    assert figures(one) == figures(several)


@pytest.mark.servers
def test_a_server_serves_two_runs_in_turn_and_refuses_one_at_once(model, run_file, tmp_path):
    one, first, second, third = (tmp_path / name for name in ("one", "first", "second", "third"))
    finish(train((), run_file, one, "--weights.bridge", "broadcast"))
    with servers(1, model) as (((here, _), *_), started):
        finish(train(here, run_file, first, *setting_of(*started)))
        run = train(here, run_file, second, "--training.steps", 100_000, *setting_of(*started))
        until(lambda: num_steps(second) >= 2, 100)
        began = time.monotonic()
        output = finish(train(here, run_file, third, *setting_of(*started)), code=2)
        assert "the run second holds it: end that run" in output
        assert time.monotonic() - began < 60
        stood = num_steps(second)
        until(lambda: num_steps(second) > stood, 60)
        run.send_signal(signal.SIGKILL)  # it does not give the server back
        run.wait(60)
        finish(train(here, run_file, third, "--resume=auto", *setting_of(*started)))
    assert figures(first) == figures(one) == figures(third)
    assert figures(second)[:3] == figures(one)[:3]


@pytest.mark.servers
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("dies_in", ["handshake:1", "transfer:3", "generation:20"])
def test_a_server_that_is_killed_is_named_and_awaited(model, run_file, tmp_path, number, dies_in):
    whole, folder = tmp_path / "whole", tmp_path / "run"
    steps = ("--training.steps", 6)
    with servers(number, model) as (((here, _), *_), started):
        finish(train(here, run_file, whole, *steps, *setting_of(*started)))
        started[-1].end()
        with in_the_place_of(started[-1], dies_in) as (dying, again):
            run = train(here, run_file, folder, *steps, *setting_of(*started[:-1], dying))
            ended(dying.process)
            assert dying.process.returncode == -signal.SIGKILL
            began = time.monotonic()
            until(lambda: any(dying.url in event["reason"] for event in restarts(folder)), 60)
            print(f"named after {time.monotonic() - began:.1f} s")
            with again():
                output = finish(run)
            assert f"the server at {dying.url} is lost" in output
    events = read_events(folder)
    assert not [event for event in events if event["kind"] == "restart"], "the run itself went on"
    assert figures(folder) == figures(whole)
    published, applied = ([(e["version"], e["digest"]) for e in events if e["kind"] == k] for k in ("publish", "apply"))
    assert set(applied) == set(published)


@pytest.mark.servers
@pytest.mark.parametrize("step", [2, 3])
def test_a_silent_server_is_named_and_goes_on(model, run_file, tmp_path, step):
    whole, folder = tmp_path / "whole", tmp_path / "run"
    steps = ("--training.steps", 40)
    with servers(1, model) as (((here, _), *_), started):
        finish(train(here, run_file, whole, *steps, *setting_of(*started)))
        run = train(here, run_file, folder, *steps, *setting_of(*started))
        until(lambda: num_steps(folder) >= step, 100)
        time.sleep(0.05 * step)  # some other moment of a step
        started[0].process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        until(lambda: any(started[0].url in event["reason"] for event in restarts(folder)), 60)
        print(f"named after {time.monotonic() - began:.1f} s")
        started[0].process.send_signal(signal.SIGCONT)
        finish(run)
    assert not read_events(folder, kinds=("restart",)), "the run itself went on"
    assert figures(folder) == figures(whole)


def restarts(folder):
    return read_events(folder, kinds=("engine_restart",)) if (folder / "events.jsonl").exists() else []


@contextlib.contextmanager
def in_the_place_of(before, dies_in):
    """In the place of a server that has ended, one that dies, and how it is started again."""
    again = lambda **more: Server(*before.arguments, **before.options, **more)  # noqa: E731
    dying = again(dies_in=dies_in)

    @contextlib.contextmanager
    def back():
        started = again()
        try:
            yield started
        finally:
            started.end()

    try:
        yield dying, back
    finally:
        dying.process.kill()
        dying.process.wait(60)


@pytest.mark.servers
@pytest.mark.parametrize("option", ["data_parallel", "tensor_parallel"])
def test_a_server_with_several_workers(run_file, tmp_path, option):
    """Two engine cores, each with a copy of the weights, or two workers with a part each."""
    wide = new_model(tmp_path / "wide", hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, context_length=64)
    one, folder = tmp_path / "one", tmp_path / "run"
    path = ("--model.path", wide)
    more = {"data_parallel": "replicas", "tensor_parallel": "tensor_parallel_size"}[option]
    finish(train((), run_file, one, *path, "--weights.bridge", "broadcast", f"--inference.{more}", 2))
    with servers(1, wide, **{option: 2}) as (((here, _), *_), started):
        finish(train(here, run_file, folder, *path, *setting_of(*started)))
        core = next(each for each in psutil.Process(started[0].process.pid).children(recursive=True) if is_core(each))
        core.kill()
        ended(started[0].process)
        assert started[0].process.returncode == 1, "vLLM died"
    check_run(folder, steps=3)
    # The probe asks each engine, and engine cores are one.
    assert [row[:3] for row in figures(folder)] == [row[:3] for row in figures(one)]


@pytest.mark.servers
def test_nothing_is_left_of_a_killed_server_with_several_cores(model, tmp_path):
    with server(model, socket=tmp_path / "engine.sock", data_parallel=2) as engine:
        until(lambda: get_status(f"{engine.inference.removesuffix('/v1')}/health") == 200, 200)
        processes = psutil.Process(engine.process.pid).children(recursive=True)
        assert len([each for each in processes if is_core(each)]) == 2
        engine.process.kill()
        until(lambda: not any(is_there(each.pid) for each in processes))


def get_status(url):
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def is_core(process):
    """Whether it computes for vLLM."""
    return "EngineCore" in process.name() or any("EngineCore" in part for part in process.cmdline())


@pytest.mark.servers
def test_one_wrong_value_in_the_second_copy_is_found(run_file, model, tmp_path):
    folder, socket = tmp_path / "run", tmp_path / "engine.sock"
    spoilt = {"data_parallel": 2, "dies_in": "second copy:3"}
    with server(model, socket=socket, **spoilt) as engine:
        output = finish(train((), run_file, folder, *setting_of(engine)), code=None)
        status, health = asyncio.run(ask(socket, "/health"))
    report = read_exit(folder)
    assert report is not None, output
    assert report.status == "failed"
    assert "model.norm.weight" in output
    assert [event["version"] for event in read_events(folder, kinds=("apply",))] == ["0.0", "0.1"]
    assert (status, health["reason"]) == (503, "version 0.2 did not verify: model.norm.weight")


@pytest.mark.servers
@pytest.mark.parametrize("bridge", ["broadcast", "disk"])
def test_a_run_whose_server_stays_away_keeps_its_steps_and_ends_as_an_engine_failure(model, run_file, tmp_path, bridge):
    whole, folder, socket = tmp_path / "whole", tmp_path / "run", tmp_path / "engine.sock"
    options = ("--training.steps", 40, "--weights.bridge", bridge, "--inference.start_timeout_s", 8)
    with server(model, socket=socket) as engine:
        until(lambda: get_status(f"{engine.inference.removesuffix('/v1')}/health") == 200, 200)
        finish(train((), run_file, whole, *options, *setting_of(engine)))
        run = train((), run_file, folder, *options, *setting_of(engine))
        until(lambda: num_steps(folder) >= 3, 100)
        engine.process.kill()
        output = finish(run, code=EngineError.exit_code)
        report, steps = read_exit(folder), num_steps(folder)
        assert (report.status, report.failure_class, report.retriable) == ("failed", "engine", True)
        assert (report.step, report.message) == (steps, output.strip().splitlines()[-1].removeprefix("error: "))
        assert engine.url in report.message
        assert f" at step {steps}" in report.message
        assert "start it again with slipstream engine, and the run with --resume" in report.message
        assert (folder / "checkpoints" / f"step-{steps:06d}" / "state").is_dir()
        with server(model, socket=socket) as again:
            until(lambda: get_status(f"{again.inference.removesuffix('/v1')}/health") == 200, 200)
            finish(train((), run_file, folder, *options, "--resume", *setting_of(again)))
    assert [event["step"] for event in read_events(folder, kinds=("resume",))][-1] == steps
    assert figures(folder) == figures(whole)
