"""What an engine's supervisor says of a death, whenever it comes."""

import pytest

from slipstream.errors import EngineError
from slipstream.inference.engine import SupervisedEngine
from slipstream.inference.settings import EngineSettings
from slipstream.records import ApplyReport, Ticket, Version


async def test_a_death_in_the_middle_of_a_broadcast_names_the_remedy(tmp_path, monkeypatch):
    settings = EngineSettings("", str(tmp_path / "socket"), "float32", 8, 8)
    engine = SupervisedEngine(settings, tmp_path / "log", start_timeout_s=1, max_restarts=3, on_event=lambda *_: None)
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
