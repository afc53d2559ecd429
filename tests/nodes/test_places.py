"""The place of a process by the variables of torchrun and srun."""

import pytest

from slipstream.config import load_config
from slipstream.errors import ConfigError
from slipstream.nodes.launcher import Nodes
from slipstream.nodes.places import Place, first_host, forget, place_of
from tests.nodes.agents import RUN_ID, TOKEN

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "gpu1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "first",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "3",
}
BATCH_SHELL = {
    "SLURM_JOB_ID": "71234",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NNODES": "4",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_NODELIST": "gpu[007-010]",
    "SLURMD_NODENAME": "gpu007",
}
SRUN = BATCH_SHELL | {
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[007-010]",
    "SLURMD_NODENAME": "gpu010",
}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (TORCHRUN, Place("torchrun", 4, 1, "gpu1:29501", "first", 0)),
        (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"}, Place("torchrun", 4, 1, "gpu1:29501", "first", 2)),
        (TORCHRUN | {"MASTER_PORT": "65535"}, Place("torchrun", 4, 1, "gpu1:65534", "first", 0)),
        (SRUN, Place("srun", 4, 3, "gpu007:21436", "71234.2", 0)),
        (
            SRUN | {"SLURM_RESTART_COUNT": "1", "SLIPSTREAM_RESTARTED_BY": "slurm"},
            Place("srun", 4, 3, "gpu007:21436", "71234.2-1", 1, is_restarted=True),
        ),
        (SRUN | TORCHRUN, Place("torchrun", 4, 1, "gpu1:29501", "first", 0)),
        (TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}, None),
        (BATCH_SHELL, None),
        (SRUN | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        ({}, None),
    ],
)
def test_the_variables_name_the_place(variables, place):
    assert place_of(variables) == place


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}, "torchrun started 2 processes on this node.*--nproc-per-node 1"),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "8"}, "srun started 2 processes on this node.*--ntasks-per-node=1"),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}, "srun started 2 processes"),
        (TORCHRUN | {"RANK": "one"}, "RANK = 'one' is no whole number"),
    ],
)
def test_several_processes_on_a_node_are_refused(variables, words):
    with pytest.raises(ConfigError, match=words):
        place_of(variables)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[007-010]", "gpu007"),
        ("gpu[3,5-9],login1", "gpu3"),
        ("login1,gpu[3,5]", "login1"),
        ("rack[0-1]node[12-13]", "rack0node12"),
        ("one.cluster", "one.cluster"),
    ],
)
def test_the_first_host_of_a_list(nodes, first):
    assert first_host(nodes) == first


def test_the_users_settings_win_or_agree(tmp_path):
    file = tmp_path / "run.toml"
    text = 'model.path = "m"\nalgorithm.kind = "sft"\ndata.path = "d"\ntraining = { ranks = 4, steps = 1 }\n'
    file.write_text(text + 'cluster = { address = "10.0.0.1:1", join_timeout_s = 5 }\n')
    place = place_of(SRUN)
    loaded = load_config(file, implied=place.settings)
    cluster = loaded.config.cluster
    assert (cluster.nodes, cluster.address, cluster.run_id, cluster.join_timeout_s) == (4, "10.0.0.1:1", "71234.2", 5)
    assert loaded.origins["cluster.nodes"] == "launcher"
    place.check(cluster.nodes)
    loaded = load_config(file, ["--cluster.nodes", "2"], implied=place.settings)
    with pytest.raises(ConfigError, match=r"cluster\.nodes = 2 contradicts srun, which started 4 nodes"):
        place.check(loaded.config.cluster.nodes)


def test_nothing_of_torchrun_reaches_the_runs_processes():
    variables = TORCHRUN | {"PATH": "/bin", "SLURM_JOB_ID": "1", "ROLE_NAME": "default", "TORCH_HOME": "/t"}
    forget(variables)
    assert variables == {"PATH": "/bin", "SLURM_JOB_ID": "1", "TORCH_HOME": "/t"}


def test_a_name_of_loopback_is_reached_from_everywhere(monkeypatch):
    monkeypatch.setattr("socket.gethostbyname", {"own": "127.0.1.1", "localhost": "127.0.0.1"}.get)
    for host, bound in (("own", "0.0.0.0"), ("localhost", "127.0.0.1"), ("127.0.0.1", "127.0.0.1")):
        nodes = Nodes(2, (host, 0), TOKEN, RUN_ID)
        try:
            assert nodes.address[0] == host
            assert nodes._server.getsockname()[0] == bound
        finally:
            nodes.close()
