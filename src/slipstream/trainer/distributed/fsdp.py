"""The process group of the trainer ranks, and sharding of models over them by FSDP2.

The ranks meet through a file in the user's private folder. Gloo's sockets listen on the loopback interface, or on the
node's one towards the others.
Guarantees: each rank keeps a shard of every parameter, by rows, or by columns if an engine's worker has columns. A
frozen vision tower stays whole on each rank: the rank reads its own images. Gradients are reduce-scattered as sums in
float32, not averages: an objective's divisors are of the whole step. Only rank 0 reads the model's files.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from slipstream.processes.rendezvous import interface_variables, meet
from slipstream.processes.variables import variables_set
from slipstream.trainer.distributed.context import ContextGroup
from slipstream.trainer.distributed.engine_memory import WorkerMemory
from slipstream.trainer.model.layers import text_layers
from slipstream.trainer.model.packing_check import check_isolation
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.model.vision_towers import frozen_parameters
from slipstream.trainer.optim.base import add_gradient_, local_tensor
from slipstream.weights.shards import Shard, part_of

_VARIABLES = {
    # At a timeout torch aborts the collective instead of the process: we can report an error.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


T = TypeVar("T")
_log = logging.getLogger(__name__)
_MARK = "_is_fsdp_managed_module"
_MAX_MESSAGE_BYTES = 512
"""Of a rank's error message."""
_kept: list[Any] = []
"""Keeps process groups alive until exit. DTensor caches their meshes by thread. A child forked by another thread clears
this cache; destroying a process group there would wait for threads missing in the child."""


