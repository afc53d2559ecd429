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
    from slipstream.config.environment import EnvironmentConfig
    from slipstream.config.methods import MethodSection
    from slipstream.config.schema import RunConfig
    from slipstream.config.sft import TrainOn
    from slipstream.data.chat_template import ChatTokenizer
    from slipstream.data.conversations import PROMPTS, Columns, Conversation, Judged, plain_conversation
    from slipstream.data.examples import Examples, SFTReader
    from slipstream.data.files.folders import held_out_split, subset_of
    from slipstream.data.images.parts import COLUMNS, with_images
    from slipstream.data.readers import Row, read_rows
    from slipstream.envs.rewards.contract import Reward
    from slipstream.envs.rows import check_settings
    from slipstream.orchestrator.method import Batches, Material, Method, RollsOut
    from slipstream.trainer.learner import Learner, Scorer
    from slipstream.trainer.loss import Objective, OneForward
    from slipstream.trainer.model.image_features import RowEmbeddings
    from slipstream.trainer.model.policy import PolicyModel
    from slipstream.trainer.packing import MicroBatch, StepBatch

__all__ = [
    "COLUMNS",
    "PROMPTS",
    "Batches",
    "ChatTokenizer",
    "Columns",
    "Conversation",
    "EnvironmentConfig",
    "Examples",
    "Factor",
    "Fraction",
    "GreedyTemperature",
    "Items",
    "Judged",
    "Learner",
    "Material",
    "Method",
    "MethodSection",
    "MicroBatch",
    "NonNegativeFactor",
    "Objective",
    "OneForward",
    "PolicyModel",
    "Problems",
    "Reward",
    "RollsOut",
    "Row",
    "RowEmbeddings",
    "Rule",
    "RunConfig",
    "SFTReader",
    "Scorer",
    "Share",
    "StepBatch",
    "TrainOn",
    "check_settings",
    "held_out_split",
    "plain_conversation",
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
        "config.environment": "EnvironmentConfig",
        "config.methods": "MethodSection",
        "config.schema": "RunConfig",
        "config.sft": "TrainOn",
        "data.chat_template": "ChatTokenizer",
        "data.conversations": "PROMPTS Columns Conversation Judged plain_conversation",
        "data.examples": "Examples SFTReader",
        "data.files.folders": "held_out_split subset_of",
        "data.images.parts": "COLUMNS with_images",
        "data.readers": "Row read_rows",
        "envs.rewards.contract": "Reward",
        "envs.rows": "check_settings",
        "orchestrator.method": "Batches Material Method RollsOut",
        "trainer.learner": "Learner Scorer",
        "trainer.loss": "Objective OneForward",
        "trainer.model.image_features": "RowEmbeddings",
        "trainer.model.policy": "PolicyModel",
        "trainer.packing": "MicroBatch StepBatch",
    },
    base="slipstream",
)
