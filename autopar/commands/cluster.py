"""`autopar cluster detect`: writes a cluster file from what schedulers and machines tell."""

from __future__ import annotations

import shutil
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from autopar.commands import AS_JSON, Command, new_app
from autopar.console import print_json, print_note, results
from autopar.options import OUTPUT_FILE
from autopar.planner.cluster import tool_output
from autopar.planner.cluster.detected import (
    BEGINNING,
    MeasuredLinks,
    cluster_text,
    detected,
)
from autopar.planner.cluster.file import parse_cluster
from autopar.planner.cluster.sheet import local_devices
from autopar.planner.errors import InputError
from autopar.planner.files import refuse_others, write_whole
from autopar.runs.run_status import asked

cluster = new_app()
_SLURM, _KUBERNETES, _HERE, _RANKS = "slurm", "kubernetes", "here", "ranks"
_SOURCES = (_SLURM, _KUBERNETES, _HERE, _RANKS)
_CARDS, _INTERFACES = Path("/sys/class/infiniband"), Path("/sys/class/net")
_SECONDS_TO_MEET = 120.0


@cluster.callback()
def cluster_options() -> None:
    """Find the machines to plan for, and write them into a cluster file.

    Example: autopar cluster detect -o cluster.toml
    """


@cluster.command("detect", cls=Command)
def detect(
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="|".join(_SOURCES),
            help="Who tells: Slurm, Kubernetes, this machine, or the processes that torchrun or "
            "srun started. Default: the first of Slurm, GPUs here and Kubernetes that answers.",
        ),
    ] = None,
    partition: Annotated[
        str | None, typer.Option("--partition", metavar="NAME", help="Only this Slurm partition.")
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            "--device",
            metavar="[KIND=]NAME",
            help="The device that the scheduler calls KIND; may be repeated.",
        ),
    ] = None,
    output: OUTPUT_FILE = Path("cluster.toml"),
    as_json: AS_JSON = False,
) -> None:
    """Write a cluster file from what Slurm, Kubernetes, nvidia-smi and Linux tell.

    Nothing is changed and no job is started. With --from ranks, under torchrun or srun with one
    process for each device, the links between devices and between machines are measured, too.

    Example: autopar cluster detect --from slurm --partition gpu -o cluster.toml
    """
    refuse_others(output, beginning=BEGINNING)
    if source not in (None, *_SOURCES):
        raise InputError(f"--from {source}", expected=", ".join(_SOURCES))
    if partition is not None and source not in (None, _SLURM):
        raise InputError("--partition is of Slurm", fix="--from slurm")
    named = dict(_named(one) for one in device or ())
    links: MeasuredLinks | None = None
    if source == _RANKS:
        chosen, (nodes, links) = source, _ranks()
        if not nodes:
            return  # the first rank writes
        found = tool_output.FoundNodes(nodes=nodes)
    else:
        chosen, found = _first_answer((source,) if source else _sources(partition), partition)
    made = detected(
        found.nodes, source=chosen, named=named, measured=links, left_out=found.left_out
    )
    text = cluster_text(made)
    size = parse_cluster(text, where="the detected cluster").size
    write_whole(output, text, what="the cluster")
    if as_json:
        print_json(asdict(made))
        return
    for word, sentences in (("found", made.found), ("assumed", made.assumed)):
        for one in sentences:
            results().print(f"{word}: {one}", soft_wrap=True)
    for one in made.left_out:
        print_note(f"left out: {one}")
    results().print(f"Written: {output}, {size} devices", soft_wrap=True)


def _named(text: str) -> tuple[str, str]:
    """Split KIND=NAME into its two parts; KIND is "" if it is missing."""
    kind, _, name = text.rpartition("=")
    return kind, name


def _sources(partition: str | None) -> Sequence[str]:
    """Return the sources to ask for machines, in this order."""
    if partition is not None:
        return (_SLURM,)
    may_answer = {
        _SLURM: shutil.which(tool_output.SLURM_QUERY[0]),
        _HERE: shutil.which(tool_output.GPU_QUERY[0]) or local_devices(),
        _KUBERNETES: shutil.which(tool_output.KUBERNETES_QUERY[0]),
    }
    return [one for one, found in may_answer.items() if found] or [_HERE]


def _first_answer(
    sources: Sequence[str], partition: str | None
) -> tuple[str, tool_output.FoundNodes]:
    """Ask the sources until one answers; return that source and its machines."""
    for one in sources[:-1]:
        try:
            return one, _found(one, partition)
        except InputError as error:
            print_note(f"--from {one}: {error}")
    return sources[-1], _found(sources[-1], partition)


def _found(source: str, partition: str | None) -> tool_output.FoundNodes:
    if source == _HERE:
        here = _here()
        if here is None:
            raise InputError(
                "this machine has no GPUs, no Slurm and no Kubernetes to ask",
                fix="run it where jobs are submitted, or on a machine of the cluster",
            )
        return tool_output.FoundNodes(nodes=(here,))
    if source == _KUBERNETES:
        return tool_output.kubernetes_nodes_in(asked(tool_output.KUBERNETES_QUERY, "the nodes"))
    found = tool_output.slurm_nodes_in(asked(tool_output.SLURM_QUERY, "the nodes"), partition)
    return replace(found, nodes=tuple(_seen_from_inside(found.nodes)))


