"""Real faults of nodes: network namespaces with an agent each. Each fault is named with its remedy."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys

import msgspec
import pytest
from tests.nodes.agents import RUN_ID, TOKEN, agent
from tests.nodes.networks import CAN_MAKE, networks
from tests.waiting import WAIT_S

from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.doctor.collectives import PairResult, hopeless, judge, rounds
from slipstream.doctor.nodes import PROGRAM
from slipstream.doctor.on_node import Look, Report
from slipstream.nodes.protocol import TOKEN_VARIABLE
from slipstream.processes.channel import Channel
from slipstream.processes.launchers import LOCAL

pytestmark = pytest.mark.real_start
PORT = 29_417
CLOCK = shutil.which("faketime")
RUN = """
model.path = "{folder}/files/model"
algorithm.kind = "sft"
data.path = "{folder}/files/rows.jsonl"
training = {{ ranks = {num}, steps = 1, prompts_per_batch = 4 }}
evaluation = false
run = {{ folder = "{folder}/runs/first", threads = 1 }}
cluster = {{ nodes = {num}, address = "{host}:29417", run_id = "{run_id}", join_timeout_s = 60 }}
"""
ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.fixture
def files(tmp_path):
    """A model and rows, and a run folder beside them."""
    (tmp_path / "files").mkdir()
    (tmp_path / "runs").mkdir()
    new_model(tmp_path / "files" / "model", hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1)
    (tmp_path / "files" / "rows.jsonl").write_text(f"{json.dumps(ROW)}\n" * 8)
    return tmp_path


def test_a_schedulers_signals_do_not_end_a_doctor(tmp_path):
    (tmp_path / "file").write_text("text")
    asked = msgspec.json.encode(Look(str(tmp_path / "file"), "text", [], is_full=False))
    child = LOCAL.launch(PROGRAM, output=tmp_path / "log")
    try:
        channel = Channel(child.socket)
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            channel.send(asked, WAIT_S)
            assert msgspec.json.decode(channel.receive(WAIT_S), type=Report).reads_folder
            os.kill(child.pid, number)
        channel.send(asked, WAIT_S)
        channel.receive(WAIT_S)
    finally:
        child.end(0.0)


def command(place, files, num, *arguments):
    prefix, host = place
    file = files / "run.toml"
    file.write_text(RUN.format(folder=files, num=num, host=host, run_id=RUN_ID))
    given = (str(file) if each == "RUN" else each for each in arguments)
    command = [*prefix, sys.executable, "-m", "slipstream.cli", *given]
    environ = os.environ | {TOKEN_VARIABLE: TOKEN}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)


def doctor(place, files, num):
    """The findings about nodes."""
    done = command(place, files, num, "doctor", "RUN", "--nodes", "--json")
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)["findings"]
    return [each for each in found if each["check"].startswith(("node", "collectives"))]


def hiding(*folders):
    """First words of a command without these folders."""
    mounts = "".join(f"mount -t tmpfs none {folder} && " for folder in folders)
    return ["unshare", "--mount", "sh", "-c", f'{mounts}exec "$0" "$@"']


def is_named(found, check, verdict, reason, remedy):
    (each,) = (each for each in found if each["check"] == check and reason in each["reason"])
    assert (each["verdict"], remedy in each["remedy"]) == (verdict, True), each


FAULTS = {
    "limits": ("node-1 limits", "warning", "512 open files", "ulimit -n 4096"),
    "packages": ("node-1", "fault", "transformers 0.1 (here", "install the same packages"),
}
if CLOCK:
    FAULTS |= {"clock": ("node-1", "warning", "its clock is +600 s off", "timedatectl")}
if CAN_MAKE:
    FAULTS |= {
        "run folder": ("node-2", "fault", "is another folder there", "shared file system"),
        "model": ("node-2", "fault", "files/model has nothing there, and", "every node reads it"),
        "data": ("node-2", "warning", "rows.jsonl has nothing there, and 1 file of", "same path on all nodes"),
        "interface": ("node-1 interfaces", "fault", "SLIPSTREAM_INTERFACE = ib9 names no", "unset SLIPSTREAM"),
        "pair": ("collectives", "fault", "between node-0 (net0) and node-1 (ib9)", "SLIPSTREAM_INTERFACE"),
    }


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """The findings about three nodes with all of these faults."""
    folder = tmp_path_factory.mktemp("nodes")
    (folder / "files" / "model").mkdir(parents=True)
    (folder / "files" / "model" / "config.json").write_text("{}")
    (folder / "files" / "rows.jsonl").write_text("{}")
    (folder / "runs").mkdir()
    (old := folder / "packages" / "transformers-0.1.dist-info").mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 0.1\n")
    later = f"{old.parent}{os.pathsep}{os.environ['PYTHONPATH']}"
    limited = ["env", f"PYTHONPATH={later}", "sh", "-c", 'ulimit -n 512 && exec "$0" "$@"']
    if CLOCK:
        limited = [CLOCK, "-f", "+600s", *limited]
    if CAN_MAKE:
        limited = ["env", "SLIPSTREAM_INTERFACE=ib9", *limited]
    prefixes = limited, hiding(folder / "runs", folder / "files") if CAN_MAKE else []
    with networks(3) as (places, _), contextlib.ExitStack() as stack:
        host = places[0][1]
        for node, prefix in enumerate(prefixes, 1):
            own = [*places[node][0], *prefix]
            stack.enter_context(agent((host, PORT), "--name", f"node-{node}", prefix=own))
        return doctor(places[0], folder, 3)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_node_is_named_with_its_remedy(broken, fault):
    is_named(broken, *FAULTS[fault])


def test_no_other_fault_of_a_node_is_named(broken):
    named = [each for each in broken if each["verdict"] != "ok" and "packages" not in each["check"]]
    assert len(named) == len(FAULTS), named


@pytest.mark.full
@pytest.mark.skipif(not CAN_MAKE, reason="no network namespaces")
def test_a_broken_pair_and_a_slow_node_are_named(files):
    with networks(4) as (places, _), contextlib.ExitStack() as stack:
        (first, host), (second, _), (third, to), (slow, _) = places
        subprocess.run([*second, "ip", "route", "add", "blackhole", to], check=True)
        limit = ("root", "tbf", "rate", "80mbit", "burst", "64kbit", "latency", "400ms")
        subprocess.run([*slow, "tc", "qdisc", "add", "dev", "net0", *limit], check=True)
        for node, prefix in enumerate((second, third, slow), 1):
            stack.enter_context(agent((host, PORT), "--name", f"node-{node}", prefix=prefix))
        found = [each for each in doctor((first, host), files, 4) if each["verdict"] != "ok"]
    is_named(found, "collectives", "fault", "no collective between node-1 (net0) and node-2 (net0)", "firewall")
    for other in (0, 1, 2):
        pair = next(each for each in found if f"node-{other}" in each["reason"] and "node-3" in each["reason"])
        assert "the median of the nodes' best pairs is" in pair["reason"]
        assert pair["verdict"] == "warning"
    assert len(found) == 4


def test_a_healthy_set_up_has_no_finding(files):
    with networks(2) as (places, _), agent((places[0][1], PORT), prefix=places[1][0]):
        done = command(places[0], files, 2, "doctor", "RUN", "--nodes", "--json")
    found = json.loads(done.stdout)
    assert [each for each in found["findings"] if each["verdict"] != "ok"] == []
    assert (done.returncode, found["exit_code"]) == (0, 0)
    assert "all-reduces of 1 of 1 pairs" in found["findings"][-1]["reason"]


def test_a_run_with_a_node_without_the_model_is_refused(files):
    with networks(2) as (places, _):
        hidden = [*places[1][0], *(hiding(files / "files") if CAN_MAKE else ())]
        with agent((places[0][1], PORT), prefix=hidden) as other:
            done = command(places[0], files, 2, "train", "RUN")
            if CAN_MAKE:
                assert done.returncode == 2, done.stdout + done.stderr
                assert "node-1: model.path" in done.stderr
                assert "the run ended with exit code 2" in other.stdout.readline() + other.stdout.readline()
            else:
                assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("num", [2, 3, 4, 7, 64])
def test_each_pair_is_in_one_round_and_each_node_once_in_a_round(num):
    names = [f"node-{number}" for number in range(num)]
    found = [*rounds(names)]
    assert len(found) == num - 1 + num % 2
    assert all(len({name for pair in pairs for name in pair}) == 2 * len(pairs) for pairs in found)
    pairs = {frozenset(pair) for each in found for pair in each}
    assert len(pairs) == sum(map(len, found)) == num * (num - 1) // 2


def test_a_node_without_success_is_named_once_and_takes_no_further_part():
    broken = [PairResult(("a", "b"), error="cut"), PairResult(("b", "c"), error="cut"), PairResult(("a", "c"), 1e8)]
    assert hopeless(broken) == {"b"}
    (found,) = judge(broken, {"b": "eth0"}, 3, "runs")
    assert (found.verdict, "between b (eth0) and any other node (cut)" in found.reason) == ("fault", True), found
    assert hopeless(broken[:1]) == set()


def test_a_slow_pair_is_named_with_both_rates():
    rates = {("a", "b"): 1e9, ("a", "c"): 9e8, ("b", "c"): 5e7}
    (found,) = judge([PairResult(pair, rate) for pair, rate in rates.items()], dict.fromkeys("abc", "ib0"), 3, "runs")
    assert found.verdict == "warning"
    assert "b (ib0) and c (ib0) all-reduce 50 MB/s, and the median of the nodes' best pairs is 1 GB/s" in found.reason


@pytest.mark.parametrize(
    ("names", "broken"), [("abc", []), ("abcd", []), ("abcd", [PairResult(("a", "b"), error="cut")])]
)
def test_a_slow_node_is_named_in_a_small_cluster(names, broken):
    """Most pairs are slow then."""
    slow, cut = names[-1], {each.pair for each in broken}
    pairs = [pair for pair in itertools.combinations(names, 2) if pair not in cut]
    results = [PairResult(pair, 1e7 if slow in pair else 5e8) for pair in pairs]
    named = [each.reason for each in judge(results + broken, {}, len(names), "runs") if each.verdict == "warning"]
    assert len(named) == len(names) - 1
    assert all(slow in reason for reason in named)


def test_pairs_that_cannot_meet_are_told_of_the_file_system():
    (found,) = judge([PairResult(("a", "b"), error="timeout", stage="files")], {}, 2, "/runs")
    assert (found.verdict, "through files in /runs" in found.reason, "locks" in found.remedy) == ("fault", True, True)
