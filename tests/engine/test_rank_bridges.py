"""What two ranks publish from their shares, to two engines or to two workers of one: the engine then answers bit for
bit as one that was started on that version. On four GPUs the ranks have the first two and the engines the others;
without GPUs it is the same over gloo."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from benchmarks.bridges import create_bridge

from slipstream.launch.build import build_sharded
from slipstream.launch.ranks.processes import RankProcesses
from slipstream.plan.memory.gpu_shares import place
from slipstream.records import Ticket

from ..launch import test_ranks
from .architectures import ARCHITECTURES
from .conftest import LiveEngine, create, create_replicas, stop
from .test_divided_memory import answers

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(580),
    pytest.mark.skipif(
        0 < torch.cuda.device_count() < 4, reason="on GPUs two ranks and two engines, or workers, need four of them"
    ),
]
ON_GPU = torch.cuda.is_available()
START_S = 310


def named(cards: tuple[int, ...]) -> tuple[str, ...]:
    """As CUDA_VISIBLE_DEVICES has them; nothing where there are none."""
    names = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1,2,3").split(",")
    return tuple(names[card] for card in cards) if ON_GPU else ()


def each(live: LiveEngine) -> list[LiveEngine]:
    """Every engine by itself."""
    return [dataclasses.replace(live, engine=engine) for engine in getattr(live.engine, "each", [live.engine])]


@pytest.mark.full
@pytest.mark.parametrize(("replicas", "workers"), [(2, 1), (1, 2)])
def test_engines_answer_as_ones_started_on_what_ranks_publish(replicas: int, workers: int, tmp_path: Path):
    architecture = ARCHITECTURES["tied"]
    dtype, model = architecture.dtype, architecture.build(tmp_path / "model", architecture.dtype)
    cards = place(ranks=2, replicas=replicas, tensor_parallel_size=workers, separate=True).engines
    if replicas > 1:
        live = create_replicas(model, tmp_path / "live", dtype, max_restarts=0, gpus=[named(own) for own in cards])
    else:
        live = create(
            model, tmp_path / "live", dtype, max_restarts=0, gpus=named(cards[0]), tensor_parallel_size=workers
        )
    live.engine.launch()
    crew, bridges = None, {}
    try:
        config = test_ranks.make_config(model, 2, {"kind": "grpo"}, dtype)
        crew = RankProcesses(config, test_ranks.SAMPLING, tmp_path / "logs")
        parts = build_sharded(config, test_ranks.SAMPLING, crew, 0)
        live.call(live.engine.wait_ready(), START_S)
        for name in ("disk", "broadcast"):
            options = {"num_workers": 2, "between_gpus": ON_GPU, "timeout_s": 60}
            bridges[name] = create_bridge(name, folder=tmp_path / "made", source=model, engine=live.engine, **options)
        made: dict[str, tuple[Ticket, list]] = {}
        # Over the group that stays, too; what was sent last is then written, for another engine to start on.
        for step, (name, trains) in enumerate([("disk", 1), ("broadcast", 1), ("broadcast", 1), ("disk", 0)]):
            if trains:
                test_ranks.one_step(parts, config, test_ranks.BATCHES[step])
            ticket = live.update(bridges[name], parts.learner.named_weights(), 1 + step)
            if step != 1:
                made[f"{step} {name}"] = ticket, [answers(one) for one in each(live)]
    finally:
        for bridge in bridges.values():
            bridge.publisher.close()
        if crew is not None:
            crew.close()
        stop(live)
    (_, found), (sent, by_broadcast), (last, by_disk) = made.values()
    assert (sent.version.digest, by_broadcast) == (last.version.digest, by_disk)
    assert found != by_disk
    assert by_disk == [started_on(last, workers, tmp_path / "oracle", dtype)] * replicas


def started_on(ticket: Ticket, workers: int, folder: Path, dtype: str) -> list:
    """What an engine answers that is started on what was written."""
    where, size = (Path(ticket.location), folder, dtype), {"max_restarts": 0, "tensor_parallel_size": workers}
    gpus = named(tuple(range(workers)))
    with create(*where, **size, gpus=gpus, version=ticket.version, parameters=ticket.parameters) as oracle:
        oracle.engine.launch()
        oracle.call(oracle.engine.wait_ready(), START_S)
        return answers(oracle)
