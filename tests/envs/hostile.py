"""Rewards that do what no reward should; the scorer workers of `test_hostile_rewards` load them from this file."""

import asyncio
import contextlib
import ctypes
import decimal
import fractions
import gc
import mmap
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

from slipstream.envs import Score
from slipstream.envs.scoring.process import Answer, encode
from slipstream.processes.channel import pack

MARK = "SLIPSTREAM_TEST_MARK"
PATCHED = 0.0


def tasks(split, num_tasks, seed):
    return []


def reward(task, completion):
    mode, _, rest = completion.partition(" ")
    if mode == "number":
        return float(rest) + PATCHED
    return globals()[mode](rest)


def mark():
    """In the command line of what clears its environment."""
    return f"sleep-{os.environ[MARK]}"


def sleeper(**options):
    return subprocess.Popen([mark(), "3000"], executable="/bin/sleep", **options)


def die(number):
    os.kill(os.getpid(), number)
    return 0.5


def write_everywhere(data):
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.write(int(name), data)


def forged():
    return pack(encode(Answer("score", (Score(1000.0),))))


# What is returned.


def returns(what):
    import numpy  # where it is needed: each worker imports this file

    return {
        "true": True,
        "float32": numpy.float32(0.1),
        "int64": numpy.int64(-7),
        "largest": 3.4e38,
        "huge": 1e308,
        "tiny": 5e-324,
        "third": fractions.Fraction(1, 3),
        "odd_keys": {"reward": 0.5, 3: 1, (1, 2): 2.0, None: 3.0, "": 4.0, "\ud83d": 5.0, "a\nb": 6.0},
        "sixty_keys": {"reward": 0.5, **{f"key{i}": i for i in range(60)}},
        "nan": float("nan"),
        "inf_metric": {"reward": 1.0, "x": float("-inf")},
        "beyond": 10**400,
        "none": None,
        "text": "1",
        "complex": 1j,
        "decimal": decimal.Decimal(1),
        "list": [1.0],
        "array": numpy.ones(3),
        "generator": (number for number in [1.0]),
        "no_key": {"score": 1.0},
        "nested": {"reward": {"reward": 1.0}},
        "many_keys": {"reward": 1.0, **{f"key{i}": i for i in range(100_000)}},
        "long_key": {"reward": 1.0, "x" * 10_000_000: 1.0},
        "class": float,
    }[what]


async def coroutine(number):
    await asyncio.sleep(0.05)
    return float(number)


def length(text):
    return float(sum(map(ord, text)))


# What is raised.


def raises(what):
    class Unspeakable(Exception):
        def __str__(self):
            raise ValueError

    raise {
        "exit": SystemExit(3),
        "interrupt": KeyboardInterrupt(),
        "base": BaseException("base"),
        "generator_exit": GeneratorExit(),
        "cancelled": asyncio.CancelledError(),
        "unspeakable": Unspeakable(),
        "surrogate": ValueError("half \ud83d of it"),
        "long": ValueError("x" * 10_000_000),
        "group": ExceptionGroup("several", [ValueError("a"), KeyError("b")]),
        "stop": StopIteration(1.0),
    }[what]


def recursion(_):
    return recursion(_)


def memory(_):
    return float(len(bytearray(2**40)))


# What leaves something behind, and a score.


def child(how):
    """Returns while what it started lives on."""
    own_session = {"start_new_session": True}
    bare = {"env": {}, "close_fds": False, **own_session}
    options = {"plain": {}, "group": {"process_group": 0}, "bare": bare}.get(how, own_session)
    if how == "deaf":
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
    process = sleeper(**options)
    if how == "stopped":
        process.send_signal(signal.SIGSTOP)
    return 0.5


def daemon(_):
    """Two forks and a session: nobody's child, with every descriptor of the worker's."""
    if pid := os.fork():
        os.waitpid(pid, 0)
        return 0.5
    os.setsid()
    if os.fork():
        os._exit(0)
    time.sleep(3000)
    os._exit(0)


