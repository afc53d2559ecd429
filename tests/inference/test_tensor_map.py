"""What a map of parameters to engine memory does with values, and which loaders it can watch; without vLLM."""

import random
from types import SimpleNamespace

import pytest
import torch
from numpy import s_
from torch import nn

from slipstream.inference.plugin.weights.receiver import WorkerExtension
from slipstream.inference.plugin.weights.tensor_map import Part, Piece, Share, TensorMap, compare, record
from slipstream.records import ParameterSpec
from slipstream.weights.fingerprint import describe

SHAPE = (5, 6, 2)


def piece_of(source, target):
    """Where a loader that copies `source`, a view of the whole parameter, puts it."""
    return Piece(source.storage_offset(), tuple(source.shape), tuple(source.stride()), target)


def spec_of(name, shape, dtype="float32"):
    return ParameterSpec(name, tuple(shape), dtype, "")


def drawn_part(draw, tensor):
    """A part of it, with its dimensions in another order or two of them as they are."""
    edges = [sorted(draw.sample(range(size + 1), 2)) if draw.random() < 0.6 else (0, size) for size in tensor.shape]
    part = tensor[tuple(slice(*pair) for pair in edges)]
    return part.permute(draw.sample(range(part.ndim), part.ndim)) if draw.random() < 0.6 else part


@pytest.mark.parametrize("seed", range(100))
def test_values_are_written_where_the_parameter_has_them(seed):
    draw = random.Random(seed)
    whole = torch.arange(60).reshape(SHAPE)
    source = drawn_part(draw, whole)
    if draw.random() < 0.3:
        source = source[:, 0]
    memory = torch.full((source.numel() * 2,), -1.0, dtype=torch.float64)
    target = memory[source.numel() :].view(source.shape)
    if draw.random() < 0.5:
        target = memory[source.numel() :].view(source.shape[::-1]).permute(*reversed(range(source.ndim)))
    located = TensorMap({"w": [piece_of(source, target)]})
    places = torch.tensor(sorted(draw.sample(range(60), draw.choice([0, 1, 30, 60]))), dtype=torch.long)
    located.write(spec_of("w", SHAPE), places, places.float() / 2)
    expected = torch.where(torch.isin(source, places), source / 2, -1.0).double()
    assert torch.equal(target, expected)
    assert (memory != -1).sum() == (expected != -1).sum(), "and nothing beside it"


def test_values_go_into_memory_of_the_same_layout_too():
    target = torch.zeros(2, 3)
    located = TensorMap({"w": [piece_of(torch.empty(2, 3), target)]})
    located.write(spec_of("w", (2, 3)), torch.tensor([1, 5]), torch.tensor([2.5, -1.0]))
    assert target.tolist() == [[0, 2.5, 0], [0, 0, -1]]
    located.write(spec_of("of another worker", (2, 3)), torch.tensor([0]), torch.tensor([9.0]))
    assert target.sum() == 1.5
    located.opaque.add("w")
    with pytest.raises(ValueError, match=r"transforms w.*publish it whole"):
        located.write(spec_of("w", (2, 3)), torch.tensor([0]), torch.tensor([9.0]))


def test_bytes_are_given_out_only_where_all_of_them_lie_in_the_parameters_order():
    whole, target = torch.empty(4, 4), torch.zeros(4, 4)
    spec = spec_of("w", (4, 4))
    (memory,) = [TensorMap({"w": [piece_of(whole, target)]}).memory(spec)]
    assert (memory.dtype, memory.shape, memory.data_ptr()) == (torch.uint8, (64,), target.data_ptr())
    for pieces in (
        [],
        [piece_of(whole[:2], target[:2]), piece_of(whole[2:], target[2:])],
        [piece_of(whole[:2], target[:2])],
        [piece_of(whole.t(), target)],
        [piece_of(whole, target.bfloat16())],
    ):
        assert TensorMap({"w": pieces}).memory(spec) is None
    assert TensorMap({"w": [piece_of(whole, target)]}, {"w"}).memory(spec) is None


def test_whole_parameters_are_copied_to_all_their_places_and_others_are_kept():
    fused, twin = torch.zeros(4, 3), torch.zeros(2, 3, dtype=torch.bfloat16)
    whole = torch.empty(2, 3)
    located = TensorMap(
        {"q": [piece_of(whole[:1], fused[3:]), piece_of(whole[1:], fused[:1]), piece_of(whole, twin)], "o": [], "t": []}
    )
    located.pieces["t"] = [piece_of(whole, torch.zeros(2, 3))]
    located.opaque.add("t")
    pack = torch.arange(24.0).reshape(4, 6)
    arrived = [("q", pack[1].reshape(2, 3)), ("o", pack[2]), ("t", pack[3].reshape(2, 3)), ("none", pack[0])]
    left = dict(located.load(arrived))
    assert fused.tolist() == [[9, 10, 11], [0, 0, 0], [0, 0, 0], [6, 7, 8]]
    assert twin.tolist() == [[6, 7, 8], [9, 10, 11]]
    pack.zero_()
    kept = {"o": [12, 13, 14, 15, 16, 17], "t": [18, 19, 20, 21, 22, 23], "none": [0, 1, 2, 3, 4, 5]}
    assert {name: tensor.flatten().tolist() for name, tensor in left.items()} == kept
    assert not located.pieces["t"][0].target.any()


