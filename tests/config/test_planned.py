"""The planned config: the same tree, no field of which can be `auto`."""

import pytest
from pydantic import ValidationError

from slipstream.config import PlannedConfig, RunConfig, with_values
from slipstream.plan.decided import planned_config

CONFIG = RunConfig.model_validate(
    {"model": {"path": "auto"}, "environment": {"name": "x"}, "algorithm": {"kind": "grpo"}, "training": {"steps": 9}}
)


def sections(schema):
    """Name and properties of each section, in order; of [algorithm] the one of reinforcement learning."""
    for name, reference in schema["properties"].items():
        found = [reference, *reference.get("anyOf", ()), *reference.get("oneOf", ())]
        names = [each["$ref"].rpartition("/")[2] for each in found if "$ref" in each]
        if names:
            yield name, schema["$defs"][names[-1]]["properties"]


def test_no_field_can_be_auto_and_none_is_missing():
    written, planned = dict(sections(RunConfig.model_json_schema())), dict(sections(PlannedConfig.model_json_schema()))
    assert {name: list(keys) for name, keys in planned.items()} == {name: list(keys) for name, keys in written.items()}
    own_names = {("algorithm", "advantage"), ("algorithm", "loss")}
    for section, keys in planned.items():
        for key, spec in keys.items():
            text = str(spec).replace("'", '"').replace(str(spec.get("description")), "")
            assert (section, key) in own_names or '"auto"' not in text, (section, key)


def test_what_is_decided_stays_and_a_recipe_is_resolved():
    config = with_values(CONFIG, {"training.learning_rate": 1e-3, "algorithm.clip_high": 0.4})
    planned = planned_config(config)
    assert isinstance(planned, PlannedConfig)
    assert planned.model.path == "auto", "a name that a user gave"
    assert (planned.training.learning_rate, planned.algorithm.clip_high) == (1e-3, 0.4)
    assert (planned.algorithm.loss, planned.algorithm.arguments.kl_estimator) == ("clip", "k3")
    assert planned_config(planned) == planned
    assert PlannedConfig.model_validate_json(planned.model_dump_json()) == planned


def test_an_auto_is_refused():
    with pytest.raises(ValidationError, match="threads"):
        with_values(planned_config(CONFIG), {"run.threads": "auto"})
