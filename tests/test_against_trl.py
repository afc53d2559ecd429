"""The benchmark against TRL judges and counts rightly; what it measures is not repeated here."""

import json
import statistics
from pathlib import Path

import pytest

from slipstream.config import load_config
from slipstream.envs.registry import load_environment

from .programs import program

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def bench():
    with program(FOLDER / "against_trl.py", "against_trl") as module:
        yield module


def run(bench, system, seconds, lengths=(10, 20), warm_up_seconds=100.0):
    def step(duration):
        return bench.Step(duration, duration / 2, duration / 2, 0.0, 0.5, list(lengths))

    return bench.Run(system, 30.0, [step(warm_up_seconds), *(step(seconds) for _ in range(3))])


def test_the_ratio_is_against_the_fastest_peer(bench):
    runs = [run(bench, "slipstream", 1.0), run(bench, "trl", 2.0), run(bench, "trl-continuous", 8.0)]
    assert bench.ratios(runs, 1) == {"slipstream": (2.0, 2.0, "trl")}
    assert bench.complaints(runs, 1) == []
    table = bench.tables(runs, 1)
    assert "| Slipstream | 1 | 30 | 1.000 | 30 | 2.00, 2.00 |" in table
    assert "| 6 | 15.0 | 20 | 20 | 20 |" in table


def test_too_slow_and_other_lengths_are_told(bench):
    runs = [run(bench, "slipstream", 1.0), run(bench, "trl", 1.2), run(bench, "trl-continuous", 8.0, (40, 80))]
    slow, other = bench.complaints(runs, 1)
    assert slow == "slipstream is 1.20 times as fast as trl, below 1.5"
    assert other.startswith("trl-continuous generated 60.0 tokens a completion and the middle of all is 15.0")


def test_both_systems_get_the_same_prompts_in_the_same_order(bench, tmp_path):
    from slipstream.data.sampler import DataOrder

    bench_prompts = bench.prompts_in_order(3, 4)
    text = bench.GRPO_FILE.format(
        model="model",
        task=bench.TASK,
        num_tasks=12,
        group_size=8,
        max_tokens=384,
        steps=3,
        prompts=4,
        learning_rate=1e-4,
        num_samples=32,
        threads=2,
    )
    (tmp_path / "run.toml").write_text(text)
    config = load_config(tmp_path / "run.toml").config
    assert config.environment is not None
    tasks = load_environment(config.environment).tasks("train", 12)
    ours = [tasks[index].prompt[-1].content for step in range(3) for index in DataOrder(12, 0).at(step * 4, 4)]
    assert bench_prompts == ours
    assert len(set(ours)) == 12


def test_lengths_come_from_the_samples(bench, tmp_path):
    rows = [
        {"step": 0, "lineage": 0, "time": 10.0},
        {
            "step": 1,
            "lineage": 0,
            "time": 13.0,
            "rollout/num": 3.0,
            "rollout/length": 4.0,
            "reward/mean": 0.5,
            "time/batch_s": 2.0,
            "time/train_s": 0.5,
            "time/update_s": 0.25,
            "time/probe_s": 0.125,
        },
    ]
    samples = [
        {"step": 0, "lineage": 0, "time": 11.0, "completion": "abc", "outcome": "done"},
        {"step": 0, "lineage": 0, "time": 11.0, "completion": "abcdefg", "outcome": "truncated"},
    ]
    for name, records in (("metrics", rows), ("samples", samples)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "events.jsonl").write_text("")
    found = bench.read_slipstream("slipstream", tmp_path, 4.0)
    assert found.start_s == 6.0
    assert found.steps == [bench.Step(3.0, 2.0, 0.5, 0.375, 0.5, [4, 7, 1])]


def test_demonstrations_have_a_long_tail(bench):
    bench.prompts_in_order(1, 1)  # makes the task importable
    from long_tail import share, tasks

    lengths = [len(task["answer"]) for task in tasks("train", 2000, 0)]
    assert statistics.median(lengths) == pytest.approx(24, rel=0.1)
    assert bench.percentile(lengths, 0.95) > 4 * statistics.median(lengths)
    assert max(lengths) < bench.MAX_TOKENS
    assert (share("abcd", "abca"), share("abcd", "")) == (0.5, 0.0)