@pytest.mark.parametrize("seed", range(4))
def test_shares_of_pieces_add_up_to_the_fingerprint(seed):
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(6, 4, generator=generator) for name in ("a", "b")}
    specs = describe(weights.items())
    whole = torch.empty(6, 4)
    located = TensorMap(
        {name: [piece_of(whole[i : i + 2], w[i : i + 2].clone()) for i in (0, 2, 4)] for name, w in weights.items()}
    )
    shares = located.shares(["a", "gone", "b"])
    assert shares == [(int(specs[0].fingerprint, 16), 24), (0, 0), (int(specs[1].fingerprint, 16), 24)]


def test_a_place_says_which_elements_are_held_in_whatever_order():
    whole, target = torch.empty(4, 2), torch.zeros(4, 2)
    rows = [piece_of(whole[i : i + 1], target[i : i + 1]) for i in range(4)]
    maps = [
        TensorMap({"w": pieces})
        for pieces in (rows[:2], rows[1::-1], rows[1:3], [piece_of(whole[:1].t(), target[:1].t())], rows[:1], [])
    ]
    places = [located.place("w") for located in maps]
    assert places[0] == places[1] == maps[0].place("w")
    assert len({*places, maps[0].place("none")}) == 5


W13 = torch.arange(40.0).reshape(8, 5)
WHOLE = torch.empty(4, 5)


@pytest.mark.parametrize(
    ("cuts", "place", "found"),
    [
        ([s_[0:4, 0:5]], s_[2:6, 0:5], (0, 0)),
        ([s_[2:3, 0:5], s_[1:2, 0:5]], s_[2:4, 0:5], (0, 1)),
        ([s_[0:4, 2:4]], s_[0:4, 1:3], (1, 2)),
        ([s_[2:4, 1:3], s_[0:2, 3:5], s_[0:2, 1:3], s_[2:4, 3:5]], s_[4:8, 0:4], (1, 1)),
    ],
)
def test_a_part_is_all_of_a_parameter_or_a_range_of_one_dimension(cuts, place, found):
    own = W13[place]
    top, left = (min(cut[dim].start for cut in cuts) for dim in range(2))
    pieces = [piece_of(WHOLE[y, x], own[y.start - top : y.stop - top, x.start - left : x.stop - left]) for y, x in cuts]
    part = TensorMap({"w": pieces}).part(spec_of("w", (4, 5)))
    assert torch.equal(part.tensor, own)
    assert part.tensor.data_ptr() == own.data_ptr()
    assert (part.dim, part.start) == found


def test_a_part_of_one_number_is_that_number():
    target = torch.tensor(3.0)
    part = TensorMap({"w": [piece_of(torch.tensor(0.0), target)]}).part(spec_of("w", ()))
    assert (part.tensor.data_ptr(), part.dim, part.start) == (target.data_ptr(), 0, 0)
    assert (Part(target).dim, Part(target).start) == (0, 0)


def apart(*pairs):
    return [piece_of(WHOLE[cut], target) for cut, target in pairs]


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([], "keeps no copy"),
        (apart((slice(0, 4), W13[:4].bfloat16())), "keeps it in bfloat16, not float32"),
        (apart((slice(0, 2), W13[:2]), (slice(2, 4), W13[2:4].clone())), "keeps its parts apart"),
        (apart((slice(0, 2), W13[:2]), (slice(2, 4), W13[3:5])), "keeps its parts apart"),
        (apart((slice(0, 2), W13[2:4]), (slice(2, 4), W13[:2])), "keeps its parts apart"),
        (apart((slice(0, 2), W13[:2]), (slice(2, 4), W13.as_strided((2, 5), (1, 2), 10))), "keeps its parts apart"),
        ([piece_of(torch.empty(5, 4).t(), W13[:4])], "keeps its parts apart"),
        (apart((s_[0:1, 2:5], W13[:1, 2:]), (s_[1:2, 0:2], W13[1:2, :2])), "keeps its parts apart"),
        (apart((slice(0, 1), W13[:1]), (slice(2, 3), W13[2:3])), "keeps only a part"),
        (apart(((slice(0, 2), slice(0, 2)), W13[:2, :2])), "keeps only a part"),
    ],
)
def test_what_is_no_part_is_told(pieces, why):
    with pytest.raises(ValueError, match=why):
        TensorMap({"w": pieces}).part(spec_of("w", (4, 5)))
    with pytest.raises(ValueError, match="loader transforms it"):
        TensorMap({"w": pieces}, {"w"}).part(spec_of("w", (4, 5)))


