"""Whether a run whose engine died with its weights is begun again: pure, from what the run folder tells."""

from types import SimpleNamespace

import pytest

from slipstream import errors
from slipstream.errors import OrchestratorError
from slipstream.inference import engine
from slipstream.launch.recovery.restarts import has_lost_weights
from slipstream.launch.recovery.retry_policy import Restart, earlier_attempts, next_restart, trained_before
from slipstream.transport import TransportAway, TransportLost

from ..orchestrator.executors import executor_of


def died(*steps):
    return [{"kind": "restart", "step": step} for step in steps]


def test_so_often_as_is_allowed_with_waits_that_double_up_to_an_end():
    found = [next_restart(10 * n, died(*range(0, 10 * n, 10)), 9) for n in range(10)]
    assert found[:3] == [Restart(1, 2.0), Restart(2, 4.0), Restart(3, 8.0)]
    assert [each.wait_s for each in found[6:9]] == [120.0, 120.0, 120.0]
    assert "run.max_restarts = 9 allows no further restart" in found[9]
    assert "run.max_restarts = 0" in next_restart(0, [], 0)


def test_not_where_one_died_at_the_same_step_before():
    assert "failed at step 7 before" in next_restart(7, died(7), 3)
    assert "failed at step 7 before" in next_restart(7, died(5, 7), 3)
    assert next_restart(5, died(7), 3) == Restart(2, 4.0)


def test_what_others_have_killed_says_nothing_of_a_step():
    killed = [{"kind": "restart", "step": 7, "outside": True}]
    assert next_restart(7, killed, 3) == Restart(2, 4.0)
    assert next_restart(None, [*killed, *died(7)], 3) == Restart(3, 8.0)
    assert "failed at step 7 before" in next_restart(7, [*killed, *died(7)], 3)


def test_only_the_attempts_of_one_command_count():
    def lineage(number, *kinds):
        return [{"lineage": number, "kind": kind, "step": number} for kind in kinds]

    again, killed, ended = ("opened", "restart"), ("opened", "apply"), ("opened", "exit")
    events = [*lineage(0, *again), *lineage(1, *killed), *lineage(2, *again), *lineage(3, *again), *lineage(4, *killed)]
    assert [each["step"] for each in earlier_attempts(events, 4)] == [3, 2]
    assert earlier_attempts(events, 2) == []
    assert earlier_attempts([*lineage(0, *again), *lineage(1, *ended), *lineage(2, "opened")], 2) == []
    assert earlier_attempts(lineage(0, "opened"), 0) == []


def test_the_time_of_training_survives_an_attempt_that_failed_at_its_start():
    seconds = enumerate((40.0, 70.0, 0.0))
    events = [{"lineage": number, "kind": "restart", "step": number, "trained_s": spent} for number, spent in seconds]
    assert [trained_before(events, number) for number in range(4)] == [0.0, 40.0, 70.0, 70.0]


@pytest.mark.parametrize(
    ("error", "is_up", "in_memory", "expected"),
    [
        (errors.EngineError("it died"), False, True, True),
        (errors.DeadlineError("it said nothing"), False, True, True),
        (errors.WeightsError("the collective broke"), False, True, True),
        (RuntimeError("CUDA error"), False, True, True),
        (errors.EngineError("it died"), False, False, False),
        (errors.EngineError("it refused"), True, True, False),
        (errors.DeadlineError("it is slow"), True, True, False),
        (errors.ConfigError("a wrong setting"), False, True, False),
        (errors.DataError("a row"), False, True, False),
        (errors.EnvironmentFault("a reward"), False, True, False),
        (errors.TrainingError("no signal"), False, True, False),
        (errors.MismatchError("too far apart"), False, True, False),
        (errors.IntegrityError("a contradiction"), False, True, False),
        (errors.Interrupted("Ctrl-C"), False, True, False),
    ],
)
def test_what_an_engines_death_is_the_reason_of(monkeypatch, error, is_up, in_memory, expected):
    monkeypatch.setattr(engine, "_DYING_S", 0.05)
    executor = executor_of(SimpleNamespace(is_up=is_up, is_in_memory_only=in_memory, wants_weights=False))
    caller = SimpleNamespace(engine_state=executor.engine_state)
    assert has_lost_weights(error, caller) is expected
    assert not has_lost_weights(error, None)


@pytest.mark.parametrize("error", [OrchestratorError("ended"), TransportAway("no answer"), TransportLost("empty")])
def test_what_an_orchestrators_death_is_the_reason_of(error):
    assert has_lost_weights(error, None)
