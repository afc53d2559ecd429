import contextlib
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import load_config
from slipstream.config.parse.command_line import parse_overrides, parse_value
from slipstream.errors import ConfigError

from .conftest import MINIMAL


def values(*arguments):
    overrides, problems = parse_overrides(arguments)
    assert problems == []
    return [(".".join(override.path), override.value) for override in overrides]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--training.steps", "5", "--run.max-restarts=3"], {"training.steps": 5, "run.max_restarts": 3}),
        (["--training.learning-rate=1e-3"], {"training.learning_rate": 1e-3}),
        (["--run.seed", "-1"], {"run.seed": -1}),
        (["--model.path", "3", "--run.folder", "2024-01-01"], {"model.path": "3", "run.folder": "2024-01-01"}),
        (["--environment.name='x'"], {"environment.name": "x"}),
        (["--environment.settings.min_len", "4", "--environment.settings.a-b.c=x"],
         {"environment.settings.min_len": 4, "environment.settings.a-b.c": "x"}),
        (["--inference.options.no-x"], {"inference.options.x": False}),
        (["--inference.options.y"], {"inference.options.y": True}),
        (["--environment.settings", "{a = 1}"], {"environment.settings": {"a": 1}}),
    ],
)  # fmt: skip
def test_names_and_values(arguments, expected):
    assert values(*arguments) == [*expected.items()]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--training.packing"], True),
        (["--training.no-packing"], False),
        (["--training.packing", "false"], False),
        (["--training.packing=true"], True),
        (["--inference.no-enforce-eager"], False),
        (["--inference.no_enforce_eager=1"], None),
        (["--inference.enforce_eager", "auto"], "auto"),
    ],
)
def test_flags(arguments, expected):
    overrides, problems = parse_overrides(arguments)
    assert ([override.value for override in overrides] == [expected]) or (expected is None and problems)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["5"], "'5' is not a setting"),
        (["--"], "'--' is not a setting"),
        (["--training"], "--training is a section: write --training.KEY VALUE"),
        (["--steps", "5"], "--steps is not a known setting: did you mean training.steps?"),
        (["--training.", "5"], "--training. is not a setting"),
        (["--training.step", "5"], "--training.step is not a known setting: did you mean training.steps?"),
        (["--trainig.steps", "5"], "--trainig.steps is not a known setting: did you mean training.steps?"),
        (["--training.steps"], "--training.steps has no value: use a positive whole number"),
        (["--training.steps", "--run.seed", "1"], "--training.steps has no value"),
        (["--training.no-steps"], "--training.no-steps is not a flag that can be turned off"),
        (["--training.no-packing", "true"], "--training.no-packing takes no value"),
        (["--training.no-pakcing"], "did you mean training.packing?"),
        (["--training.steps.more", "3"], "training.steps has no keys of its own"),
        (["--no-training"], "--no-training is a section"),
        (["--no-evaluation", "false"], "--no-evaluation takes no value"),
        (["--evaluation=5"], "--evaluation takes no value"),
        (["--max-steps", "9"], "did you mean training.steps?"),
        (["--actor_rollout_ref.rollout.n=2"], "did you mean algorithm.group_size?"),
        (["--resume"], "--resume is not a known setting"),
    ],
)
def test_what_cannot_be_read(arguments, expected):
    _, problems = parse_overrides(arguments)
    assert len(problems) == 1
    assert expected in problems[0]


def test_the_last_setting_wins(run_file):
    assert load_config(run_file(), ["--training.steps", "1", "--training.steps", "2"]).config.training.steps == 2


def test_settings_inside_a_table_keep_its_other_keys(run_file):
    path = run_file(MINIMAL.replace("[algorithm]", "settings = { a = 1, b = 2 }\n[algorithm]"))
    loaded = load_config(path, ["--environment.settings.b", "3", "--environment.settings.c.d", "x"])
    assert loaded.config.environment.settings == {"a": 1, "b": 3, "c": {"d": "x"}}
    assert loaded.origins["environment.settings.a"] == "run.toml:7"
    assert loaded.origins["environment.settings.b"] == "command line"
    assert loaded.origins["environment.settings.c.d"] == "command line"
    whole = load_config(path, ["--environment.settings", "{z = 1}"])
    assert whole.config.environment.settings == {"z": 1}
    assert whole.origins["environment.settings.z"] == "command line"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1), ("1.5", 1.5), ("true", True), ("word", "word"), ("", ""), ('"1"', "1"), ("[1, 2]", [1, 2]),
        ("1, 2", "1, 2"), ("1 # x", "1 # x"), ("]\nx = [", "]\nx = ["), ("a b", "a b"), ("{a=1}", {"a": 1}),
        ("[1", "[1"), ("None", "None"),
    ],
)  # fmt: skip
def test_values(text, expected):
    assert parse_value(text) == expected


@given(st.text())
def test_any_text_has_a_value(text):
    value = parse_value(text)
    assert value == text or tomllib.loads(f"v = {text.strip()}")["v"] == value or value != value


@given(st.lists(st.text() | st.sampled_from(["--training.steps", "--run.no-x", "--environment.settings.a", "1"])))
def test_any_command_line_is_settings_or_a_config_error(tmp_path_factory, arguments):
    path = tmp_path_factory.getbasetemp() / "run.toml"
    path.write_text(MINIMAL)
    with contextlib.suppress(ConfigError):
        load_config(path, arguments)


def test_a_table_given_as_text_is_not_shown(run_file):
    with pytest.raises(ConfigError, match=r"environment\.settings is a text") as raised:
        load_config(run_file(), ["--environment.settings", '{"password": "S3KRETX"'])
    assert "S3KRETX" not in str(raised.value)


def test_data_takes_a_path(run_file):
    loaded = load_config(run_file(), ["--algorithm.kind", "sft", "--data", "rows.jsonl"])
    assert loaded.config.data.path.endswith("rows.jsonl")