class Model(nn.Module):
    """Holds `w` and a buffer `b`; its loader is a function."""

    def __init__(self, load, dtype=torch.float32):
        super().__init__()
        self.w = nn.Parameter(torch.full((4, 3), 7.0, dtype=dtype))
        self.register_buffer("b", torch.full((3,), 7.0))
        self.one = nn.Parameter(torch.full((1,), 7.0))
        self.load = load

    def load_weights(self, weights):
        for name, tensor in weights:
            self.load(self, name, tensor)


def places(located):
    return {name: [(p.offset, p.sizes, p.strides) for p in pieces] for name, pieces in located.pieces.items()}


def watched(load, *names, dtype=torch.float32, shape=(4, 3)):
    model = Model(load, dtype)
    located = record(model, tuple(spec_of(name, {"b": (3,), "one": (1,)}.get(name, shape)) for name in names))
    assert all((tensor == 7).all() for tensor in (model.w, model.b, model.one)), "nothing is written"
    return model, located


def test_copies_into_parameters_and_buffers_are_seen():
    def load(model, name, tensor):
        if name == "b":
            model.b.copy_(tensor)
        else:
            model.w.data[2:].copy_(tensor[:2])
            model.w.data[:2, :].copy_(tensor[2:])
            model.w.data.zero_()

    model, located = watched(load, "w", "b")
    assert places(located) == {"w": [(0, (2, 3), (3, 1)), (6, (2, 3), (3, 1))], "b": [(0, (3,), (1,))]}
    first, second = located.pieces["w"]
    assert first.target.data_ptr() == model.w[2:].data_ptr()
    assert second.target.data_ptr() == model.w.data_ptr()
    assert (first.numel, located.opaque) == (6, set())


@pytest.mark.parametrize(
    ("load", "is_opaque"),
    [
        (lambda model, name, tensor: model.w.data.copy_(tensor * 2), True),
        (lambda model, name, tensor: model.w.data.copy_(tensor.to(torch.bfloat16)), True),
        (lambda model, name, tensor: model.w.data.copy_(tensor[:1]), True),
        (lambda model, name, tensor: model.w.data.index_copy_(0, torch.arange(4), tensor), True),
        (lambda model, name, tensor: model.w.data.fill_(1.0), False),
        (lambda model, name, tensor: model.w.data.masked_fill_(torch.ones(4, 3, dtype=torch.bool), 1.0), True),
        (lambda model, name, tensor: torch.zeros(4, 3).copy_(tensor).add_(1), False),
    ],
)
def test_what_is_computed_on_the_way_is_never_taken_for_a_copy(load, is_opaque):
    _, located = watched(load, "w")
    assert not located.pieces
    assert located.opaque == ({"w"} if is_opaque else set())


def test_an_engine_with_another_dtype_is_seen_and_a_single_number_may_be_filled_in():
    _, located = watched(lambda model, name, tensor: model.w.data.copy_(tensor), "w", dtype=torch.bfloat16)
    assert places(located) == {"w": [(0, (4, 3), (3, 1))]}
    _, located = watched(lambda model, name, tensor: model.one.data.fill_(1.0), "one")
    assert located.opaque == {"one"}
    _, located = watched(lambda model, name, tensor: model.one.data.fill_(1.0), "one", "w")
    assert located.opaque == {"one"}


def test_a_parameter_without_elements_hides_no_other():
    def load(model, name, tensor):
        if name == "none":
            model.w.data[:0].copy_(tensor)
        else:
            model.w.data.copy_(tensor)

    _, located = watched(load, "w", "none", shape=(4, 3))
    assert places(located)["w"] == [(0, (4, 3), (3, 1))]
    model = Model(load)
    located = record(model, (spec_of("none", (0, 3)), spec_of("w", (4, 3))))
    assert places(located)["w"] == [(0, (4, 3), (3, 1))]


def test_a_loader_goes_on_with_what_it_has_written_and_with_tensors_of_the_named_dtype():
    def load(model, name, tensor):
        assert tensor.dtype == torch.bfloat16
        written = (model.w.data.copy_(tensor), model.w.data.zero_(), model.w.data.copy_(tensor[:1]))
        assert all(each.data_ptr() == model.w.data_ptr() for each in written)
        model.w.data.copy_(torch.ops.aten._pin_memory(tensor))

    model = Model(load)
    located = record(model, (spec_of("w", (4, 3), "bfloat16"),))
    assert places(located)["w"] == [(0, (4, 3), (3, 1))] * 2


NAMES = ("experts.0.up_proj.weight", "experts.1.up_proj.weight", "gate.weight")


