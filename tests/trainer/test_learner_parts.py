"""Parts of a learner by themselves: dummy rows of ranks, sums over rows, memory metrics, random states, garbage."""

import gc
import os
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from slipstream import records
from slipstream.config.bounds import GIB
from slipstream.trainer import garbage_collection
from slipstream.trainer import learner as module
from slipstream.trainer.learner import (
    Reference,
    Sums,
    add_gradients,
    deterministic_on_cpu,
    memory_metrics,
    predicted,
    random_state,
    restore_state,
    row_predictions,
)
from slipstream.trainer.loss import SFTObjective
from slipstream.trainer.packing import StepBatch, micro_batches
from slipstream.weights.adapter_folder import AdapterConfig
from slipstream.weights.fingerprint import describe

CPU = torch.device("cpu")


def rows_of(batch, *places):
    """Rows of one sequence each; None for a place that is None."""
    rows = list(micro_batches(batch, 1, packing=False))
    return [None if place is None else rows[place] for place in places]


class Counting:
    """A model that counts its rows by their numbers of tokens."""

    def __init__(self, model):
        self.model, self.rows = model, []

    def __getattr__(self, name):
        return getattr(self.model, name)

    def logits(self, micro):
        self.rows.append(len(micro.token_ids_T))
        return self.model.logits(micro)


def test_a_rank_without_a_row_computes_a_dummy_one(make_learner, make_batch, gradients_of):
    learner, batch = make_learner(), make_batch(num=3)
    plain, model = Counting(learner.model), Counting(learner.model)
    sampling = records.SamplingParams(max_tokens=4)
    expected = row_predictions(plain, rows_of(batch, 0, 2), sampling)
    found = row_predictions(model, rows_of(batch, None, 0, None, 2), sampling)
    assert model.rows == [1, plain.rows[0], 1, plain.rows[1]]
    assert found.keys() == expected.keys() == {0, 2}
    assert all(torch.equal(a, b) for key in found for a, b in zip(found[key], expected[key], strict=True))
    assert [len(part) for part in found[7]] == [0, 0], "of a sequence without a trainable token"
    objective, divisors = SFTObjective(), {"tokens": 8.0}
    sums = add_gradients(learner.model, rows_of(batch, 0, 2), objective, divisors)
    gradients = gradients_of(learner)
    learner.optimizer.discard_gradients()
    counting = Counting(learner.model)
    with_dummies = add_gradients(counting, rows_of(batch, None, 0, None, 2), objective, divisors)
    assert counting.rows == [1, plain.rows[0], 1, plain.rows[1]]
    assert with_dummies == sums
    assert (sums.num_micro_batches, sums.num_row_tokens) == (2, sum(plain.rows))
    assert sums.longest_row == max(plain.rows)
    assert all(torch.equal(gradients[name], gradient) for name, gradient in gradients_of(learner).items())
    assert all(value.dtype == torch.float64 for value in sums.values.values())


def test_a_loss_scale_multiplies_the_gradients_and_not_what_is_told(make_learner, make_batch, gradients_of):
    learner, batch = make_learner(), make_batch(num=2)
    found = []
    for scale in (1.0, 4.0):
        sums = add_gradients(learner.model, rows_of(batch, 0, 1), SFTObjective(), {"tokens": 8.0}, scale)
        found.append((sums.values["loss"], gradients_of(learner)))
        learner.optimizer.discard_gradients()
    assert found[0][0] == found[1][0]
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], 4.0 * gradient)


def test_sums_of_further_rows_are_added():
    sums = Sums({"a": torch.tensor(1.0)}, 1, 10, 10)
    sums.add(Sums({"a": torch.tensor(2.0), "b": torch.tensor(5.0)}, 2, 30, 20))
    sums.add(Sums({"b": torch.tensor(1.0)}, 1, 5, 5))
    assert sums == Sums({"a": torch.tensor(3.0), "b": torch.tensor(6.0)}, 4, 45, 20)


@pytest.mark.parametrize(("before", "warns", "fills"), [(False, False, True), (True, True, False), (True, False, True)])
def test_determinism_is_as_it_was_after_a_backward_pass(before, warns, fills):
    def now():
        flags = torch.utils.deterministic.fill_uninitialized_memory
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            flags,
        )

    kept = now()
    try:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills
        start = now()
        within = []
        with pytest.raises(ZeroDivisionError), deterministic_on_cpu(CPU):
            within.append(now()) or 1 / 0
        assert within == [(True, True, False)]
        assert now() == start
        with deterministic_on_cpu(torch.device("meta")):
            assert now() == start
    finally:
        torch.use_deterministic_algorithms(kept[0], warn_only=kept[1])
        torch.utils.deterministic.fill_uninitialized_memory = kept[2]


