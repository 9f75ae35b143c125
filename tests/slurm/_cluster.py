"""
A real Slurm on machines of its own: munged and slurmctld on the last one, a slurmd on each of the others.

Rules of this file: nothing of it outlives this process, as the machines do not (`tests.hosts._netns`). Root, iproute2
and Debian's packages slurmctld, slurmd, slurm-client and munge are needed; `missing` says what is not there.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from attrs import frozen

from tests.hosts import _netns
from tests.hosts._netns import Host, machines
from tests.waiting import wait_until

PROGRAMS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge"}
LIMIT = 60.0
_PATH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
_CONF = """\
ClusterName=tests
SlurmctldHost={head}({head_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
ReturnToService=2
SlurmdTimeout=20
MessageTimeout=10
InactiveLimit=0
KillWait=30
MinJobAge=3600
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no Slurm here; empty when there can."""
    lacking = [package for program, package in PROGRAMS.items() if shutil.which(program, path=_PATH) is None]
    return f"not installed: {', '.join(lacking)}" if lacking else _netns.missing()


@frozen
class Cluster:
    """Slurm, and the machine on which its commands run."""

    head: Host
    folder: Path
    workers: tuple[Host, ...] = ()
    """The machines of the nodes, in their order."""

    def run(self, *command: str, check: bool = True) -> str:
        """Return the output of *command*, run on the machine of slurmctld."""
        done = subprocess.run(self.head.entered(*command), env=self.environment(), capture_output=True, text=True)
        assert not check or done.returncode == 0, f"{command}: {done.returncode} {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def environment(self) -> dict[str, str]:
        """For commands of Slurm: as a user's, with the programs of this Python first."""
        own = {"SLURM_CONF": f"{self.folder}/slurm.conf", "PATH": _PATH}
        return {**os.environ, **own}

    def submit(self, script: Path, *options: str) -> Job:
        """Run *script* by sbatch in its folder; what its tasks say goes to the file ``output``."""
        out = script.with_name("output")
        places = (f"--chdir={script.parent}", f"--output={out}")
        number = self.run("sbatch", "--parsable", *places, *options, str(script))
        return Job(self, number.strip(), out)

    def start(self, folder: Path, program: str, command: str, *options: str, header: str = "") -> Job:
        """Run *command*, for the *program* ``train.py``, on two nodes; the batch script says its status."""
        (folder / "train.py").write_text(program)
        script = folder / "job.sh"
        script.write_text(
            f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n{header}{command}\necho status $?\n"
        )
        return self.submit(script, *options)


@frozen
class Job:
    """One job of the cluster."""

    cluster: Cluster
    number: str
    _out: Path

    @property
    def output(self) -> str:
        """Output of the job's tasks so far."""
        return self._out.read_text(errors="replace") if self._out.exists() else ""

    def wait_for_output(self, text: str, times: int = 1, limit: float = LIMIT) -> None:
        """Return once its tasks have written *text* so often."""
        wait_until(
            lambda: self.output.count(text) >= times or self.is_over(), limit, lambda: f"{text!r} in: {self.output}"
        )
        assert self.output.count(text) >= times, f"{self.facts()['JobState']}: {self.output}"

    def cancel(self, *options: str) -> None:
        """Call scancel for it."""
        self.cluster.run("scancel", *options, self.number, check=False)  # it fails for a job that has just ended

    def processes(self, **variables: str) -> Iterator[int]:
        """Yield its processes on all nodes that have these *variables* in their environment."""
        wanted = {f"{name}={value}".encode() for name, value in {"SLURM_JOB_ID": self.number, **variables}.items()}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if wanted <= set((folder / "environ").read_bytes().split(b"\0")):
                    yield int(folder.name)

    def start_again(self) -> None:
        """Start it soon after it was requeued: Slurm itself would wait two minutes."""
        # Its nodes take a job that was revoked in the same second for the revoked one, which fails.
        self.cluster.run("scontrol", "update", f"JobId={self.number}", "StartTime=now+3seconds")

    def facts(self) -> dict[str, str]:
        """Return the fields that ``scontrol show job`` prints."""
        pairs = self.cluster.run("scontrol", "show", "job", "-o", self.number).split()
        return dict(pair.split("=", 1) for pair in pairs if "=" in pair)

    def is_over(self) -> bool:
        """Return whether Slurm reports that no process of the job is left."""
        return self.facts()["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "SUSPENDED", "CONFIGURING")

    def ends(self, limit: float = LIMIT) -> str:
        """Its last state, once it has one."""
        wait_until(self.is_over, limit, lambda: self.output)
        return self.facts()["JobState"]


@contextmanager
def cluster(nodes: int, cpus: int = 4, prefix: str = "m") -> Iterator[Cluster]:
    """*nodes* nodes ``m1``, ``m2``, ... that are idle; with another *prefix* no name server knows them."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eslurm-")))
        *workers, head = stack.enter_context(machines(nodes + 1))
        found = Cluster(head, folder, tuple(workers))
        names = [host.name.replace("m", prefix, 1) for host in workers]
        _configure(found, workers, names, cpus)
        _start(stack, found, head, "munged", "--force", "--foreground", *_munge(folder))
        wait_until((folder / "munge/socket").exists, what=lambda: _logs(folder))
        _start(stack, found, head, "slurmctld", "-D")
        for host, name in zip(workers, names, strict=True):
            _start(stack, found, host, "slurmd", "-D", "-N", name)
        wait_until(lambda: _idle(found) == nodes, what=lambda: _logs(folder))
        try:
            yield found
        finally:
            found.run("scancel", "--signal=KILL", "--user=root", check=False)


def _configure(found: Cluster, workers: Sequence[Host], names: Sequence[str], cpus: int) -> None:
    rows = [
        f"NodeName={name} NodeHostname={host.name} NodeAddr={host.address} CPUs={cpus} RealMemory=1000"
        for host, name in zip(workers, names, strict=True)
    ]
    facts = {"head": found.head.name, "head_address": found.head.address, "folder": found.folder}
    (found.folder / "slurm.conf").write_text(_CONF.format(**facts, nodes="\n".join(rows)))
    (found.folder / "state").mkdir()
    for name in names:
        (found.folder / f"spool.{name}").mkdir()
    found.folder.chmod(0o755)


def _munge(folder: Path) -> list[str]:
    (folder / "munge").mkdir(mode=0o711)
    key = folder / "munge/key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    places = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
    return [f"--{option}={folder}/munge/{name}" for option, name in places.items()]


def _start(stack: ExitStack, found: Cluster, host: Host, *command: str) -> None:
    log = stack.enter_context(open(found.folder / f"{command[0]}.{host.name}.log", "w"))
    process = host.popen(command, env=found.environment(), stdout=log, stderr=log, cwd="/", start_new_session=True)
    stack.callback(process.wait)
    stack.callback(process.kill)


def _idle(found: Cluster) -> int:
    states = found.run("sinfo", "-h", "-N", "-o", "%T", check=False).split()
    return states.count("idle")


def _logs(folder: Path) -> str:
    return "\n".join(f"{path.name}: {path.read_text()[-1000:]}" for path in folder.glob("*.log"))