class Mixture(nn.Module):
    """Experts under a kernel of vLLM's called `backend`."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.w13_weight = nn.Parameter(torch.zeros(2, 8, 4))
        self.experts.quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(name=backend))
        self.gate = nn.Linear(4, 2, bias=False)

    @torch.no_grad()
    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "gate.weight":
                self.gate.weight.copy_(tensor)
            else:
                self.experts.w13_weight[int(name.split(".")[1]), 4:].copy_(tensor)


@pytest.mark.parametrize("backend", ["TRITON", "CPU", "FLASHINFER_TRTLLM", "AITER"])
def test_experts_are_verified_only_where_the_kernel_reads_them_as_they_are_loaded(backend):
    layer = Mixture(backend)
    weights = {name: torch.randn(2, 4) if name == "gate.weight" else torch.randn(4, 4) for name in NAMES}
    specs = describe(weights.items())
    layer.load_weights(weights.items())
    located = record(layer, specs)
    assert [spec.name for spec in specs if compare(spec, _shares(located, spec.name)) == "match"] == list(NAMES)
    kept = backend in ("TRITON", "CPU")
    assert located.opaque == (set() if kept else set(NAMES[:2]))
    if kept:
        assert torch.equal(located.part(specs[1]).tensor, weights[NAMES[1]])
    else:
        with pytest.raises(ValueError, match="transforms it"):
            located.part(specs[1])


class Picky(nn.Module):
    """Its loader makes tensors of its own, of a dtype that it names, to find the rows that it wants."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 4))

    @torch.no_grad()
    def load_weights(self, weights):
        for _, tensor in weights:
            rows = torch.zeros(2, dtype=torch.long) + torch.ones(2, dtype=torch.long)
            assert rows.dtype == torch.long
            self.weight.copy_(tensor[int(rows[0]) : int(rows[0]) + 2])


def test_what_a_loader_computes_for_itself_is_computed_as_it_says():
    weights = {"weight": torch.randn(4, 4)}
    located = record(layer := Picky(), describe(weights.items()))
    assert not located.opaque
    (piece,) = located.pieces["weight"]
    assert piece.offset == 4, "its second row is the first that is kept"
    assert not layer.weight.any(), "and nothing was written"


class Wrapped(nn.Module):
    """A layer with adapters as vLLM 0.26 makes it: a loader does not see through it."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Wrapped(nn.Linear(4, 2, bias=False))

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)


class AdapterManager:
    """As vLLM's, its length is the number of adapters."""

    def __init__(self, model: nn.Module, num_adapters: int) -> None:
        self.modules = {"gate": model.gate}
        self.num_adapters = num_adapters

    def __len__(self) -> int:
        return self.num_adapters


@pytest.mark.parametrize("num_adapters", [0, 1])
def test_layers_that_can_have_adapters_are_found_whether_there_are_any_or_not(num_adapters):
    model = Adapted()
    wrapped, live = model.gate, model.gate.base_layer.weight
    manager = SimpleNamespace(_adapter_manager=AdapterManager(model, num_adapters))
    worker = WorkerExtension()
    worker.model_runner = SimpleNamespace(model=model, lora_manager=manager)
    (spec,) = describe([("gate.weight", live.detach().clone())])
    assert worker._slipstream_locate((spec,)).part(spec).tensor.data_ptr() == live.data_ptr()
    assert model.gate is wrapped


HALVES = {0: slice(0, 4), 1: slice(4, 8)}


@pytest.mark.parametrize("held", [[None], [None, None], [0, 1], [0, 0, 1, 1], [0, 1, 0, 1]])
def test_shares_of_workers_add_up_and_those_of_the_same_elements_must_be_equal(held):
    """None: the whole."""
    whole = torch.randn(8, 4)
    (spec,) = describe([("k", whole)])
    copies = [(whole if half is None else whole[HALVES[half]]).clone() for half in held]
    shares = [_share(copy, half) for copy, half in zip(copies, held, strict=True)]
    assert compare(spec, shares) == "match"
    for number, half in enumerate(held):
        damaged = copies[number].clone()
        damaged[1, 2] += 1
        assert compare(spec, [*shares[:number], _share(damaged, half), *shares[number + 1 :]]) == "differs"
    if 1 in held:
        missing = [share for share, half in zip(shares, held, strict=True) if half == 0]
        assert compare(spec, missing) == "unverified"


def _share(target: torch.Tensor, half: int | None) -> Share:
    offset = 0 if half is None else 16 * half
    located = TensorMap({"k": [Piece(offset, tuple(target.shape), target.stride(), target)]})
    return _shares(located, "k")[0]


def _shares(located: TensorMap, name: str) -> list[Share]:
    ((value, count),) = located.shares([name])
    return [Share(value, count, located.place(name))]
