"""Shards of a model in the memory of the engine's tensor-parallel workers: each rank shares memory with one worker.

vLLM shards most parameters as FSDP2 can, in equal rows or equal columns: for these a rank's shard is its worker's
tensor. If the two differ (norms, replicated by vLLM; key heads fewer than workers; vocabularies not evenly divisible)
the rank has its own shard, and copies the values to its worker after every change. Guarantees: the worker's memory
is written only after its comparison with the model's files. After `write` returns, all of the worker's weights are the
new version's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import WeightsError
from slipstream.trainer.model.policy import PolicyModel, shares_memory
from slipstream.trainer.model.vision_towers import frozen_parameters
from slipstream.weights.bridges.single_copy import OTHER_BRIDGE, CannotShare, SharedTensor, SharedWeights, open_weights
from slipstream.weights.shards import Shard, gathered_everywhere


class WorkerMemory:
    """The memory of worker number `rank`, and how all `workers` shard `model`."""

    def __init__(self, model: PolicyModel, workers: Sequence[SharedWeights], rank: int) -> None:
        self._folder, self._size = model.folder, len(workers)
        self._live: dict[str, Tensor] = {}
        """The worker's tensors, by the network's parameter names."""
        self._places: dict[str, tuple[int, int]] = {}
        """(dimension, first index) of the worker's shard of each parameter."""
        self.dims: dict[str, int] = {}
        """The shard dimension of each parameter sharded alike by FSDP2 and vLLM: its memory is shared."""
        self._placed: set[str] = set()
        self.copied: set[str] = set()
        """Trained parameters sharded differently: copied after every change."""
        opened, towers = open_weights(workers[rank]), {id(parameter) for parameter in frozen_parameters(model.network)}
        for name, parameter in model.network.named_parameters():
            probe = torch.zeros(1, dtype=parameter.dtype).expand(parameter.shape)
            found = model.stored(name, probe)
            stored = found[0][0] if found else name
            reason = next((worker.refused[stored] for worker in workers if stored in worker.refused), "")
            if len(found) != 1 or not shares_memory(found[0][1], probe):
                reason = "transformers converts it, and the engine stores it differently"
            elif not reason and any(stored not in worker.tensors for worker in workers):
                reason = "the engine has none"
            elif not reason and opened[stored].dtype != parameter.dtype:
                reason = f"the engine has it in {opened[stored].dtype}, the trainer in {parameter.dtype}"
            if reason:
                raise CannotShare(f"trainer and engine cannot have one copy of {stored} ({reason})")
            place = workers[rank].tensors[stored]
            self._live[name], self._places[name] = opened[stored], (place.dim, place.start)
            dim = _common_shard_dim([worker.tensors[stored] for worker in workers], tuple(parameter.shape))
            if id(parameter) in towers:  # each rank has them as a whole
                continue
            if dim is not None:
                self.dims[name] = dim
            elif parameter.requires_grad:
                self.copied.add(name)

    def place(self, module: nn.Module, prefix: str) -> None:
        """Replace the shards of `module`, just sharded by FSDP2, by the worker's tensors; `prefix` is its name in the
        network with a dot. FSDP2 takes over other tensors through `load_state_dict`."""
        replaced: dict[int, nn.Parameter] = {}
        state: dict[str, nn.Parameter] = {}
        for own_name, parameter in module.named_parameters(remove_duplicate=False):
            name = prefix + own_name
            if id(parameter) not in replaced:
                if name not in self.dims or name in self._placed:
                    continue
                self._placed.add(name)
                part = shard_like(self._live[name], parameter)
                replaced[id(parameter)] = nn.Parameter(part, requires_grad=parameter.requires_grad)
            # A tied parameter has both names.
            state[own_name] = replaced[id(parameter)]
        module.load_state_dict(state, strict=False, assign=True)

    def check(self, name: str, whole: Tensor) -> None:
        """Raise `WeightsError` unless the worker's tensor equals `whole`, the parameter in the model's files."""
        if not torch.equal(self._live[name], self._worker_slice(name, whole)):
            raise WeightsError(f"the engine holds another {name} than the files in {self._folder}: {OTHER_BRIDGE}")

    @torch.no_grad()
    def write(self, shards: Iterable[Shard]) -> int:
        """All-gather the parameters in `copied`, from this rank's `shards`, and copy the worker's slices to it.
        Returns the number of bytes copied. Call it after every change."""
        num_bytes = 0
        for name, whole in gathered_everywhere(shards, self._size):
            num_bytes += self._live[name].copy_(self._worker_slice(name, whole)).nbytes
        if torch.cuda.is_initialized():
            # The engine computes as soon as all ranks have answered: the copies must be complete.
            torch.cuda.synchronize()
        return num_bytes

    def _worker_slice(self, name: str, whole: Tensor) -> Tensor:
        dim, start = self._places[name]
        return whole.narrow(dim, start, self._live[name].shape[dim])


def shard_like(part: Tensor, parameter: Any) -> Tensor:
    """Wrap this rank's shard as a DTensor of the parameter's full shape, with its placements."""
    from torch.distributed.tensor import DTensor

    made: Any = DTensor.from_local
    shape, stride = parameter.shape, torch.empty(parameter.shape, device="meta").stride()
    return made(part, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride)


def _common_shard_dim(parts: Sequence[SharedTensor], shape: tuple[int, ...]) -> int | None:
    """The dimension of the workers' `parts` of a parameter, if these are equal, contiguous shards as FSDP2 makes them;
    None if they are not."""
    dim = parts[0].dim
    each, rest = divmod(shape[dim], len(parts))
    expected = (*shape[:dim], each, *shape[dim + 1 :])
    strides = torch.empty(expected, device="meta").stride()
    alike = (
        (part.dim, part.start, part.shape, part.strides) == (dim, rank * each, expected, strides)
        for rank, part in enumerate(parts)
    )
    return dim if not rest and all(alike) else None
