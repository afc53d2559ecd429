"""Environments in a process of their own, with the run's interpreter (`environment.processes`) or another."""

from slipstream.envs.hosted.keeper import EnvironmentRaised, Keeper, KeptEnvironment
from slipstream.envs.hosted.process import Frame, Host, HostDied, HostFailed
from slipstream.envs.own_loop import in_own_loop

__all__ = ["EnvironmentRaised", "Frame", "Host", "HostDied", "HostFailed", "Keeper", "KeptEnvironment", "in_own_loop"]
