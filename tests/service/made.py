"""Records for tests of pure functions."""

from slipstream.plan.times import Estimate
from slipstream.service.deployments.records import Deployment
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


def deployment(name="run-step-1", **fields):
    values = {"owner": "me", "run": "run", "step": 1, "kind": "adapter", "source": "/a", "digest": "ab" * 8}
    values |= {"base": "/base", "rank": 2, "server": "base-1", "created": 1.0}
    return Deployment(name=name, **{**values, **fields})
