"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd in namespaces of their own."""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.nodes.networks import CAN_MAKE
from tests.waiting import until

REQUIRE = "SLIPSTREAM_REQUIRE_SLURM"
PATH = f"{os.environ['PATH']}:/usr/local/sbin:/usr/sbin:/sbin"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
HAS_ALL = all(shutil.which(program, path=PATH) for program in PROGRAMS)
needs_slurm = pytest.mark.skipif(
    not CAN_MAKE or not (HAS_ALL or os.environ.get(REQUIRE)),
    reason="needs network namespaces, and Slurm: apt-get install slurm-wlm munge",
)
ADDRESS, NODES = "10.202.0.1", ("n1", "n2")
TIMEOUT_S = 5
"""Slurm's SlurmdTimeout: how long a dead slurmd goes unnoticed, at least."""
BOOT = f"""
set -e
hostname box
ip link set lo up
ip link add net0 type veth peer name net1
ip address add {ADDRESS}/24 dev net0
ip link set net0 up
ip link set net1 up
mount --bind hosts /etc/hosts
munged --force --key-file="$PWD/key" --socket="$PWD/munge" --pid-file="$PWD/munged.pid" \
    --log-file="$PWD/munged.log" --seed-file="$PWD/seed"
slurmctld
slurmd -N n1
slurmd -N n2
touch booted
while true; do sleep 3600 & wait; done
"""
CONFIG = """
ClusterName=tests
SlurmctldHost=box({address})
SlurmctldPort=16817
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=2
SlurmdTimeout={timeout_s}
KillWait=30
NodeName=n1 NodeHostname=box NodeAddr={address} Port=16801 CPUs=1
NodeName=n2 NodeHostname=box NodeAddr={address} Port=16802 CPUs=1
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """A running cluster. Programs run inside see its network, and names of its nodes."""

    def __init__(self, folder, init):
        self.folder, self.init = folder, init

    def command(self, *words, inside=("--net", "--mount", "--uts")):
        return ["nsenter", f"--target={self.init.pid}", *inside, *map(str, words)]

    @property
    def environment(self):
        return {**os.environ, "PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *words, code=0, **options):
        """What a program prints."""
        done = subprocess.run(
            self.command(*words, **options),
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        assert code is None or done.returncode == code, done.stdout
        return done.stdout.strip()

    def slipstream(self, *arguments, code=0):
        return self.run(sys.executable, "-m", "slipstream.cli", *arguments, code=code)

    def start_slurmd(self, node):
        self.run("slurmd", "-N", node, inside=("--all",))

    def kill_slurmd(self, node):
        pid = (self.folder / f"slurmd-{node}.pid").read_text().strip()
        self.run("kill", "-9", pid, inside=("--all",))

    def state(self, job):
        """The job's state, and how often it was requeued."""
        line = self.run("scontrol", "show", "job", "--oneliner", job)
        fields = dict(each.split("=", 1) for each in line.split() if "=" in each)
        return fields["JobState"], int(fields["Restarts"])

    def rank_0(self):
        """The process of a run."""
        found = [each for each in self.ours() if "slipstream.cli" in each.cmdline() and "python" in each.name()]
        (run,) = (each for each in found if each.environ().get("SLURM_PROCID") == "0")
        return run

    def ours(self):
        """Processes of Slipstream on all nodes, and those of Slurm that hold them."""
        found = []
        for each in self.init.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = each.cmdline()
                is_ours = any("slipstream" in word or word.startswith("slurmstepd") for word in words)
                if is_ours and each.status() != psutil.STATUS_ZOMBIE:
                    found.append(each)
        return found


@contextlib.contextmanager
def cluster():
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    (folder / "state").mkdir()
    (folder / "key").write_bytes(secrets.token_bytes(128))
    (folder / "key").chmod(0o600)
    names = "".join(f"{ADDRESS} {name}\n" for name in ("box", *NODES))
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
    (folder / "boot.sh").write_text(BOOT)
    config = CONFIG.format(address=ADDRESS, folder=folder, timeout_s=TIMEOUT_S)
    (folder / "slurm.conf").write_text(config)
    namespaces = ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "--mount-proc", "--kill-child"]
    environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
    with (folder / "boot.log").open("wb") as log:
        outer = subprocess.Popen([*namespaces, "bash", "boot.sh"], cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        until(lambda: (folder / "booted").exists() or outer.poll() is not None, 30)
        assert outer.poll() is None, (folder / "boot.log").read_text()
        (init,) = psutil.Process(outer.pid).children()
        made = Cluster(folder, init)
        until(lambda: made.run("sinfo", "--noheader", "--format=%T %D") == "idle 2", 30)
        yield made
    finally:
        outer.send_signal(signal.SIGKILL)
        outer.wait(30)
        shutil.rmtree(folder, ignore_errors=True)
