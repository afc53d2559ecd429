"""A run that runs out of memory ends in one sentence with its plan's numbers, and goes on smaller."""

import pytest
import torch

from slipstream.errors import EngineError
from slipstream.runlog import read_settings
from slipstream.trainer.learner import Learner

ONE_STEP = ("--training.steps", "2", "--evaluation", "false")


def until_step(step, fail):
    """`forward_backward` that fails from optimizer step `step` on."""
    real = Learner.forward_backward

    def forward_backward(self, *args, **kwargs):
        if self.step >= step:
            fail()
        return real(self, *args, **kwargs)

    return forward_backward


def allocate_too_much():
    torch.empty(1 << 50, dtype=torch.uint8)


def say_what_a_gpu_says():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of")


@pytest.mark.parametrize("fail", [allocate_too_much, say_what_a_gpu_says])
def test_a_trainer_without_memory_is_one_sentence_and_its_resume_is_planned_smaller(scripted, monkeypatch, fail):
    with monkeypatch.context() as patched:
        patched.setattr(Learner, "forward_backward", until_step(1, fail))
        report = scripted.run(*ONE_STEP, "--run.checkpoint_every", "1")
    assert (report.status, report.exit_code, report.error, report.traceback) == ("failed", 9, "OutOfMemory", "")
    rows = read_settings(scripted.folder)["training.micro_batch_tokens"]
    wanted = "2.50 GiB" if fail is say_what_a_gpu_says else f"{1 << 50} bytes"
    assert f"the trainer ran out of memory (it asked for {wanted})" in report.message
    assert "for the trainer" in report.message
    assert "for the engine" in report.message
    smaller = f"--resume, which plans training.micro_batch_tokens = {rows // 2} instead of {rows}"
    assert smaller in report.message
    (event,) = scripted.events("out_of_memory")
    assert (event["who"], event["row_tokens"]) == ("trainer", rows)
    overrides = ("--run.folder", str(scripted.folder), "--run.checkpoint_every", "1")
    scripted.finish(2, *ONE_STEP, *overrides, resume=True)
    assert read_settings(scripted.folder)["training.micro_batch_tokens"] == rows // 2
    assert "ran out of memory with rows of" in (scripted.folder / "resolved.toml").read_text()


def test_what_a_person_has_set_is_named_and_stays(scripted, monkeypatch):
    monkeypatch.setattr(Learner, "forward_backward", until_step(0, allocate_too_much))
    given = ("--training.micro_batch_tokens", "512", "--training.gradient_checkpointing", "true")
    report = scripted.run(*ONE_STEP, *given, "--inference.max_num_seqs", "8")
    assert report.exit_code == 9
    assert "lower training.micro_batch_tokens = 512" in report.message


def test_an_engine_without_memory_is_the_same(scripted):
    def start_without_room(engine):
        async def wait_ready():
            raise EngineError(
                "the engine did not start: engine process ended with code 1 (ValueError: No available memory for the "
                f"cache blocks.); its log is {scripted.folder}/logs/engine.log"
            )

        engine.wait_ready = wait_ready

    report = scripted.run(*ONE_STEP, change=start_without_room)
    assert (report.exit_code, report.error) == (9, "OutOfMemory")
    assert "the engine ran out of memory" in report.message
    sequences = read_settings(scripted.folder)["inference.max_num_seqs"]
    assert f"inference.max_num_seqs = {sequences // 2} instead of {sequences}" in report.message
    assert "engine.log" in report.message
    assert scripted.run(*ONE_STEP, "--run.folder", str(scripted.folder), resume=True).status == "finished"
    assert read_settings(scripted.folder)["inference.max_num_seqs"] == sequences // 2
