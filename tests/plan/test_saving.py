"""What checkpoints take of memory and disk: the count against real ones, and what follows from it."""

import dataclasses

import pytest
from safetensors.torch import load_file

from slipstream import records
from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.config import LoraConfig, with_values
from slipstream.errors import ConfigError
from slipstream.launch.build import build_optimizer
from slipstream.launch.recovery.resume import refuse_to_resume
from slipstream.plan.derive import make_plan
from slipstream.plan.facts import AdapterFacts, DiskFacts
from slipstream.plan.machine import measure_disk
from slipstream.plan.measure import read_trained_model
from slipstream.plan.memory.checkpoints import saved_bytes
from slipstream.plan.memory.sizes import GIB
from slipstream.trainer.checkpoints.checkpoint import CheckpointStore
from slipstream.trainer.learner import Learner
from slipstream.trainer.loss import SFTObjective
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.packing import StepBatch

from .test_plan import CARD, GENERATED, GRPO, facts, note, plan, reasons, refusal


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return new_model(tmp_path_factory.mktemp("models") / "tiny", hidden_size=64, num_layers=2, context_length=64)


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [("adamw", "float32"), ("adamw", "bfloat16"), ("adamw_bf16", "bfloat16"), ("muon", "bfloat16")],
)
def test_the_count_is_what_a_checkpoint_takes(model, optimizer, dtype, tmp_path):
    config = with_values(GRPO, {"training.optimizer": optimizer, "model.dtype": dtype, "training.learning_rate": 1e-3})
    policy = PolicyModel.load(model, dtype)
    learner = Learner(policy, build_optimizer(config, policy.network))
    learner.forward_backward(StepBatch([records.Sequence([5, 6, 7, 8], [False, True, True, True])]), SFTObjective())
    learner.optim_prepare(1e-3)
    learner.optim_commit()
    path = CheckpointStore(tmp_path).save(1, learner, model, {})
    state = sum(tensor.nbytes for tensor in load_file(path / "state/learner.safetensors").values())
    weights = sum(tensor.nbytes for tensor in load_file(path / "weights/model.safetensors").values())
    counted = saved_bytes(config, dataclasses.replace(facts(), model=read_trained_model(str(model))))
    assert counted.weights == weights
    assert counted.state == pytest.approx(state, rel=0.05)


class TestBeside:
    """`run.async_checkpoints`."""

    def test_where_there_is_memory(self):
        made = plan(GENERATED, memory_bytes=128 * GIB, **CARD)
        assert made.config.run.async_checkpoints is True
        told = note(made, "size of a checkpoint")
        assert told.value == pytest.approx(1_543_714_304 * 14 / GIB, abs=0.01)
        assert "from a copy in the machine's memory" in told.how
        assert "1 kept to resume from, the weights of 2" in told.how

    def test_where_there_is_none_training_waits_and_the_plan_says_so(self):
        made = plan(GENERATED, memory_bytes=24 * GIB, **CARD)
        assert made.config.run.async_checkpoints is False
        assert "training waits" in reasons(made)["run.async_checkpoints"]
        assert "training waits while it is written" in note(made, "size of a checkpoint").how
        asked = GENERATED | {"run.async_checkpoints": True}
        assert plan(asked, memory_bytes=24 * GIB, **CARD).config.run.async_checkpoints is True, "it does fit"
        assert "needs 20.13 GiB of the machine's memory" in refusal(asked, memory_bytes=16 * GIB, **CARD)

    def test_what_else_is_in_the_machines_memory_counts(self):
        memory = 50 * GIB
        assert plan(GENERATED, memory_bytes=memory, **CARD).config.run.async_checkpoints is True
        paged = GENERATED | {"training.optimizer": "adamw_paged"}
        assert plan(paged, memory_bytes=memory, **CARD).config.run.async_checkpoints is False

    def test_an_adapter_needs_little(self):
        config, adapter = GRPO.model_copy(update={"lora": LoraConfig(rank=8)}), AdapterFacts(9_000_000, ("q_proj",))
        made = plan(GENERATED, config, memory_bytes=4 * GIB, adapter=adapter, **CARD)
        assert made.config.run.async_checkpoints is True

    def test_several_ranks_write_while_training_waits(self):
        ranks = {"training.ranks": 2}
        made = plan(ranks)
        assert made.config.run.async_checkpoints is False
        assert "2 ranks" in reasons(made)["run.async_checkpoints"]
        assert "goes with one rank" in refusal(ranks | {"run.async_checkpoints": True})


class TestDisk:
    """One checkpoint takes 20.1 GiB, and a published version 2.9."""

    def planned(self, free, values=None, own=0):
        values = GENERATED | {"weights.bridge": "disk"} | (values or {})
        return plan(values, memory_bytes=128 * GIB, disk=DiskFacts(free * GIB, own * GIB), **CARD)

    def test_room_enough(self):
        assert self.planned(64).warnings == ()

    def test_one_that_is_certainly_too_small(self):
        full = r"take [\d.]+ GiB of the disk of the run folder .* are free there: make"
        every = "run.checkpoint_every"
        for free, values in ((28, {}), (51, {every: 10}), (100, {every: 1, "run.keep_checkpoints": 4})):
            with pytest.raises(ConfigError, match=full):
                self.planned(free, values)
        self.planned(28, own=30)
        assert self.planned(28, {"weights.bridge": "single_copy"}).config.weights.bridge == "single_copy"

    def test_one_that_may_be_too_small(self):
        (warning,) = self.planned(45).warnings
        assert "may take 51.76 GiB of the disk of the run folder (20.13 GiB each, 2.88 GiB of it weights)" in warning
        (warning,) = self.planned(56).warnings
        assert "56.00 GiB are free there" in warning

    def test_what_is_there(self, tmp_path):
        folder = tmp_path / "not/yet"
        assert measure_disk(folder).free_bytes > 0
        assert measure_disk(folder).own_bytes == 0
        for name in ("checkpoints/step-000001/state/a", "weights/0.1/b", "logs/c"):
            (folder / name).parent.mkdir(parents=True)
            (folder / name).write_bytes(bytes(1000))
        (folder / "checkpoints/best").symlink_to("step-000001")
        assert measure_disk(folder).own_bytes == 2000


def test_a_run_none_of_whose_checkpoints_is_whole_does_not_begin_again_by_itself(tmp_path):
    config = make_plan(GRPO, facts()).config
    refuse_to_resume(tmp_path, config)
    (tmp_path / "checkpoints/step-000004").mkdir(parents=True)
    damage = r"none of the checkpoints .* can be resumed from \(step-000004: its manifest"
    with pytest.raises(ConfigError, match=damage):
        refuse_to_resume(tmp_path, config)
