"""The fingerprint of a tensor is the same wherever, and in whatever parts, it is computed."""

import os
import subprocess
import sys
import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.records import ParameterSpec
from slipstream.weights import fingerprint_numpy
from slipstream.weights.fingerprint import as_hex, describe, digest, fingerprints
from slipstream.weights.fingerprint_torch import GOLDEN, HIGH, LOW, MIX_1, MIX_2, Slice, fingerprint
from slipstream.weights.shards import ShardedWeights


def slices(dtype: torch.dtype, device: str = "cpu", num_large: int = 70_000) -> list[Slice]:
    """Whole tensors, rows, columns, shards in memory of their own, transposed ones, empty ones; some of many of the
    kernel's blocks, one of which does not begin where the card likes to read."""
    torch.manual_seed(0)
    large = (torch.randn(num_large) * 50).to(dtype).to(device)
    whole = (torch.randn(70, 130) * 50).to(dtype).to(device)
    blocks = whole.view(7, 10, 130)
    return [
        Slice(whole),
        Slice(whole[10:40]),
        Slice(whole[:, 20:70], 20, (130, 1), (70, 50)),
        Slice(whole[5:9].clone(), 5 * 130, (130, 1), (4, 130)),
        Slice(whole.t().contiguous(), 0, (1, 130), (130, 70)),
        Slice(blocks[:, 2:5], 260, (1300, 130, 1), (7, 3, 130)),
        Slice(blocks.view(7, 10, 13, 10)[:, 2:5, :, 3:6], 263, (1300, 130, 10, 1), (7, 3, 13, 3)),
        Slice(whole[0, 0]),
        Slice(large),
        Slice(large[1:], 2**33 + 7, (1,), (num_large - 1,)),
        Slice(torch.empty(0, dtype=dtype, device=device)),
    ]


def check_kernel(parts: list[Slice]) -> None:
    """It writes into `parts`."""
    from slipstream.weights import fingerprint_triton

    fingerprint_triton._tables.clear()
    found = [value % 2**64 for value in fingerprint_triton.fingerprints(parts)]
    assert found == [fingerprint(*part) for part in parts]
    # The layout is known by now, and what lies there is not what lay there.
    simple = [part for part in parts if part.tensor.is_contiguous() and part.strides is None]
    for _ in range(2):
        parts[0].tensor.view(-1)[1::3] = 0
        found = [value % 2**64 for value in fingerprint_triton.fingerprints(simple)]
        assert found == [fingerprint(*part) for part in simple]
        assert len(fingerprint_triton._tables) == 1
    fingerprint_triton._tables.clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="is run as it is where there is a CUDA device")
def test_the_kernel_for_gpus_in_tritons_interpreter():
    """In a process of its own: whether Triton interprets is settled when it is first imported."""
    command = [sys.executable, __file__]
    subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, check=True, timeout=120)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float64])
def test_the_kernel_on_a_gpu(dtype):
    check_kernel(slices(dtype, "cuda"))
    assert fingerprints(slices(dtype, "cuda")) == fingerprints(slices(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float64])
