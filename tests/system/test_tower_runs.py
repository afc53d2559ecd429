"""A model that reads images, trained on text with real vLLM: every update proves decoder and tower."""

import os

import pytest
from safetensors.torch import load_file

from slipstream.runlog import read_events, read_exit, read_metrics
from tests.engine.architectures import ARCHITECTURES

from .test_real_runs import COIN

pytestmark = pytest.mark.engine


@pytest.fixture
def images(tmp_path, monkeypatch):
    """The folder of such a model, and an environment in which vLLM can load it."""
    architecture = ARCHITECTURES["vision"]
    if missing := architecture.missing():
        pytest.skip(missing)
    path = [*architecture.path(), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    return architecture.build(tmp_path / "model", "float32")


@pytest.mark.full
@pytest.mark.parametrize(
    "how", [("--weights.bridge", "broadcast"), ("--weights.bridge", "single_copy"), ("--lora.rank", "4")]
)
def test_grpo(how, command, run_file, images, tmp_path):
    folder = tmp_path / "run"
    options = ("--model.path", images, "--training.learning_rate", "1e-2", "--run.folder", folder)
    code, _, err = command("train", run_file, *COIN, *options, *how).wait(400)
    assert code == 0, err
    assert read_exit(folder).status == "finished"
    assert len({event["digest"] for event in read_events(folder) if event["kind"] == "apply"}) == 4
    assert all(row["probe/abs_logprob_diff"] < 1e-3 for row in read_metrics(folder))
    weights = folder / "checkpoints/step-000003/weights"
    if how[0] == "--lora.rank":
        names = load_file(weights / "adapter_model.safetensors").keys()
        assert names
        assert not any("visual" in name for name in names)
        return
    before, after = (load_file(path / "model.safetensors") for path in (images, weights))
    assert before.keys() == after.keys()
    assert (weights / "processor_config.json").is_file()
    for name, tensor in before.items():
        assert tensor.equal(after[name]) == ("visual" in name), name
