"""The section [evaluation]: several samples a task."""

import pytest

from slipstream.config import load_config
from slipstream.errors import ConfigError

MINIMAL = """\
[model]
path = "some/model"
[environment]
name = "reasoning_gym/spell_backward"
[algorithm]
kind = "grpo"
[training]
steps = 1
"""


def test_several_samples_need_a_temperature(run_file):
    four = ("--evaluation.samples_per_task", "4")
    file = run_file(MINIMAL)
    assert load_config(file).config.evaluation.samples_per_task == 1
    assert load_config(file, four).config.evaluation.samples_per_task == 4
    with pytest.raises(ConfigError, match=r"samples_per_task = 4 at temperature 0 samples the same completion"):
        load_config(file, (*four, "--evaluation.temperature", "0"))
    load_config(file, ("--evaluation.temperature", "0"))


@pytest.mark.parametrize("value", ["0", "129", "1.5"])
def test_their_number_is_bounded(run_file, value):
    with pytest.raises(ConfigError, match=r"evaluation\.samples_per_task"):
        load_config(run_file(MINIMAL), ("--evaluation.samples_per_task", value))