def test_a_gpus_peaks_are_told_in_gib(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 4 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_alloc_retries": 2})
    gpu = torch.device("cuda")
    expected = {
        "memory/trainer_peak_gib": 3.0,
        "memory/trainer_held_gib": 4.0,
        "memory/trainer_alloc_retries": 2.0,
        "memory/trainer_row_tokens": 9.0,
    }
    assert memory_metrics(gpu, None, 9) == expected
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {})
    planned = {"memory/trainer_planned_gib": 1.5, "memory/trainer_alloc_retries": 0.0}
    assert memory_metrics(gpu, int(1.5 * GIB), 9) == expected | planned
    assert memory_metrics(CPU, GIB, 9) == {}


def test_the_longest_row_so_far_is_told(make_learner, make_batch, monkeypatch):
    told = []
    monkeypatch.setattr(module, "memory_metrics", lambda *arguments: told.append(arguments) or {"memory/told": 1.0})
    learner, batch = make_learner(1), make_batch(num=2)
    learner.planned_bytes = 7
    metrics = learner.forward_backward(batch, SFTObjective())
    lengths = [len(micro.token_ids_T) for micro in micro_batches(batch, 1)]
    assert (metrics["num_micro_batches"], metrics["num_row_tokens"]) == (2.0, float(sum(lengths)))
    assert metrics["memory/told"] == 1.0
    short = StepBatch([records.Sequence([1, 2], [False, True])])
    learner.forward_backward(short, SFTObjective())
    assert told == [(CPU, 7, max(lengths))] * 2


def test_rows_are_as_long_as_asked(make_learner, make_batch, monkeypatch):
    asked = []
    build = module.micro_batches
    monkeypatch.setattr(
        module,
        "micro_batches",
        lambda batch, most, **options: asked.append((most, options)) or build(batch, most, **options),
    )
    learner, sequences = make_learner(60), make_batch(num=3).sequences
    scores = learner.forward(sequences)
    again = learner.forward(sequences, micro_batch_tokens=90)
    warmer = records.SamplingParams(max_tokens=1, temperature=0.5)
    reference = Reference(partial(predicted, learner.model), 70).forward(sequences, warmer)
    learner.values(sequences)
    learner.forward_backward(make_batch(num=3), SFTObjective())
    assert asked == [(most, {"packing": True, "device": CPU}) for most in (60, 90, 70, 60, 60)]
    for ours, theirs in zip(scores.logprobs, again.logprobs, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        assert (ours.dtype, ours.device) == (torch.float32, CPU)
    assert not torch.allclose(reference.logprobs[0], scores.logprobs[0], atol=1e-3)


@pytest.mark.parametrize("lora", [None, AdapterConfig(4, 12.0, ("q_proj",), "")])
def test_weights_that_are_written_are_on_the_disk_and_described(
    lora, make_learner, model_folder, tmp_path, monkeypatch
):
    synced = set()
    monkeypatch.setattr(os, "fsync", lambda file: synced.add(os.path.basename(os.readlink(f"/proc/self/fd/{file}"))))
    learner = make_learner()
    if lora is not None:
        learner.model.add_adapter(lora)
    said = learner.write_weights(tmp_path / "weights", model_folder)
    name = "model.safetensors" if lora is None else "adapter_model.safetensors"
    assert set(said) == set(describe(load_file(tmp_path / "weights" / name).items()))
    assert {name, tmp_path.name} < synced


def test_features_of_images_are_forgotten_when_weights_change(make_learner, make_batch, tmp_path):
    learner, cleared = make_learner(), []
    learner.forward_backward(make_batch(num=2), SFTObjective())
    learner.model.images = SimpleNamespace(clear=lambda: cleared.append(learner.step))
    learner.optim_prepare(1e-3)
    assert cleared == []
    learner.optim_commit()
    learner.save(tmp_path / "a" / "state")
    learner.load(tmp_path / "a" / "state")
    assert cleared == [1, 1]


def test_random_states_of_a_gpu_are_kept_and_restored_where_there_is_one(monkeypatch):
    state, given = torch.tensor([5], dtype=torch.uint8), []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *arguments: given.append(arguments))
    gpu = torch.device("cuda")
    assert random_state(CPU).keys() == {"rng.cpu"}
    kept = random_state(gpu)
    assert kept.keys() == {"rng.cpu", "rng.cuda"}
    loaded = []
    optimizer = SimpleNamespace(load_state=loaded.append)
    drawn = torch.rand(2)
    for device in (gpu, CPU):
        restore_state(optimizer, kept | {"optimizer.master.a": state}, device)
    assert torch.equal(torch.rand(2), drawn)
    assert given == [(state, gpu)]
    assert loaded == [{"master.a": state}] * 2


class Node:
    """Refers to itself."""

    def __init__(self):
        self.own = self


def test_garbage_goes_and_what_lives_is_left_out_until_the_end(freezing):
    gc.disable()
    try:
        reference = weakref.ref(Node())
        garbage_collection.freeze()
        assert reference() is None
        assert gc.get_freeze_count() > 0
    finally:
        garbage_collection.unfreeze()
        gc.enable()
    assert gc.get_freeze_count() == 0
