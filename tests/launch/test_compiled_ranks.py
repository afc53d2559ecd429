"""Compiled layers over ranks: the same losses, gradients and weights as uncompiled ones of one process, no graph more
for more layers or longer rows, and one sentence where a rank's compiler fails."""

import json

import pytest
import torch

from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.errors import ConfigError
from slipstream.launch.ranks import processes
from slipstream.trainer.model import layers

from . import quick_rank
from .test_ranks import BATCHES, CASES, compare, four_steps, make_config, one_step, trained
from .test_ranks import model as model

LONG = {"rank_timeout_s": 400.0}


@pytest.fixture(autouse=True)
def compilers(monkeypatch):
    """Have each rank compile with what it is given."""

    def use(*names):
        monkeypatch.setenv(quick_rank.VARIABLE, json.dumps(names))
        monkeypatch.setattr(layers, "COMPILER", quick_rank.compiler(0))

    monkeypatch.setattr(processes, "PROGRAM", quick_rank.__name__)
    monkeypatch.setattr(processes, "ENVIRONMENT", {})  # the program is found from the current folder
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield use
    torch._dynamo.reset()


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("case", "compiler", "more"),
    [("grpo", "aot_eager", {}), ("lora", "eager", {}), ("grpo", "aot_eager", {"context_parallel": 2})],
)
def test_losses_gradients_and_weights_are_those_of_one_process(case, compiler, more, compilers, model, tmp_path):
    """Dynamo as it is, and in the first case AOTAutograd. Under `lora` layers are computed again, and without their
    adapter too."""
    compilers(compiler, compiler)
    (tmp_path / "one").mkdir()
    (tmp_path / "several").mkdir()
    one = four_steps(make_config(model, 1, compile=False, **CASES[case]), tmp_path / "one")
    several = four_steps(make_config(model, 2, compile=True, **LONG, **CASES[case], **more), tmp_path / "several")
    compare(several, one)


@pytest.mark.full
def test_all_layers_have_the_same_graphs_and_state_is_read_again(compilers, monkeypatch, tmp_path):
    """FSDP2 gives layers other parameters and other classes: neither may have the compiler begin anew, or take the size
    of their heads for a number that changes: kernels would divide by it."""
    compilers("eager", "eager")
    changing: set[str] = set()

    def compiler(graph, _):
        inputs = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        numbers = {str(each) for each in inputs if isinstance(each, torch.SymInt)}
        sizes = {str(size) for each in inputs if isinstance(each, torch.Tensor) for size in each.shape}
        changing.update(numbers - sizes)
        return graph

    monkeypatch.setattr(layers, "COMPILER", compiler)
    model = new_model(tmp_path / "model", hidden_size=32, num_layers=5, intermediate_size=48, context_length=256)
    config = make_config(model, 2, {"kind": "grpo"}, compile=True, **LONG)
    found, graphs = torch._dynamo.utils.counters["stats"], []
    with trained(config, tmp_path) as (parts, _):
        graphs.append(found["unique_graphs"])
        one_step(parts, config, BATCHES[0])
        parts.learner.save(tmp_path / "state")
        losses = [one_step(parts, config, batch)["loss"] for batch in BATCHES[2:]]
        parts.learner.load(tmp_path / "state")
        again = [one_step(parts, config, batch)["loss"] for batch in BATCHES[2:]]
        graphs.append(found["unique_graphs"])
    assert again == losses
    assert changing == set(), "but the sizes of tensors"
    assert 0 < graphs[0] <= 10, "those of one layer: before and after its attention, with gradients and without"
    assert graphs[1] <= graphs[0] + 2, "a segment that is alone in its row"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.full
def test_a_compiler_that_fails_on_one_rank_ends_all_with_the_same_sentence(
    rank, compilers, model, monkeypatch, tmp_path
):
    """The others wait for nobody: they would until the deadline."""
    close = processes.RankProcesses.close

    def close_later(crew):  # or a rank might be killed before it has said why it ends
        for one in crew._ranks:
            one.process.wait(120)
        close(crew)

    monkeypatch.setattr(processes.RankProcesses, "close", close_later)
    compilers(*("broken" if number == rank else "eager" for number in (0, 1)))
    config = make_config(model, 2, {"kind": "grpo"}, compile=True, gradient_checkpointing=True, **LONG)
    says = (
        rf"layers could not be compiled \(trainer process {rank}: BackendCompilerFailed: .*no C\+\+ compiler here.*"
        r"set training.compile = false"
    )
    with pytest.raises(ConfigError, match=says) as raised, trained(config, tmp_path):
        pass
    assert str(raised.value) in (tmp_path / "rank-1.log").read_text()
