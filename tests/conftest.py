"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# How long an example takes is a matter of the machine, and nothing that a test should fail for.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
