"""The endpoint for Prometheus: what is served, in which format, and for how long."""

import os
import socket
import threading
import time
import urllib.error
import urllib.request

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from slipstream.errors import ConfigError
from slipstream.processes import heartbeat
from slipstream.processes.heartbeat import Beating
from slipstream.runlog import RunLog, read_events
from slipstream.sinks.prometheus import MetricsServer, gauge_names

ROW = {"rollout/num": 8.0, "tokens/trained": 20.0, "dropped/stale": 3.0, "retry/late": 1.0, "reward/mean": 0.25}


def get(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read().decode()


def samples(text):
    """{(name, further labels): value}, as Prometheus' own client reads it."""
    found = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {(s.name, *sorted(v for k, v in s.labels.items() if k not in ("run", "lineage"))): s.value for s in found}


@pytest.fixture
def log(tmp_path):
    with RunLog.create(tmp_path / "run") as log:
        yield log


@pytest.fixture
def server(log):
    with MetricsServer(0) as server:
        server.serve(log, "run")
        yield server


def test_names_are_made_of_what_prometheus_allows_and_stay_apart():
    row = ("reward/a b", "reward/a-b", "train/ratio_below_0.5", "reward/länge", "step/")
    assert gauge_names(row, {"slipstream_step_"}) == {
        "reward/a b": "slipstream_reward_a_b",
        "reward/a-b": "slipstream_reward_a_b_2",
        "train/ratio_below_0.5": "slipstream_train_ratio_below_0_5",
        "reward/länge": "slipstream_reward_l_nge",
        "step/": "slipstream_step__2",
    }


def test_the_newest_row_and_what_all_rows_add_up_to(tmp_path):
    with RunLog.create(tmp_path / "run") as log, Beating(log, 0.05), MetricsServer(0) as server:
        server.serve(log, 'my "run"')
        empty = samples(get(server.url))
        assert {name for name, *_ in empty} >= {"slipstream_step", "slipstream_restarts"}
        assert not any("total" in name for name, *_ in empty)
        log.metrics(1, ROW | {"train/loss": float("nan")})
        log.metrics(2, ROW | {"train/skipped": 1.0, "dropped/stale": 1.0, "dropped/surplus": 2.0})
        log.metrics(3, ROW | {"reward/mean": 0.75})
        text = get(server.url)
        assert 'slipstream_reward_mean{lineage="0",run="my \\"run\\""} 0.75\n' in text
        found = samples(text)
        assert found["slipstream_step",] == 3
        assert found["slipstream_rollouts_trained_total",] == 16
        assert found["slipstream_tokens_trained_total",] == 40
        assert found["slipstream_rollouts_dropped_total", "stale"] == 7
        assert found["slipstream_rollouts_dropped_total", "surplus"] == 2
        assert found["slipstream_requests_retried_total", "late"] == 3
        assert ("slipstream_train_loss",) not in found, "of an older row"
        log.add_metrics(2, {"eval/accuracy": 0.5})
        later = samples(get(server.url))
        assert (later["slipstream_eval_accuracy",], later["slipstream_reward_mean",]) == (0.5, 0.75)
        assert (later["slipstream_step",], later["slipstream_rollouts_trained_total",]) == (3, 16)
        assert 0 <= found["slipstream_progress_age_seconds",] < 60
        deadline = time.monotonic() + 60
        while ("slipstream_heartbeat_age_seconds",) not in found and time.monotonic() < deadline:
            found = samples(get(server.url))
        assert 0 <= found["slipstream_heartbeat_age_seconds",] < 60
    (event,) = [event for event in read_events(tmp_path / "run") if event["kind"] == "metrics_server"]
    assert event["url"] == server.url
    with pytest.raises(urllib.error.URLError):
        get(server.url)
    assert not any(thread.name == "metrics-server" for thread in threading.enumerate())


def test_ages_of_the_heartbeats_of_further_processes(log, server):
    folder = heartbeat.folder_of(log.folder)
    assert not any(name.startswith("slipstream_process_") for name, *_ in samples(get(server.url)))
    folder.mkdir(parents=True)
    now = time.time()
    for pid, role, ago in ((os.getpid(), "engine-0", 7.0), (os.getppid(), "rank-1", 70.0)):
        beat = heartbeat.ProcessHeartbeat(now, pid, socket.gethostname(), role, "loading weights", now - ago)
        (folder / f"{beat.name}.json").write_bytes(msgspec.json.encode(beat))
    found = samples(get(server.url))
    for name, ago in ((f"engine-0-{os.getpid()}", 7.0), (f"rank-1-{os.getppid()}", 70.0)):
        assert 0 <= found["slipstream_process_heartbeat_age_seconds", name] < 60
        assert ago <= found["slipstream_process_progress_age_seconds", name] < ago + 60


def test_tokens_and_idle_seconds_are_counted_by_reason(log, server):
    row = {"tokens/generated": 50.0, "tokens/trained": 20.0, "dropped_tokens/surplus": 5.0}
    row |= {"dropped_groups/undone_by_a_resume": 1.0, "idle/engine_s": 3.0, "idle/engine_trainer_s": 2.0}
    row |= {"retry/exhausted": 3.0}
    row |= {"idle/engine_update_s": 1.0, "idle/trainer_generation_s": 0.5, "staleness/age_1": 0.25}
    log.metrics(1, ROW | row)
    log.metrics(2, ROW | row)
    found = samples(get(server.url))
    assert found["slipstream_tokens_generated_total",] == 100
    assert found["slipstream_requests_given_up_total",] == 6
    assert ("slipstream_requests_retried_total", "exhausted") not in found
    assert found["slipstream_tokens_dropped_total", "surplus"] == 10
    assert found["slipstream_groups_dropped_total", "undone_by_a_resume"] == 2
    idle = {key[1:]: value for key, value in found.items() if key[0] == "slipstream_idle_seconds_total"}
    assert idle == {("engine", "trainer"): 4, ("engine", "update"): 2, ("generation", "trainer"): 1}
    assert found["slipstream_staleness_age_1",] == 0.25


def test_counters_go_on_after_a_resume_and_steps_made_again_count_once(tmp_path):
    with RunLog.create(tmp_path / "run") as log:
        for step in (1, 2, 3):
            log.metrics(step, ROW)
    with RunLog.create(tmp_path / "run", resume=True) as log, MetricsServer(0) as server:
        log.resumed(1)
        server.serve(log, "run")
        text = get(server.url)
        assert 'lineage="1"' in text
        assert samples(text)["slipstream_rollouts_trained_total",] == 8
        assert samples(text)["slipstream_reward_mean",] == 0.25
        log.metrics(2, ROW)
        assert samples(get(server.url))["slipstream_rollouts_trained_total",] == 16


def test_it_listens_on_this_machine_alone_and_a_port_in_use_is_one_sentence():
    with MetricsServer(0) as server:
        host, port = server._server.server_address
        assert host == "127.0.0.1"
        taken = rf"run.metrics_port = {port}: nothing can listen .* already in use.*or 0 for"
        with pytest.raises(ConfigError, match=taken):
            MetricsServer(port)
    with MetricsServer(port) as again:
        assert again.url == f"http://127.0.0.1:{port}/metrics"


def test_without_a_port_there_is_nothing(log):
    with MetricsServer(None) as server:
        server.serve(log, "run")
        assert server.url == ""
    assert "metrics_server" not in (log.folder / "events.jsonl").read_text()


def test_a_client_that_says_nothing_holds_nobody_up(server):
    with socket.create_connection(server._server.server_address, timeout=60):
        assert "slipstream_step" in get(server.url)
        began = time.monotonic()
        server.__exit__()
        assert time.monotonic() - began < 9, "it would have 10 s"


@pytest.mark.parametrize(("host", "status"), [("evil.example", 421), ("127.0.0.1:1", 200), ("localhost", 200)])
def test_a_web_page_that_was_pointed_here_gets_nothing(host, status, server):
    request = urllib.request.Request(server.url, headers={"Host": host})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            found = answer.status
    except urllib.error.HTTPError as error:
        found = error.code
    assert found == status
