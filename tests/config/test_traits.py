"""Facts about a config that several parts of a run rely on."""

import pytest

from slipstream.config.traits import begins_early
from slipstream.launch.engines import engine_plan
from tests.trainer.loops import planned


@pytest.mark.parametrize(
    "others",
    [
        {"weights": {"bridge": "disk"}},
        {"weights": {"bridge": "single_copy", "in_flight": "keep"}},
        {"weights": {"bridge": "single_copy", "in_flight": "drain"}},
        {"training": {"staleness": 1}},
        {"lora": {"rank": 4}},
        {"environment": {"curriculum": "adaptive"}},
    ],
    ids=str,
)
def test_a_batch_begins_early_where_its_requests_can_wait_in_the_engine(others):
    shared = {"weights": {"bridge": "single_copy"}}
    assert begins_early(planned(**shared))
    assert not begins_early(planned(**(shared | others)))


@pytest.mark.parametrize(
    ("bridge", "places", "expected"), [("single_copy", 16, 24), ("single_copy", 15, 15), ("disk", 16, 16)]
)
def test_the_probe_has_places_beside_a_whole_batch(bridge, places, expected):
    config = planned(weights={"bridge": bridge}, inference={"max_num_seqs": places})
    assert engine_plan(config, "m", on_cpu=True).settings.max_num_seqs == expected
