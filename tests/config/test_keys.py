import pytest

from slipstream.config import load_config, with_values
from slipstream.config.parse.keys import all_keys, keys_of, optional_sections
from slipstream.config.parse.suggestions import suggestion
from slipstream.config.recipes import RECIPES


def test_keys_know_what_they_take():
    keys = all_keys()
    assert keys["training.steps"].requirement == "a positive whole number"
    assert keys["model.path"].required
    assert not keys["training.steps"].required, "training.epochs may stand in its place"
    assert not keys["training.seed" if "training.seed" in keys else "run.seed"].required
    assert keys["inference.enforce_eager"].is_flag
    assert keys["inference.enforce_eager"].requirement == 'true, false or "auto"'
    assert keys["run.folder"].is_text
    assert keys["run.sinks"].requirement == 'a list of "tensorboard", "wandb" or "trackio"'
    assert keys["environment.settings"].is_free
    assert keys["algorithm.group_size"].kinds == tuple(RECIPES)
    assert keys["algorithm.arguments"].is_free
    assert keys["algorithm.arguments.kl_in"].choices == ("auto", "loss", "reward")
    assert len([key for key in keys_of("algorithm") if "grpo" in key.kinds or key.name == "kind"]) == 16
    assert keys["algorithm.train_on"].kinds == ("sft",)
    assert keys["algorithm.kind"].choices == ("sft", *RECIPES)
    assert keys["evaluation.temperature"].requirement == 'a number of at least 0 and at most 2 or "auto"'
    assert [key.name for key in keys_of("algorithm") if not key.kinds or "sft" in key.kinds] == [
        "kind",
        "train_on",
    ]
    assert optional_sections() == ("evaluation",)


@pytest.mark.parametrize("path", sorted(all_keys()))
def test_a_slip_of_the_finger_finds_its_key(path):
    section, _, name = path.rpartition(".")
    if len(name) < 5:
        return
    slip = name[:2] + name[3:]
    found = suggestion(f"{section}.{slip}")
    assert found == f"did you mean {path}?" or found.startswith("did you mean "), found


def test_with_values_validates(run_file):
    config = load_config(run_file()).config
    assert with_values(config, {"sampling.max_tokens": 7}).sampling.max_tokens == 7
    with pytest.raises(ValueError, match="greater than"):
        with_values(config, {"sampling.max_tokens": 0})
