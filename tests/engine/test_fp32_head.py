"""The output head in float32 on both sides: in bfloat16 engine and trainer come nearer to one another."""

import pytest

from slipstream.inference.plugin.arguments import checked_head, engine_arguments
from slipstream.records import SamplingParams
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.model.tiny_qwen3 import new_model
from slipstream.weights.model_files import read_model_folder, write_model_folder

from .conftest import differences, settings_for, start, stop

SAMPLING = SamplingParams(max_tokens=32, temperature=1.0)


@pytest.mark.engine
def test_the_difference_falls(tmp_path):
    """In a model made for it: one hidden channel is large and the same for every token, so that it is in each logit,
    where it costs bfloat16 its precision, and in no log-probability."""
    folder = new_model(tmp_path / "new", hidden_size=64, num_layers=1, seed=3)
    weights = dict(read_model_folder(folder))
    for name, tensor in weights.items():
        if "embed_tokens" in name or "lm_head" in name:
            tensor[:, 0] = 1.0
    write_model_folder(tmp_path / "model", weights.items(), folder)
    found = {}
    for fp32_head in (False, True):
        model = PolicyModel.load(tmp_path / "model", "bfloat16", fp32_head=fp32_head)
        live = start(tmp_path / "model", tmp_path / f"engine-{fp32_head}", "bfloat16", fp32_head=fp32_head)
        try:
            health = live.call(live.engine.wait_ready())
            assert ("fp32_head" in health.patches) is fp32_head
            found[fp32_head] = differences(live, model, SAMPLING)
        finally:
            stop(live)
    print({on: (values.mean().item(), values.max().item()) for on, values in found.items()})
    assert found[True].mean() < 0.5 * found[False].mean()
    assert found[True].max() < 0.5 * found[False].max()


def test_an_engine_that_computes_it_otherwise_does_not_start():
    assert checked_head([["float32"], ["float32"]]) == "fp32_head"
    for found in ([["bfloat16"]], [["float32"], ["?"]], [[]]):
        with pytest.raises(RuntimeError, match=r"model\.fp32_head = true asks for logits in float32.*set it to false"):
            checked_head(found)


def test_overrides_of_the_users_stay(tmp_path):
    settings = settings_for(tmp_path, fp32_head=True, options={"hf_overrides": {"rope_theta": 1.0}})
    assert engine_arguments(settings)["hf_overrides"] == {"rope_theta": 1.0, "head_dtype": "float32"}
    assert "hf_overrides" not in engine_arguments(settings_for(tmp_path))
