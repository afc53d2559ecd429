"""What ran out of memory is told with its plan, and planned smaller afterwards."""

import dataclasses
import errno

import pytest
import torch

from slipstream.config import with_values
from slipstream.errors import ConfigError, EngineError, RankError
from slipstream.launch.recovery.out_of_memory import who_ran_out
from slipstream.plan import machine
from slipstream.plan.derive import make_plan
from slipstream.plan.facts import Shortage
from slipstream.plan.machine import count_oom_kills
from slipstream.plan.memory import shortages
from slipstream.plan.memory.shortages import find_shortages, memory_at_start
from slipstream.runlog import RunLog

from .test_plan import reasons
from .test_trainer_memory import CONFIG, FACTS

VLLM = "the engine did not start: engine process ended with code 1 ({}); its log is runs/x/logs/engine.log"
KILLED = "the engine died: engine process ended with code -9; its log is runs/x/logs/engine.log"


def plan(*shortages, **values):
    named = {name.replace("__", "."): value for name, value in values.items()}
    return make_plan(with_values(CONFIG, named), dataclasses.replace(FACTS, shortages=shortages))


def sizes(made):
    config = made.config
    training, inference = config.training, config.inference
    return training.micro_batch_tokens, training.gradient_checkpointing, inference.max_num_seqs


def failed(made, side="trainer"):
    return Shortage("x (lineage 0)", side, *sizes(made))


def test_a_trainer_gets_shorter_rows_then_computes_layers_again_then_takes_from_the_engine():
    first = plan()
    rows, checkpointing, sequences = sizes(first)
    assert checkpointing is False
    found, seen = [], [sizes(first)]
    for _ in range(24):
        made = plan(*found)
        if found and sizes(made) == seen[-1]:
            break
        found.append(failed(made))
        seen.append(sizes(made))
    lengths = [row for row, _, _ in seen]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[2] == rows // 2
    longest = first.config.inference.max_model_len
    kinds = [(row == longest, again, number < sequences) for row, again, number in seen]
    expected = [(False, False, False), (True, False, False), (True, True, False), (True, True, True)]
    assert list(dict.fromkeys(kinds)) == expected
    assert seen[-1][2] == 1  # there is an end
    halved = plan(failed(first))
    assert "x (lineage 0) ran out of memory with rows of" in reasons(halved)["training.micro_batch_tokens"]


def test_what_is_set_stays():
    given = {"training__micro_batch_tokens": 8192, "training__gradient_checkpointing": True}
    made = plan(**given)
    assert sizes(plan(failed(made), **given))[:2] == (8192, True)
    assert sizes(plan(failed(made, "engine"), inference__max_num_seqs=64, **given))[2] == 64


def test_an_engine_gets_a_smaller_cache():
    first = plan()
    made = plan(failed(first, "engine"))
    assert sizes(made)[2] == sizes(first)[2] // 2
    assert made.config.inference.kv_cache_gib < first.config.inference.kv_cache_gib
    assert made.config.inference.gpu_memory_utilization < first.config.inference.gpu_memory_utilization
    assert "the engine of x (lineage 0) ran out of memory" in reasons(made)["inference.max_num_seqs"]


@pytest.mark.parametrize(
    ("error", "oom_killed", "who"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"), False, "trainer"),
        (MemoryError(), False, "trainer"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), False, "trainer"),
        (RuntimeError("CUDA error: out of memory"), False, "trainer"),
        (RankError("trainer process 1 failed (OutOfMemoryError: CUDA out of memory.): look at x"), False, "trainer"),
        (RankError("trainer process 1 (of 0 to 1) was killed (SIGKILL): continue with --resume"), True, "trainer"),
        (EngineError(VLLM.format("ValueError: No available memory for the cache blocks. Try")), False, "engine"),
        (EngineError(VLLM.format("ValueError: Free memory on device cuda:0 (3.1/79.1 GiB) on startup is less")),
         False, "engine"),
        (EngineError(VLLM.format("torch.OutOfMemoryError: CUDA out of memory.")), False, "engine"),
        (EngineError(KILLED), True, "engine"),
        (EngineError(VLLM.format("torch.OutOfMemoryError").replace("logs/", "logs/teacher/")), False, "teacher"),
        # Nothing of these is about memory.
        (EngineError(KILLED), False, None),
        (EngineError("the engine did not answer /apply within 5 s: engine process is running"), True, None),
        (RankError("trainer process 1 (of 0 to 1) was killed (SIGKILL): continue with --resume"), False, None),
        (RuntimeError("shapes differ"), True, None),
        (ConfigError("the run needs about 90 GiB: it would be out of memory"), False, None),
        (OSError(errno.ENOSPC, "No space left on device"), False, None),
    ],
)  # fmt: skip
def test_who_ran_out_is_seen_by_what_is_said_and_who_was_killed(error, oom_killed, who):
    assert who_ran_out(error, oom_killed=oom_killed) == who


