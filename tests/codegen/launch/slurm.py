"""A real Slurm of two nodes on this machine, with daemons of its own in a folder of the test."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HOST = socket.gethostname()
NODES = (HOST, f"{HOST}-2")  # torchrun meets on the first, whose name leads to this machine
GPUS = dict(zip(NODES, ("h100:8", "a100:4"), strict=True))  # as Slurm counts them
_DAEMONS = ("munged", "slurmctld", "slurmd")
_SECONDS = 60


def why_no_slurm() -> str:
    """Return why there can be no Slurm here, or ""."""
    missing = [one for one in (*_DAEMONS, "sbatch") if _found(one) is None]
    if missing:
        return f"there is no {', '.join(missing)} (Debian: slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root"


def _found(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm:
    """A running Slurm; its commands need its configuration."""

    configuration: Path

    @property
    def variables(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.configuration)}

    def call(self, *words: str, folder: Path | None = None) -> str:
        """Run one of Slurm's commands, and return what it prints."""
        done = subprocess.run(
            words, cwd=folder, env=self.variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        """Return a job's state, such as RUNNING."""
        told = self.call("scontrol", "show", "job", job)
        return told.partition("JobState=")[2].split()[0]


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Start a Slurm of two nodes in a folder, and end its daemons."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        found = _started(folder, started)
        try:
            yield found
        finally:
            _end_jobs(found)
    finally:
        for one in reversed(started):
            one.terminate()
        for one in started:
            try:
                one.wait(timeout=20)
            except subprocess.TimeoutExpired:
                one.kill()


def _end_jobs(slurm: Slurm) -> None:
    """End all jobs; their processes would outlive the daemons."""
    slurm.call("scancel", "--user=root")
    _await(lambda: not slurm.call("squeue", "--noheader", "--format=%i").strip())


def _started(folder: Path, started: list[subprocess.Popen[bytes]]) -> Slurm:
    for name in ("run", "state", *NODES):
        (folder / name).mkdir(mode=0o755, parents=True)
    key, told = folder / "munge.key", folder / "munge.socket"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    own = [f"--{name}-file={folder / name}" for name in ("pid", "log", "seed")]
    started.append(
        _start(folder, "munged", "-F", "--force", f"--key-file={key}", f"--socket={told}", *own)
    )
    _await(told.exists)
    configuration = folder / "slurm.conf"
    configuration.write_text(_configuration(folder, told), encoding="utf-8")
    (folder / "gres.conf").write_text("\n".join(_pretended_gpus(folder)), encoding="utf-8")
    found = Slurm(configuration=configuration)
    hosts = [f"127.0.0.{number} {name}" for number, name in enumerate(NODES, start=1)]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]), encoding="utf-8")
    started.append(_start(folder, "slurmctld", "-D", "-f", str(configuration)))
    for node in NODES:
        started.append(_start_on(node, folder, "slurmd", "-D", "-f", str(configuration)))
    _await(lambda: _idle(found) == len(NODES))
    return found


def _pretended_gpus(folder: Path) -> Iterator[str]:
    """Yield what slurmd reads of the GPUs of nodes; it wants a file for each."""
    for name, (kind, _, count) in ((name, one.partition(":")) for name, one in GPUS.items()):
        for place in range(int(count)):
            (folder / f"gpu{place}").touch()
        files = f"{folder}/gpu[0-{int(count) - 1}]"
        yield f"NodeName={name} Name=gpu Type={kind} File={files}"


def _start_on(node: str, folder: Path, program: str, *words: str) -> subprocess.Popen[bytes]:
    """Start a program under another name of the host: a daemon takes the node of that name."""
    hosts = folder / "hosts"
    renamed = f'mount --bind {hosts} /etc/hosts && hostname {node} && exec {_found(program)} "$@"'
    return _start(folder, "unshare", "--uts", "--mount", "bash", "-c", renamed, program, *words)


def _start(folder: Path, program: str, *words: str) -> subprocess.Popen[bytes]:
    path = _found(program)
    assert path is not None
    log = (folder / f"{program}.out").open("ab")
    return subprocess.Popen([path, *words], stdout=log, stderr=log)


def _idle(slurm: Slurm) -> int:
    done = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%t"],
        env=slurm.variables,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.split().count("idle")


def _await(is_there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not is_there():
        assert time.monotonic() < deadline, "Slurm has not started"
        time.sleep(0.2)


def _configuration(folder: Path, munge: Path) -> str:
    ports = [_free_port() for _ in range(3)]
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.{number} Port={port} CPUs=16 "
        f"Gres=gpu:{GPUS[name]}"
        for number, (name, port) in enumerate(zip(NODES, ports[1:], strict=True), start=1)
    )
    return f"""
ClusterName=tests
SlurmctldHost={HOST}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={munge},cred_expire=5
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
GresTypes=gpu
FirstJobId={random.randrange(1000, 20_000)}
ReturnToService=2
KillWait=10
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
