"""Nodes as network namespaces of this machine, joined by a bridge; all on loopback where none can be made."""

import contextlib
import os
import shutil
import subprocess

CAN_MAKE = (
    all(map(shutil.which, ("ip", "nsenter", "unshare")))
    and not subprocess.run(["unshare", "--net", "--mount", "true"], check=False, capture_output=True).returncode
)


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=60)


@contextlib.contextmanager
def networks(num):
    """`num` nodes, each with a command's first words and its address, and the bridge's namespace, or None."""
    if not CAN_MAKE:
        yield [([], "127.0.0.1")] * num, None
        return
    prefix = f"sl{os.getpid()}"
    hub, names = f"{prefix}h", [f"{prefix}n{number}" for number in range(num)]
    try:
        ip("netns", "add", hub)
        ip("-n", hub, "link", "add", "hub", "type", "bridge")
        ip("-n", hub, "link", "set", "hub", "up")
        found = []
        for number, name in enumerate(names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "add", "net0", "type", "veth", "peer", "name", f"to{number}", "netns", hub)
            ip("-n", hub, "link", "set", f"to{number}", "master", "hub", "up")
            ip("-n", name, "address", "add", f"10.201.7.{number + 1}/24", "dev", "net0")
            ip("-n", name, "link", "set", "net0", "up")
            found.append((["nsenter", f"--net=/run/netns/{name}"], f"10.201.7.{number + 1}"))
        yield found, hub
    finally:
        for name in (*names, hub):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=60)
