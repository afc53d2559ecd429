"""Which engine a plan makes: one alone, or replicas, whose numbers are those of the whole run."""

import dataclasses

import pytest

from slipstream.errors import EngineError
from slipstream.inference.engine import SupervisedEngine
from slipstream.inference.replicas import EngineReplicas
from slipstream.inference.settings import EngineSettings
from slipstream.launch.engines import EnginePlace, EnginePlan, create_engine

PLAN = EnginePlan(EngineSettings("model", "float32", max_model_len=64, max_num_seqs=4), 10.0, 10.0)


def test_the_only_engine_of_a_run_is_one_and_one_of_several_orchestrators_a_replica(tmp_path):
    alone = create_engine(PLAN, tmp_path, lambda kind, **fields: None)
    assert isinstance(alone, SupervisedEngine)
    assert alone.take_metrics() == {}
    one = create_engine(dataclasses.replace(PLAN, is_only=False, first_number=1), tmp_path, lambda kind, **fields: None)
    assert isinstance(one, EngineReplicas)
    found = one.take_metrics()
    assert found.pop("replica_0/idle_s") >= 0.0
    assert found == {"replica_0/requests": 0.0, "replica_0/restarts": 0.0}  # the trainer adds the first's


@pytest.mark.parametrize("num_engines", [1, 2])
async def test_events_name_an_engine_by_its_number_in_the_run(tmp_path, num_engines):
    events = []
    plan = dataclasses.replace(
        PLAN, places=(EnginePlace(),) * num_engines, is_only=False, first_number=2, max_restarts=0
    )
    engines = create_engine(plan, tmp_path, lambda kind, **fields: events.append((kind, fields["replica"])))
    with pytest.raises(EngineError, match=r"inference.max_restarts = 0"):
        await engines.joined()
    assert events == [("replica_lost", number) for number in range(2, 2 + num_engines)]
