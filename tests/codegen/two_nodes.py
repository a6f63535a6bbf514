"""Two nodes on one machine: network namespaces, joined by a cable of their own.

As on Debian, the name of a node means 127.0.1.1 on that node itself.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from uuid import uuid4

CABLE = "cable"  # the name of either end, in its node
HOST = "first-node"
_NETWORK = ("10.213.77.1", "10.213.77.2")
# What every command is told of the nodes.
PLACE = ("--nnodes", "2", "--node-rank", "NODE", "--master-addr", HOST, "--master-port", "29513")
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
_SPACES = Path("/run/netns")  # where `ip` keeps namespaces
_HOSTS = Path("/etc/hosts")
# From <sched.h> and <sys/mount.h>.
_NETWORK_SPACE, _MOUNT_SPACE = 0x40000000, 0x20000
_BIND, _PRIVATE_AND_ALL_BELOW = 0x1000, 0x44000


def why_not() -> str:
    """Return why there can be no two nodes here; nothing where there can."""
    if shutil.which("ip") is None:
        return "there is no command `ip` (iproute2)"
    name = f"try-{uuid4().hex[:6]}"
    tried = _run("ip", "netns", "add", name)
    _run("ip", "netns", "delete", name)
    return f"network namespaces need root: {tried.stderr.strip()}" if tried.returncode else ""


@contextmanager
def two_nodes() -> Iterator[tuple[str, str]]:
    """Make two namespaces that see each other and nothing else, and give their names."""
    word = uuid4().hex[:6]
    first, second = f"node-{word}-0", f"node-{word}-1"
    try:
        for name, address in ((first, "127.0.1.1"), (second, _NETWORK[0])):
            _done("ip", "netns", "add", name)
            _name_hosts(name, {HOST: address, socket.gethostname(): "127.0.1.1"})
        peer = ("type", "veth", "peer", "name", CABLE, "netns", second)
        _done("ip", "link", "add", CABLE, "netns", first, *peer)
        for name, address in zip((first, second), _NETWORK, strict=True):
            _done("ip", "-n", name, "address", "add", f"{address}/24", "dev", CABLE)
            for device in ("lo", CABLE):
                _done("ip", "-n", name, "link", "set", device, "up")
        yield first, second
    finally:
        for name in (first, second):
            _run("ip", "netns", "delete", name)
            _hosts_of(name).unlink(missing_ok=True)


def start_on(nodes: Sequence[str], folder: Path, *words: str) -> list[subprocess.Popen[str]]:
    """Start a Python command on each node; `NODE` in it stands for the number of the node."""
    return [
        subprocess.Popen(
            [sys.executable, *(word.replace("NODE", str(number)) for word in words)],
            env=os.environ | _ENVIRONMENT,
            cwd=folder,
            preexec_fn=partial(_enter, node),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, node in enumerate(nodes)
    ]


def _enter(node: str) -> None:
    """Move this process to a node: its network, and its file of hosts.

    `ip netns exec` does the same, but only for programs that it starts, which cannot be forked.
    """
    with (_SPACES / node).open() as space:
        _call("setns", space.fileno(), _NETWORK_SPACE)
    _call("unshare", _MOUNT_SPACE)
    _call("mount", b"none", b"/", None, _PRIVATE_AND_ALL_BELOW, None)
    _call("mount", bytes(_hosts_of(node)), bytes(_HOSTS), None, _BIND, None)


def _call(name: str, *words: bytes | int | None) -> None:
    """Call a function of the C library that returns 0 where it succeeds."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*words):
        raise OSError(ctypes.get_errno(), name)


def _hosts_of(node: str) -> Path:
    return Path(tempfile.gettempdir()) / f"hosts-of-{node}"


def _name_hosts(node: str, addresses: Mapping[str, str]) -> None:
    """Say which addresses names of machines have on a node."""
    lines = ("127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items()))
    _hosts_of(node).write_text("\n".join(lines) + "\n")


def _done(*words: str) -> None:
    done = _run(*words)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False)
