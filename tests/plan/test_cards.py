"""Plans for GPUs that are elsewhere, for GPUs that others use too, and for runs that do not fit."""

import dataclasses
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config import LoraConfig, with_values
from slipstream.config.traits import uses_engine
from slipstream.errors import ConfigError
from slipstream.plan import machine, make_plan
from slipstream.plan.derive import DoesNotFit, draft_plan
from slipstream.plan.memory.cards import (
    MEMORY_GIB,
    Gpus,
    chosen_gpus,
    read_processes,
    read_state,
    read_used,
    with_gpus,
    with_held,
)
from slipstream.plan.memory.sizes import GIB
from slipstream.plan.render import leading, plan_as_json
from tests.plan.test_plan import FACTS, GRPO, LARGE, SFT, facts

GENERATED = {"sampling.max_tokens": 512, "inference.max_model_len": 640}
H100 = Gpus(1, int(79.1 * GIB), 9, "NVIDIA H100")


def on(gpus, **changes):
    return with_gpus(facts(**LARGE, **changes), gpus)


class TestNamed:
    @pytest.mark.parametrize("name", MEMORY_GIB)
    def test_every_card_has_a_plan(self, name):
        gpus = chosen_gpus(name.upper(), None, 2)
        made = draft_plan(with_values(GRPO, GENERATED), with_gpus(facts(**LARGE), gpus))
        assert name in made.device
        assert made.config.model.dtype == ("float16" if name in ("v100", "t4") else "bfloat16")
        assert any(name in notice for notice in made.notices)

    def test_a_card_by_its_memory(self):
        assert chosen_gpus(None, 24, 3) == Gpus(3, 24 * GIB, 8, "GPU with 24 GiB", is_here=False)
        assert chosen_gpus("h100", 10, 1).memory_bytes == 10 * GIB
        assert chosen_gpus(None, None, 1) is None

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            (("h10", None, 1), "--device h10"),
            ((None, 0.0, 1), "--device-memory 0"),
            ((None, float("nan"), 1), "--device-memory nan"),
            (("h100", None, 0), "--gpus 0"),
            ((None, None, 2), "--gpus 2"),
        ],
    )
    def test_what_is_no_card(self, options, named):
        with pytest.raises(ConfigError, match=named):
            chosen_gpus(*options)

    def test_its_disk_and_memory_are_not_this_machines(self):
        found = on(dataclasses.replace(H100, count=2, is_here=False))
        assert (found.disk, found.memory_bytes) == (None, 4 * H100.memory_bytes)
        assert on(H100).memory_bytes == FACTS.memory_bytes


class TestWhole:
    """Of a run that does not fit there is the whole plan, and why."""

    SMALL = Gpus(1, 24 * GIB, 8, "small")

    def test_the_plan_comes_with_the_refusal(self):
        with pytest.raises(DoesNotFit) as caught:
            make_plan(with_values(GRPO, GENERATED), on(self.SMALL))
        made = caught.value.plan
        assert str(caught.value) == made.refusals[0]
        assert {"model.dtype", "training.micro_batch_tokens", "run.async_checkpoints"} <= {x.name for x in made.derived}
        assert json.loads(plan_as_json(made))["refusals"] == [*made.refusals]
        assert [name for name, _ in leading(made)] == ["run", "memory", "time"]

    def test_a_full_disk(self):
        full = dataclasses.replace(facts(max_sequence_tokens=90), disk=machine.DiskFacts(1000))
        assert ["disk" in sentence for sentence in draft_plan(SFT, full).refusals] == [True]

    def test_what_fits_has_no_refusal(self):
        assert draft_plan(GRPO, FACTS).refusals == ()


