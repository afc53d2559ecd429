"""Values of `inference.options` are vLLM's to judge, before a run."""

import pytest

from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.errors import ConfigError
from slipstream.inference.settings import EngineSettings
from slipstream.plan.preflight.vllm_options import try_options


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return new_model(tmp_path_factory.mktemp("options") / "model", hidden_size=32, num_layers=1)


def tried(model, **options):
    try_options(EngineSettings(str(model), "float32", 64, 4, kv_cache_bytes=1 << 26, options=options))


@pytest.mark.timeout(900)
@pytest.mark.full
def test_a_value_that_vllm_refuses(model):
    with pytest.raises(ConfigError, match=r'inference.options.block_size = "many": .* refuses it .*integer') as raised:
        tried(model, block_size="many", max_logprobs=5)
    assert "\n" not in str(raised.value)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_values_that_it_takes(model):
    tried(model, block_size=32, max_logprobs=5)
