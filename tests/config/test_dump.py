import re
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config import (
    Derived,
    EnvironmentConfig,
    EvaluationConfig,
    Loaded,
    ModelConfig,
    RLConfig,
    RunConfig,
    SamplingConfig,
    SFTConfig,
    TrainingConfig,
    dump_given,
    dump_resolved,
    load_config,
)
from slipstream.config.parse.dump import toml_value
from slipstream.config.schema import ArgumentsConfig

from .conftest import MINIMAL

texts = st.text(st.characters(exclude_categories=["Cs"]))
integers = st.integers(-(2**63), 2**63 - 1)  # as TOML has them
scalars = texts | integers | st.booleans() | st.floats(allow_nan=False) | st.dates() | st.datetimes() | st.times()
trees = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=8)


@given(trees)
def test_values_read_back(value):
    assert tomllib.loads(f"v = {toml_value(value)}") == {"v": value}


def test_what_has_no_form_is_refused():
    with pytest.raises(TypeError, match="no form in TOML"):
        toml_value([None])


def test_each_line_says_where_its_value_came_from(run_file):
    loaded = load_config(run_file(), ["--sampling.top_k", "5"])
    derived = [
        Derived("sampling.max_tokens", 12, "1.25 x the\nlongest"),
        Derived("training.prompts_per_batch", 3, "few"),
    ]
    lines = [" ".join(line.split()) for line in dump_resolved(loaded, derived).splitlines()]
    assert "steps = 20 # run.toml:11" in lines
    assert "top_k = 5 # command line" in lines
    assert "top_p = 1.0 # default" in lines
    assert "max_tokens = 12 # derived: 1.25 x the longest" in lines
    assert "prompts_per_batch = 3 # derived: few" in lines
    assert '# arguments.kl_estimator = "auto" # has no effect while algorithm.kl_coef is 0' in lines
    assert "# folder is not set # default" in lines


def round_trip(path, loaded, derived=()):
    path = path.with_name("resolved.toml")
    path.write_text(dump_resolved(loaded, derived), encoding="utf-8")
    return load_config(path)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["--no-evaluation"],
        ["--algorithm.kind", "sft"],
        ["--algorithm.kind", "sft", "--no-evaluation"],
        ["--algorithm.kind", "sft", "--data.path", "rows.jsonl"],
        ["--algorithm.importance_sampling", "none", "--algorithm.kl_coef", "0.1"],
        ["--algorithm.hooks", "own", "--algorithm.arguments.weight", "0.5", "--algorithm.arguments.best_of", "2"],
        ["--run.folder", "runs/x", "--sampling.stop", '["\\n", "#"]'],
        ["--inference.options.a.b", "[{x = 1}]", "--environment.name", "a/b.py:C"],
    ],
)
def test_round_trip(run_file, overrides):
    path = run_file()
    loaded = load_config(path, overrides)
    again = round_trip(path, loaded)
    assert again.config == loaded.config
    assert round_trip(path, again).config == loaded.config
    given = path.with_name("given.toml")
    given.write_text(dump_given(loaded), encoding="utf-8")
    assert load_config(given).config == loaded.config
    assert "gradient_checkpointing" not in given.read_text()  # a default


def test_a_run_with_former_keys_reads_back(run_file):
    path = run_file(name="resolved.toml")
    overrides = ("--algorithm.kl_coef", "0.1", "--algorithm.arguments.best_of", "2")
    overrides += ("--environment.processes", "1", "--algorithm.hooks", "own", "--algorithm.arguments.weight", "0.5")
    loaded = load_config(path, overrides)
    moved = rf"^arguments[.]({'|'.join(ArgumentsConfig.model_fields)}) "
    old = re.sub(moved, r"\1 ", dump_resolved(loaded), flags=re.MULTILINE)
    assert "\nbest_of = 2 " in old
    assert "arguments.weight = 0.5" in old
    old, num_changed = re.subn(r"^processes = 1 ", "apart = true ", old, flags=re.MULTILINE)
    assert num_changed == 1
    path.write_text(old, encoding="utf-8")
    assert load_config(path).config == loaded.config


def test_round_trip_without_environment(run_file):
    text = MINIMAL.replace('"grpo"', '"sft"').replace("[environment]\nname", "[data]\npath")
    loaded = load_config(run_file(text))
    assert round_trip(run_file(text), loaded).config == loaded.config


positive = st.floats(min_value=0, max_value=1, exclude_min=True)
configs = st.builds(
    RunConfig,
    model=st.builds(ModelConfig, path=st.just("org/name"), trust_remote_code=st.booleans()),
    environment=st.builds(
        EnvironmentConfig,
        name=st.just("x"),
        settings=st.dictionaries(texts, trees, max_size=3),
        system_prompt=texts,
        seed=st.integers(0, 2**32 - 1),
    ),
    algorithm=st.builds(RLConfig, clip_low=positive, kl_coef=st.just(0.5)) | st.builds(SFTConfig),
    training=st.builds(TrainingConfig, steps=st.integers(1, 10**8), learning_rate=positive),
    sampling=st.builds(SamplingConfig, stop=st.lists(texts.filter(bool)).map(tuple)),
    evaluation=st.builds(EvaluationConfig, threshold=st.floats(allow_nan=False, allow_infinity=False)),
)


@settings(max_examples=60)
@given(configs)
def test_any_config_reads_back(tmp_path_factory, config):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(dump_resolved(Loaded(config, {})), encoding="utf-8")
    assert load_config(path).config == config
