"""The places where the tests of transports keep their queues."""

import itertools

import pytest

from slipstream.transport import FileStreams, MemoryTransport, RedisStreams, open_transport

from ..redis_server import VARIABLE, Server


def on(server, run_id, url=""):
    """Queues on a server of tests."""
    return RedisStreams(url or server.url, run_id, password_variable=VARIABLE)


PLACES = {
    "memory": lambda request, number: None,
    "files": lambda request, number: FileStreams(request.getfixturevalue("tmp_path_factory").mktemp("streams"), number),
    "redis": lambda request, number: on(request.getfixturevalue("redis_server"), f"run-{number}"),
}
NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A server that stands still for a while on a busy machine is not taken for one that does not answer."""
    for name in ("redis_server._ANSWER_S", "redis._OPEN_S", "polled._CALL_S"):
        monkeypatch.setattr(f"slipstream.transport.{name}", 60.0)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory):
    """One server for all tests, which only read and write queues there."""
    server = Server(tmp_path_factory.mktemp("redis"))
    yield server
    server.end()


def makers(*names):
    """A fixture that gives a function from a capacity to an empty queue in each of these places."""

    @pytest.fixture(params=names)
    def maker(request):
        def make(capacity):
            return open_in(make.new_streams(), capacity)

        make.name = request.param
        make.new_streams = lambda: PLACES[request.param](request, next(NUMBERS))
        return make

    return maker


def open_in(streams, capacity, kind=int | str):
    """The queue that all tests use."""
    if streams is None:
        return MemoryTransport(capacity, "the writer", "the reader")
    return open_transport(streams, "batches", kind, capacity=capacity, producer="the writer", consumer="the reader")


def give_back(streams):
    """What a killed reader of files had taken can be taken again; a Redis server does so for every new reader."""
    if isinstance(streams, FileStreams):
        for path in (streams.folder / str(streams.lineage) / "batches").glob("*.taken"):
            path.rename(path.with_name(f"{path.name.partition('.')[0]}.msg"))


make = makers(*PLACES)
make_shared = makers(*(name for name in PLACES if name != "memory"))