def test_a_real_allocator_is_understood():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert who_ran_out(caught.value, oom_killed=False) == "trainer"
    with pytest.raises(MemoryError) as caught:
        bytearray(1 << 60)
    assert who_ran_out(caught.value, oom_killed=False) == "trainer"


def test_kills_are_counted_for_the_own_group_first(tmp_path, monkeypatch):
    groups, membership, counters = tmp_path / "groups", tmp_path / "membership", tmp_path / "vmstat"

    def count(groups=groups, membership=membership, counters=counters):
        for name, path in (("_GROUPS", groups), ("_MEMBERSHIP", membership), ("_COUNTERS", counters)):
            monkeypatch.setattr(machine, name, path)
        return count_oom_kills()

    counters.write_text("pgfault 12\noom_kill 40\n")
    membership.write_text("0::/mine\n")
    assert count(membership=tmp_path / "none") == 40
    (groups / "mine").mkdir(parents=True)
    (groups / "mine" / "memory.events").write_text("low 0\noom 5\noom_kill 3\noom_group_kill 0\n")
    assert count() == 3
    assert count(counters=tmp_path / "none") == 3
    assert count(groups=tmp_path / "none", counters=tmp_path / "none") == 0


def began(folder, config, *, ends=None, resume=False):
    """A run that began with `config`; `ends`: its exit, None: none was written."""
    log = RunLog.create(folder, resume=resume)
    log.event("start", memory=memory_at_start(config))
    if ends is not None:
        log.exit(ends)
    log.close()


def test_one_that_started_again_by_itself_was_not_killed(tmp_path, monkeypatch):
    """It says itself what its engine died of."""
    monkeypatch.setattr(shortages, "count_oom_kills", lambda: 4)
    with RunLog.create(tmp_path / "run") as log:
        log.event("start", memory=memory_at_start(plan().config))
        log.event("restart", number=1)
        log.has_exit = True
    monkeypatch.setattr(shortages, "count_oom_kills", lambda: 5)
    assert find_shortages(tmp_path / "run") == ((), ())


@pytest.mark.parametrize(("kills", "boot", "ends", "number"), [
    (5, "now", None, 1), (4, "now", None, 0), (5, "later", None, 0), (5, "now", RuntimeError("x"), 0),
])  # fmt: skip
def test_a_run_that_the_kernel_killed_is_found_by_its_count(tmp_path, monkeypatch, kills, boot, ends, number):
    monkeypatch.setattr(shortages, "count_oom_kills", lambda: 4)
    monkeypatch.setattr(shortages, "_boot", lambda: "now")
    config = plan().config
    began(tmp_path / "run", config, ends=ends)
    monkeypatch.setattr(shortages, "count_oom_kills", lambda: kills)
    monkeypatch.setattr(shortages, "_boot", lambda: boot)
    found, damage = find_shortages(tmp_path / "run")
    assert [(each.side, each.run) for each in found] == [("trainer", "run (lineage 0)")] * number
    assert damage == ()
    if found:
        assert sizes(plan(*found))[0] == config.training.micro_batch_tokens // 2


def test_what_a_run_wrote_of_it_is_found_again_and_what_is_damaged_is_named(tmp_path):
    shortage = failed(plan(), "engine")
    with RunLog.create(tmp_path / "run") as log:
        log.event("out_of_memory", cause="x", **dataclasses.asdict(shortage))
        log.event("out_of_memory", side="nobody")
    found, damage = find_shortages(tmp_path / "run")
    assert found == (shortage,)
    assert len(damage) == 1
    assert find_shortages(tmp_path / "none") == find_shortages(None) == ((), ())
