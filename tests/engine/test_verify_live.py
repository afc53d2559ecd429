"""A live engine is asked whether it holds what was published, through its private socket."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from benchmarks.bridges import create_bridge
from safetensors.torch import load_file

from slipstream.commands.verify import _ask, raise_unless_right, verify
from slipstream.errors import DeadlineError, EngineError, WeightsError
from slipstream.records import ApplyReport, EngineHealth, ParameterSpec, Ticket, Version
from slipstream.runlog import RunLog

from .conftest import LiveEngine, perturbed


@pytest.mark.engine
def test_a_live_engine_proves_its_version_and_a_difference_is_named(live: LiveEngine, tmp_path):
    bridge = create_bridge("disk", folder=tmp_path / "weights", source=live.model, engine=live.engine)
    weights = perturbed(load_file(live.model / "model.safetensors"), 77)
    ticket = live.update(bridge, weights.items(), 3, 4)
    with RunLog.create(tmp_path / "run") as log:
        log.event("engine_socket", path=live.engine.socket)
        log.published(ticket)
        (verdict,) = verify(tmp_path / "run")  # it goes on: its socket is known
        (named,) = verify(tmp_path / "run", Path(live.engine.socket))
    for found in (verdict, named):
        assert (found.what, found.version, found.problems) == ("live engine", "4.3", ())
        assert found.num_parameters == len(ticket.parameters)
        assert found.gb_per_s > 0
    path = tmp_path / "run" / "tickets" / "4.3.json"
    wrong = msgspec.structs.replace(ticket.parameters[5], fingerprint="0" * 16)
    parameters = (*ticket.parameters[:5], wrong, *ticket.parameters[6:])
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(ticket, parameters=parameters)))
    found = verify(tmp_path / "run", Path(live.engine.socket))
    assert found[0].problems == (f"{wrong.name} differs",)
    with pytest.raises(WeightsError, match=f"live engine 4.3 is not what was recorded .{wrong.name} differs.: restart"):
        raise_unless_right(found)
    with pytest.raises(EngineError, match="is no socket of an engine"):
        verify(tmp_path / "run", tmp_path / "nowhere.sock")


class Asked:
    """An engine that takes a new version while it is verified."""

    socket = "scripted"

    def __init__(self, versions: list[Version]) -> None:
        self._versions = versions
        self.reason = ""

    async def health(self) -> EngineHealth:
        status = "out_of_service" if self.reason else "ready"
        return EngineHealth(status, self._versions[0], reason=self.reason)

    async def verify(self, ticket: Ticket, timeout_s: float) -> ApplyReport:
        if len(self._versions) > 1:
            self._versions.pop(0)
        is_right = ticket.version == self._versions[0]
        return ApplyReport(ticket.version, mismatched=() if is_right else ("model.norm.weight",))


@pytest.fixture
def run(tmp_path):
    parameters = (ParameterSpec("model.norm.weight", (2,), "float32", "0" * 16),)
    with RunLog.create(tmp_path / "run") as log:
        for step in (1, 2):
            log.published(Ticket(Version(0, step, "d"), "broadcast", "", parameters))
    return tmp_path / "run"


async def test_an_update_meanwhile_is_no_difference(run):
    verdict = await _ask(run, Asked([Version(0, 1, "d"), Version(0, 2, "d")]), 10.0)
    assert (verdict.version, verdict.problems, verdict.num_bytes) == ("0.2", (), 8)


async def test_it_is_not_waited_for_without_end(run):
    with pytest.raises(DeadlineError, match=r"keeps no ticket of the version 0\.9 that it holds"):
        await _ask(run, Asked([Version(0, 9, "d")]), 0.3)
    asked = Asked([Version(0, 1, "d")])
    asked.reason = "the trainer is writing the weights"
    with pytest.raises(DeadlineError, match="the trainer is writing the weights"):
        await _ask(run, asked, 0.3)