def many(_):
    for _ in range(20):
        sleeper(start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return 0.5


def forks(how):
    pid = ctypes.PyDLL(None).fork() if how == "unseen" else os.fork()
    if pid:
        return 0.5
    if how == "raises":
        raise ValueError("the child")
    if how == "answers":
        write_everywhere(forged())
    return 0.25


def thread(_):
    threading.Thread(target=time.sleep, args=(3000,)).start()
    return 0.5


def at_exit(_):
    import atexit

    atexit.register(time.sleep, 3000)
    return 0.5


def elsewhere(_):
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    shutil.rmtree(folder)
    return 0.5


def limits(_):
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    return 0.5


def prints(_):
    print("x" * 3_000_000)
    os.write(2, b"\xff\x00" * 500_000)
    return 0.5


def takes_input(_):
    return 0.5 if sys.stdin.read() == "" else 0.0


def no_streams(_):
    for fd in range(3):
        os.close(fd)
    return 0.5


def no_output(_):
    sys.stdout = sys.stderr = None
    gc.disable()
    return 0.5


def own_loop(_):
    async def wait():
        await asyncio.sleep(0.01)
        return 0.5

    return asyncio.run(wait())


# What costs the worker.


def dies(how):
    if how.startswith("exit"):
        os._exit(int(how[4:]))
    die(getattr(signal, f"SIG{how}"))


def forges(_):
    write_everywhere(forged())
    return 0.5


def junk(_):
    write_everywhere(b"\xff" * 1000)
    return 0.5


def closes(_):
    os.closerange(0, 1000)
    return 0.5


def guard(number):
    os.kill(os.getppid(), getattr(signal, f"SIG{number}"))
    time.sleep(3000)


# What hangs.


def hangs(how):
    if how == "sleep":
        time.sleep(3000)
    if how == "loop":
        while True:
            pass
    if how == "regex":
        re.match(r"(a+)+$", "a" * 64 + "b")
    if how == "stop":
        die(signal.SIGSTOP)
    if how == "deaf":
        signal.pthread_sigmask(signal.SIG_SETMASK, range(1, signal.NSIG))
        time.sleep(3000)
    if how == "program":
        subprocess.run([mark(), "3000"], executable="/bin/sleep", start_new_session=True, check=False)
    if how == "sympy":
        import sympy

        sympy.sympify("9**9**9")
    if how == "bomb":
        while True:
            sleeper(start_new_session=True)
            time.sleep(0.02)


def fork_bomb(_):
    """Doubles until it is stopped, or has made 2,000 processes; each of them ends after 30 s."""
    made = mmap.mmap(-1, 8)
    while int.from_bytes(made[:8], "big") < 2000:
        try:
            if os.fork() == 0:
                signal.alarm(30)
                os.setsid()
        except BlockingIOError:
            time.sleep(0.01)
        made[:8] = (int.from_bytes(made[:8], "big") + 1).to_bytes(8, "big")
    time.sleep(30)
    os._exit(0)


def memory_bomb(_):
    """In each of three children, too."""
    for _ in range(3):
        if os.fork() == 0:
            break
    kept = []
    for _ in range(4096):
        kept.append(b"x" * 2**20)
    return float(len(kept))


def prints_much(_):
    for _ in range(100):
        os.write(1, b"x" * 2**20)
    return 0.5


async def awaits(how):
    if how == "ever":
        await asyncio.sleep(3000)
    if how == "blocked":
        time.sleep(3000)
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3000)


# What only a worker for each call can bear.


def patches(_):
    globals()["PATCHED"] = 100.0
    return 0.5


def alarm(_):
    signal.alarm(1)
    return 0.5


# What looks for keys.


def reads(pid):
    """Looks for the key of `test_tools_in_workers` in a process's environment."""
    pid = str(os.getppid()) if pid == "guard" else pid
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            text, denied = file.read(), 0.0
    except PermissionError:
        text, denied = b"", 1.0
    has_key = b"s3cr3t" in text or any("s3cr3t" in value for value in os.environ.values())
    return {"reward": 1.0, "has_key": float(has_key), "denied": denied}
