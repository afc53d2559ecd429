"""Settings of all tests."""

from hypothesis import settings

# How long an example takes is a matter of the machine, and nothing that a test should fail for.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
