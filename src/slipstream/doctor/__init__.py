"""Looks at a machine, and at a run file, before a run: `slipstream doctor`.

Each check is a function of what it may read, with this machine's as defaults, and yields findings. Guarantees: nothing
is changed; a check that fails itself is a finding; every wait has a deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from slipstream.doctor import gpus, host, packages
from slipstream.doctor.findings import Finding
from slipstream.errors import one_line

CHECKS: tuple[Callable[[], Iterable[Finding]], ...] = (
    *(host.check_system, packages.check_packages, packages.check_vllm, packages.check_torch),
    *(gpus.check_gpus, gpus.check_visible, gpus.check_compiler),
    *(host.check_cpus, host.check_memory, host.check_shared_memory, host.check_limits, host.check_temporary_folder),
    *(host.check_network, host.check_interfaces, host.check_proxies, host.check_clock),
)
"""In the order of their findings."""


def examine(checks: Iterable[Callable[[], Iterable[Finding]]] = CHECKS) -> Iterator[Finding]:
    """Yield the findings of all checks, one by one."""
    for check in checks:
        try:
            yield from check()
        except Exception as error:  # noqa: BLE001 (becomes a finding)
            name = getattr(check, "__name__", "check").removeprefix("check_").replace("_", " ")
            yield Finding(name, "fault", f"the check itself failed: {one_line(error)}", "report it to us")
