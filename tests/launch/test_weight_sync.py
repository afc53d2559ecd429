"""What a run writes down of a version that its engines have taken."""

from types import SimpleNamespace

from slipstream.orchestrator.control.weight_sync import RunHooks
from slipstream.records import ApplyReport, Version


def noted(memory_bytes):
    notes, events = {}, []
    log = SimpleNamespace(note=notes.update, event=lambda kind, **fields: events.append(fields))
    engine = SimpleNamespace(tensor_parallel_size=2, sleep=False)
    config = SimpleNamespace(weights=SimpleNamespace(apply_timeout_s=1.0), inference=engine)
    hooks = RunHooks(config, log, None, None, planned_bytes=4 << 30)
    hooks.version_applied(ApplyReport(Version(0, 1, "d"), memory_bytes=memory_bytes), {"update/bytes": 1.0})
    return notes, events


def test_the_memory_that_the_engine_took_stands_beside_the_planned_one():
    notes, [event] = noted(10 << 30)
    assert notes == {"memory/engine_gib": 5.0, "memory/engine_planned_gib": 4.0, "update/bytes": 1.0}
    assert event["memory_bytes"] == 10 << 30
    assert noted(0)[0] == {"update/bytes": 1.0}, "on a CPU it is not measured"
