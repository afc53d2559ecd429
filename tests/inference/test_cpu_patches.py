"""What the patches of vLLM's CPU workers compute, with layers of torch in the place of vLLM's."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from slipstream.inference.plugin.patches import cpu, patch_table
from slipstream.inference.plugin.patches.patch_table import Absent

from .fakes import put


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(cpu, "_packed_layers", type(cpu._packed_layers)())
    monkeypatch.setattr(cpu, "_packed_experts", type(cpu._packed_experts)())
    monkeypatch.setattr(cpu, "_pack", None)


def wrapper(monkeypatch):
    """Our version of vLLM's class; what it leaves to vLLM's own code is noted."""

    class Wrapper:
        left = ()

        def add_lora_linear(self, *arguments, **options):
            self.left = (arguments, options)

    put(monkeypatch, lora__punica_wrapper__punica_cpu={"PunicaWrapperCPU": Wrapper})
    cpu.one_adapter()
    return Wrapper()


@pytest.mark.parametrize(
    "slots", [[1, 1, 1, 1], [-1, -1, -1, -1], [0, 2, 0, 2], [2, -1, 0, -1], [1, -1, -1, -1]], ids=str
)
def test_each_token_gets_the_adapter_of_its_slot(slots, monkeypatch):
    made, generator = wrapper(monkeypatch), torch.Generator().manual_seed(0)
    made.token_lora_indices = torch.tensor(slots)
    sizes = (3, 5)
    x, y = torch.randn(4, 6, generator=generator), torch.randn(4, 8, generator=generator)
    a = tuple(torch.randn(3, 1, 2, 6, generator=generator) for _ in sizes)
    b = tuple(torch.randn(3, 1, size, 2, generator=generator) for size in sizes)
    wanted = y.clone()
    for row, slot in enumerate(slots):
        if slot >= 0:
            wanted[row] += torch.cat([b[i][slot, 0] @ (a[i][slot, 0] @ x[row]) for i in range(2)])
    made.add_lora_linear(y, x, a, b, 1.0, sizes)
    torch.testing.assert_close(y, wanted)
    assert made.left == ()


@pytest.mark.parametrize("odd", ["scale", "options", "slots", "rows"])
def test_what_it_does_not_know_is_left_to_vllm(odd, monkeypatch):
    made = wrapper(monkeypatch)
    made.token_lora_indices = torch.zeros(3 if odd == "slots" else 2, dtype=torch.long)
    x = torch.ones(2, 6)
    y = torch.zeros(3 if odd == "rows" else 2, 4)
    options = {"add_inputs": True} if odd == "options" else {}
    given = (y, x, (torch.ones(1, 1, 2, 6),), (torch.ones(1, 1, 4, 2),), 2.0 if odd == "scale" else 1.0, (4,))
    made.add_lora_linear(*given, **options)
    assert made.left[1] == options
    assert all(mine is theirs for mine, theirs in zip(made.left[0], given, strict=True))
    assert not y.any()


@pytest.mark.parametrize(
    ("patch", "modules"),
    [
        (cpu.one_adapter, {"lora__punica_wrapper__punica_cpu": {}}),
        (cpu.one_adapter, {"lora__punica_wrapper__punica_cpu": {"PunicaWrapperCPU": object}}),
        (cpu.seeded_prefill, {"v1__worker__gpu_model_runner": {"GPUModelRunner": type("", (), {"_sample": 1})}}),
        (
            cpu.seeded_prefill,
            {"v1__worker__gpu_model_runner": {"GPUModelRunner": type("", (), {"_bookkeeping_sync": 1})}},
        ),
        (cpu.live_weights, {"model_executor__layers": {"utils": SimpleNamespace(), "vocab_parallel_embedding": None}}),
        (cpu.live_experts, {"model_executor__layers__fused_moe__experts__cpu_moe": {}}),
        (
            cpu.experts_under_lora,
            {"model_executor__layers__fused_moe": {"unquantized_fused_moe_method": SimpleNamespace()}},
        ),
    ],
)
def test_a_vllm_that_lacks_what_is_patched_is_named(patch, modules, monkeypatch):
    put(monkeypatch, **modules)
    with pytest.raises(Absent):
        patch()


def test_a_seed_is_not_spent_on_tokens_that_are_discarded(monkeypatch):
    class Runner:
        def __init__(self, discards):
            mask = SimpleNamespace(np=np.array([*discards, True]))
            self.discard_request_mask = mask
            generators = {i: torch.Generator().manual_seed(i) for i in range(3)}
            self.input_batch = SimpleNamespace(generators=generators, num_reqs=2)
            self.seen = None

        def _sample(self, *given, **options):
            drawn = [torch.rand(1, generator=g).item() for g in self.input_batch.generators.values()]
            return drawn, given, options

        def _bookkeeping_sync(self, *given, **options):
            self.seen = sorted(self.input_batch.generators)
            if options:
                raise KeyError
            return given

    put(monkeypatch, v1__worker__gpu_model_runner={"GPUModelRunner": Runner})
    cpu.seeded_prefill()
    runner = Runner([True, False])
    first, given, options = runner._sample(1, x=2)
    assert (given, options) == ((1,), {"x": 2})
    again = runner._sample()[0]
    assert [a == b for a, b in zip(first, again, strict=True)] == [True, False, False]
    kept = dict(runner.input_batch.generators)
    assert (runner._bookkeeping_sync(5), runner.seen) == ((5,), [1, 2])
    assert runner.input_batch.generators == kept
    with pytest.raises(KeyError):
        runner._bookkeeping_sync(x=1)
    assert runner.input_batch.generators == kept


class Linear(nn.Module):
    """Its kernel reads a packed copy of the weight."""

    def __init__(self, shape=(3, 4)):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape), requires_grad=False)

    def cpu_linear(self, x, weight, bias):
        return x @ self.packed.t()


class Experts:
    """As vLLM's kernel of experts on a CPU: it replaces a layer's weights with packed ones."""

    _use_zentorch = False

    def process_weights_after_loading(self, layer):
        for name in ("w13_weight", "w2_weight"):
            setattr(layer, name, nn.Parameter(getattr(layer, name).data + 100, requires_grad=False))

    def apply(self, output, hidden, w1, w2, *given, **options):
        self.applied = (w1, w2, given, options)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.w13_weight, self.w2_weight = (nn.Parameter(torch.zeros(2), requires_grad=False) for _ in range(2))


@pytest.fixture
def packed(monkeypatch):
    """A model whose linear layers and experts were packed under our patches."""
    calls = []

    def dispatch(layer, remove_weight):
        calls.append(remove_weight)
        layer.packed = layer.weight.clone()

    utils, embedding = SimpleNamespace(dispatch_cpu_unquantized_gemm=dispatch), SimpleNamespace()
    embedding.dispatch_cpu_unquantized_gemm = dispatch
    kind = type("Fresh", (Experts,), {})
    put(
        monkeypatch,
        model_executor__layers={"utils": utils, "vocab_parallel_embedding": embedding},
        model_executor__layers__fused_moe__experts__cpu_moe={"CPUUnquantizedExperts": kind},
    )
    cpu.live_weights()
    cpu.live_experts()
    model = nn.Module()
    model.a, model.b, model.plain, model.moe, model.flat = Linear(), Linear((5, 2)), Linear(), Mixture(), Linear((3,))
    model.plain.packed = torch.zeros(3, 4)
    utils.dispatch_cpu_unquantized_gemm(model.a, True)
    embedding.dispatch_cpu_unquantized_gemm(model.b, remove_weight=True)
    utils.dispatch_cpu_unquantized_gemm(model.flat, True)
    model.kernel = kind()
    model.kernel.process_weights_after_loading(model.moe)
    return model, calls


def test_a_model_without_packed_copies_has_none_that_are_stale():
    assert (cpu.repack(Mixture()), cpu.stale_packed_layers(Mixture())) == (0, [])


def test_weights_stay_beside_their_packed_copies_and_are_packed_again(packed):
    model, calls = packed
    assert calls == [False] * 3
    assert cpu.stale_packed_layers(model) == []
    model.a.weight += 1
    model.b.weight[4, 1] += 1
    assert cpu.stale_packed_layers(model) == ["a", "b"]
    assert cpu.stale_packed_layers(model, 4 * 12) == ["a", "b"]
    assert cpu.stale_packed_layers(model, 4 * 12 - 1) == ["b"]
    assert cpu.repack(model) == 4
    assert calls == [False] * 6
    assert cpu.stale_packed_layers(model) == []
    assert (cpu.repack(nn.Linear(2, 2)), cpu.stale_packed_layers(nn.Linear(2, 2))) == (0, [])
    model.bfloat16()
    cpu.repack(model)
    model.b.weight[4, 1] += 1
    assert cpu.stale_packed_layers(model) == ["b"]


@pytest.mark.parametrize(("rows", "found"), [(1 << 30, ["a"]), (1 << 31, [])])
def test_large_layers_are_left_to_the_probe(rows, found, packed):
    model, _ = packed
    model.a.packed = torch.zeros(3, 2)
    model.a.weight = nn.Parameter(torch.ones(1).expand(rows, 2), requires_grad=False)
    assert cpu.stale_packed_layers(model) == found


def test_experts_are_computed_with_their_packed_copies(packed):
    model, _ = packed
    moe, kernel = model.moe, model.kernel
    assert (moe.w13_weight.tolist(), moe.w2_weight.tolist()) == ([0, 0], [0, 0])
    kernel.apply(None, None, moe.w13_weight, moe.w2_weight, 7, x=8)
    assert ([w.tolist() for w in kernel.applied[:2]], *kernel.applied[2:]) == ([[100, 100]] * 2, (7,), {"x": 8})
    moe.w2_weight.data += 1
    for _ in range(2):
        assert cpu.stale_packed_layers(model) == ["moe"]
        kernel.apply(None, None, moe.w13_weight, moe.w2_weight)
        assert kernel.applied[1].tolist() == [100, 100], "looking changes nothing"
    assert cpu.repack(model) == 4
    assert cpu.stale_packed_layers(model) == []
    kernel.apply(None, None, moe.w13_weight, moe.w2_weight)
    assert [w.tolist() for w in kernel.applied[:2]] == [[100, 100], [101, 101]]
    other = type(kernel)()
    other._use_zentorch = True
    moe = Mixture()
    other.process_weights_after_loading(moe)
    other.apply(None, None, moe.w13_weight, moe.w2_weight)
    assert [w.tolist() for w in other.applied[:2]] == [[100, 100]] * 2
    model.other = moe
    assert cpu.repack(model) == 4


def test_experts_have_the_kernel_of_a_cpu_also_beside_adapters(monkeypatch):
    config = dataclasses.make_dataclass("Config", [("is_lora_enabled", bool, True), ("size", int, 3)])
    method = SimpleNamespace(select_unquantized_moe_backend=lambda moe_config: moe_config)
    put(monkeypatch, model_executor__layers__fused_moe={"unquantized_fused_moe_method": method})
    cpu.experts_under_lora()
    given = config()
    assert method.select_unquantized_moe_backend(given) == config(False, 3)
    assert given == config()


def test_what_cannot_be_updated_in_place_is_refused(monkeypatch):
    monkeypatch.setattr(patch_table, "_applied", [])
    cpu.check_live(nn.Module())
    cpu.check_live(nn.Linear(2, 2, device="meta"))
    with pytest.raises(RuntimeError, match="weights cannot be updated in a running engine"):
        cpu.check_live(nn.Linear(2, 2))
    monkeypatch.setattr(patch_table, "_applied", ["live_cpu_weights"])
    cpu.check_live(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="experts cannot be updated in a running engine"):
        cpu.check_live(Mixture())
    monkeypatch.setattr(patch_table, "_applied", ["live_cpu_weights", "live_cpu_experts"])
    cpu.check_live(Mixture())
