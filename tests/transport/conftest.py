"""The places where the tests of transports keep their queues."""

import itertools

import pytest

from slipstream.transport import FileStreams, MemoryStreams, open_transport

PLACES = {
    "memory": lambda request, number: MemoryStreams(),
    "files": lambda request, number: FileStreams(request.getfixturevalue("tmp_path_factory").mktemp("streams"), number),
}
NUMBERS = itertools.count()


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
    return open_transport(streams, "batches", kind, capacity=capacity, producer="the writer", consumer="the reader")


make = makers(*PLACES)
make_shared = makers(*(name for name in PLACES if name != "memory"))
