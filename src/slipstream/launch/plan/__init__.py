"""The plan: config and measured facts in, every `auto` replaced by a value, each with its reason. Pure."""
