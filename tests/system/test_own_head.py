"""A model with a head of its own, whose `config.json` ties it to the embedding: trainer and engine leave both apart."""

import json

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.inference.plugin.serving import with_digests
from slipstream.inference.settings import EngineSettings
from slipstream.plan.measure import read_model
from slipstream.trainer.model.policy import PolicyModel
from slipstream.weights.model_files import HEAD

from .test_real_runs import check_run

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def own_head(tmp_path):
    size = {"hidden_size": 32, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "context_length": 64}
    folder = new_model(tmp_path / "model", **size, tie_embeddings=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return folder


@pytest.mark.parametrize("is_own", [True, False])
def test_all_parts_ask_the_files(own_head, is_own):
    file = own_head / "model.safetensors"
    if not is_own:
        tensors = load_file(file)
        save_file(tensors | {HEAD: tensors[EMBEDDING].clone()}, file, {"format": "pt"})
    for unread in (False, True):
        model = PolicyModel.load(own_head, unread=unread, checked=False)
        assert (HEAD in dict(model.named_weights())) == is_own
    settings = with_digests(EngineSettings(str(own_head), "float32", 64, 8, 0))
    assert (HEAD in {each.name for each in settings.parameters}) == is_own
    assert read_model(str(own_head)).tied_embeddings != is_own


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.quick("one copy")
@pytest.mark.parametrize(
    "options",
    [("--weights.bridge", "disk"), ("--weights.bridge", "single_copy"), ("--training.ranks", "2")],
    ids=["files", "one copy", "ranks"],
)
def test_a_checkpoint_does_not_tie_it(command, run_file, own_head, tmp_path, options):
    more = ("--environment.settings", "{coin = true}", "--evaluation", "false", "--run.folder", tmp_path / "run")
    command("train", run_file, "--model.path", own_head, *options, *more).ok()
    check_run(tmp_path / "run", steps=3)
    weights = tmp_path / "run" / "checkpoints" / "step-000003" / "weights"
    assert json.loads((weights / "config.json").read_text())["tie_word_embeddings"] is False
    stored, before = load_file(weights / "model.safetensors"), load_file(own_head / "model.safetensors")
    assert not stored[HEAD].equal(before[HEAD])
    assert AutoModelForCausalLM.from_pretrained(weights).lm_head.weight.equal(stored[HEAD])
