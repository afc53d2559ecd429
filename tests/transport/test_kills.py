"""A process that is killed at any moment loses nothing, doubles nothing that was acknowledged, and holds no place."""

import multiprocessing
import os
import random
import signal
import sys
import time
from contextlib import contextmanager
from itertools import count, pairwise
from statistics import median

import pytest

from slipstream.errors import DeadlineError
from slipstream.runlog.files import whole_lines
from slipstream.transport import TransportClosed

from ..waiting import until
from .conftest import give_back, open_in

CAPACITY = 3
PLENTY_S = 60.0
OUTSIDE = {"open", "close", "flock", "listdir", "pwrite", "ftruncate", "rename", "replace", "unlink", "link", "read"}
OUTSIDE |= {"write", "truncate", "chmod", "mkdir", "connect", "send", "sendall", "recv", "recv_into"}
PIECES = {("recv", "recv"), ("recv_into", "recv_into")}
WALK = ("put", "put", "take", "ack", "put", "put", "take", "take", "ack", "put", "take", "take")
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["__main__", "slipstream.transport.redis_server", "redis", __name__])


class Log:
    """What a process does, in a file that outlives it."""

    def __init__(self, path):
        self.path = path
        self.handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, *words):
        os.write(self.handle, (" ".join(map(str, words)) + "\n").encode())

    def read(self):
        return [line.decode().split() for _, line in whole_lines(self.path)]  # others write meanwhile


@contextmanager
def killed_at(moments, moment):
    """Kills this process before the call with this number of a function that changes something outside, or learns of
    it. Between two such calls nobody else can tell the moments apart. Reading an answer counts once, in however many
    pieces it comes."""
    name = ""

    def before(_, event, function):
        nonlocal name
        if event == "c_call" and function.__name__ in OUTSIDE and (name, function.__name__) not in PIECES:
            name = function.__name__
            if next(moments) == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(before)
    try:
        yield
    finally:
        sys.setprofile(None)


def walk(streams, path, moment):
    """Takes the steps of `WALK`, and is killed at this moment."""
    transport, log, moments = open_in(streams, CAPACITY), Log(path), count()
    numbers, taken = count(), {}
    for step in WALK:
        if step == "put":
            number = next(numbers)
            log("put", number)
            with killed_at(moments, moment):
                transport.put(number, PLENTY_S)
        elif step == "take":
            with killed_at(moments, moment):
                receipt, number = transport.take(PLENTY_S)
            taken[number] = receipt
            log("taken", number)
            continue
        else:
            number, receipt = taken.popitem()
            log("ack", number)
            with killed_at(moments, moment):
                assert transport.ack(receipt)
        log(f"{step}-done", number)
    log("end")


def numbers_of(log, word):
    return {int(words[1]) for words in log if words[0] == word}


def run(function, *arguments):
    process = PROCESSES.Process(target=function, args=arguments)
    process.start()
    return process


def check_rest(streams, log):
    """A new process finds what it has to, in order, and all places."""
    give_back(streams)
    transport = open_in(streams, CAPACITY)
    found = []
    while True:
        try:
            receipt, record = transport.take(0)
        except DeadlineError:
            break
        found.append(record)
        assert transport.ack(receipt)
    due = numbers_of(log, "put-done") - numbers_of(log, "ack")
    doubtful = numbers_of(log, "put") - numbers_of(log, "ack-done")
    assert found == sorted(set(found))
    assert due <= set(found) <= doubtful
    for number in range(CAPACITY):
        transport.put(number, 0)
    with pytest.raises(DeadlineError):
        transport.put(CAPACITY, 0)


@pytest.mark.quick("files")
def test_a_kill_at_any_moment_of_any_operation(make_shared, tmp_path):
    for moment in count():
        streams, path = make_shared.new_streams(), tmp_path / str(moment)
        process = run(walk, streams, path, moment)
        process.join(PLENTY_S)
        check_rest(streams, log := Log(path).read())
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert log[-1][0] == "end"
    assert moment >= 3 * len(WALK)


def produce(streams, path, first):
    transport, log = open_in(streams, CAPACITY), Log(path)
    for number in count(first):
        log("put", number)
        transport.put(number, PLENTY_S)
        log("put-done", number)


def consume(streams, path):
    give_back(streams)
    transport, log = open_in(streams, CAPACITY), Log(path)
    while True:
        receipt, number = transport.take(PLENTY_S)
        log("taken", number)
        log("ack", number)
        assert transport.ack(receipt)
        log("ack-done", number)


def test_both_sides_killed_at_random_moments(make_shared, tmp_path):
    chance = random.Random(7)
    streams, path = make_shared.new_streams(), tmp_path / "log"
    log = Log(path)

    def start(side):
        last = max(numbers_of(log.read(), "put"), default=-1)
        return run(produce, streams, path, last + 1) if side == "put" else run(consume, streams, path)

    running = {side: start(side) for side in ("put", "take")}
    num_done = 0
    for _ in range(20):
        until(lambda most=num_done: len(numbers_of(log.read(), "ack-done")) > most)
        num_done = len(numbers_of(log.read(), "ack-done"))
        time.sleep(chance.uniform(0, 0.1))
        side = chance.choice(sorted(running))
        running[side].kill()
        running[side].join()
        running[side] = start(side)
    for process in running.values():
        process.kill()
        process.join()
    lines = log.read()
    check_rest(streams, lines)
    acknowledged = set()
    for word, number in lines:
        assert word != "taken" or int(number) not in acknowledged
        if word == "ack-done":
            acknowledged.add(int(number))
    assert len(acknowledged) >= 20


def test_a_close_reaches_the_other_process(make_shared, tmp_path):
    streams = make_shared.new_streams()
    process = run(consume, streams, tmp_path / "log")
    transport = open_in(streams, CAPACITY)
    for number in range(5):
        transport.put(number, PLENTY_S)
    transport.close("the engine died")
    process.join(PLENTY_S)
    assert process.exitcode == 1, "it was to end with the closing's reason"
    with pytest.raises(TransportClosed, match="the engine died"):
        open_in(streams, CAPACITY).take(0)


def test_one_process_feeds_another_at_a_fair_pace(make_shared, tmp_path):
    streams = make_shared.new_streams()
    process = run(produce, streams, tmp_path / "log", 0)
    transport = open_in(streams, CAPACITY)
    transport.ack(transport.take(PLENTY_S)[0])
    times = [time.monotonic()]
    for number in range(1, 200):
        receipt, record = transport.take(PLENTY_S)
        assert record == number
        transport.ack(receipt)
        times.append(time.monotonic())
    process.kill()
    process.join()
    assert median(end - begin for begin, end in pairwise(times)) < 0.1, "about 10 ms are waited for each record at most"
