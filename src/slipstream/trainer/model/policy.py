"""A Hugging Face causal language model with logits at chosen positions of a packed row.

Guarantees: scaling and soft-capping of logits are the model's own. Only positions with a trainable target reach the LM
head. Dropout is off: equal weights give equal log-probabilities. Loading refuses a model if its packed sequences attend
to one another, by a test (`packing_check.py`) rather than by a list.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from slipstream import records
from slipstream.algo.logprobs import HeadLogits, Logits, PartLogits
from slipstream.errors import ConfigError, TrainingError, one_line
from slipstream.shared_kernels.products import pin_products
from slipstream.trainer.attention import packed
from slipstream.trainer.distributed.context import ContextGroup
from slipstream.trainer.experts.replay import ExpertReplay
from slipstream.trainer.model.float16_check import check_float16
from slipstream.trainer.model.image_features import (
    ImageFeatures,
    RowEmbeddings,
    embed_images,
    image_places,
    uses_its_own_attention,
)
from slipstream.trainer.model.layers import Checkpointing, LayerOptions, configure_layers
from slipstream.trainer.model.loading import (
    SharedTensors,
    check_architecture,
    hide_progress_bars,
    load_network,
    resolve_folder,
    stored_weights,
    unpacked_attention,
)
from slipstream.trainer.model.lora import Adapter
from slipstream.trainer.model.packing_check import check_isolation
from slipstream.trainer.model.rotary_frequencies import fix_rotary
from slipstream.trainer.model.shared_layers import share_kernels
from slipstream.trainer.model.vision_towers import freeze_towers, read_config, reads_images, text_config
from slipstream.trainer.model.wide_residual import widen_residual
from slipstream.trainer.packing import MicroBatch, StepBatch, micro_batches
from slipstream.weights.adapter_folder import AdapterConfig
from slipstream.weights.model_files import weights_digest


class GraphedDecoder(Protocol):
    """The decoder as CUDA graphs (`DecoderGraphs`)."""

    @property
    def problem(self) -> str:
        """Why rows are computed without graphs since a capture failed; empty if none did."""
        ...

    def hidden(self, row: MicroBatch) -> Tensor | None:
        """Its last hidden states `[T, D]`. None: no graph serves this row now."""
        ...


@dataclass(frozen=True)
class Form:
    """How a model is saved: as this adapter alone, or whole, and with these keys of config.json otherwise."""

    adapter: AdapterConfig | None = None
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])


class PolicyModel:
    """A network and its weights. `folder`: their source, with the tokenizer and configuration files."""

    def __init__(self, network: nn.Module, folder: Path, *, packing: bool = True) -> None:
        self.network = network.eval()
        self.folder = folder
        self.packing = packing
        self.adapter: Adapter | None = None
        """The LoRA adapter, if only it is trained."""
        self.layers = LayerOptions()
        """How the decoder layers compute."""
        self.max_model_len: int | None = None
        """The engine's `max_model_len`, if known."""
        self.images: ImageFeatures | None = None
        """Features of images from the vision tower, if there is one."""
        self.replay: ExpertReplay | None = None
        """Sends tokens to the engine's experts, under `replay_experts`."""
        self.context: ContextGroup | None = None
        """The ranks of each row. None: one rank."""
        self.graphs: GraphedDecoder | None = None
        """The decoder as CUDA graphs, if it is small and trained."""
        self._uses_adapter = True
        self._adapter_values: dict[str, Tensor] | None = None
        """See `as_it_is`."""
        self._fp32_head: nn.Linear | None = None
        self._root: nn.Module | None = None
        self._stored: list[tuple[str, Tensor]] = []
        """Cache: a checkpoint's tensors, as views of the weights."""
        self._stored_of: list[tuple[int, int, torch.dtype, torch.Size]] = []
        """Key of the cache: identity, address, dtype and shape of the live tensors."""

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        device: torch.device | str = "cpu",
        trust_remote_code: bool = False,
        *,
        packing: bool = True,
        checkpointing: Checkpointing = False,
        offload: bool = False,
        shared: SharedTensors | None = None,
        unread: bool = False,
        checked: bool = True,
        fp32_head: bool = False,
        fp32_residual: bool = False,
        max_model_len: int | None = None,
        train_tower: bool = False,
        shared_kernels: bool = False,
        replay_experts: bool = False,
    ) -> PolicyModel:
        """Load the model in `path`, a folder or a hub id. Raises ConfigError, with the reason, if the model cannot be
        trained.

        `packing`: False uses transformers' attention, with one sequence per row. `checkpointing`: layers save only
        their input, or with "selective" also matmul and attention outputs, and recompute the rest in the backward pass.
        `offload`: saved activations wait in host memory. `shared`: tensors to use as the parameters; the folder gives
        names and configuration. `unread`: parameters take no memory and have no values. `checked`: False leaves the
        packing check to the caller. `fp32_head`, `fp32_residual`: see `use_fp32_head`, `use_fp32_residual`.
        `max_model_len`: the engine's; it determines rotary frequencies (`rotary_frequencies.py`). `train_tower`:
        vision towers are trained too. `shared_kernels`: as the engine computes (`shared_layers.py`). `replay_experts`:
        with the experts named by a row's sequences.
        """
        if shared_kernels:
            pin_products()
        hide_progress_bars()
        folder = resolve_folder(path)
        check_architecture(folder, trust_remote_code, packing=packing)
        implementation = (
            packed.register() if packing else unpacked_attention(read_config(str(folder), trust_remote_code))[0]
        )
        network = load_network(
            folder, dtype, trust_remote_code, implementation=implementation, shared=shared, unread=unread
        )
        if "logits_to_keep" not in inspect.signature(network.forward).parameters:
            raise ConfigError(f"{type(network).__name__} cannot restrict its logits to positions: use another model")
        if not train_tower:
            freeze_towers(network)
        fix_rotary(network, text_config(cast("Any", network).config), max_model_len)
        model = cls(network.to(device), folder, packing=packing)
        model.layers, model.max_model_len = LayerOptions(checkpointing, offload), max_model_len
        if reads_images(network.config):
            uses_its_own_attention(network)
            model.images = ImageFeatures(network, folder, trained=train_tower, trust_remote_code=trust_remote_code)
        if shared_kernels:
            share_kernels(network)
        if replay_experts:
            model.replay = ExpertReplay(network)
        configure_layers(network, model.layers)
        if fp32_residual:
            model.use_fp32_residual(checked=checked)
        if dtype == "float16" and checked:
            check_float16(model)
        if packing and checked:
            check_isolation(model)
        if fp32_head:
            model.use_fp32_head()
        return model

    @property
    def roots(self) -> list[nn.Module]:
        """The modules to call; together they have every parameter."""
        return [self.network]

    @property
    def form(self) -> Form:
        """Its form in checkpoints."""
        return Form(None if self.adapter is None else self.adapter.config)

    @property
    def device(self) -> torch.device:
        """The weights' device."""
        return next(self.network.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The live weights' dtype."""
        return next(self.network.parameters()).dtype

    @property
    def config(self) -> Any:
        """The transformers configuration."""
        return self.network.config

    def add_adapter(self, config: AdapterConfig, folder: Path | None = None) -> Adapter:
        """Freeze all weights and train a LoRA adapter beside them: a fresh one, or the one in `folder`."""
        self.adapter = Adapter.attach(self.network, replace(config, base_digest=weights_digest(self.folder)))
        if folder is not None:
            self.adapter.load(folder)
        return self.adapter

    def without_adapter(self) -> PolicyModel:
        """The base model: the same memory, computing without the adapter."""
        base = self._frozen()
        base._uses_adapter = False
        return base

    def as_it_is(self) -> PolicyModel:
        """A snapshot of the policy: the same memory, but for a copy of the adapter's values. To compute, it exchanges
        the copy with the live values for a moment."""
        assert self.adapter is not None
        frozen = self._frozen()
        frozen._adapter_values = {name: tensor.detach().clone() for name, tensor in self.adapter.named_weights()}
        return frozen

    def _frozen(self) -> PolicyModel:
        frozen = copy.copy(self)
        frozen.replay = frozen.graphs = None
        if self.images is not None:
            frozen.images = self.images.frozen()
        return frozen

    def logits(self, row: MicroBatch) -> Logits:
        """Compute logits `[N, V]` at `row.predict_index_N` in the model's dtype; lazy ones after `use_fp32_head`, and
        of a shard of the row its own."""
        with self._switched():
            return self._logits(row)

    def embed(self, row: MicroBatch) -> RowEmbeddings:
        """The decoder's inputs for a row: its tokens' embeddings, with the features of its images in their places."""
        if not row.images:
            return RowEmbeddings(self.token_embeddings(row.token_ids_T))
        if self.images is None:
            raise TrainingError(f"{type(self.network).__name__} has no vision tower, and a row has images: remove them")
        index_P = image_places(row.images).to(self.device)
        # A placeholder may be no token of the vocabulary; its embedding is replaced anyway.
        embeds_TD = self.token_embeddings(row.token_ids_T.index_fill(0, index_P, 0))
        with self._switched():
            features = self.images.of(row.images)
        return embed_images(embeds_TD, index_P, features)

    def token_embeddings(self, token_ids_T: Tensor) -> Tensor:
        """The input embeddings `[T, D]` of tokens."""
        network: Any = self.network
        return network.get_input_embeddings()(token_ids_T)

    def forward(self, embeddings: RowEmbeddings, row: MicroBatch) -> Tensor:
        """The decoder's last hidden states `[T, D]` for `embeddings`, at the row's positions and in its layout."""
        network: Any = self.network
        positions = row.position_ids_T[None]
        if row.rotary_ids_3T is not None:
            # Transformers takes the row of token positions first, and tells packed sequences by it.
            positions = torch.cat([positions, row.rotary_ids_3T])[:, None]
        with self._switched():
            output = network.get_decoder()(
                inputs_embeds=embeddings.embeds_TD[None],
                position_ids=positions,
                use_cache=False,
                **self._of_row(row),
                **embeddings.further(),
            )
        return output.last_hidden_state.squeeze(0)

    def head(self, hidden_TD: Tensor, index_N: Tensor) -> Tensor | HeadLogits:
        """Logits `[N, V]` at row positions `index_N`, for models without a change of logits after the LM head."""
        network: Any = self.network
        return self._of_head(network.get_output_embeddings()(hidden_TD[index_N]))

    def _switched(self) -> AbstractContextManager[object]:
        if self.adapter is None:
            return nullcontext()
        if self._adapter_values is not None:
            return self.adapter.exchanged(self._adapter_values)
        return self.adapter.switched(self._uses_adapter)

    def use_fp32_head(self) -> None:
        """Compute logits in float32, lazily and in chunks (`HeadLogits`). Raises ConfigError if the network's logits
        are not just the LM head's outputs."""
        network: Any = self.network
        head, name = network.get_output_embeddings(), type(network).__name__
        if not isinstance(head, nn.Linear) or "bias" in dict(head.named_parameters()):
            raise ConfigError(f"{name} has no plain output head: set model.fp32_head = false")
        with torch.no_grad():
            # Scaling or soft-capping after the head would change this constant.
            head.forward = _mark_logits
            marked = self.logits(self.small_row())
        if not isinstance(marked, Tensor) or not bool((marked == _MARK).all()):
            del head.forward
            raise ConfigError(
                f"{name} changes its logits after the output head, which model.fp32_head = true computes itself: set "
                "it to false"
            )
        head.forward = _identity
        self._fp32_head = head

    @property
    def has_lazy_logits(self) -> bool:
        """Whether `logits` are lazy, and read the head's weight after the network's forward pass."""
        return self._fp32_head is not None

    def use_fp32_residual(self, *, checked: bool = True) -> None:
        """Add up the layers' outputs in float32 (`wide_residual.py`). Raises ConfigError if some layer then cannot take
        its input; `checked`: False does not try."""
        hooks = widen_residual(self.network)
        if not (hooks and checked):
            return
        try:
            with torch.no_grad():
                self.logits(self.small_row())
        except (RuntimeError, TypeError, ValueError) as error:
            for hook in hooks:
                hook.remove()
            raise ConfigError(
                f"{type(self.network).__name__} cannot add up in float32 ({one_line(error)}): set model.fp32_residual "
                "= false"
            ) from error

    def small_row(self) -> MicroBatch:
        """A row for trials."""
        sequence = records.Sequence([0, 1, 2, 3], [False, True, True, True])
        (row,) = micro_batches(StepBatch([sequence]), 8, packing=self.packing, device=self.device)
        return row

    def take_work(self) -> None:
        """Make the first of the `roots` run the work given to `within`: FSDP gathers a module's weights only in a call
        of the module."""
        root = self.roots[0]
        forward: Callable[..., Any] = root.forward

        @functools.wraps(forward)
        def either(*args: Any, work: Callable[[], Any] | None = None, **options: Any) -> Any:
            return forward(*args, **options) if work is None else work()

        root.forward = either
        self._root = root

    def within(self, work: Callable[[], Tensor]) -> Tensor:
        """Run `work()` as one call of the network; `work` calls parts of it."""
        return work() if self._root is None else self._root(work=work)

    def _logits(self, row: MicroBatch) -> Logits:
        if row.images:
            head: Any = cast("Any", self.network).get_output_embeddings()
            return self._of_head(self.within(lambda: head(self.forward(self.embed(row), row)[row.predict_index_N])))
        if self.graphs is not None and (hidden_TD := self.graphs.hidden(row)) is not None:
            return self.head(hidden_TD, row.predict_index_N)
        token_ids_T, position_ids_T, predict_index_N = row.inputs
        output = self.network(
            input_ids=token_ids_T[None],
            position_ids=position_ids_T[None],
            logits_to_keep=predict_index_N,
            use_cache=False,
            **self._of_row(row),
        )
        # `squeeze`: the backward of indexing would allocate zeros and copy, for the largest tensor of all.
        logits = self._of_head(output.logits.squeeze(0))
        if (shard := row.shard) is None:
            return logits
        num_targets = len(row.target_ids_N)
        return PartLogits(logits, shard.index_M, lambda values_M: shard.join(values_M, num_targets))

    def _of_head(self, outputs_NV: Tensor) -> Tensor | HeadLogits:
        return outputs_NV if self._fp32_head is None else HeadLogits(outputs_NV, self._fp32_head.weight)

    def _of_row(self, row: MicroBatch) -> dict[str, Any]:
        """The layers' further arguments for a row, besides its tokens and positions."""
        segments = {"segments": row.layout} if self.packing else {}
        return segments if self.replay is None else segments | self.replay.arguments(row.experts)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Live tensors under their `save_pretrained` names, each once (without a tied LM head), with an adapter merged
        in."""
        return self._model_weights(merged=True)

    def base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The same without the adapter."""
        return self._model_weights(merged=False)

    def stored(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """The saved and published tensors of the network's parameter `name`, without the adapter; none for an adapter's
        parameter. Valid for single parameters if `check_parts` passes."""
        state = {name: tensor}
        if self.adapter is not None:
            state = self.adapter.model_state(state, merged=False)
        return list(stored_weights(self.network, state))

    def check_parts(self) -> None:
        """Raise ConfigError if a stored tensor is assembled from several parameters: ranks store one parameter at a
        time."""
        seen: set[str] = set()
        for own, parameter in self.network.named_parameters():
            names = {
                name for name, _ in self.stored(own, torch.zeros(1, dtype=parameter.dtype).expand(parameter.shape))
            }
            if twice := seen & names:
                raise ConfigError(
                    f"{type(self.network).__name__} stores several parameters as one, {min(twice)}, which ranks have "
                    "parts of: set training.ranks = 1"
                )
            seen |= names

    def _model_weights(self, *, merged: bool) -> Iterator[tuple[str, Tensor]]:
        # A generator, to begin the work only on consumption.
        if self.adapter is not None:
            state = self.adapter.model_state(dict(self.network.state_dict()), merged=merged)
            yield from stored_weights(self.network, state)
            return
        # Every update waits for this: cached while all stored tensors are views of live ones.
        live = [*self.network.parameters(), *self.network.buffers()]
        places = [(id(tensor), tensor.data_ptr(), tensor.dtype, tensor.shape) for tensor in live]
        if places != self._stored_of or not self._stored:
            self._stored, self._stored_of = list(stored_weights(self.network, self.network.state_dict())), places
        stored = self._stored
        if not {_memory(weight) for _, weight in stored} <= {_memory(tensor) for tensor in live} - {0}:
            self._stored = []
        yield from stored


def shares_memory(stored: Tensor, own: Tensor) -> bool:
    """Whether the stored tensor has the same shape and memory as the network's own."""
    return stored.shape == own.shape and _memory(stored) == _memory(own)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


_MARK = 64.0


def _mark_logits(input: Tensor) -> Tensor:
    return torch.full_like(input, _MARK)


def _identity(input: Tensor) -> Tensor:
    return input
