"""Looks, before anything is started, whether the machines of a run can meet where they are told."""

from __future__ import annotations

import socket

from autopar.planner.errors import InputError
from autopar.runs.run_folder import Nodes


def check_meeting_place(nodes: Nodes) -> None:
    """Raise InputError where the first machine is not found, or its port is taken.

    torchrun looks for a host that is not there for minutes, and tells a taken port by a traceback.
    """
    if nodes.address is None:
        return
    try:
        socket.getaddrinfo(nodes.address, nodes.port)
    except OSError as error:
        raise InputError(
            f"--master-addr {nodes.address} is not found from this machine: {error.strerror}",
            fix="give the first machine's name or address as the others see it",
        ) from None
    if nodes.rank == 0 and _is_taken(nodes.port):
        raise InputError(
            f"--master-port {nodes.port} is in use on this machine",
            fix="give another one, the same on each machine, or end the program that has it",
        )


def _is_taken(port: int) -> bool:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
        try:
            tried.bind(("", port))
        except OSError:
            return True
    return False
