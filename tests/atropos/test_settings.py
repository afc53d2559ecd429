"""Settings of the environment `atropos` that cannot be used are refused with a remedy."""

import pytest

from slipstream.atropos.entrance import token_of
from slipstream.config import load_config
from slipstream.config.atropos import atropos_settings
from slipstream.config.environment import EnvironmentConfig
from slipstream.errors import ConfigError

FILE = """
evaluation = false
[model]
path = "m"
[environment]
name = "atropos"
[algorithm]
kind = "grpo"
[training]
steps = 2
"""


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prot": 1}, "environment.settings.prot is no setting: did you mean 'port'"),
        ({"port": 70_000}, "environment.settings.port = 70000"),
        ({"url": "run-api:8000"}, "is no address of a run-api"),
        ({"url": "http://:secret@host:8000"}, "without a key in it"),
        ({"host": "0.0.0.0"}, "nothing asks for a token: set token_variable"),
        ({"token_variable": "a secret"}, "is no name of an environment variable"),
    ],
)
def test_settings_that_cannot_be(settings, words):
    with pytest.raises(ConfigError) as refused:
        atropos_settings(EnvironmentConfig(name="atropos", settings=settings))
    assert words in str(refused.value)
    assert "secret" not in str(refused.value)


def test_the_token_comes_from_its_variable(monkeypatch):
    settings = atropos_settings(
        EnvironmentConfig(name="atropos", settings={"host": "0.0.0.0", "token_variable": "API_TOKEN"})
    )
    with pytest.raises(ConfigError, match="API_TOKEN is not set"):
        token_of(settings)
    monkeypatch.setenv("API_TOKEN", "token")
    assert token_of(settings) == "token"
    assert atropos_settings(EnvironmentConfig(name="rows")) is None


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (("--evaluation", "true"), "set evaluation = false"),
        (("--algorithm.kind", "sft"), "use grpo"),
        (("--inference.sleep", "true"), "inference.sleep = true does not go with"),
        (("--run.orchestrators", "2", "--run.streams", "files", "--training.prompts_per_batch", "4"), "one entrance"),
        (("--teacher.url", "http://a:1/v1", "--teacher.path", "t"), "both given"),
    ],
)
def test_runs_that_cannot_be(tmp_path, override, words):
    file = tmp_path / "run.toml"
    file.write_text(FILE)
    load_config(file, ())
    load_config(file, ("--teacher.coef", "0.5"))
    with pytest.raises(ConfigError) as refused:
        load_config(file, override)
    assert words in str(refused.value)
