"""The process group of several trainer processes (ranks) on one host, and models spread over them by FSDP2.

The ranks meet over a file in a folder that only the user can open; gloo's sockets listen on the loopback interface.
Guarantees: of every parameter each rank keeps some rows, or columns where an engine's worker has them, as FSDP2 deals
them; gradients are added up over the ranks in float32, never averaged, since an objective's divisors are the whole
step's; only rank 0 reads the model's files.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from slipstream.trainer.distributed.engine_memory import WorkerMemory
from slipstream.trainer.model.layers import decoder_layers
from slipstream.trainer.model.packing_check import check_isolation
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.optim.base import add_gradient_, local_part
from slipstream.weights.bridges.broadcast import environment
from slipstream.weights.shards import Shard, part_of

_VARIABLES = {
    # At a deadline torch gives up what waits, instead of ending the process: then it is an error with a sentence.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "GLOO_SOCKET_IFNAME": "lo",
}


T = TypeVar("T")
_log = logging.getLogger(__name__)
_MARK = "_is_fsdp_managed_module"
_SAID_BYTES = 512
"""Of what a rank may say of a failure."""
_kept: list[Any] = []
"""Process groups live as long as the process. DTensor keeps their meshes in a cache of the thread, which a child that
another thread forks clears: the last to let go there would wait for threads that a forked child does not have."""


class RankGroup:
    """One rank's membership: `rank` of `size`, on `device`. Every wait for another rank ends after `timeout_s`."""

    def __init__(self, store: str, rank: int, size: int, *, timeout_s: float) -> None:
        distributed: Any = torch.distributed
        on_gpu = torch.cuda.is_available()
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)
        timeout = timedelta(seconds=timeout_s)
        files = distributed.FileStore(store, size)
        files.set_timeout(timeout)
        # NCCL itself would wait without end for somebody who never comes.
        files.set(f"here-{rank}", b"1")
        files.wait([f"here-{other}" for other in range(size)], timeout)
        with environment(_VARIABLES):
            distributed.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=files,
                rank=rank,
                world_size=size,
                timeout=timeout,
                device_id=self.device if on_gpu else None,
            )
        _kept.append(torch.distributed.group.WORLD)
        self.mesh: Any = torch.distributed.device_mesh.init_device_mesh(self.device.type, (size,))

    def leave(self) -> None:
        """Give the group up, without waiting for anybody."""
        try:
            if self.device.type == "cuda":
                self.abort()
            torch.distributed.destroy_process_group()
        except (RuntimeError, ValueError, AssertionError) as error:
            _log.warning("the ranks' group was given up with %s: %s", type(error).__name__, error)

    def abort(self) -> None:
        """End every wait for the others, from any thread; only GPUs need it, since gloo notices by itself."""
        try:
            group: Any = torch.distributed.group.WORLD
            group._get_backend(self.device).abort()
        except (RuntimeError, ValueError, AssertionError, AttributeError) as error:
            _log.warning("waits of the ranks' group could not be ended: %s: %s", type(error).__name__, error)

    def norm(self, own: float) -> float:
        """The norm of what all ranks have, from the norm of this one's."""
        squares = torch.tensor([own], dtype=torch.float64, device=self.device).square()
        torch.distributed.all_reduce(squares)
        return squares.sqrt().item()

    def sums(self, own: list[int]) -> list[int]:
        """Of these numbers, over all ranks."""
        counts = torch.tensor(own, dtype=torch.int64, device=self.device)
        torch.distributed.all_reduce(counts)
        return counts.tolist()

    def first_problem(self, own: str) -> str:
        """What went wrong on the first rank that says something, and which one that is: the same on all of them."""
        said = torch.zeros(self.size, _SAID_BYTES, dtype=torch.uint8, device=self.device)
        text = own.encode()[:_SAID_BYTES]
        said[self.rank, : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        torch.distributed.all_reduce(said)
        texts = (bytes(row).rstrip(b"\0").decode(errors="replace") for row in said.tolist())
        return next((f"trainer process {rank}: {text}" for rank, text in enumerate(texts) if text), "")

    def spread(self, model: PolicyModel, *, checked: bool = True, memory: WorkerMemory | None = None) -> None:
        """Leave this rank its part of every parameter of `model`, whose values are rank 0's, and have its layers gather
        theirs whenever they compute. With `memory` it has rows or columns there, of which the values must be the same.
        If `checked`, packed sequences may then not see one another."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from torch.distributed.tensor import Shard as Dealt

        # What a scalar is spread to, where this rank has no values, is of no more use than its shape and type.
        whole = {name: parameter.detach() for name, parameter in model.network.named_parameters()}
        dims = {} if memory is None else memory.dims
        dim_of = {id(parameter): dims.get(name, 0) for name, parameter in model.network.named_parameters()}
        prefixes = {module: f"{name}." if name else "" for name, module in model.network.named_modules()}
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "reshard_after_forward": True,
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
            "shard_placement_fn": lambda parameter: Dealt(dim_of.get(id(parameter), 0)),
        }
        for module in (*decoder_layers(model.network), *model.roots):
            if self.rank:
                self._make_room(module)
            sharded: Any = fully_shard(module, **options)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            _add_up_by_kernel(sharded)
            _have_compiled_as_ever(module)
            if memory is not None:
                memory.place(module, prefixes[module], self.mesh)
        self._fill(model.network, whole, memory)
        if model.packing and checked:
            check_isolation(model)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # whole layers and words, which an engine may have on this card

    def _make_room(self, module: nn.Module) -> None:
        """Give the parameters of a module that has no values yet memory; its rows alone stay when it is sharded."""
        for parameter in module.parameters():
            if not parameter.is_contiguous():
                parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.device)

    @torch.no_grad()
    def _fill(self, network: nn.Module, whole: dict[str, Tensor], memory: WorkerMemory | None) -> None:
        """Take rank 0's values, one parameter at a time; in the engine's memory they must be there."""
        for name, parameter in network.named_parameters():
            own = whole.pop(name)
            value = own.to(self.device).contiguous() if self.rank == 0 else torch.empty_like(own, device=self.device)
            value = value.contiguous()
            torch.distributed.broadcast(value, 0)
            if memory is not None:
                memory.check(name, value)
            if memory is None or name not in memory.dims:
                local_part(parameter).copy_(part_of(value, shard_dim(parameter), self.rank, self.size))
        for buffer in network.buffers():
            value = buffer.detach().to(self.device).contiguous()
            torch.distributed.broadcast(value, 0)
            buffer.data = value

    def through_step(self, modules: Iterable[nn.Module], rows: Iterable[T], count: int) -> Generator[T]:
        """The `rows` of a step, of which there are `count`, for a forward and a backward pass each. Meanwhile this rank
        keeps the whole weights of these `modules`, without those below them, and their gradients, in float32; the last
        backward pass adds these up over the ranks, and leaves this one its part. Every pass goes through all of the
        modules. After a row that failed this rank is of no use."""
        spread: list[Any] = list(modules)
        for module in spread:
            module.set_reshard_after_forward(False, recurse=False)
        for number, row in enumerate(rows, 1):
            for module in spread:
                module.set_requires_gradient_sync(number == count, recurse=False)
                module.set_reshard_after_backward(number == count, recurse=False)
            yield row
        for module in spread:
            module.set_reshard_after_forward(True, recurse=False)

    def as_shard(self, part: Tensor, shape: torch.Size, dim: int) -> Tensor:
        """This part as one of a tensor (a DTensor) of that shape, dealt out along `dim`, to save and load."""
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor import Shard as Dealt

        stride = torch.empty(shape, device="meta").stride()
        made: Any = DTensor.from_local
        return made(part, self.mesh, [Dealt(dim)], run_check=False, shape=shape, stride=stride)


def saved_of(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All that `network` would save, under its own names: parameters, tied ones once, and buffers."""
    yield from network.named_parameters()
    state: dict[str, Tensor] = network.state_dict(keep_vars=True)  # a DTensor's detach takes its time
    yield from ((name, buffer) for name, buffer in network.named_buffers() if name in state)


def shard_of(name: str, tensor: Tensor) -> Shard:
    """This rank's part of a parameter that is spread, or of a buffer, which every rank has, as it is now."""
    dim = shard_dim(tensor) if hasattr(tensor, "placements") else None
    return Shard(name, local_part(tensor), tuple(tensor.shape), dim)


def shard_dim(parameter: Tensor) -> int:
    """Along which dimension a parameter that is spread is dealt out."""
    known: Any = parameter
    (placement,) = known.placements
    return int(placement.dim)


def _have_compiled_as_ever(module: nn.Module) -> None:
    """Take FSDP2's mark from a module: of one that has it torch's compiler takes numbers such as the size of its heads
    for ones that change from call to call, and its kernels divide by them."""
    for part in module.modules():
        if hasattr(part, _MARK):
            setattr(part, _MARK, False)


def _add_up_by_kernel(module: Any) -> None:
    """Have the gradients that a rank adds up itself, between the first pass of a step and the last, be added by
    `add_gradient_`: torch's own addition of two types takes twice as long."""
    group = module._get_fsdp_state()._fsdp_param_group
    for parameter in () if group is None else group.fsdp_params:
        parameter.accumulate_unsharded_grad_if_needed = partial(_add_up, parameter)


def _add_up(parameter: Any) -> None:
    total = parameter.unsharded_accumulated_grad
    # Of a module that no pass went through no whole weights are there.
    if total is not None and (gradient := parameter.unsharded_param.grad) is not None:
        add_gradient_(total, gradient)
        parameter.unsharded_param.grad = None
