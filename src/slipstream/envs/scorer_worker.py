"""A reward worker, `python -m slipstream.envs.scorer_worker`: the other half of the protocol in `scorer_process.py`.

It makes the environment itself from its config, answers one request after another, and ends when its input closes
or its parent dies, even in the middle of a reward. Rewards may print and read as they like: the protocol's
pipes are moved away from the standard streams first, and closed in every process that a reward forks; one that comes
back from the reward ends there. On SIGUSR1 it writes where it is, also from inside C code.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import signal
import sys
from io import BufferedReader, FileIO

import msgspec

from slipstream.config.schema import EnvironmentConfig
from slipstream.envs.base import RewardError, judge
from slipstream.envs.registry import load_environment
from slipstream.envs.scorer_process import Answer, Request, Setup, frame
from slipstream.errors import SlipstreamError

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Serve until the input ends; the exit code is 1 when the environment could not be made."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    requests, answers = _take_standard_streams()
    data = _read_frame(requests)
    if data is None:
        return 0
    setup = msgspec.msgpack.decode(data, type=Setup)
    if not _follow_parent(setup.parent_pid):
        return 0
    if setup.memory_limit_bytes is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = setup.memory_limit_bytes if hard == resource.RLIM_INFINITY else min(setup.memory_limit_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        environment = load_environment(EnvironmentConfig.model_validate_json(setup.config_json))
    except SlipstreamError as error:
        _write_all(answers, frame(Answer("failed", message=str(error))))
        return 1
    _write_all(answers, frame(Answer("ready")))
    decoder = msgspec.msgpack.Decoder(Request)
    own = os.getpid()
    while (data := _read_frame(requests)) is not None:
        request = decoder.decode(data)
        try:
            answer = Answer("score", judge(environment, request.task, request.completion), id=request.id)
        except RewardError as error:
            answer = Answer("failed", None, str(error), error.details, request.id)
        if os.getpid() != own:
            os._exit(0)  # the reward has forked, and this is its child: the parent answers
        _write_all(answers, frame(answer))
    return 0


def _take_standard_streams() -> tuple[BufferedReader, FileIO]:
    """Input and output as private files; what is printed goes to stderr from now on, and reading finds nothing."""
    requests, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    os.register_at_fork(after_in_child=lambda: (os.close(requests), os.close(answers)))
    return BufferedReader(FileIO(requests, "r")), FileIO(answers, "w")


def _follow_parent(parent_pid: int) -> bool:
    """Have the kernel kill this process when its parent's starting thread ends; false when it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent_pid


def _read_frame(source: BufferedReader) -> bytes | None:
    length = source.read(4)
    if len(length) < 4:
        return None
    return source.read(int.from_bytes(length, "big"))


def _write_all(target: FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[target.write(view) :]


if __name__ == "__main__":
    sys.exit(main())