def test_it_is_the_sum_that_the_module_names(dtype):
    """In Python's own numbers, one element after another."""
    whole = (torch.randn(9, 17, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)
    size = whole.element_size()
    raw = bytes(whole.view(torch.uint8).flatten().tolist())
    total = 0
    for index in range(whole.numel()):
        bits = int.from_bytes(raw[index * size : (index + 1) * size], "little", signed=size > 1)
        x = (bits * 0xC2B2AE3D) % 2**32
        if size == 8:
            x = ((x ^ x >> 15) + (bits >> 32) * 0x27D4EB2F) % 2**32
        x ^= ((index + 1) * 0x9E3779B97F4A7C15) % 2**64 >> 32
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        total += x ^ x >> 16
    assert fingerprint(whole) == total % 2**64


@given(st.integers(0, 2**31), st.integers(0, 15), st.integers(0, 4999), st.integers(0, 4999))
def test_a_bit_and_a_place_show(seed, bit, place, other):
    whole = torch.randint(-(2**15), 2**15, (5000,), dtype=torch.int16, generator=torch.Generator().manual_seed(seed))
    before = fingerprint(whole)
    whole[place] ^= torch.tensor(1 << bit).to(torch.int16)
    assert fingerprint(whole) != before
    changed = fingerprint(whole)
    first, second = whole[place].item(), whole[other].item()
    whole[place], whole[other] = second, first
    assert (fingerprint(whole) != changed) == (first != second)


def test_the_halves_of_eight_bytes_do_not_undo_one_another():
    whole = torch.randn(50, dtype=torch.float64)
    before = fingerprint(whole)
    for bit in range(32):
        changed = whole.clone()
        changed.view(torch.int32).view(-1, 2)[7] ^= torch.tensor(1 << bit).to(torch.int32)
        assert fingerprint(changed) != before


def test_multipliers_are_invertible_numbers_of_the_kernels_types():
    for bits, multipliers in ((64, [GOLDEN]), (32, [LOW, HIGH, MIX_1, MIX_2])):
        for each in multipliers:
            assert -(2 ** (bits - 1)) <= each < 2 ** (bits - 1)
            assert each % 2 == 1


def test_no_elements_and_one_whose_term_is_nothing_add_nothing():
    assert fingerprint(torch.empty(0, 3)) == 0
    assert fingerprint(torch.tensor(2.0)) == fingerprint(torch.tensor([[2.0]])) != 0
    bits = (0x9E3779B97F4A7C15 >> 32) * pow(0xC2B2AE3D, -1, 2**32) % 2**32  # undone by its place
    signed = bits - 2**32 * (bits >= 2**31)
    assert fingerprint(torch.tensor([signed], dtype=torch.int32)) == 0


def test_parts_of_a_large_parameter_add_up_to_it_whatever_their_layout():
    whole = torch.randn(1000, 300, generator=torch.Generator().manual_seed(3)).bfloat16()
    expected = sum(fingerprint(row, 300 * number) for number, row in enumerate(whole)) % 2**64
    turned = whole.t().contiguous()
    for parts in (
        [(whole,)],
        [(turned, 0, (1, 300))],
        [(turned.flatten(), 0, (1, 300), (300, 1000))],
        [(whole[:1], 0, (7, 1)), (whole[1:].flatten(), 300, (300, 1), (999, 300))],
        [(whole[1:-1], 300), (whole[[0, -1]], 0, (999 * 300, 1))],
        [(whole[:, :1].contiguous(), 0, (300, 1)), (whole[:, 1:].contiguous(), 1, (300, 1), (1000, 299))],
    ):
        assert sum(fingerprint(*part) for part in parts) % 2**64 == expected


def test_places_of_elements_that_lie_in_line_are_never_all_in_memory():
    whole = torch.zeros(2, 1, 5000, 300, dtype=torch.bfloat16)
    for strides in (None, (1_500_000, 1_500_000, 300, 1), (1_500_000, 7, 300, 1)):
        tracemalloc.start()
        fingerprint(whole, 0, strides)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < whole.numel() * 4, "half of their places"


def test_threads_share_a_large_tensor():
    bits = torch.randint(-(2**15), 2**15, (3_500_001,), dtype=torch.int16)
    whole = fingerprint_numpy.fingerprint(bits.numpy(), 77, 1)
    assert fingerprint_numpy.fingerprint(bits.numpy(), 77, 3) == whole
    apart = fingerprint(bits[:1_000_000], 77) + fingerprint(bits[1_000_000:], 1_000_077)
    assert apart % 2**64 == whole


def test_hexadecimal_digits_are_sixteen_of_any_sum():
    assert as_hex(0) == "0" * 16
    assert as_hex(2**64 + 0x1F) == as_hex(3 * 2**64 + 0x1F) == "1f".zfill(16)
    assert as_hex(-1) == as_hex(2**64 - 1) == "f" * 16


def test_a_description_names_each_tensor_and_a_digest_all_of_them():
    tensors = {"b": torch.ones(2, 3, dtype=torch.bfloat16), "a": torch.arange(4)}
    found = describe(tensors.items())
    shapes = [("b", (2, 3), "bfloat16"), ("a", (4,), "int64")]
    wanted = [ParameterSpec(*each, f"{fingerprint(tensors[each[0]]):016x}") for each in shapes]
    assert list(found) == wanted
    whole = digest(found)
    assert len(whole) == len(bytes.fromhex(whole)) * 2 == 16
    assert digest(reversed(found)) == whole
    others = [("c", (2, 3), "bfloat16"), ("b", (3, 2), "bfloat16"), ("b", (2, 3), "float16")]
    changed = [ParameterSpec(*each, wanted[0].fingerprint) for each in others]
    changed.append(ParameterSpec("b", (2, 3), "bfloat16", wanted[1].fingerprint))
    assert len({whole, digest(wanted[:1]), *(digest([each, wanted[1]]) for each in changed)}) == 6


def test_sharded_weights_describe_themselves_without_a_gather():
    spec = ParameterSpec("w", (2,), "float32", "0" * 16)
    weights = ShardedWeights(lambda: pytest.fail("gathered"), lambda: (spec,))
    assert describe(weights) == (spec,)


if __name__ == "__main__":
    from slipstream.weights import fingerprint_triton

    fingerprint_triton._BLOCK = 4096  # an interpreter takes its time, and a block costs the same however short it is
    for each in (torch.bfloat16, torch.float32, torch.uint8, torch.float64):
        check_kernel(slices(each, num_large=9000))
