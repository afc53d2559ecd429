"""What is said of a report that does not prove the published version, and who receives versions; no engine needed."""

import asyncio

import pytest

from slipstream.errors import WeightsError
from slipstream.records import ApplyReport, ParameterSpec, Ticket, Version
from slipstream.weights import check_report, receiver_of

VERSION = Version(0, 3, "abc")
TICKET = Ticket(VERSION, "disk", "/weights/0.3", (ParameterSpec("w", (1,), "float32", ""),) * 9, num_bytes=36)


@pytest.mark.parametrize("field", ["mismatched", "unverified"])
@pytest.mark.parametrize(
    ("count", "shown"), [(1, "(p0)"), (5, "(p0, p1, p2, p3, p4)"), (6, "(p0, p1, p2, p3, p4 ...)")]
)
def test_parameters_that_are_not_proved_are_named(field, count, shown):
    report = ApplyReport(VERSION, **{field: tuple(f"p{number}" for number in range(count))})
    with pytest.raises(WeightsError) as error:
        check_report(report, TICKET)
    assert shown in str(error.value)
    says = f"{count} of 9 parameters in the engine differ" if field == "mismatched" else "cannot be verified"
    assert says in str(error.value)


def test_only_the_published_version_will_do():
    check_report(ApplyReport(VERSION), TICKET)
    for other in (Version(0, 4, "abc"), Version(0, 3, "abd"), Version(1, 3, "abc")):
        with pytest.raises(WeightsError, match=r"after 0\.3 \(abc\) was published"):
            check_report(ApplyReport(other), TICKET)


class Engine:
    """Says what it was asked for."""

    def __init__(self):
        self.asked = []

    async def restart(self, *given):
        self.asked.append(("restart", *given))

    async def verify(self, *given):
        self.asked.append(("verify", *given))
        return ApplyReport(VERSION, verify_s=2.0)

    async def fence(self, timeout_s):
        self.asked.append(("fence", timeout_s))


def test_restart_starts_the_engine_on_the_folder_and_verifies_it():
    engine = Engine()
    receiver, fence = receiver_of("restart", engine)
    report = asyncio.run(receiver.apply(TICKET, 7.0))
    assert engine.asked == [("restart", "/weights/0.3", VERSION, TICKET.parameters), ("verify", TICKET, 7.0)]
    assert (report.version, report.verify_s, report.num_bytes) == (VERSION, 2.0, 36)
    assert 0.0 < report.transfer_s < 60.0
    assert fence is None


@pytest.mark.parametrize("name", ["disk", "broadcast", "lora", "single_copy"])
def test_only_weights_in_the_engines_own_memory_need_a_fence(name):
    engine = Engine()
    receiver, fence = receiver_of(name, engine)
    assert receiver is engine
    assert (fence is not None) == (name == "single_copy")