class RankGroup:
    """The process group as seen by rank `rank` of `size`, on `device`. Waits for other ranks end after `timeout_s`.
    Every `num_together` neighbours hold a row together (context parallelism). The ranks hold `num_copies` copies of the
    weights, each by equally many neighbours (hybrid sharding)."""

    def __init__(
        self,
        address: str,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        gpu: int | None = None,
        num_together: int = 1,
        num_copies: int = 1,
    ) -> None:
        """`gpu`: the number of its GPU on its node, by default `rank`."""
        distributed: Any = torch.distributed
        on_gpu = torch.cuda.is_available()
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.num_copies, self.num_shards = num_copies, size // num_copies
        self.copy, self.place = divmod(rank, self.num_shards)
        """The number of this rank's copy of the weights, and of its shard."""
        self.device = torch.device("cuda", rank if gpu is None else gpu) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)
        timeout = timedelta(seconds=timeout_s)
        store = meet(address, rank, size, timeout_s)
        with variables_set(_VARIABLES | interface_variables()):
            distributed.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=store,
                rank=rank,
                world_size=size,
                timeout=timeout,
                device_id=self.device if on_gpu else None,
            )
            self._groups = [distributed.group.WORLD]
            self.context: ContextGroup | None = None
            if num_together > 1:
                neighbours, _ = distributed.new_subgroups(num_together, timeout=timeout)
                self._groups.append(neighbours)
                self.context = ContextGroup(rank % num_together, num_together, neighbours)
            self.of_copy: Any = None
            """The process group of this rank's copy; None: all ranks."""
            self.mesh: Any = self._hybrid_mesh(timeout) if num_copies > 1 else self._flat_mesh()
        _kept.extend(self._groups)

    def _flat_mesh(self) -> Any:
        return torch.distributed.device_mesh.init_device_mesh(self.device.type, (self.size,))

    def _hybrid_mesh(self, timeout: timedelta) -> Any:
        """Gradients are reduce-scattered within a copy, and their shards are all-reduced over the copies."""
        distributed: Any = torch.distributed
        ranks = torch.arange(self.size).view(self.num_copies, self.num_shards)
        # A mesh's groups would wait for half an hour.
        self.of_copy, _ = distributed.new_subgroups(self.num_shards, timeout=timeout)
        across, _ = distributed.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=timeout)
        self._groups += [self.of_copy, across]
        mesh: Any = distributed.device_mesh.DeviceMesh
        names = ("replicate", "shard")
        return mesh.from_group([across, self.of_copy], self.device.type, mesh=ranks, mesh_dim_names=names)

    def leave(self) -> None:
        """Destroy the process group without waiting for other ranks."""
        try:
            if self.device.type == "cuda":
                self.abort()
            torch.distributed.destroy_process_group()
        except (RuntimeError, ValueError, AssertionError) as error:
            _log.warning("destroying the ranks' process group failed with %s: %s", type(error).__name__, error)

    def abort(self) -> None:
        """Abort all pending collectives, from any thread. Only NCCL needs it: gloo notices lost peers by itself."""
        try:
            for group in self._groups:
                group._get_backend(self.device).abort()
        except (RuntimeError, ValueError, AssertionError, AttributeError) as error:
            _log.warning("aborting the ranks' collectives failed: %s: %s", type(error).__name__, error)

    def sums(self, own: list[float]) -> list[float]:
        """All-reduce: the element-wise sums over the shards of one copy, in float64."""
        sums = torch.tensor(own, dtype=torch.float64, device=self.device)
        # Over all ranks: all copies have the same bits.
        torch.distributed.all_reduce(sums)
        return (sums / self.num_copies).tolist()

    def first_problem(self, own: str) -> str:
        """All-reduce of error messages: the first nonempty one, with its rank; the same on all ranks."""
        messages = torch.zeros(self.size, _MAX_MESSAGE_BYTES, dtype=torch.uint8, device=self.device)
        text = own.encode()[:_MAX_MESSAGE_BYTES]
        messages[self.rank, : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        torch.distributed.all_reduce(messages)
        texts = (bytes(row).rstrip(b"\0").decode(errors="replace") for row in messages.tolist())
        return next((f"trainer process {rank}: {text}" for rank, text in enumerate(texts) if text), "")

    def shard(self, model: PolicyModel, *, checked: bool = True, memory: WorkerMemory | None = None) -> None:
        """Shard `model` with rank 0's values: each rank keeps its shard of every parameter but a frozen vision tower's,
        and layers all-gather their weights when they compute. With `memory` the shards lie in the engine worker's
        memory; its values must be equal. If `checked`, check afterwards the isolation of packed sequences."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from torch.distributed.tensor import Shard as ShardPlacement

        # On ranks other than 0 these are expanded scalars: only shape and dtype are used.
        whole = {name: parameter.detach() for name, parameter in model.network.named_parameters()}
        dims = {} if memory is None else memory.dims
        dim_of = {id(parameter): dims.get(name, 0) for name, parameter in model.network.named_parameters()}
        prefixes = {module: f"{name}." if name else "" for name, module in model.network.named_modules()}
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "ignored_params": {parameter for _, parameter in replicated(model.network)},
            "reshard_after_forward": True,
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
            "shard_placement_fn": lambda parameter: ShardPlacement(dim_of.get(id(parameter), 0)),
        }
        model.take_work()
        for module in (*text_layers(model.network), *model.roots):
            if self.rank:
                self._allocate(module)
            sharded: Any = fully_shard(module, **options)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            _use_fused_accumulation(sharded)
            _clear_fsdp_mark(module)
            if memory is not None:
                memory.place(module, prefixes[module])
        self._broadcast_values(model.network, whole, memory)
        if model.packing and checked:
            check_isolation(model)
        model.context = self.context
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the full layers and embeddings: an engine may need the memory

    def _allocate(self, module: nn.Module) -> None:
        """Allocate memory for the parameters of a module without values; sharding keeps this rank's shard only."""
        for parameter in module.parameters():
            if not parameter.is_contiguous():
                parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.device)

    @torch.no_grad()
    def _broadcast_values(self, network: nn.Module, whole: dict[str, Tensor], memory: WorkerMemory | None) -> None:
        """Broadcast rank 0's values, one parameter at a time; the engine's memory must already have them."""
        for name, parameter in network.named_parameters():
            own = whole.pop(name)
            value = own.to(self.device).contiguous() if self.rank == 0 else torch.empty_like(own, device=self.device)
            value = value.contiguous()
            torch.distributed.broadcast(value, 0)
            if memory is not None:
                memory.check(name, value)
            if (dim := shard_dim(parameter)) is None:
                parameter.data = value
            elif memory is None or name not in memory.dims:
                local_tensor(parameter).copy_(part_of(value, dim, self.place, self.num_shards))
        for buffer in network.buffers():
            value = buffer.detach().to(self.device).contiguous()
            torch.distributed.broadcast(value, 0)
            buffer.data = value

    def rows_unsharded(self, modules: Iterable[nn.Module], rows: Iterable[T], count: int) -> Generator[T]:
        """Yield the `count` rows of a step, for one forward and backward pass each. `modules` (not their submodules)
        are not resharded in between: weights and float32 gradients stay unsharded on this rank until the last backward
        pass. This pass reduce-scatters the gradients. Every pass must go through all of the modules. After an error in
        a row this rank must not be used."""
        sharded: list[Any] = list(modules)
        for module in sharded:
            module.set_reshard_after_forward(False, recurse=False)
        for number, row in enumerate(rows, 1):
            for module in sharded:
                module.set_requires_gradient_sync(number == count, recurse=False)
                module.set_reshard_after_backward(number == count, recurse=False)
            yield row
        for module in sharded:
            module.set_reshard_after_forward(True, recurse=False)

    def rows_gathered(self, modules: Iterable[nn.Module], rows: Iterable[T]) -> Generator[T]:
        """Yield `rows`, for one forward pass each. `modules` (not their submodules) are resharded only after the last
        one: their weights can be read after a pass, too."""
        sharded: list[Any] = list(modules)
        for module in sharded:
            module.set_reshard_after_forward(False, recurse=False)
        yield from rows
        for module in sharded:
            module.reshard()
            module.set_reshard_after_forward(True, recurse=False)


