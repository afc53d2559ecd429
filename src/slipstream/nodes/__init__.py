"""Processes on other nodes: agents join a run over TCP, and start its children with the local launcher."""
