"""A model spread over ranks in the memory of the engine's workers: what a rank has is what the worker beside it has.

vLLM divides most parameters as FSDP2 can: equal rows, or equal columns. Of these a rank's part is its worker's own
tensor. What the two divide otherwise (norms, which every worker has; heads of keys that are fewer than workers; words
that do not come out even) the rank has a part of its own of, and copies the whole's values to its worker after every
change. Guarantees: nothing of the worker's is written before it was compared with the model's files; after `write`
returns, all that the worker has is this version's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import WeightsError
from slipstream.trainer.model.policy import PolicyModel, is_same
from slipstream.weights.bridges.single_copy import OTHER_BRIDGE, CannotShare, SharedTensor, SharedWeights, open_weights
from slipstream.weights.shards import Shard, gathered_everywhere


class WorkerMemory:
    """The memory of the worker `rank`, and how all of the `workers` have divided `model`."""

    def __init__(self, model: PolicyModel, workers: Sequence[SharedWeights], rank: int) -> None:
        self._folder, self._size = model.folder, len(workers)
        self._live: dict[str, Tensor] = {}
        """By the network's own names."""
        self._places: dict[str, tuple[int, int]] = {}
        """Where the worker's part begins, and along which dimension."""
        self.dims: dict[str, int] = {}
        """Along which dimension each parameter is divided that ranks and workers divide alike."""
        self._placed: set[str] = set()
        self.apart: set[str] = set()
        """What is trained and divided otherwise."""
        opened = open_weights(workers[rank])
        for name, parameter in model.network.named_parameters():
            probe = torch.zeros(1, dtype=parameter.dtype).expand(parameter.shape)
            found = model.stored(name, probe)
            stored = found[0][0] if found else name
            reason = next((worker.refused[stored] for worker in workers if stored in worker.refused), "")
            if len(found) != 1 or not is_same(found[0][1], probe):
                reason = "transformers changes it, and the engine has it otherwise"
            elif not reason and any(stored not in worker.tensors for worker in workers):
                reason = "the engine has none"
            elif not reason and opened[stored].dtype != parameter.dtype:
                reason = f"the engine has it in {opened[stored].dtype}, the trainer in {parameter.dtype}"
            if reason:
                raise CannotShare(f"trainer and engine cannot have one copy of {stored} ({reason})")
            place = workers[rank].tensors[stored]
            self._live[name], self._places[name] = opened[stored], (place.dim, place.start)
            dim = _divided_alike([worker.tensors[stored] for worker in workers], tuple(parameter.shape))
            if dim is not None:
                self.dims[name] = dim
            elif parameter.requires_grad:
                self.apart.add(name)

    def place(self, module: nn.Module, prefix: str, mesh: Any) -> None:
        """Have the parameters of `module`, which has just been spread, lie where the worker has them; in the network
        its name is `prefix`, with a dot. `load_state_dict` is how a module that is spread takes over other tensors."""
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor import Shard as Dealt

        made: Any = DTensor.from_local
        taken: dict[int, nn.Parameter] = {}
        state: dict[str, nn.Parameter] = {}
        for own_name, parameter in module.named_parameters(remove_duplicate=False):
            name = prefix + own_name
            if id(parameter) not in taken:
                if name not in self.dims or name in self._placed:
                    continue
                self._placed.add(name)
                dim, shape, stride = Dealt(self.dims[name]), parameter.shape, parameter.stride()
                part = made(self._live[name], mesh, [dim], run_check=False, shape=shape, stride=stride)
                taken[id(parameter)] = nn.Parameter(part, requires_grad=parameter.requires_grad)
            # A tied one stands under both names.
            state[own_name] = taken[id(parameter)]
        module.load_state_dict(state, strict=False, assign=True)

    def check(self, name: str, whole: Tensor) -> None:
        """Raise `WeightsError` unless the worker has loaded what the files have."""
        if not torch.equal(self._live[name], self._of_worker(name, whole)):
            raise WeightsError(f"the engine holds another {name} than the files in {self._folder}: {OTHER_BRIDGE}")

    @torch.no_grad()
    def write(self, shards: Iterable[Shard]) -> int:
        """After parameters were changed: have the worker know those `apart` too, of which `shards` are this rank's. A
        collective; how many bytes were copied to the worker."""
        num_bytes = 0
        for name, whole in gathered_everywhere(shards, self._size):
            num_bytes += self._live[name].copy_(self._of_worker(name, whole)).nbytes
        if torch.cuda.is_initialized():
            # The engine computes as soon as all ranks have answered.
            torch.cuda.synchronize()
        return num_bytes

    def _of_worker(self, name: str, whole: Tensor) -> Tensor:
        dim, start = self._places[name]
        return whole.narrow(dim, start, self._live[name].shape[dim])


def _divided_alike(parts: Sequence[SharedTensor], shape: tuple[int, ...]) -> int | None:
    """Along which dimension the workers' `parts` of a parameter are the equal ones that FSDP2 deals; None when they are
    others."""
    dim = parts[0].dim
    each, rest = divmod(shape[dim], len(parts))
    expected = (*shape[:dim], each, *shape[dim + 1 :])
    strides = torch.empty(expected, device="meta").stride()
    alike = (
        (part.dim, part.start, part.shape, part.strides) == (dim, rank * each, expected, strides)
        for rank, part in enumerate(parts)
    )
    return dim if not rest and all(alike) else None
