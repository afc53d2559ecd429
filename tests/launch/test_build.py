"""The learner is built as the planned config says, and what cannot be done is said."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from slipstream import records
from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.config import ModelConfig, RLConfig, RunConfig, SFTConfig, TrainingConfig, with_values
from slipstream.launch.build import build, capture_graphs, most_row_tokens, rehearse, usual_rows
from slipstream.plan.decided import planned_config
from slipstream.plan.facts import DataFacts
from slipstream.trainer.learner import Learner
from slipstream.trainer.model import compilation, layers
from slipstream.trainer.model.decoder_graphs import RowShape
from slipstream.trainer.model.layers import LayerOptions
from slipstream.trainer.packing import StepBatch, micro_batches
from tests.refusals import refuses


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    shape = {"hidden_size": 32, "num_layers": 2, "intermediate_size": 48, "context_length": 128}
    folder = new_model(tmp_path_factory.mktemp("models") / "tiny", **shape)
    training = TrainingConfig(steps=1, micro_batch_tokens=256, gradient_checkpointing="selective", compile=False)
    model = ModelConfig(path=str(folder), dtype="float32")
    return planned_config(RunConfig(model=model, algorithm=SFTConfig(), training=training, evaluation=None))


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def broken_compiler(monkeypatch):
    def compiler(_graph, _inputs):
        raise RuntimeError("out of order")

    monkeypatch.setattr(layers, "COMPILER", compiler)


def test_a_compiler_that_fails_ends_the_run(config, broken_compiler):
    with refuses("training.compile"):
        build(with_values(config, {"training.compile": True}), None, 123)


def test_layers_are_as_the_config_says_and_rehearsed_without_random_numbers(config, monkeypatch):
    graphs = []

    def compiler(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(layers, "COMPILER", compiler)
    asked = with_values(config, {"training.compile": True, "inference.max_model_len": 64})
    before = torch.get_rng_state()
    rehearse(asked)
    assert torch.equal(torch.get_rng_state(), before), "compiling early must not change the random numbers of a run"
    num_graphs = len(graphs)
    assert num_graphs > 0
    learner = build(asked, None, 123).learner
    assert learner.planned_bytes == 123
    assert learner.model.layers == LayerOptions("selective", compiled=True)
    assert len(graphs) == num_graphs
    assert build(config, None, 123).learner.model.layers == LayerOptions("selective")


@pytest.mark.parametrize("algorithm", [SFTConfig(), RLConfig(kind="grpo")], ids=["sft", "grpo"])
def test_a_rehearsal_makes_a_whole_step(config, algorithm, monkeypatch, caplog):
    caplog.set_level("INFO", "slipstream")
    steps = []
    monkeypatch.setattr(Learner, "optim_commit", lambda learner: steps.append(weakref.ref(learner)))
    rehearse(planned_config(RunConfig(model=config.model, algorithm=algorithm, training=config.training)))
    assert len(steps) == 1, caplog.text
    assert steps[0]() is None, "its memory is free"


def test_a_failed_rehearsal_does_not_end_the_run(config, broken_compiler, caplog):
    caplog.set_level("INFO", "slipstream")
    rehearse(with_values(config, {"training.compile": True}))
    assert "no step is rehearsed before the model is loaded" in caplog.text
    assert "out of order" in caplog.text


def test_a_rehearsal_covers_rows_of_the_runs_length(config, monkeypatch):
    asked = []
    monkeypatch.setattr(compilation, "compile_layers", lambda *_, row_tokens, **__: asked.append(row_tokens) or "")
    rehearse(with_values(config, {"training.compile": True}))
    assert asked == [256]


class Graphs:
    """Serves no row, and notes them; breaks at row `breaks_at`, or has a `problem` from row `ends_at` on."""

    def __init__(self, breaks_at=None, ends_at=None):
        self.shapes, self.breaks_at, self.ends_at = [], breaks_at, ends_at

    @property
    def problem(self):
        return "no memory" if self.ends_at and len(self.shapes) >= self.ends_at else ""

    def hidden(self, row):
        assert torch.is_grad_enabled()
        self.shapes.append(RowShape.of(row.layout).tokens)
        if len(self.shapes) == self.breaks_at:
            raise torch.OutOfMemoryError("full")


def test_graphs_are_captured_from_the_largest_row_on(config, caplog):
    caplog.set_level("INFO", "slipstream")
    learner = build(with_values(config, {"training.micro_batch_tokens": 6000}), None, 123).learner
    before = {name: tensor.clone() for name, tensor in learner.state().items()}

    def captured(is_over=lambda: False, **breaks):
        learner.model.graphs = graphs = Graphs(**breaks)
        capture_graphs(learner, 6000, is_over)
        assert not any(holder.grad is not None for holder in learner.optimizer._holders.values())
        return graphs.shapes

    assert captured() == [8192, 4096, 2048]
    waits = iter([False, True])
    assert captured(lambda: next(waits)) == [8192]
    assert not caplog.text
    assert captured(breaks_at=2) == [8192, 4096]
    assert "no more graphs are captured before the first step (OutOfMemoryError: full)" in caplog.text
    assert captured(ends_at=2) == [8192, 4096]
    assert learner.model.graphs is None, "made anew, of a model on a CPU"
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.state().items())


@pytest.mark.parametrize(("most", "number"), [(8192, 3), (6000, 3), (4097, 3), (4096, 3), (1000, 2), (0, 0)])
def test_usual_rows_have_the_shapes_of_short_groups(most, number):
    rows = [list(micro_batches(batch, most)) for batch in usual_rows(most)]
    assert [len(row) for row in rows] == [1] * number
    mask = [False] * 100 + [True] * 100
    groups = [records.Sequence([number, *[0] * 199], mask) for number in range(4) for _ in range(4)]
    expected = RowShape.of(next(iter(micro_batches(StepBatch(groups), 8192))).layout)
    found = [RowShape.of(row.layout) for [row] in rows]
    assert all(shape == expected._replace(tokens=shape.tokens, keys=8 * shape.tokens) for shape in found)


def test_rows_are_foreseen_for_short_groups_alone(config):
    def most(prompt=50, turns=1, **values):
        training = TrainingConfig(steps=1, prompts_per_batch=32, micro_batch_tokens=8192)
        asked = {"algorithm": RLConfig(kind="grpo", group_size=8), "sampling": {"max_tokens": 8}, **values}
        planned = planned_config(RunConfig(model=config.model, training=training, **asked))
        facts = SimpleNamespace(data=DataFacts(1000, prompt, None, max_turns=turns))
        return most_row_tokens(planned, facts)

    assert most() == 32 * (50 + 8 * 8)
    assert most(sampling={"max_tokens": 200}) == 8192
    assert [most(257), most(turns=2), most(sampling={"max_tokens": 257})] == [0] * 3
    assert [most(algorithm=SFTConfig()), most(algorithm=RLConfig(kind="grpo", group_size=1))] == [0] * 2
