"""`WorkerExtension`: the methods for weight updates mixed into vLLM's worker (`worker_extension_cls`).

They run in the engine core's loop, between two steps. Arguments and results are JSON text, as they cross vLLM's process
boundary and nothing there may be unpickled. `EngineServer` judges from their results whether an update succeeded.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from slipstream.inference.plugin.patches import cpu, patch_table
from slipstream.inference.plugin.weights import adapter_map, tensor_map
from slipstream.records import ParameterSpec, Ticket
from slipstream.weights.bridges import broadcast, delta, single_copy
from slipstream.weights.model_files import read_model_folder


class WorkerExtension:
    """Mixed into vLLM's worker; `model_runner` is vLLM's."""

    model_runner: Any
    rank: int
    _slipstream_group: broadcast.Group | None = None
    _slipstream_exporter: single_copy.Exporter | None = None
    _slipstream_map: tensor_map.TensorMap | None = None
    _slipstream_layout: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    _slipstream_adapters_seen: dict[Any, tensor_map.TensorMap] | None = None

    def _slipstream_model(self) -> Any:
        return self.model_runner.get_model() if hasattr(self.model_runner, "get_model") else self.model_runner.model

    def _slipstream_locate(self, parameters: tuple[ParameterSpec, ...]) -> tensor_map.TensorMap:
        layout = tuple((p.name, p.shape, p.dtype) for p in parameters)
        if self._slipstream_map is None or layout != self._slipstream_layout:
            model, manager = self._slipstream_model(), self._slipstream_adapters()
            # Not "if manager": one without adapters has the length 0.
            with nullcontext() if manager is None else adapter_map.without_adapters(model, manager):
                self._slipstream_map = tensor_map.record(model, parameters)
            self._slipstream_layout = layout
        return self._slipstream_map

    def _slipstream_adapters(self) -> Any:
        """vLLM's `LoRAModelManager`, owner of the LoRA buffers; None in an engine without LoRA."""
        manager = getattr(self.model_runner, "lora_manager", None)
        return manager._adapter_manager if manager is not None else None

    def slipstream_describe(self) -> str:
        """JSON: patches in force, reasons for the others' absence, dtypes of the logits, and files to remove when
        the engine ends."""
        patch_table.apply_to(self.model_runner)
        return json.dumps(
            {
                "patches": patch_table.applied(),
                "patches_left_out": patch_table.left_out(),
                "head_dtypes": _head_dtypes(self._slipstream_model()),
                "files": _left_behind(),
            }
        )

    @torch.no_grad()
    def slipstream_load(self, ticket_json: str, first_rank: str = "1") -> str:
        """Load a version, or its delta, into the live weights, from files or from the process group. This engine's
        workers have the group's ranks from `first_rank` on. JSON: seconds and bytes."""
        ticket = msgspec.json.decode(ticket_json, type=Ticket)
        started = time.perf_counter()
        model, num_bytes = self._slipstream_model(), 0
        cpu.check_live(model)
        located, first = self._slipstream_locate(ticket.parameters), int(first_rank)

        def counted(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            nonlocal num_bytes
            for name, tensor in tensors:
                num_bytes += tensor.nbytes
                yield name, tensor

        if ticket.delta is not None:
            for patch in delta.patched(
                ticket, counted(self._slipstream_source(ticket, first)), next(model.parameters()).device
            ):
                located.write(*patch)
        elif ticket.bridge == "broadcast":
            num_bytes = ticket.num_bytes
            left = self._slipstream_receive(ticket, first, located)
            if left:
                model.load_weights(left)
        elif ticket.bridge != "single_copy":
            model.load_weights(counted(self._slipstream_source(ticket, first)))
        if ticket.bridge == "broadcast" and self._slipstream_group is not None:
            self._slipstream_group.finish()
        cpu.repack(model)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return json.dumps({"seconds": time.perf_counter() - started, "num_bytes": num_bytes})

    @torch.no_grad()
    def slipstream_share(self, parameters_json: str) -> str:
        """JSON: handles for another process to open this worker's part of the live weights, by Hugging Face name. On
        a CPU the weights are moved into shared memory for it."""
        parameters = msgspec.json.decode(parameters_json, type=tuple[ParameterSpec, ...])
        model = self._slipstream_model()
        cpu.check_live(model)
        if self._slipstream_exporter is None:
            self._slipstream_exporter = single_copy.Exporter(model.parameters())
            self._slipstream_map = None
            cpu.repack(model)
        located = self._slipstream_locate(parameters)
        views: dict[str, Tensor] = {}
        refused: dict[str, str] = {}
        places: dict[str, tuple[int, int]] = {}
        for spec in parameters:
            try:
                part = located.part(spec)
            except ValueError as error:
                refused[spec.name] = str(error)
            else:
                views[spec.name], places[spec.name] = part.tensor, (part.dim, part.start)
        return msgspec.json.encode(self._slipstream_exporter.describe(views, refused, places)).decode()

    @torch.no_grad()
    def slipstream_written(self) -> str:
        """Repack weights written in place, on a CPU. JSON: null."""
        if not torch.cuda.is_available():  # only CPU kernels read packed copies
            cpu.repack(self._slipstream_model())
        return "null"

    def slipstream_settle(self) -> str:
        """Wait for all GPU work of earlier steps; called while steps are paused. JSON: null."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return "null"

    def slipstream_leave(self) -> str:
        """Leave the process group for new weights, if this worker is in one. JSON: null."""
        if self._slipstream_group is not None:
            self._slipstream_group.leave()
            self._slipstream_group = None
        return "null"

    def _slipstream_source(self, ticket: Ticket, first_rank: int) -> Iterator[tuple[str, Tensor]]:
        if ticket.bridge != "broadcast":
            return read_model_folder(Path(ticket.location))
        return itertools.chain.from_iterable(self._slipstream_join(ticket, first_rank).receive(ticket))

    def _slipstream_join(self, ticket: Ticket, first_rank: int) -> broadcast.Group:
        rendezvous = broadcast.rendezvous_of(ticket)
        if self._slipstream_group is None or self._slipstream_group.rendezvous != rendezvous:
            self.slipstream_leave()
            self._slipstream_group = broadcast.Group(rendezvous, rank=first_rank + self._slipstream_number())
        return self._slipstream_group

    def _slipstream_number(self) -> int:
        """This worker's number over all engine cores (data parallel)."""
        config = getattr(getattr(self, "vllm_config", None), "parallel_config", None)
        core = getattr(config, "data_parallel_index", getattr(config, "data_parallel_rank", 0)) or 0
        return core * getattr(config, "world_size", 1) + self.rank

    def _slipstream_receive(
        self, ticket: Ticket, first_rank: int, located: tensor_map.TensorMap
    ) -> list[tuple[str, Tensor]]:
        """Receive whole parameters from the group into the engine's memory; returns those the map cannot place, in
        the ticket's order."""
        group = self._slipstream_join(ticket, first_rank)
        is_here = next(self._slipstream_model().parameters()).device == group.device
        left: dict[str, Tensor] = {}
        for arrived in group.receive(ticket, located.memory if is_here else lambda _: None):
            left.update(located.load(arrived))
        return [(spec.name, left[spec.name]) for spec in ticket.parameters if spec.name in left]

    @torch.no_grad()
    def slipstream_fingerprint(self, parameters_json: str) -> str:
        """JSON: this worker's share of each parameter's fingerprint, and layers with stale packed copies."""
        parameters = msgspec.json.decode(parameters_json, type=tuple[ParameterSpec, ...])
        located = self._slipstream_locate(parameters)
        shares = _shares(located, parameters)
        stale = cpu.stale_packed_layers(self._slipstream_model())
        return json.dumps({"shares": shares, "stale": stale, "memory_bytes": _memory_bytes()})

    @torch.no_grad()
    def slipstream_fingerprint_adapter(self, parameters_json: str, ids_json: str) -> str:
        """The same for a LoRA adapter, in the buffers of vLLM's kernels. `ids_json`: ids of all adapters
        for vLLM to hold, this one's first. `stale`: layers with anything beside the adapter in their buffers."""
        parameters = msgspec.json.decode(parameters_json, type=tuple[ParameterSpec, ...])
        manager = self._slipstream_adapters()
        slot = adapter_map.slot_of(manager, msgspec.json.decode(ids_json, type=list[int]))
        layout = (slot, *((p.name, p.shape, p.dtype) for p in parameters))
        seen = self._slipstream_adapters_seen = self._slipstream_adapters_seen or {}
        if layout not in seen:
            seen[layout] = adapter_map.record(manager, slot, parameters)
        located = seen[layout]
        stray = adapter_map.stray_layers(manager, slot, located)
        shares = _shares(located, parameters)
        return json.dumps({"shares": shares, "stale": stray, "memory_bytes": _memory_bytes()})


def _left_behind() -> list[str]:
    """Shared-memory files of vLLM's CPU workers, some megabytes: they stay when these are killed."""
    name = os.environ.get("VLLM_DIST_IDENT")
    return [str(path) for path in Path("/dev/shm").glob(f"{name}-*")] if name else []


def _head_dtypes(model: torch.nn.Module) -> list[str]:
    """The dtype of each `LogitsProcessor`; `?` if this vLLM has no such attribute."""
    makers = [module for module in model.modules() if type(module).__name__ == "LogitsProcessor"]
    return sorted({str(getattr(module, "head_dtype", "?")).removeprefix("torch.") for module in makers})


def _shares(located: tensor_map.TensorMap, parameters: tuple[ParameterSpec, ...]) -> dict[str, tuple[str, int, str]]:
    names = [spec.name for spec in parameters if spec.name not in located.opaque]
    values = zip(names, located.shares(names), strict=True)
    shares = {name: (f"{value:x}", count, located.place(name)) for name, (value, count) in values}
    return {spec.name: shares.get(spec.name, ("0", 0, "")) for spec in parameters}


def _memory_bytes() -> int:
    """Bytes allocated by torch on this worker's GPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
