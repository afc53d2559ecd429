"""Event loops whose time passes at once, for tests of what takes seconds: it hangs on no machine's speed.

For code that waits for nothing but its own event loop: no sockets, no other processes, no clock but the loop's. A
module's tests get such loops where it imports the fixture `event_loop_policy`.
"""

import asyncio

import pytest


class Loop(asyncio.SelectorEventLoop):
    """Its time passes while it waits for a timer, which takes none, and when it is `held_up`."""

    def __init__(self):
        super().__init__()
        self.now, select = 1000.0, self._selector.select

        def at_once(timeout):
            if timeout is None:  # a thread may have something
                return select(None)
            self.held_up(timeout)
            return select(0)

        self._selector.select = at_once

    def time(self):
        return self.now

    def held_up(self, seconds):
        self.now += max(0.0, seconds)


class Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self):
        return Loop()


@pytest.fixture(scope="module")
def event_loop_policy():
    return Policy()


def run(work):
    """`asyncio.run` in such a loop."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(work)
