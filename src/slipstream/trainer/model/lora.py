"""LoRA (arXiv 2106.09685): a trainable low-rank product beside each chosen linear layer. DoRA (arXiv 2402.09353) also
trains the norms (magnitudes) of the rows of the sum.

Guarantees: the base is frozen, and is the same memory whether the adapter is enabled or not. Names, initialization and
arithmetic are PEFT's: adapters can be exchanged with it. There is no dropout: equal weights must give equal
log-probabilities.
"""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from slipstream.errors import ConfigError
from slipstream.trainer.model.vision_towers import blank_network, in_modules, text_parts, tower_names
from slipstream.weights.adapter_folder import (
    AdapterConfig,
    adapter_parameter,
    check_adapter_fits,
    magnitude_parameter,
    read_adapter_tensors,
    selects,
)

ALL_LINEAR = "all-linear"
_BASE, _A, _B, _MAGNITUDE = "base_layer", "lora_A", "lora_B", "lora_magnitude"


class LoraLinear(nn.Module):
    """`base(x) + scaling * B A x`; B starts at zero: training starts from the base."""

    def __init__(self, base_layer: nn.Linear, rank: int, scaling: float) -> None:
        super().__init__()
        self.base_layer = base_layer
        weight = base_layer.weight
        # Drawn on the CPU: a seed gives the same adapter on every device and for any number of ranks.
        a = nn.init.kaiming_uniform_(torch.empty(rank, base_layer.in_features), a=math.sqrt(5))
        b = torch.zeros(base_layer.out_features, rank, device=weight.device)
        self.lora_A = nn.Parameter(a.to(weight.device, weight.dtype))
        self.lora_B = nn.Parameter(b.to(weight.dtype))
        self.scaling = scaling
        self.enabled = True

    @property
    def weight(self) -> Tensor:
        """The frozen weight, read by some models."""
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        """The frozen bias."""
        return self.base_layer.bias

    def merged_weight(self) -> Tensor:
        """`W + scaling * B A`, computed in float32 and rounded once."""
        return self._sum().to(self.weight.dtype)

    def _sum(self) -> Tensor:
        return self.weight.float() + self.scaling * (self.lora_B.float() @ self.lora_A.float())

    def forward(self, x: Tensor) -> Tensor:
        """See the class; without the second term while the adapter is off."""
        output: Tensor = self.base_layer(x)
        if not self.enabled:
            return output
        return output + linear(linear(x, self.lora_A), self.lora_B) * self.scaling


