"""Settings of [algorithm] in one call."""

from slipstream.config.schema import ArgumentsConfig, RLConfig


def rl(**values):
    """[algorithm] with these values, of which some are the recipe's arguments."""
    arguments = {name: value for name, value in values.items() if name in ArgumentsConfig.model_fields}
    return RLConfig(arguments=arguments, **{name: values[name] for name in values if name not in arguments})
