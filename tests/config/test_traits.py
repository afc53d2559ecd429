"""Facts about a config that several parts of a run rely on."""

import pytest

from slipstream.config.traits import begins_early
from tests.trainer.loops import planned


@pytest.mark.parametrize(
    "others",
    [
        {"weights": {"bridge": "disk"}},
        {"weights": {"bridge": "single_copy", "in_flight": "keep"}},
        {"training": {"staleness": 1}},
        {"lora": {"rank": 4}},
        {"environment": {"name": "agent", "settings": {"command": "python agent.py"}}},
        {"environment": {"name": "atropos"}},
        {"environment": {"curriculum": "adaptive"}},
    ],
    ids=str,
)
def test_a_batch_begins_early_where_its_requests_can_wait_in_the_engine(others):
    shared = {"weights": {"bridge": "single_copy"}}
    assert begins_early(planned(**shared))
    assert not begins_early(planned(**(shared | others)))
