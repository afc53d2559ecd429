"""Engine and trainer take turns on one GPU: when the engine sleeps, and is woken; and which groups of an earlier
attempt are used again."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest

from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.config import load_settings
from slipstream.errors import EngineError
from slipstream.launch.generation import shape_of_groups
from slipstream.launch.prepare import prepare
from slipstream.orchestrator.control.commands import EngineState
from slipstream.orchestrator.control.handle import LocalCaller
from slipstream.orchestrator.control.weight_sync import RunHooks
from slipstream.orchestrator.thread import EventLoopThread

from ..orchestrator.executors import executor_of


class Engine:
    def __init__(self):
        self.calls = []

    async def sleep(self, timeout_s):
        self.calls.append("sleep")

    async def wake(self, timeout_s):
        self.calls.append("wake")


@pytest.fixture
def thread():
    made = EventLoopThread(lambda: False)

    async def nothing():
        """Nobody is left to be ended."""

    yield made
    made.stop(nothing())


def hooks_of(thread, engine, kind, *, sleeps=True):
    log = SimpleNamespace(phase=lambda name: contextlib.nullcontext())
    config = SimpleNamespace(
        algorithm=SimpleNamespace(kind=kind),
        method=None,
        inference=SimpleNamespace(sleep=sleeps),
        weights=SimpleNamespace(apply_timeout_s=60.0),
    )
    return RunHooks(config, log, SimpleNamespace(), LocalCaller(thread, executor_of(engine)))


@pytest.mark.parametrize(("kind", "sleeps"), [("grpo", True), ("sft", True), ("grpo", False)])
def test_it_sleeps_from_the_taken_batch_or_the_end_of_an_evaluation_to_the_next_update(thread, kind, sleeps):
    engine, calls = Engine(), []
    hooks = hooks_of(thread, engine, kind, sleeps=sleeps)
    for _ in range(2):
        hooks.before_update()
        hooks.version_released(0)
        calls += ["wake"] + ["sleep"] * (kind == "sft")
        assert engine.calls == calls * sleeps
        if kind == "grpo":
            hooks.batch_taken()
            calls += ["sleep"]
            assert engine.calls == calls * sleeps


@pytest.mark.parametrize(
    ("bridge", "orchestrators", "replicas", "is_up", "expected"),
    [
        ("broadcast", 1, 2, False, True),
        ("broadcast", 2, 1, False, True),
        ("broadcast", 2, 1, True, False),
        ("broadcast", 1, 1, False, False),
        ("disk", 2, 2, False, False),
    ],
)
def test_an_update_is_repeated_where_one_engine_of_several_died(bridge, orchestrators, replicas, is_up, expected):
    events = []
    log = SimpleNamespace(event=lambda kind, **fields: events.append((kind, fields)))
    config = SimpleNamespace(
        weights=SimpleNamespace(bridge=bridge, apply_timeout_s=60.0),
        inference=SimpleNamespace(replicas=replicas, servers=(), sleep=False),
        run=SimpleNamespace(orchestrators=orchestrators),
    )
    caller = SimpleNamespace(engine_state=lambda settles: EngineState(is_up, True))
    hooks = RunHooks(config, log, SimpleNamespace(), caller)
    assert hooks.repeats_update(EngineError("it died")) is expected
    assert events == ([("update_repeated", {"reason": "it died"})] if expected else [])


ENVIRONMENT = """
def tasks(split, num_tasks, seed):
    return [{"prompt": f"{split} {i}"} for i in range(4)]
def reward(task, completion):
    return 0.0
"""


def test_groups_of_an_earlier_attempt_are_used_only_where_all_that_made_them_is_equal(tmp_path):
    model = new_model(tmp_path / "model", hidden_size=32, num_layers=1)
    file, more = tmp_path / "environment.py", tmp_path / "more.py"
    file.write_text(ENVIRONMENT)
    more.write_text(ENVIRONMENT + "# another\n")

    def prepared(environment=file, **changes):
        settings = {
            "model": {"path": str(model)},
            "algorithm": {"kind": "grpo", "group_size": 4},
            "training": {"steps": 4, "prompts_per_batch": 2, "staleness": 1},
            "environment": {"name": str(environment)},
            "evaluation": False,
        }
        for name, change in changes.items():
            settings[name] = {**settings.get(name, {}), **change}
        return prepare(load_settings(settings))

    def with_kernels(plan):
        model = plan.config.model.model_copy(update={"shared_kernels": True})
        return replace(plan, config=plan.config.model_copy(update={"model": model}))

    usual = prepared()
    shape = shape_of_groups(usual)
    assert shape_of_groups(prepared()) == shape
    assert shape_of_groups(prepared(training={"steps": 5, "learning_rate": 1e-4})) == shape
    others = [
        prepared(training={"prompts_per_batch": 4}),
        prepared(training={"staleness": 2}),
        prepared(training={"order": "data"}),
        prepared(algorithm={"group_size": 2}),
        prepared(sampling={"temperature": 0.7}),
        prepared(run={"seed": 1}),
        prepared(more),
        replace(usual, train_tasks=usual.train_tasks[:3]),
        replace(usual, plan=with_kernels(usual.plan)),
    ]
    assert all(shape_of_groups(other) != shape for other in others)
    assert len({repr(shape_of_groups(other)) for other in others}) == len(others)
