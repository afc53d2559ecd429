"""Memory of a vision tower while it reads images, and of their kept features. Pure arithmetic.

Its weights, gradients and optimizer states are counted with those of the rest (`sizes.py`): with all of them if it is
trained, as weights alone if it is frozen.
"""

from __future__ import annotations

from slipstream.config.bounds import KEPT_FEATURES, TOWER_PATCHES
from slipstream.plan.facts import TowerFacts
from slipstream.plan.memory.sizes import BYTES_OF

_MLP = {"qwen2_vl": 3, "qwen2_5_vl": 4, "qwen3_vl": 2, "gemma3": 2}
"""Vectors of the MLP's size kept by a block for a patch: its input's product and activation, the sigmoid of one, or
the gate's and the product of both."""


def patches_at_once(tower: TowerFacts) -> int:
    """Most patches that the tower computes at once."""
    return min(tower.merged * tower.total_tokens, max(TOWER_PATCHES, tower.merged * tower.image_tokens))


def block_elements(tower: TowerFacts, dtype: str) -> int:
    """Elements kept by a block for a patch until its backward pass: the residual stream twice, both norms' outputs,
    q, k and v before the rotation, q and k after it, the attention's output twice, and the MLP's; RMS norms also
    keep their fp32 values before the scale. With the attention's and the norms' statistics. SigLIP (Gemma 3) has no
    rotation, and its attention's output once."""
    hidden, wide = tower.hidden_size, 4 // BYTES_OF[dtype]
    norms = 2 * wide * hidden if tower.model_type == "qwen2_5_vl" else 0
    return (
        (8 if tower.model_type == "gemma3" else 11) * hidden
        + norms
        + _MLP.get(tower.model_type, 4) * tower.intermediate_size
        + wide * (tower.num_heads + 4)
    )


def tower_bytes(tower: TowerFacts, dtype: str) -> int:
    """Memory of the tower while it computes. Trained, it keeps all blocks, the embedded patches and the mergers for one
    backward pass, and then also a block's gradients; frozen, a block at a time, with its rotation in fp32."""
    size, merged = BYTES_OF[dtype], tower.merged
    blocks = (tower.depth + 1 if tower.is_trained else 1) * block_elements(tower, dtype)
    blocks += 0 if tower.is_trained else 2 * 4 // size * tower.hidden_size
    # Patches, and the merger with its norm; another such merger for each layer given beside.
    ends = (9 + 5 * tower.num_added if tower.is_trained else 4) * tower.hidden_size + -(-tower.token_outputs // merged)
    return patches_at_once(tower) * (size * (blocks + ends) + 4 * tower.patch_elements)


def feature_bytes(tower: TowerFacts, dtype: str, rows_of_step: int) -> int:
    """Bytes of image features beside the rows. A frozen tower's are kept from step to step, up to a
    bound; a trained one has those of a step, of `rows_of_step` conversations, with their gradients."""
    each = tower.token_outputs * BYTES_OF[dtype]
    if not tower.is_trained:
        return min(KEPT_FEATURES, each * tower.total_tokens)
    return 2 * each * min(tower.total_tokens, rows_of_step * tower.row_tokens)
