"""`single_copy` over two workers and two ranks: each rank trains its worker's own tensors, and the engine then answers
bit for bit as with files of what they have made: loaded by vLLM into itself, and once by one that starts on them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers
from benchmarks.bridges import create_bridge
from benchmarks.weight_sync.process_memory import pids_of, session_of

from slipstream.launch.build import build_sharded
from slipstream.launch.ranks.processes import RankProcesses
from slipstream.records import SamplingParams, Ticket
from slipstream.weights.model_files import stored_parameters

from ..launch import test_ranks
from ..mapped import maps_of
from .architectures import ARCHITECTURES
from .conftest import PROMPTS, LiveEngine, start, stop

# A start takes three quarters of a minute on two GPUs, and longer on a busy CPU.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]
SAMPLING = SamplingParams(max_tokens=24, temperature=0.8)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)


def started(model: Path, folder: Path, dtype: str, **changes) -> LiveEngine:
    folder.mkdir()
    return start(model, folder, dtype, max_restarts=0, tensor_parallel_size=2, **changes)


def answers(live: LiveEngine) -> list[tuple[list[int], list[float]]]:
    """One after the other: what a GPU computes depends on what else is in the batch."""
    asked = [(number, sampling) for number in range(4) for sampling in (SAMPLING, GREEDY)]
    found = [live.sample(f"divided {n} {s.temperature}", s, [PROMPTS[n]])[0] for n, s in asked]
    assert [c.error for c in found] == [""] * len(asked)
    return [(c.token_ids, c.logprobs) for c in found]


def with_words(model: Path, count: int) -> Path:
    """The model with so many words, of which the last are never used."""
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    torch.manual_seed(1)
    network.resize_token_embeddings(count, mean_resizing=False)
    network.save_pretrained(model)
    return model


def shared_files(live: LiveEngine) -> set[str]:
    """What torch and vLLM keep in shared memory for the engine's workers."""
    pids = [pid for leader in pids_of(live.engine) for pid in session_of(leader)]
    return set(re.findall(r" (/dev/shm/(?:torch|vllm)_\S+)", maps_of(pids)))


@pytest.mark.full
@pytest.mark.parametrize(("kind", "words"), [("tied", 128), ("untied", None)], ids=["even", "uneven"])
def test_what_ranks_train_is_what_the_workers_compute_with(kind: str, words: int | None, tmp_path: Path):
    architecture = ARCHITECTURES[kind]
    dtype, model = architecture.dtype, architecture.build(tmp_path / "model", architecture.dtype)
    if words is not None:
        with_words(model, words)
    live = started(model, tmp_path / "live", dtype)
    crew, files = None, set()
    try:
        workers = live.call(live.engine.share(stored_parameters(model, dtype), 60))
        files = shared_files(live)
        config = test_ranks.make_config(model, 2, {"kind": "grpo"}, dtype)
        crew = RankProcesses(config, test_ranks.SAMPLING, tmp_path / "logs", workers)
        parts = build_sharded(config, test_ranks.SAMPLING, crew, 0)
        alone = parts.learner._sharded.local.memory._live.keys() - parts.learner._sharded.local.memory.dims.keys()
        assert any("embed" in name for name in alone) == (words is None)
        assert {name.split(".")[-2].split("_")[-1] for name in alone} <= {"layernorm", "norm", "tokens", "head"}
        how = {"folder": tmp_path, "source": model, "engine": live.engine, "num_workers": 2}
        bridge = create_bridge("single_copy", **how, go_on=lambda version: live.call(live.engine.go_on(version, 60)))
        before = None
        for step in (1, 2):
            live.call(bridge.fence(60))
            test_ranks.one_step(parts, config, test_ranks.BATCHES[step - 1])
            ticket = live.update(bridge, parts.learner.named_weights(), step)
            found = answers(live)
            assert found != before
            before = found
        disk = create_bridge("disk", folder=tmp_path / "made", source=model, engine=live.engine)
        made = live.update(disk, parts.learner.named_weights(), 3)
        assert made.version.digest == ticket.version.digest
        assert answers(live) == found
    finally:
        if crew is not None:
            crew.close()
        stop(live)
    left = [path for path in files if Path(path).exists()]
    if words is not None:
        check_another(tmp_path / "oracle", dtype, made, found)
    assert left == []


def check_another(folder: Path, dtype: str, made: Ticket, expected: list[tuple[list[int], list[float]]]) -> None:
    """An engine that is started on what was made answers so."""
    with started(Path(made.location), folder, dtype, version=made.version, parameters=made.parameters) as oracle:
        assert answers(oracle) == expected
