"""Runs whose vLLM reads images: torchvision is in the path of their processes, which fork servers of their own fork."""

import os

import pytest

from . import fork_server


@pytest.fixture(scope="session")
def seeing_servers(tmp_path_factory):
    """Started when they are first needed, in what is this process's environment then."""
    servers = fork_server.ForkServers(tmp_path_factory.mktemp("seeing"))
    yield servers
    servers.stop()


@pytest.fixture
def sees(monkeypatch, seeing_servers):
    """vLLM's image models can be imported by what the test starts."""
    from .engine.architectures import ARCHITECTURES

    architecture = ARCHITECTURES["vision"]
    if missing := architecture.missing():
        pytest.skip(missing)
    if not (more := architecture.path()):
        return
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*more, *filter(None, [os.environ.get("PYTHONPATH")])]))
    if fork_server._owned is not None:
        monkeypatch.setattr(fork_server, "_owned", seeing_servers)
        monkeypatch.setattr(fork_server, "_sockets", seeing_servers.folder)
        fork_server.take_for_usual(os.environ)