class TestHeld:
    MIB = 1 << 20
    USED = "GPU-a, 81559, 41000\nGPU-b, 81559, 600\nGPU-c, [N/A], [N/A]\n"
    PROCESSES = "GPU-a, 4711, 40960, /usr/bin/python3\nGPU-a, 12, [N/A], [Not Found]\nno row\n"

    def test_rows_of_nvidia_smi(self):
        assert read_used(self.USED) == {
            "GPU-a": (81559 * self.MIB, 41000 * self.MIB),
            "GPU-b": (81559 * self.MIB, 600 * self.MIB),
        }
        first, second = read_processes(self.PROCESSES)["GPU-a"]
        assert "4711" in first
        assert "40.00 GiB" in first
        assert "12" in second

    def test_the_fullest_gpu_decides_and_the_drivers_own_memory_is_nobodys(self):
        two = dataclasses.replace(H100, count=2)
        totals = [H100.memory_bytes] * 2
        found = with_held(two, totals, [600 * self.MIB, 40 * GIB], [["x"], ["python3 (process 4711)"]])
        assert (found.held_bytes, found.holders) == (40 * GIB, ("python3 (process 4711)",))
        assert with_held(two, totals, [600 * self.MIB, 0], [["x"], []]).held_bytes == 0

    def test_a_plan_has_what_is_left(self):
        held = dataclasses.replace(H100, held_bytes=40 * GIB, holders=("python3 (process 4711, 39.90 GiB)",))
        asked = with_values(GRPO, GENERATED | {"training.gradient_checkpointing": True})
        small = {"num_parameters": 1_000_000_000}
        free, left = (draft_plan(asked, with_gpus(facts(**LARGE | small), each)) for each in (H100, held))
        assert not left.refusals
        assert left.config.training.micro_batch_tokens <= free.config.training.micro_batch_tokens
        sizes = {note.name: note.value for note in left.notes}
        assert sizes["memory of the trainer"] + sizes["memory of the engine"] <= 39.1
        assert any("4711" in warning and "40.00 GiB" in warning for warning in left.warnings)

    def test_or_is_refused_with_who_holds_it(self):
        held = dataclasses.replace(H100, held_bytes=70 * GIB, holders=("python3 (process 4711)",))
        with pytest.raises(DoesNotFit, match=r"70\.00 GiB are held by python3 \(process 4711\)"):
            make_plan(with_values(GRPO, GENERATED), on(held))

    def test_it_is_asked_once_so_that_a_restart_does_not_count_its_own(self, monkeypatch):
        asked = []

        def query(*queries):
            asked.append(queries)
            return [self.USED, self.PROCESSES]

        monkeypatch.delenv(machine.IN_USE, raising=False)
        monkeypatch.setattr(machine, "query_gpus", query)
        first = machine.gpus_in_use()
        assert machine.gpus_in_use() == first
        assert len(asked) == 1
        monkeypatch.delenv(machine.IN_USE)

    def test_a_run_records_driver_temperature_and_processes(self):
        row = "GPU-a, 81559, 41000, 570.86, 43, NVIDIA H100 80GB HBM3\n"
        [found] = read_state(row + "GPU-b, 1\n", self.PROCESSES)
        assert (found["driver"], found["temperature_c"], found["name"]) == ("570.86", 43, "NVIDIA H100 80GB HBM3")
        assert len(found["processes"]) == 2
        assert read_state("", "") == []

    def test_nothing_is_known_without_the_program(self, monkeypatch):
        monkeypatch.delenv(machine.IN_USE, raising=False)
        monkeypatch.setattr(machine.shutil, "which", lambda name: None)
        assert machine.gpus_in_use() == ({}, {})
        assert machine.IN_USE not in machine.os.environ


ADVICE = re.compile(r"set ([a-z_]+)\.([a-z0-9_]+) = (\"[^\"]*\"|[\w.]+)")


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(["auto", "float32", "bfloat16", "float16"]),
    optimizer=st.sampled_from(["adamw", "adamw_8bit", "adamw_bf16", "muon"]),
    lora=st.booleans(),
    checkpointing=st.sampled_from(["auto", True, False]),
    memory=st.sampled_from([0, 4, 16, 40, 80]),
    num_gpus=st.integers(1, 3),
    held=st.integers(0, 30),
    config=st.sampled_from([GRPO, SFT]),
)
def test_no_advice_is_followed_already(dtype, optimizer, lora, checkpointing, memory, num_gpus, held, config):
    values = GENERATED | {"model.dtype": dtype, "training.optimizer": optimizer}
    values |= {"training.gradient_checkpointing": checkpointing}
    config = with_values(config, values)
    if lora:
        config = config.model_copy(update={"lora": LoraConfig()})
    gpus = Gpus(num_gpus if memory else 0, memory * GIB, 8, held_bytes=min(held, memory) * GIB)
    try:
        made = draft_plan(config, with_gpus(facts(**LARGE, max_sequence_tokens=400), gpus))
    except ConfigError:  # what nothing is planned for
        return
    for sentence in made.refusals:
        assert "[lora]" not in sentence or made.config.lora is None, sentence
        for section, key, value in ADVICE.findall(sentence):
            now = getattr(getattr(made.config, section), key)
            assert value not in (str(now).lower(), f'"{now}"'), sentence
        for setting in re.findall(r"(?:lower|raise) (inference\.\w+)", sentence):
            assert uses_engine(made.config), (setting, sentence)
