"""The objective of rollout matching: cross-entropy of all but coordinate tokens, and losses of boxes.

Channel A computes `softctx_iterations` forwards of a row. In each but the first the input embeddings of coordinate
tokens are replaced, all at once (Jacobi), by those that the forward before expects there; the losses are those of the
last. Channel B, steps whose sequences begin with a rollout, is one forward. What concerns the token at p is computed
from the logits at p - 1; divisors are the weights of tokens and the boxes of the whole optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from slipstream.errors import TrainingError
from slipstream.plugins import MicroBatch, PolicyModel, RowEmbeddings, StepBatch, token_statistics
from slipstream_matching.coordinate_losses import (
    box_ciou_loss,
    box_giou_loss,
    box_l1,
    expected_coordinates,
    gate_loss,
    soft_cross_entropy,
    soft_targets,
    with_expected_embeddings,
)
from slipstream_matching.coordinates import LAST_BIN
from slipstream_matching.row_boxes import APPENDED, IN_ROLLOUT, ORIGINS, WEIGHTS, row_boxes
from slipstream_matching.settings import MatchingConfig


class MatchingObjective:
    """See the module. `coordinate_ids`: the ids of the coordinate tokens, by bin."""

    ignores_silent = False

    def __init__(self, config: MatchingConfig, coordinate_ids: Sequence[int]) -> None:
        self._config = config
        self._coordinate_ids = torch.tensor(list(coordinate_ids))
        self._box_loss = box_ciou_loss if config.box_loss == "ciou" else box_giou_loss

    def counts(self, batch: StepBatch) -> dict[str, float]:
        """Trainable tokens, the sum of their weights, boxes, all and those after a rollout, and forwards of a row."""
        origins = [origin for each in batch.sequences for origin in each.values(ORIGINS) or () if origin >= 0]
        found = origins.count(IN_ROLLOUT)
        is_rollout = found or APPENDED in origins
        return {
            "tokens": float(batch.num_tokens),
            "weights": float(sum(sum(each.values(WEIGHTS) or ()) for each in batch.sequences)),
            "boxes": len(origins) / 4,
            "tail": (len(origins) - found) / 4,
            "prefix": found / 4,
            "forwards": 1.0 if is_rollout else float(self._config.softctx_iterations),
        }

    def terms(
        self, model: PolicyModel, micro: MicroBatch, divisors: dict[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The losses of a row over the step's divisors."""
        config, row = self._config, row_boxes(micro)
        ids_K = self._coordinate_ids.to(micro.token_ids_T.device)
        num_forwards = int(divisors["forwards"])
        logits_NV = model.within(lambda: self._logits(model, micro, ids_K, row.slots_M, row.index_M, num_forwards))
        logprobs_N, _, greedy_N = token_statistics(logits_NV, micro.target_ids_N)
        is_text_N = row.weights_N > 0
        ce_N = torch.where(is_text_N, -logprobs_N * row.weights_N, 0.0)
        logits_MV = logits_NV[row.index_M]
        gate_M = gate_loss(logits_MV, ids_K)
        logits_MK = logits_MV[:, ids_K]
        predicted_B4 = expected_coordinates(logits_MK, config.softctx_temperature).view(-1, 4)
        true_B4 = row.true_B4.to(predicted_B4.dtype)
        l1_B, iou_B = box_l1(predicted_B4, true_B4), self._box_loss(predicted_B4, true_B4)
        coord_B = config.bbox_l1_weight * l1_B + config.bbox_iou_weight * iou_B
        coord_B = coord_B + config.coordinate_gate_weight * gate_M.view(-1, 4).mean(-1)
        further: dict[str, Tensor] = {}
        if config.soft_ce_weight > 0.0:
            bins_M = (true_B4.flatten() * LAST_BIN).round()
            soft_B = soft_cross_entropy(logits_MK, soft_targets(bins_M, config.soft_ce_sigma)).view(-1, 4).mean(-1)
            coord_B, further["soft"] = coord_B + config.soft_ce_weight * soft_B, soft_B.detach().sum()
        loss = ce_N.sum() / divisors["weights"] + coord_B.sum() / divisors["boxes"]
        coord_B = coord_B.detach()
        right_N = (greedy_N == micro.target_ids_N) & is_text_N
        return loss, {
            "loss": loss.detach(),
            "ce": ce_N.detach().sum(),
            "l1": l1_B.detach().sum(),
            "iou": iou_B.detach().sum(),
            "gate": gate_M.detach().sum() / 4,
            "coord": coord_B.sum(),
            "tail": coord_B[row.is_appended_B].sum(),
            "prefix": coord_B[~row.is_appended_B].sum(),
            "right": (right_N * row.weights_N).sum(),
            **further,
            "forwards": torch.tensor(float(num_forwards)),
        }

    def idle(self, model: PolicyModel, blank: MicroBatch, divisors: dict[str, float]) -> Tensor:
        """See `Objective`: the forwards of a row without coordinates."""
        ids_K, none = self._coordinate_ids.to(model.device), torch.zeros(0, dtype=torch.int64, device=model.device)
        return model.within(lambda: self._logits(model, blank, ids_K, none, none, int(divisors["forwards"])))

    def _logits(
        self, model: PolicyModel, micro: MicroBatch, ids_K: Tensor, slots_M: Tensor, index_M: Tensor, forwards: int
    ) -> Tensor:
        """The last forward's logits `[N, V]`; `slots_M` and `index_M`: see `RowBoxes`."""
        config = self._config
        embeddings = own = model.embed(micro)
        for _ in range(forwards - 1):
            with nullcontext() if config.softctx_unrolled else torch.no_grad():
                hidden_TD = model.forward(embeddings, micro)
                logits_MK = _plain(model, hidden_TD, micro.predict_index_N[index_M])[:, ids_K]
                replaced_TD = with_expected_embeddings(
                    own.embeds_TD,
                    slots_M,
                    logits_MK,
                    model.token_embeddings(ids_K),
                    config.softctx_temperature,
                    unrolled=config.softctx_unrolled,
                )
            embeddings = _with_slots(own, slots_M, replaced_TD)
        return _plain(model, model.forward(embeddings, micro), micro.predict_index_N)

    def summarize(self, sums: dict[str, Tensor], divisors: dict[str, float]) -> dict[str, float]:
        """Means over weights of tokens (`loss/ce`) and over boxes; `loss` as it was minimized."""
        numbers = {name: value.item() for name, value in sums.items()}
        boxes = divisors["boxes"]
        found = {
            "loss": numbers["loss"],
            "num_tokens": divisors["tokens"],
            "token_accuracy": numbers["right"] / divisors["weights"],
            "loss/ce": numbers["ce"] / divisors["weights"],
            "loss/bbox_l1": numbers["l1"] / boxes,
            f"loss/bbox_{self._config.box_loss}": numbers["iou"] / boxes,
            "loss/coord_gate": numbers["gate"] / boxes,
            "loss/coord": numbers["coord"] / boxes,
            "stage2/num_boxes": boxes,
            "stage2/num_forwards": numbers["forwards"],
        }
        if "soft" in numbers:
            found["loss/coord_soft_ce"] = numbers["soft"] / boxes
        parts = {part: numbers[part] / divisors[part] for part in ("prefix", "tail") if divisors[part]}
        return found | {f"loss/coord_{part}": value for part, value in parts.items()}


def _with_slots(own: RowEmbeddings, slots_M: Tensor, replaced_TD: Tensor) -> RowEmbeddings:
    """The row's own embeddings, with their graph, and the slots' replaced ones."""
    return replace(own, embeds_TD=own.embeds_TD.index_copy(0, slots_M, replaced_TD[slots_M]))


def _plain(model: PolicyModel, hidden_TD: Tensor, index_N: Tensor) -> Tensor:
    logits_NV = model.head(hidden_TD, index_N)
    if not isinstance(logits_NV, Tensor):
        raise TrainingError("rollout matching reads the logits of coordinates: set model.fp32_head = false")
    return logits_NV
