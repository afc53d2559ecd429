"""Settings of a run: the schema, reading them from a run file and the command line, and writing them back.

A `RunConfig` from `load_config` has settings that agree with each other. An error names the key, its value, the reason
and the remedy, before any process starts. Nothing in this package imports torch. Values that depend on the model, the
tasks or the machine are derived in `plan`.
"""

from typing import TYPE_CHECKING

from slipstream.exports import exported

if TYPE_CHECKING:
    from slipstream.config.parse.dump import Derived, dump_given, dump_resolved
    from slipstream.config.parse.keys import with_values
    from slipstream.config.parse.load import Loaded, load_config, load_settings
    from slipstream.config.planned import PlannedConfig, PlannedRL
    from slipstream.config.recipes import needs_engine_logprobs
    from slipstream.config.schema import (
        CriticConfig,
        EnvironmentConfig,
        EvaluationConfig,
        InferenceConfig,
        LoraConfig,
        ModelConfig,
        RLConfig,
        RunConfig,
        RunSection,
        SamplingConfig,
        TrainingConfig,
        WeightsConfig,
    )
    from slipstream.config.sft import DataConfig, SFTConfig

__all__ = [
    "CriticConfig",
    "DataConfig",
    "Derived",
    "EnvironmentConfig",
    "EvaluationConfig",
    "InferenceConfig",
    "Loaded",
    "LoraConfig",
    "ModelConfig",
    "PlannedConfig",
    "PlannedRL",
    "RLConfig",
    "RunConfig",
    "RunSection",
    "SFTConfig",
    "SamplingConfig",
    "TrainingConfig",
    "WeightsConfig",
    "dump_given",
    "dump_resolved",
    "load_config",
    "load_settings",
    "needs_engine_logprobs",
    "with_values",
]
__getattr__ = exported(
    __name__,
    {
        "parse.dump": "Derived dump_given dump_resolved",
        "parse.keys": "with_values",
        "parse.load": "Loaded load_config load_settings",
        "planned": "PlannedConfig PlannedRL",
        "recipes": "needs_engine_logprobs",
        "schema": (
            "CriticConfig EnvironmentConfig EvaluationConfig InferenceConfig LoraConfig ModelConfig RLConfig "
            "RunConfig RunSection SamplingConfig TrainingConfig WeightsConfig"
        ),
        "sft": "DataConfig SFTConfig",
    },
)
