"""Where vLLM places an adapter, and what lies beside it; with layers of torch in the place of vLLM's."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from slipstream.inference.plugin.weights.adapter_map import record, slot_of, stray_layers, without_adapters
from slipstream.records import ParameterSpec

from .fakes import put

RANK, ROOM, SLOTS = 2, 4, 3


class Layer(nn.Module):
    """Two fused outputs of 3 and 5, with an adapter each; as vLLM's, its first half may be one tensor."""

    def __init__(self, is_single):
        super().__init__()
        self.base_layer = nn.Linear(6, 8, bias=False)
        a, b = torch.zeros(SLOTS, 1, ROOM, 6), torch.zeros(SLOTS, 1, 3, ROOM)
        self.lora_a_stacked = a if is_single else (a, torch.zeros(SLOTS, 1, ROOM, 6))
        self.lora_b_stacked = b if is_single else (b, torch.zeros(SLOTS, 1, 5, ROOM))

    def set_lora(self, slot, lora_a, lora_b):
        halves = ((self.lora_a_stacked, lora_a), (self.lora_b_stacked, lora_b))
        for stacked, given in halves:
            for buffer, half in zip([stacked] if torch.is_tensor(stacked) else stacked, given, strict=True):
                buffer[slot, 0, : half.shape[0], : half.shape[1]].copy_(half)


class Model(nn.Module):
    lora_skip_prefixes = ("mtp.",)

    def __init__(self):
        super().__init__()
        self.block = nn.Module()
        self.block.qk = Layer(False)
        self.o = Layer(True)
        self.hf_to_vllm_mapper = SimpleNamespace(get_unstacked_mapper=lambda: "unstacked")


class Manager:
    """As vLLM's `LoRAModelManager`, of a model whose `o` has no adapter."""

    def __init__(self):
        self.model = Model()
        self.modules = {"block.qk": self.model.block.qk, "o": self.model.o}
        self.lora_index_to_id = [None, 7, 4]
        self.lora_config = SimpleNamespace(lora_dtype=torch.bfloat16)
        self.merged = 0

    def list_adapters(self):
        return {7: None, 4: None}

    def _create_merged_loras_inplace(self, lora):
        self.merged += 1

    def _get_lora_layer_weights(self, lora, name):
        return lora if name == "block.qk" else None


def specs():
    shapes = {"q.lora_A": (RANK, 6), "q.lora_B": (3, RANK), "k.lora_A": (RANK, 6), "k.lora_B": (5, RANK)}
    return tuple(ParameterSpec(f"{name}.weight", shape, "float32", "") for name, shape in shapes.items())


@pytest.fixture
def manager(monkeypatch):
    made = Manager()

    def from_lora_tensors(**given):
        made.given = given
        q_a, q_b, k_a, k_b = given["tensors"].values()
        return SimpleNamespace(lora_a=[q_a, k_a], lora_b=[q_b, k_b])

    put(
        monkeypatch,
        lora__lora_model={"LoRAModel": SimpleNamespace(from_lora_tensors=from_lora_tensors)},
        lora__peft_helper={"PEFTHelper": lambda **given: given},
    )
    return made


def test_a_slot_is_that_of_the_adapter_among_those_that_vllm_should_hold(manager):
    assert slot_of(manager, [7, 4]) == 1
    assert slot_of(manager, [4, 7]) == 2
    for ids in ([7], [7, 4, 9], [9, 4]):
        with pytest.raises(RuntimeError, match=r"holds the adapters \[4, 7\], and should hold"):
            slot_of(manager, ids)
    manager.lora_index_to_id = [None, 4, None]
    with pytest.raises(RuntimeError, match="holds the adapters"):
        slot_of(manager, [7, 4])


def test_an_adapter_is_found_in_its_slot_and_nothing_is_written(manager):
    located = record(manager, 1, specs())
    qk = manager.model.block.qk
    wanted = {
        "q.lora_A.weight": qk.lora_a_stacked[0][1, 0, :RANK],
        "k.lora_A.weight": qk.lora_a_stacked[1][1, 0, :RANK],
        "q.lora_B.weight": qk.lora_b_stacked[0][1, 0, :, :RANK],
        "k.lora_B.weight": qk.lora_b_stacked[1][1, 0, :, :RANK],
    }
    assert located.pieces.keys() == wanted.keys()
    for name, target in wanted.items():
        (piece,) = located.pieces[name]
        assert (piece.target.data_ptr(), piece.target.stride()) == (target.data_ptr(), target.stride())
        assert (piece.offset, piece.sizes) == (0, tuple(target.shape))
    assert not any(buffer.any() for buffer in (*qk.lora_a_stacked, *qk.lora_b_stacked))
    given = manager.given
    assert given["peft_helper"] == {"r": RANK, "lora_alpha": RANK, "target_modules": []}
    assert (given["device"], given["dtype"], given["skip_prefixes"]) == ("cpu", torch.bfloat16, ("mtp.",))
    assert (given["weights_mapper"], manager.merged) == ("unstacked", 1)
    manager.model.hf_to_vllm_mapper.get_rename_mapper = lambda: "renamed"
    record(manager, 1, specs())
    assert given is not manager.given
    assert manager.given["weights_mapper"] == "renamed"
    del manager.model.hf_to_vllm_mapper
    record(manager, 1, specs())
    assert manager.given["weights_mapper"] is None


def test_what_lies_beside_an_adapter_is_told(manager):
    located = record(manager, 1, specs())
    qk, o = manager.model.block.qk, manager.model.o
    for pieces in located.pieces.values():
        pieces[0].target.fill_(2.0)
    qk.lora_a_stacked[0][1, 0, 0, 3] = 0.0
    for layer in (qk.lora_a_stacked[0], o.lora_a_stacked):
        layer[0].fill_(1.0)
        layer[2].fill_(1.0)
    assert stray_layers(manager, 1, located) == []
    o.lora_b_stacked[1, 0, 2, 3] = 1.0
    assert stray_layers(manager, 1, located) == ["o"]
    qk.lora_b_stacked[1][1, 0, 4, RANK] = 1.0
    assert stray_layers(manager, 1, located) == ["block.qk", "o"]
    o.lora_b_stacked[1] = 0
    assert stray_layers(manager, 1, located) == ["block.qk"]
    # The same memory noted twice is counted once.
    qk.lora_b_stacked[1][1, 0, 4, RANK] = 0.0
    for pieces in located.pieces.values():
        pieces += pieces
    assert stray_layers(manager, 1, located) == []


def test_where_adapters_fill_all_nothing_can_lie_beside_them(manager):
    manager.modules = {"block.qk": manager.model.block.qk}
    full = tuple(
        ParameterSpec(spec.name, tuple(ROOM if size == RANK else size for size in spec.shape), "float32", "")
        for spec in specs()
    )
    located = record(manager, 1, full)
    manager.model.block.qk.lora_a_stacked[0].fill_(1.0)
    assert stray_layers(manager, 1, located) == []


def test_layers_are_their_own_within_the_block_and_wrapped_again_after_an_error(manager):
    model, wrapped = manager.model, dict(manager.modules)

    def work():
        with without_adapters(model, manager):
            assert (model.block.qk, model.o) == (wrapped["block.qk"].base_layer, wrapped["o"].base_layer)
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert (model.block.qk, model.o) == (wrapped["block.qk"], wrapped["o"])
