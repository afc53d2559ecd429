"""What an engine's supervisor says of a death, whenever it comes."""

import asyncio
import os
import signal

import pytest

from slipstream.errors import EngineError
from slipstream.processes.launchers import LOCAL
from slipstream.records import ApplyReport, Ticket, Version

from .fakes import supervised


async def test_a_death_in_the_middle_of_a_broadcast_names_the_remedy(tmp_path, monkeypatch):
    engine = supervised(tmp_path, max_restarts=3)
    alive = [True]

    async def apply(ticket, timeout_s):
        if ticket.version.step == 2:
            alive[0] = False
            raise EngineError("it said nothing and was killed")
        return ApplyReport(ticket.version)

    monkeypatch.setattr(engine.process, "is_alive", lambda: alive[0])
    monkeypatch.setattr(engine.process.client, "apply", apply)
    await engine.apply(Ticket(Version(0, 1, ""), "broadcast", "", ()), 1.0)
    with pytest.raises(EngineError) as raised:
        await engine.apply(Ticket(Version(0, 2, ""), "broadcast", "", ()), 1.0)
    assert "no file holds the weights that it had by broadcast: continue the run with --resume" in str(raised.value)
    assert "it said nothing and was killed" in str(raised.value)


class Sleepers:
    """Starts processes that never get ready, and sends each its signal."""

    def __init__(self, *numbers):
        self.numbers, self.started = list(numbers), []

    def launch(self, module, arguments, environment, resources, node, *, output):
        self.started.append(
            LOCAL.launch("tests.processes.small_child", ["live"], environment, resources, output=output)
        )
        os.kill(self.started[-1].pid, self.numbers.pop(0))
        return self.started[-1]


@pytest.mark.parametrize("first", [signal.SIGSTOP, signal.SIGKILL])
async def test_one_that_is_stopped_or_killed_before_it_is_ready_is_started_again(tmp_path, first):
    events, launcher = [], Sleepers(first, signal.SIGKILL)
    engine = supervised(
        tmp_path, silence_s=0.5, launcher=launcher, on_event=lambda kind, **fields: events.append((kind, fields))
    )
    engine.launch()
    with pytest.raises(EngineError, match=r"the engine did not start: engine process ended with code -9"):
        await asyncio.wait_for(engine.wait_ready(), 120)
    ((kind, fields),) = events
    assert (kind, fields["number"], len(launcher.started)) == ("engine_restart", 1, 2)
    assert fields["reason"].startswith(f"engine process {'was killed, as' if first == signal.SIGSTOP else 'ended'}")
    assert [each.poll() for each in launcher.started] == [-signal.SIGKILL] * 2
    await engine.stop()


async def test_one_that_is_killed_by_the_end_of_the_run_is_not_started_again(tmp_path):
    launcher = Sleepers(signal.SIGCONT)
    engine = supervised(tmp_path, launcher=launcher, on_event=lambda kind, **fields: pytest.fail(kind))
    engine.launch()
    waiting = asyncio.create_task(engine.wait_ready())
    await asyncio.sleep(0.2)
    engine.kill()
    with pytest.raises(EngineError, match="did not start"):
        await asyncio.wait_for(waiting, 60)
    assert len(launcher.started) == 1
    await engine.process.client.close()
