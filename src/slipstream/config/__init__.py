"""The run's settings: the schema, reading it from a run file and the command line, writing it back.

Guarantees: whoever holds a `RunConfig` from `load_config` holds settings that agree with each other, and
every error names the key, its value, the reason and the remedy before any process starts. Nothing in this
package imports torch. Values that need the model, the tasks or the machine are `launch.plan`'s.
"""

from slipstream.config.parse.dump import Derived, dump_resolved
from slipstream.config.parse.keys import with_values
from slipstream.config.parse.load import Loaded, load_config
from slipstream.config.planned import PlannedConfig, PlannedRL
from slipstream.config.recipes import needs_engine_logprobs
from slipstream.config.schema import (
    CriticConfig,
    DataConfig,
    EnvironmentConfig,
    EvaluationConfig,
    InferenceConfig,
    LoraConfig,
    ModelConfig,
    RLConfig,
    RunConfig,
    RunSection,
    SamplingConfig,
    SFTConfig,
    TrainingConfig,
    WeightsConfig,
)

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
    "dump_resolved",
    "load_config",
    "needs_engine_logprobs",
    "with_values",
]
