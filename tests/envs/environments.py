"""Environments for tests; scorer workers load them from this file by path."""

import asyncio
import contextlib
import ctypes
import os
import sys
import time
from pathlib import Path

import msgspec

from slipstream.config.schema import EnvironmentConfig
from slipstream.envs import Score, SingleTurn, Task
from slipstream.envs.scoring.process import Answer, encode
from slipstream.envs.single_turn import as_tasks
from slipstream.processes.channel import pack


class Behaving(SingleTurn):
    """The reward does what the completion says; otherwise it compares with the answer."""

    changed = 0.0
    is_set_up = False

    def __init__(self, seed=0, size=8, gold=True):
        super().__init__(seed)
        self.size, self.has_gold = size, gold

    def tasks(self, split, num_tasks):
        rows = [{"prompt": f"{split} {i}", "answer": f"answer {i * i + 10}"} for i in range(min(num_tasks, self.size))]
        return as_tasks(rows, split, self.name)

    def gold(self, task):
        return task.answer if self.has_gold else None

    def reward(self, task, completion):
        verb, _, rest = completion.partition(" ")
        act = getattr(self, f"_{verb}", None)
        return act(rest) if act else {"reward": float(completion == task.answer), "length": len(completion)}

    async def _until(self, file):
        """Waits for ever; writes down that it began, and that it was cancelled."""
        with open(file, "a") as notes:
            print("begun", file=notes, flush=True)
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                print("cancelled", file=notes, flush=True)

    def setup_scoring(self):
        self.is_set_up = True

    def _ready(self, _):
        return float(self.is_set_up)

    def _sleep(self, seconds):
        time.sleep(float(seconds))
        return 1.0

    def _hang(self, _):
        ctypes.PyDLL(None).sleep(60)  # holds the interpreter's lock, as a bad regular expression does

    def _raise(self, what):
        raise KeyError(what)

    def _exit(self, code):
        os._exit(int(code))

    def _sysexit(self, code):
        sys.exit(int(code))

    def _kill(self, _):
        os.kill(os.getpid(), 11)

    def _give(self, what):
        return {
            "nan": float("nan"),
            "text": "1",
            "none": None,
            "empty": {},
            "true": True,
            "inf": {"reward": 1, "x": 1e999},
        }[what]

    def _pid(self, _):
        return float(os.getpid())

    def _meet(self, folder):
        """Right when another comes there while this one waits."""
        (Path(folder) / str(os.getpid())).touch()
        end = time.monotonic() + 30
        while len(list(Path(folder).iterdir())) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        return float(len(list(Path(folder).iterdir())) == 2)

    def _number(self, number):
        return float(number)

    def _fork(self, how):
        """The child comes back from the reward, as its parent does."""
        if os.fork():
            return 0.5
        if how == "writes":
            self._forge("")
        return 0.25

    def _forge(self, _):
        """Writes an answer of its own wherever it can."""
        for number in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(number, pack(encode(Answer("score", (Score(1000.0),)))))
        return 0.5

    def _variable(self, name):
        return float(name in os.environ)

    async def _wait(self, how):
        seconds, number = how.split()
        await asyncio.sleep(float(seconds))
        return float(number)

    async def _wait_beside(self, number):
        """How many are at it at once, once there have been `number`."""
        self.at_once = getattr(self, "at_once", 0) + 1
        self.most = max(getattr(self, "most", 0), self.at_once)
        end = time.monotonic() + 30
        while self.most < int(number) and time.monotonic() < end:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        at_once = self.at_once
        self.at_once -= 1
        return float(at_once)

    async def _in_coroutine(self, how):
        await asyncio.sleep(0.1)
        return self.reward(None, how)

    def _own_loop(self, number):
        return asyncio.run(self._wait(f"0.05 {number}"))

    def _change(self, number):
        type(self).changed = float(number)
        return self.changed

    def _changed(self, _):
        return self.changed

    def _metrics(self, how):
        number, name = how.split()
        return {"reward": 1.0, **{f"{name}.{i}": i for i in range(int(number))}}


def config(name="Behaving", timeout_s=60.0, **settings):
    return EnvironmentConfig(name=f"{Path(__file__)}:{name}", reward_timeout_s=timeout_s, settings=settings)


def task(answer="4"):
    return Task("t", (), answer)


def shorten(pool, timeout_s):
    """From now on a reward of the pool has so long. What is to succeed is graded before, and may take its time."""
    pool._rewards._setup = msgspec.structs.replace(pool._rewards._setup, timeout_s=timeout_s)