class DoraLinear(LoraLinear):
    """`m V / |V| x` with `V = W + scaling * B A`: the rows of V give directions, `m` their norms (DoRA, arXiv
    2402.09353, equation 5). It starts as the base, with `m = |W|`. No gradient goes through `|V|` (section 4.3)."""

    def __init__(self, base_layer: nn.Linear, rank: int, scaling: float) -> None:
        super().__init__(base_layer, rank, scaling)
        self.lora_magnitude = nn.Parameter(self._row_norms())

    @torch.no_grad()
    def _row_norms(self) -> Tensor:
        """|V| by row, rounded like `m`: `m / |V|` is exactly 1 before the first update."""
        return torch.linalg.vector_norm(self._sum(), dim=1).to(self.weight.dtype)

    def _factor(self) -> Tensor:
        return self.lora_magnitude.float() / self._row_norms().float()

    def merged_weight(self) -> Tensor:
        """See `LoraLinear`."""
        return (self._sum() * self._factor()[:, None]).to(self.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        if not self.enabled:
            return self.base_layer(x)
        output = linear(x, self.weight) + linear(linear(x, self.lora_A), self.lora_B) * self.scaling
        output = output * self._factor().to(x.dtype)
        return output if self.bias is None else output + self.bias


class Adapter:
    """All LoRA layers of one network."""

    def __init__(self, layers: dict[str, LoraLinear], config: AdapterConfig) -> None:
        self.layers = layers
        self.config = config
        self.unreached: dict[str, int] = {}
        """See `unreached_parameters`."""
        self.of_tower: frozenset[str] = frozenset()
        """Names of the vision tower's layers."""
        self._is_exchanged = False

    @classmethod
    def attach(cls, network: nn.Module, config: AdapterConfig) -> Adapter:
        """Freeze `network` and add a fresh adapter to the layers named by `config.target_modules`, under
        `config.with_tower` of a vision tower too.

        Raises ConfigError when one of them names no linear layer, or the output head.
        """
        targets = ALL_LINEAR if config.target_modules == (ALL_LINEAR,) else config.target_modules
        layers: dict[str, LoraLinear] = {}
        kind = DoraLinear if config.dora else LoraLinear
        network.requires_grad_(False)
        unreached, towers = unreached_parameters(network, config.with_tower), tower_names(network)
        modules = {name for name, _ in network.named_modules()}
        for name in target_layers(network, targets, config.with_tower):
            parent, _, leaf = name.rpartition(".")
            module = kind(network.get_submodule(name), config.rank, config.scaling)  # pyright: ignore[reportArgumentType]
            setattr(network.get_submodule(parent), leaf, module)
            layers[name] = module
        excluded = () if config.with_tower else tuple(towers)
        others = modules - layers.keys() - set(in_modules(modules, excluded))
        if targets == ALL_LINEAR or any(selects(config.target_modules, name) for name in others):
            # Spelled out: other loaders may resolve "all-linear" differently, and adapt other modules too.
            config = replace(config, target_modules=_ends(layers, others))
        adapter = cls(layers, replace(config, excluded=excluded))
        adapter.unreached = unreached
        adapter.of_tower = frozenset(in_modules(layers, towers))
        return adapter

    @property
    def num_parameters(self) -> int:
        """Number of trainable elements."""
        return sum(tensor.numel() for _, tensor in self.named_weights())

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Live adapter tensors under PEFT's names."""
        for name, layer in self.layers.items():
            yield adapter_parameter(name, "A"), layer.lora_A
            yield adapter_parameter(name, "B"), layer.lora_B
            if isinstance(layer, DoraLinear):
                yield magnitude_parameter(name), layer.lora_magnitude

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every adapter tensor."""
        return {name: tuple(tensor.shape) for name, tensor in self.named_weights()}

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Load the adapter in `folder`. Raises ConfigError unless names and shapes are equal."""
        names = check_adapter_fits(folder, self.config, self.shapes())
        live = dict(self.named_weights())
        for name, tensor in read_adapter_tensors(folder).items():
            live[names[name]].copy_(tensor)

    @contextmanager
    def switched(self, on: bool) -> Generator[None]:
        """Context with the adapter enabled or disabled."""
        before = [layer.enabled for layer in self.layers.values()]
        for layer in self.layers.values():
            layer.enabled = on
        try:
            yield
        finally:
            for layer, enabled in zip(self.layers.values(), before, strict=True):
                layer.enabled = enabled

    @contextmanager
    def exchanged(self, tensors: dict[str, Tensor]) -> Generator[None]:
        """Context with the values of the live tensors and of `tensors`, by name, exchanged. It does nothing within
        itself."""
        if self._is_exchanged:
            yield
            return
        self._exchange(tensors)
        self._is_exchanged = True
        try:
            yield
        finally:
            self._is_exchanged = False
            self._exchange(tensors)

    @torch.no_grad()
    def _exchange(self, tensors: dict[str, Tensor]) -> None:
        for name, live in self.named_weights():
            kept = live.detach().clone()
            live.copy_(tensors[name])
            tensors[name].copy_(kept)

    @torch.no_grad()
    def model_state(self, state: dict[str, Tensor], *, merged: bool) -> dict[str, Tensor]:
        """The network's `state` under the names of a network without LoRA layers: of the base, or with the adapter
        merged."""
        plain: dict[str, Tensor] = {}
        for key, tensor in state.items():
            module, _, last = key.rpartition(".")
            if last in (_A, _B, _MAGNITUDE) and module in self.layers:
                continue
            owner = module.removesuffix(f".{_BASE}")
            if owner == module or owner not in self.layers:
                plain[key] = tensor
            else:
                layer = self.layers[owner]
                plain[f"{owner}.{last}"] = layer.merged_weight() if merged and last == "weight" else tensor
        return plain


def _ends(layers: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    """The shortest ends of the layers' names; none is an end of another module's name."""
    taken = {end for name in others for end in _ends_of(name)}
    return tuple(sorted({next((end for end in _ends_of(name) if end not in taken), name) for name in layers}))


def _ends_of(name: str) -> Iterator[str]:
    """All ends of a name, the shortest first."""
    parts = name.split(".")
    return (".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1))


def target_layers(network: nn.Module, targets: str | Sequence[str], with_tower: bool = False) -> list[str]:
    """Names of the linear layers selected by `targets`: suffixes of names, or `all-linear`, all but the LM head. Layers
    of a vision tower are excluded unless `with_tower`."""
    found: Any = network
    head = found.get_output_embeddings() if hasattr(found, "get_output_embeddings") else None
    reached = {id(module) for part in _parts(network, with_tower) for module in part.modules()}
    every = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    linears = {name: module for name, module in every.items() if id(module) in reached}
    usable = [name for name, module in linears.items() if module is not head]
    known = ", ".join(sorted({name.rpartition(".")[2] for name in usable}))
    if targets == ALL_LINEAR:
        if not usable:
            raise ConfigError(f"{type(network).__name__} has no linear layers for LoRA: remove [lora]")
        return usable
    chosen: set[str] = set()
    for target in targets:
        matching = [name for name in linears if selects([target], name)]
        if not matching and any(selects([target], name) for name in every):
            raise ConfigError(
                f'lora.target_modules has "{target}", a layer of the vision tower, which is frozen: set '
                "model.train_tower = true, or leave it out"
            )
        if not matching:
            raise ConfigError(
                f'lora.target_modules has "{target}", and no linear layer of {type(network).__name__} that '
                f"{'is trained' if with_tower else 'text goes through'} has that name: use some of {known}"
            )
        if not set(matching) <= set(usable):
            raise ConfigError(f'lora.target_modules has "{target}", the output head: use some of {known}')
        chosen.update(matching)
    return [name for name in usable if name in chosen]


def _parts(network: nn.Module, with_tower: bool) -> list[nn.Module]:
    return [network] if with_tower else text_parts(network)


def unreached_parameters(network: nn.Module, with_tower: bool = False) -> dict[str, int]:
    """Number of elements, by name within a layer, of the language model's matrices, and `with_tower` of a vision
    tower's, outside of linear and embedding layers (fused experts, their router): no `targets` can select them."""
    own: Any = (nn.Linear, nn.Embedding)
    found: dict[str, int] = {}
    for part in _parts(network, with_tower):
        for prefix, module in part.named_modules():
            for name, parameter in module.named_parameters(prefix, recurse=False):
                if parameter.ndim > 1 and not isinstance(module, own):
                    within = re.sub(r"^.*\.\d+\.", "", name)
                    found[within] = found.get(within, 0) + parameter.numel()
    return found


def rate_in_adapter(ratio: float, name: str) -> float:
    """The factor on the learning rate of the parameter `name` under LoRA+ (arXiv 2402.12354); as in PEFT, DoRA's
    magnitudes use B's."""
    return ratio if name.rpartition(".")[2] in (_B, _MAGNITUDE) else 1.0


def blank_adapter(model: str, config: AdapterConfig, *, trust_remote_code: bool = False) -> Adapter:
    """The adapter of `config` for a model's configuration, on the meta device: for names, shapes and sizes."""
    network = blank_network(model, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        return Adapter.attach(network, config)
