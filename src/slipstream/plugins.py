"""Public names for plug-ins, beside `slipstream.envs`, `slipstream.records` and `slipstream.errors` (docs/plugins.md).

Each name is imported when it is first asked for.
"""

from typing import TYPE_CHECKING

from slipstream.exports import exported

if TYPE_CHECKING:
    from slipstream.algo.logprobs import token_statistics
    from slipstream.config.bounds import (
        Factor,
        Fraction,
        GreedyTemperature,
        Items,
        NonNegativeFactor,
        Problems,
        Rule,
        Share,
        without_effect,
    )
    from slipstream.config.methods import MethodSection
    from slipstream.config.schema import RunConfig
    from slipstream.data.chat_template import ChatTokenizer
    from slipstream.data.examples import Examples, SFTReader
    from slipstream.data.files.folders import held_out_split, subset_of
    from slipstream.data.images.parts import COLUMNS, with_images
    from slipstream.data.readers import Row, read_rows
    from slipstream.envs.rows import check_settings
    from slipstream.orchestrator.method import Batches, Material, Method, RollsOut
    from slipstream.trainer.loss import Objective, OneForward
    from slipstream.trainer.model.image_features import RowEmbeddings
    from slipstream.trainer.model.policy import PolicyModel
    from slipstream.trainer.packing import MicroBatch, StepBatch

__all__ = [
    "COLUMNS",
    "Batches",
    "ChatTokenizer",
    "Examples",
    "Factor",
    "Fraction",
    "GreedyTemperature",
    "Items",
    "Material",
    "Method",
    "MethodSection",
    "MicroBatch",
    "NonNegativeFactor",
    "Objective",
    "OneForward",
    "PolicyModel",
    "Problems",
    "RollsOut",
    "Row",
    "RowEmbeddings",
    "Rule",
    "RunConfig",
    "SFTReader",
    "Share",
    "StepBatch",
    "check_settings",
    "held_out_split",
    "read_rows",
    "subset_of",
    "token_statistics",
    "with_images",
    "without_effect",
]
__getattr__ = exported(
    __name__,
    {
        "algo.logprobs": "token_statistics",
        "config.bounds": "Factor Fraction GreedyTemperature Items NonNegativeFactor Problems Rule Share without_effect",
        "config.methods": "MethodSection",
        "config.schema": "RunConfig",
        "data.chat_template": "ChatTokenizer",
        "data.examples": "Examples SFTReader",
        "data.files.folders": "held_out_split subset_of",
        "data.images.parts": "COLUMNS with_images",
        "data.readers": "Row read_rows",
        "envs.rows": "check_settings",
        "orchestrator.method": "Batches Material Method RollsOut",
        "trainer.loss": "Objective OneForward",
        "trainer.model.image_features": "RowEmbeddings",
        "trainer.model.policy": "PolicyModel",
        "trainer.packing": "MicroBatch StepBatch",
    },
    base="slipstream",
)
