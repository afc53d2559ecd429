"""Each optimizer through the whole loop, critic included: an interrupted run goes on as it was."""

import pytest

from slipstream.config.schema import OptimizerName
from slipstream.weights.fingerprint import describe
from slipstream.weights.model_files import read_model_folder

from .conftest import learned

OPTIONS = ("--evaluation", "false", "--training.steps", "4")
LAST = "checkpoints/step-000004/weights"


# The others have such a case in trainer/, without a run around it.
@pytest.mark.quick("adamw_bf16")
@pytest.mark.parametrize("name", OptimizerName.__args__)
def test_a_resumed_run_is_the_same(scripted, tmp_path, name):
    options = (*OPTIONS, "--training.optimizer", name)
    if name in ("adamw_bf16", "adamw_8bit"):
        options += ("--algorithm.kind", "ppo")
    undisturbed = scripted.folder
    scripted.run(*options)
    assert scripted.error is None
    scripted.folder = tmp_path / "again"
    scripted.run(*options, "--training.steps", "2")
    scripted.run(*options, "--run.folder", str(scripted.folder), resume=True)
    assert scripted.error is None
    assert learned(undisturbed) == learned(scripted.folder)
    assert describe(read_model_folder(undisturbed / LAST)) == describe(read_model_folder(scripted.folder / LAST))


def test_another_optimizer_cannot_go_on_with_it(scripted):
    scripted.run(*OPTIONS, "--training.steps", "2")
    report = scripted.run(*OPTIONS, "--training.optimizer", "muon", resume=True)
    assert report.status == "failed"
    assert "the saved optimizer state is another optimizer's" in str(scripted.error)
    scripted.finish(4, *OPTIONS, resume=True)
