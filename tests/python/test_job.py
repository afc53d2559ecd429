"""A call's process as its caller sees it: what it writes, how it ends, and that it goes on in a new one."""

import asyncio
import subprocess
import sys
import time

import msgspec
import pytest

from slipstream.processes import launchers
from slipstream.python.child import _sample
from slipstream.python.protocol import Call, Outcome
from slipstream.python.run_handle import Job, Run
from slipstream.records import Message, Rollout, Sequence

CHILD = """
import os, signal, sys, time
import msgspec
from slipstream.python.protocol import Call, Outcome
from slipstream.processes.channel import Channel
channel = Channel.of_parent()
call = msgspec.msgpack.decode(channel.receive(), type=Call)
def end(**outcome):
    channel.send(msgspec.msgpack.encode(Outcome(**outcome)))
    os._exit(outcome.get("exit_code", 0))
"""
CALL = Call("train", {"model": {"path": "m"}})


@pytest.fixture
def job(monkeypatch):
    """A job whose child runs a few lines instead of a call."""

    def make(lines, call=CALL):
        def popen(command, **options):
            return subprocess.Popen([sys.executable, "-c", CHILD + lines], **options)

        monkeypatch.setattr(launchers, "popen", popen)
        return Job(call, shown=False)

    return make


@pytest.mark.timeout(300)
def test_an_outcome_of_any_size_arrives(job):
    """More than a pipe holds: the child would wait for ever."""
    assert len(job("end(summary={'text': 'a' * 1_000_000})").follow().summary["text"]) == 1_000_000


def test_it_goes_on_in_a_new_process_with_resume(job):
    outcome = job("end(summary={'pid': os.getpid()}) if call.resume else end(again=True)").follow()
    assert outcome.summary["pid"] > 0


def test_what_ends_it_unasked_is_an_error_with_its_last_words(job):
    outcome = job("print('no room left', flush=True); os.kill(os.getpid(), signal.SIGKILL)").follow()
    assert outcome.error == "SlipstreamError"
    assert "signal SIGKILL: no room left" in outcome.message


@pytest.mark.parametrize(("ending", "error"), [("os._exit(130)", "Interrupted"), ("os.abort()", "SlipstreamError")])
def test_only_a_wished_end_is_taken_for_one(job, ending, error):
    made = job(f"signal.signal(signal.SIGINT, lambda *_: {ending})\nprint('ready', flush=True)\ntime.sleep(600)")
    stopped = []

    def stop():
        if made._tail and not stopped:
            stopped.append(made.stop())

    assert made.follow(stop).error == error


def test_the_status_before_the_run_has_a_folder(job, tmp_path):
    seen, ending = [], "os._exit(130)"
    lines = f"signal.signal(signal.SIGINT, lambda *_: {ending})\nprint('ready', flush=True)\ntime.sleep(600)"

    def start():
        made = job(lines)
        wait = made._wait

        def waiting(each):
            while not made._tail:
                time.sleep(0.01)
            seen.append((run.status, run.is_running))
            made.stop()
            wait(each)

        made._wait = waiting
        return made

    run = Run(tmp_path / "none", start)
    run.follow()
    assert seen == [("running", True)]
    assert (run.status, run.is_running) == ("interrupted", False)


def test_a_callback_is_given_whole_rows_of_its_own_call(job, tmp_path):
    rows = tmp_path / "metrics.jsonl"
    rows.write_text('{"step": 0}\n{"step": 1}\n{"step": 2')  # torn by a process that died
    seen = []
    lines = f"""
rows = open({str(rows)!r}, "rb+", buffering=0)
rows.truncate(24); rows.seek(24)
for text in (b'{{"step": 1, "x": 1', b'}}\\n', b'{{"step": 2}}\\n{{"st'):
    rows.write(text); time.sleep(0.3)
end()
"""
    run = Run(tmp_path, lambda: job(lines), lambda step, row: seen.append((step, row.get("x"))))
    run.follow()
    assert seen == [(1, 1), (2, None)]
    assert run.wait() is run


