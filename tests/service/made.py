"""Records for tests of pure functions."""

from slipstream.plan.times import Estimate
from slipstream.service.records import Need, Record

ESTIMATE = Estimate("a shape", 5, 1.0)


def record(name="a", **fields):
    values = {
        "id": name,
        "owner": "me",
        "host": "here",
        "submitted": 0.0,
        "cwd": "/",
        "model": "m",
        "algorithm": "sft",
        "steps": 5,
        "grace_s": 30.0,
        "need": Need(0),
        "estimate": ESTIMATE,
    }
    return Record(**{**values, **fields})