def saved_tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, tied ones once, and persistent buffers of `network`, under its names."""
    yield from network.named_parameters()
    state: dict[str, Tensor] = network.state_dict(keep_vars=True)  # detaching DTensors is slow
    yield from ((name, buffer) for name, buffer in network.named_buffers() if name in state)


def replicated(network: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The unsharded parameters: a frozen vision tower's."""
    frozen = {id(parameter) for parameter in frozen_parameters(network) if not parameter.requires_grad}
    return ((name, parameter) for name, parameter in network.named_parameters() if id(parameter) in frozen)


def shard_of(name: str, tensor: Tensor) -> Shard:
    """This rank's current shard of a sharded parameter, or a replicated one or buffer."""
    return Shard(name, local_tensor(tensor), tuple(tensor.shape), shard_dim(tensor))


def shard_dim(tensor: Tensor) -> int | None:
    """The dimension of a parameter's sharding; None if it is replicated."""
    known: Any = tensor
    if not hasattr(known, "placements"):
        return None
    *_, placement = known.placements  # over the copies it is replicated
    return int(placement.dim)


def _clear_fsdp_mark(module: nn.Module) -> None:
    """Remove FSDP2's mark from a module. In marked modules torch.compile treats integers such as the head size as
    dynamic, and its kernels divide by them at run time."""
    for part in module.modules():
        if hasattr(part, _MARK):
            setattr(part, _MARK, False)


def _use_fused_accumulation(module: Any) -> None:
    """Accumulate unsharded gradients with `add_gradient_`: torch's mixed-dtype addition takes twice as long."""
    group = module._get_fsdp_state()._fsdp_param_group
    for parameter in () if group is None else group.fsdp_params:
        parameter.accumulate_unsharded_grad_if_needed = partial(_accumulate, parameter)


def _accumulate(parameter: Any) -> None:
    total = parameter.unsharded_accumulated_grad
    # A module without part in the pass has no unsharded weights.
    if total is not None and (gradient := parameter.unsharded_param.grad) is not None:
        add_gradient_(total, gradient)
        parameter.unsharded_param.grad = None