def test_a_sample_of_an_evaluation_is_one_of_a_run_without_its_tokens_and_can_be_sent():
    calls = ({"function": {"name": "look", "arguments": {"at": "\ud800"}}},)
    turns = [Message("assistant", "\udfff", tool_calls=calls), Message("user", "go on")]
    made = Rollout("eval.3", "t3", "eval.3", [Sequence([1], [True])], reward=0.5, outcome="done", turns=turns)
    made.prompt, made.completion, made.answer = "2+2?", "<think>\ud800</think>4", "4"
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(Outcome(samples=[_sample(made)])), type=Outcome).samples[0]
    assert (sent["id"], sent["task"], sent["prompt"], sent["answer"]) == ("eval.0.3", "t3", "2+2?", "4")
    assert (sent["completion"], sent["reward"], sent["outcome"]) == ("<think>\\ud800</think>4", 0.5, "done")
    assert sent["turns"][0]["tool_calls"][0]["function"]["arguments"] == {"at": "\\ud800"}
    assert not {"step", "version", "sequences"} & sent.keys()


ROWS = """
rows = open({rows!r}, "ab", buffering=0)
got = []
signal.signal(signal.SIGINT, lambda *_: got.append(1))
for text in {texts!r}:
    rows.write(text + b"\\n")
    time.sleep(0.1)
while not got and {waits}:
    time.sleep(0.02)
end(error="Interrupted" if got else "", exit_code=130 if got else 0)
"""


def test_a_callback_is_called_once_for_each_step_in_order(job, tmp_path):
    """An evaluation beside training adds to the row of an earlier step; a restart makes steps again."""
    rows = tmp_path / "metrics.jsonl"
    steps = [(0, "a"), (1, "a"), (0, "eval"), (2, "a"), (1, "a"), (2, "a"), (3, "a"), (2, "eval")]
    texts = [f'{{"step": {step}, "lineage": 0, "time": 1.0, "x/{name}": {step}}}'.encode() for step, name in steps]
    (tmp_path / "events.jsonl").touch()
    seen = []
    lines = ROWS.format(rows=str(rows), texts=texts, waits=False)
    run = Run(tmp_path, lambda: job(lines), lambda step, row: seen.append((step, row["x/a"])))
    run.follow()
    assert seen == [(step, step) for step in range(4)]
    assert [(row["step"], row.get("x/eval")) for row in run.rows] == [(0, 0), (1, None), (2, 2), (3, None)]


@pytest.mark.quick("error0")
@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(), GeneratorExit(), LookupError("x")])
def test_whatever_a_callback_raises_ends_the_run_first(job, tmp_path, error):
    seen = []

    def on_step(step, row):
        seen.append(step)
        raise error

    lines = ROWS.format(rows=str(tmp_path / "metrics.jsonl"), texts=[b'{"step": 0}', b'{"step": 1}'], waits=True)
    run = Run(tmp_path, lambda: job(lines), on_step)
    run.follow()
    assert run._job.process.poll() == 130
    with pytest.raises(type(error)) as raised:
        run.wait()
    assert raised.value is error
    assert seen == [0]


def test_an_interrupt_during_a_callback_is_a_wished_end_and_loses_no_row(job, tmp_path):
    seen = []

    def on_step(step, row):
        seen.append(step)
        if step == 0:
            raise KeyboardInterrupt

    lines = ROWS.format(rows=str(tmp_path / "metrics.jsonl"), texts=[b'{"step": 0}\n{"step": 1}'], waits=True)
    run = Run(tmp_path, lambda: job(lines), on_step)
    run.follow()
    assert run.wait() is run
    assert (run._job.process.poll(), seen) == (130, [0, 1])


def test_what_a_handler_of_a_signal_raises_ends_the_run_first(job, monkeypatch):
    made = job("signal.signal(signal.SIGINT, lambda *_: os._exit(130))\nprint('ready', flush=True)\ntime.sleep(600)")

    def each():
        if made._tail and not made._stop_asked:
            raise SystemExit(4)

    with pytest.raises(SystemExit):
        made.follow(each)
    assert made.process.poll() == 130


def test_the_newest_weights_are_those_of_the_highest_step(tmp_path):
    for step in (999_999, 1_000_000, 5):
        (tmp_path / "checkpoints" / f"step-{step:06d}" / "weights").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-1000001").mkdir()
    assert Run(tmp_path).weights == tmp_path / "checkpoints" / "step-1000000" / "weights"