def _seen_from_inside(nodes: Sequence[tool_output.FoundNode]) -> Iterator[tool_output.FoundNode]:
    """Yield the nodes; those like this machine get its memory, wiring and network cards."""
    own = next((one for one in nodes if one.name == socket.gethostname()), None)
    here = None if own is None else _here()
    for one in nodes:
        if own is None or here is None or (one.kind, one.devices) != (own.kind, own.devices):
            yield one
        else:
            yield replace(
                one,
                memory_bytes=here.memory_bytes,
                wiring=here.wiring,
                pcie_generation=here.pcie_generation,
                cards=here.cards,
            )


def _here() -> tool_output.FoundNode | None:
    """Return this machine with the most frequent kind of its GPUs, or None without any."""
    if shutil.which(tool_output.GPU_QUERY[0]):
        found = tool_output.gpus_in(asked(tool_output.GPU_QUERY, "the GPUs"))
    else:  # torch also sees other vendors' GPUs
        found = tuple(
            tool_output.FoundGpu(name=one.name, memory_bytes=one.memory_bytes, pcie_generation=None)
            for one in local_devices()
        )
    if not found:
        return None
    (gpu, count), *rest = Counter(found).most_common()
    for other, left in rest:
        print_note(f"left out: {left} × {other.name}, as a node has GPUs of one kind")
    return tool_output.FoundNode(
        name=socket.gethostname(),
        kind=gpu.name,
        devices=count,
        memory_bytes=gpu.memory_bytes,
        wiring=None if rest else _wiring(),
        pcie_generation=gpu.pcie_generation,
        cards=tuple(_cards()),
    )


def _wiring() -> tool_output.GpuWiring | None:
    if not shutil.which(tool_output.TOPOLOGY_QUERY[0]):
        return None
    try:
        return tool_output.wiring_in(asked(tool_output.TOPOLOGY_QUERY, "how the GPUs are joined"))
    except InputError as error:
        print_note(f"links between GPUs are not known: {error.found}")
        return None


def _cards() -> Iterator[tool_output.NetworkCard]:
    """Yield this machine's network cards; ordinary Ethernet only if there are no others."""
    ports = {one.name: one / "ports" / "1" for one in sorted(_CARDS.glob("*"))}
    cards = tool_output.cards_in(
        {
            name: (_text(port / "rate"), _text(port / "state"), _text(port / "link_layer"))
            for name, port in ports.items()
        }
    )
    yield from cards
    if cards:
        return
    for one in sorted(_INTERFACES.glob("*/device")):
        speed = _text(one.parent / "speed").strip()  # in Mb/s; -1 if it is down
        if speed.isascii() and speed.isdecimal() and len(speed) < 8 and int(speed):
            rate = int(speed) * 1e6 / 8
            yield tool_output.NetworkCard(name=one.parent.name, bytes_per_second=rate, layer="TCP")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _ranks() -> tuple[tuple[tool_output.FoundNode, ...], MeasuredLinks]:
    """Return, on rank 0, the machines of all ranks and their links; nothing on other ranks."""
    import torch.distributed as dist

    from autopar.planner.profile.net import pair_link
    from autopar.runtime.ranks.leaving import known_place
    from autopar.runtime.ranks.mesh import start, stop

    own = known_place()
    if own.world_size == 1:
        raise InputError(
            "--from ranks needs several processes",
            fix="torchrun --nproc-per-node 8 -m autopar cluster detect --from ranks",
        )
    mesh = start(data=own.world_size, timeout=_SECONDS_TO_MEET)
    here = _here() if own.local_rank == 0 else None
    cpu = tool_output.FoundNode(name=socket.gethostname(), kind="cpu", devices=1, memory_bytes=None)
    machine = replace(here or cpu, devices=max(own.local_world_size, here.devices if here else 0))
    every: list[tuple[int, int, tool_output.FoundNode]] = [(0, 0, machine)] * own.world_size
    dist.all_gather_object(every, (own.node, own.local_rank, machine))
    firsts = [rank for rank, (_, local, _) in enumerate(every) if local == 0]
    inside = [
        (one, one + 1) for one in firsts if every[one + 1 : one + 2] and every[one + 1][1] == 1
    ]
    between = list(pairwise(firsts))
    links = [
        [pair_link(one, other, mesh.device.type) for one, other in pairs]
        for pairs in (inside, between)
    ]
    stop(mesh)
    if own.rank:
        return (), MeasuredLinks()
    slow_inside, slow_between = (
        min(own_links, key=lambda one: one.bytes_per_second, default=None) for own_links in links
    )
    return (
        tuple(every[one][2] for one in firsts),
        MeasuredLinks(inside=slow_inside, between=slow_between),
    )
