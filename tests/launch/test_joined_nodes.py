"""What a run makes of its nodes before it uses them."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from slipstream.config.schema import ClusterConfig
from slipstream.doctor.findings import Finding
from slipstream.errors import ConfigError, Interrupted
from slipstream.launch import children
from slipstream.processes.signals import StopRequest

FAULT = Finding("node-1", "fault", "its doctor gave no report", "run slipstream doctor on node-1")


@pytest.mark.parametrize(("stops", "error"), [(False, ConfigError), (True, Interrupted)])
def test_a_signal_to_all_processes_of_a_job_is_no_fault_of_a_node(monkeypatch, tmp_path, stops, error):
    """Slurm signals the doctors too, which may end before they can ignore it."""
    nodes = SimpleNamespace(close=lambda code: None, wait=lambda *how: None, interface="lo", lost="")

    def examined(*what, **how):
        if stops:
            run.should_stop.request()
        yield FAULT

    monkeypatch.setattr(children, "open_nodes", lambda *how: nodes)
    monkeypatch.setattr(children, "examine_nodes", examined)
    run = SimpleNamespace(
        config=SimpleNamespace(cluster=ClusterConfig(nodes=2), environment=None),
        folder=tmp_path,
        should_stop=StopRequest(),
        stages=SimpleNamespace(stage=lambda name: nullcontext()),
        log=SimpleNamespace(warning=print, event=lambda kind, **fields: None),
        prepared=SimpleNamespace(loaded=None, images_of_agents=None),
    )
    monkeypatch.setattr(children, "gateway_of", lambda *how: None)
    monkeypatch.setattr(children.Children, "_exit_code", lambda self: 0)
    with pytest.raises(error), children.Children(run) as found:
        found.join_nodes(1)
