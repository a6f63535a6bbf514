"""What tools print on real machines; only names of hosts are changed, and legends left out."""

# ruff: noqa: E501, W291 (lines are as they are printed)

from __future__ import annotations

import json
from collections.abc import Sequence


def _table(rows: Sequence[str]) -> str:
    """Return rows as nvidia-smi separates them."""
    return "\n".join("\t".join(row.split()) if row.split() else row for row in rows)


_LEGEND = """

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""

# DGX A100: eight of twelve network cards are beside GPUs.
DGX_A100 = (
    "\t"
    + _table(
        """GPU0 GPU1 GPU2 GPU3 GPU4 GPU5 GPU6 GPU7 mlx5_0 mlx5_1 mlx5_2 mlx5_3 mlx5_4 mlx5_5 mlx5_6 mlx5_7 mlx5_8 mlx5_9 mlx5_10 mlx5_11 CPU Affinity NUMA Affinity
GPU0 X NV12 NV12 NV12 NV12 NV12 NV12 NV12 PXB PXB SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS 48-63,176-191 3
GPU1 NV12 X NV12 NV12 NV12 NV12 NV12 NV12 PXB PXB SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS 48-63,176-191 3
GPU2 NV12 NV12 X NV12 NV12 NV12 NV12 NV12 SYS SYS PXB PXB SYS SYS SYS SYS SYS SYS SYS SYS 16-31,144-159 1
GPU3 NV12 NV12 NV12 X NV12 NV12 NV12 NV12 SYS SYS PXB PXB SYS SYS SYS SYS SYS SYS SYS SYS 16-31,144-159 1
GPU4 NV12 NV12 NV12 NV12 X NV12 NV12 NV12 SYS SYS SYS SYS SYS SYS PXB PXB SYS SYS SYS SYS 112-127,240-255 7
GPU5 NV12 NV12 NV12 NV12 NV12 X NV12 NV12 SYS SYS SYS SYS SYS SYS PXB PXB SYS SYS SYS SYS 112-127,240-255 7
GPU6 NV12 NV12 NV12 NV12 NV12 NV12 X NV12 SYS SYS SYS SYS SYS SYS SYS SYS PXB PXB SYS SYS 80-95,208-223 5
GPU7 NV12 NV12 NV12 NV12 NV12 NV12 NV12 X SYS SYS SYS SYS SYS SYS SYS SYS PXB PXB SYS SYS 80-95,208-223 5
mlx5_4 SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS SYS X PIX SYS SYS SYS SYS SYS SYS""".splitlines()
    ).replace("CPU\tAffinity\tNUMA\tAffinity", "CPU Affinity\tNUMA Affinity")
    + _LEGEND
)

# Eight V100 in a cube mesh: each has six NVLinks to four others.
DGX_V100 = """\
	GPU0	GPU1	GPU2	GPU3	GPU4	GPU5	GPU6	GPU7	mlx5_0	mlx5_1	CPU Affinity	NUMA Affinity
GPU0	X	NV1	NV2	NV1	SYS	SYS	SYS	NV2	NODE	SYS	0-23,48-71	0
GPU1	NV1	X	NV1	NV2	SYS	SYS	NV2	SYS	NODE	SYS	0-23,48-71	0
GPU2	NV2	NV1	X	NV2	SYS	NV1	SYS	SYS	PIX	SYS	0-23,48-71	0
GPU3	NV1	NV2	NV2	X	NV1	SYS	SYS	SYS	PIX	SYS	0-23,48-71	0
GPU4	SYS	SYS	SYS	NV1	X 	NV2	NV2	NV1	SYS	NODE	24-47,72-95	1
GPU5	SYS	SYS	NV1	SYS	NV2	X 	NV1	NV2	SYS	NODE	24-47,72-95	1
GPU6	SYS	NV2	SYS	SYS	NV2	NV1	X 	NV1	SYS	PIX	24-47,72-95	1
GPU7	NV2	SYS	SYS	SYS	NV1	NV2	NV1	X 	SYS	PIX	24-47,72-95	1
mlx5_0	NODE	NODE	PIX	PIX	SYS	SYS	SYS	SYS	X	SYS		
mlx5_1	SYS	SYS	SYS	SYS	NODE	NODE	PIX	PIX	SYS	X 		
"""

# Eight H100 as a terminal shows them: the head is underlined, and cards have numbers.
H100 = """\
	\x1b[4mGPU0	GPU1	GPU2	GPU3	NIC0	NIC1	NIC2	CPU Affinity	NUMA Affinity	GPU NUMA ID\x1b[0m
GPU0	 X 	NV18	NV18	NV18	PXB	NODE	SYS	0-63,128-191	0		N/A
GPU1	NV18	 X 	NV18	NV18	NODE	PXB	SYS	0-63,128-191	0		N/A
GPU2	NV18	NV18	 X 	NV18	SYS	SYS	PXB	64-127,192-255	1		N/A
GPU3	NV18	NV18	NV18	 X 	SYS	SYS	NODE	64-127,192-255	1		N/A
NIC0	PXB	NODE	SYS	SYS	 X 	NODE	SYS				
NIC1	NODE	PXB	SYS	SYS	NODE	 X 	SYS				
NIC2	SYS	SYS	PXB	NODE	SYS	SYS	 X 				

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_3
  NIC2: mlx5_6
"""

# Four A100 whose twelve NVLinks are divided among the three others.
POLARIS = """\
GPU0	GPU1	GPU2	GPU3	mlx5_0	mlx5_1 CPU Affinity NUMA Affinity
GPU0	 X 	NV4	NV4	NV4	SYS	SYS	24-31,56-63	3
GPU1	NV4	 X 	NV4	NV4	SYS	PHB	16-23,48-55	2
GPU2	NV4	NV4	 X 	NV4	SYS	SYS	8-15,40-47	1
GPU3	NV4	NV4	NV4	 X 	PHB	SYS	0-7,32-39	0
mlx5_0	SYS	SYS	SYS	PHB	 X 	SYS		
mlx5_1	SYS	PHB	SYS	SYS	SYS	 X 		
"""
TWO_3090 = """\
	GPU0	GPU1	CPU Affinity	NUMA Affinity	GPU NUMA ID
GPU0	 X 	NV4	0-23	0		N/A
GPU1	NV4	 X 	0-23	0		N/A
"""
THREE_A6000 = """\
	GPU0	GPU1	GPU2	CPU Affinity	NUMA Affinity
GPU0	 X 	NV4	NODE	0-31,64-95	0
GPU1	NV4	 X 	NODE	0-31,64-95	0
GPU2	NODE	NODE	 X 	0-31,64-95	0
"""
TWO_ON_TWO_CPUS = """\
	GPU0	GPU1	NIC0	NIC1	NIC2	NIC3	CPU Affinity	NUMA Affinity	GPU NUMA ID
GPU0	 X 	SYS	PHB	PHB	SYS	SYS	0-13,28-41	0		N/A
GPU1	SYS	 X 	SYS	SYS	PHB	PHB	14-27,42-55	1		N/A
NIC0	PHB	SYS	 X 	PIX	SYS	SYS				
"""
TWO_ON_ONE_CPU = """\
	GPU0	GPU1	CPU Affinity	NUMA Affinity	GPU NUMA ID
GPU0	 X 	NODE	28-55,84-111	1		N/A
GPU1	NODE	 X 	28-55,84-111	1		N/A
"""
FOUR_IN_A_CLOUD = """\
        GPU0	GPU1	GPU2	GPU3	CPU Affinity	NUMA Affinity	GPU NUMA ID
    GPU0	 X 	SYS	SYS	SYS	0-47	0		N/A
    GPU1	SYS	 X 	SYS	SYS	0-47	0		N/A
    GPU2	SYS	SYS	 X 	SYS	0-47	0		N/A
    GPU3	SYS	SYS	SYS	 X 	0-47	0		N/A
"""
ONE_GB10 = "	GPU0	CPU Affinity	NUMA Affinity	GPU NUMA ID\nGPU0	 X 	0-19	0		N/A\n"

CARD_400 = ("400 Gb/sec (4X NDR)\n", "4: ACTIVE\n", "InfiniBand\n")
CARD_200 = ("200 Gb/sec (4X HDR)\n", "4: ACTIVE\n", "InfiniBand\n")
CARD_DOWN = ("10 Gb/sec (4X SDR)\n", "1: DOWN\n", "InfiniBand\n")
CARD_ROCE = ("100 Gb/sec (4X EDR)\n", "4: ACTIVE\n", "Ethernet\n")
CARD_EFA = ("100 Gb/sec (4X EDR)\n", "4: ACTIVE\n", "Unspecified\n")

A40 = (
    "NodeName=cg14 Arch=x86_64 CoresPerSocket=16  CPUAlloc=0 CPUEfctv=32 CPUTot=32 CPULoad=10.64 "
    "AvailableFeatures=icelake,mem512GB,rack_f1,gpua40 ActiveFeatures=icelake,mem512GB,rack_f1,gpua40 "
    "Gres=gpu:a40:1 GresDrain=N/A GresUsed=gpu:a40:0(IDX:N/A) NodeAddr=cg14 NodeHostName=cg14 "
    "Version=23.11.3 OS=Linux 5.14.0-687.24.1.el9_8.x86_64 #1 SMP PREEMPT_DYNAMIC Thu Jul 9 16:32:56 "
    "UTC 2026  RealMemory=512000 AllocMem=0 FreeMem=465242 Sockets=2 Boards=1 State=IDLE "
    "ThreadsPerCore=1 TmpDisk=0 Weight=10 Owner=N/A MCS_label=N/A Partitions=gpua40i,hpua40i  "
    "BootTime=2026-07-13T10:15:51 CfgTRES=cpu=32,mem=500G,billing=32,gres/gpu=1,gres/gpu:a40=1 "
    "AllocTRES= CapWatts=n/a CurrentWatts=0 AveWatts=0"
)
A100_AND_V100 = """\
NodeName=node-a1 Arch=x86_64 CoresPerSocket=1 CPUAlloc=8 CPUTot=32 CPULoad=8.60 Gres=gpu:a100:4 NodeAddr=node-a1.cluster.local NodeHostName=node-a1 Version=23.02.7 OS=Linux 5.15.0-107-generic RealMemory=256000 State=MIXED Partitions=gpu-high CfgTRES=cpu=32,mem=256000M,billing=32,gres/gpu=4,gres/gpu:a100=4 AllocTRES=cpu=8,mem=128G,gres/gpu=2,gres/gpu:a100=2
NodeName=node-b1 Arch=x86_64 CoresPerSocket=1 CPUAlloc=48 CPUTot=48 CPULoad=47.1 Gres=gpu:v100:4(S:0-1) NodeAddr=node-b1.cluster.local NodeHostName=node-b1 Version=23.02.7 OS=Linux 5.15.0-107-generic RealMemory=256000 State=ALLOCATED Partitions=gpu-high,old CfgTRES=cpu=48,mem=256000M,billing=48,gres/gpu=4,gres/gpu:v100=4
NodeName=node-b2 Arch=x86_64 CoresPerSocket=1 CPUAlloc=0 CPUTot=48 CPULoad=0.01 Gres=gpu:v100:4 NodeAddr=node-b2.cluster.local NodeHostName=node-b2 Version=23.02.7 OS=Linux 5.15.0-107-generic RealMemory=256000 State=IDLE Partitions=gpu-high,old
NodeName=node-b3 CoresPerSocket=1 CPUAlloc=0 CPUTot=48 CPULoad=N/A Gres=gpu:v100:4 NodeAddr=node-b3 RealMemory=1 State=DOWN*+DRAIN Partitions=old Reason=Not responding [root@2017-06-29T08:00:07]
NodeName=node-c1 Arch=x86_64 CoresPerSocket=1 CPUAlloc=0 CPUTot=64 CPULoad=0.02 Gres=(null) NodeAddr=node-c1 RealMemory=128000 State=IDLE Partitions=cpu
"""
B200_SLICES = (
    "NodeName=nv2 Arch=x86_64 CoresPerSocket=56 CPUAlloc=88 CPUTot=224 "
    "Gres=gpu:nvidia_b200:4,gpu:nvidia_b200_2g.45gb:8,gpu:nvidia_b200_3g.90gb:4 "
    "ActiveFeatures=efa State=MIXED ThreadsPerCore=2 Partitions=main"
)
UNTYPED = (
    "NodeName=gpu-st-ml-1 Arch=x86_64 CoresPerSocket=1 AvailableFeatures=static,p5.48xlarge,efa,gpu "
    "ActiveFeatures=static,p5.48xlarge,efa,h100 Gres=gpu:8 NodeAddr=10.0.10.160 "
    "State=IDLE+CLOUD ThreadsPerCore=1 Partitions=compute-gpu Reason=Node start up [root@2026] "
    "InstanceId=i-0cba89ff05359cd2f InstanceType=p5.48xlarge"
)


def kubernetes_node(
    name: str, labels: dict[str, str], allocatable: dict[str, str], *, ready: str = "True"
) -> dict[str, object]:
    """Return a node as `kubectl get nodes -o json` prints it, shortened."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "spec": {"taints": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]},
        "status": {
            "allocatable": allocatable,
            "conditions": [
                {"type": "MemoryPressure", "status": "False", "reason": "KubeletHasEnoughMemory"},
                {"type": "Ready", "status": ready, "reason": "KubeletReady"},
            ],
        },
    }


def kubernetes(*nodes: dict[str, object]) -> str:
    """Return a list of nodes as kubectl prints it."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(nodes)})


H100_LABELS = {
    "nvidia.com/gpu.count": "8",
    "nvidia.com/gpu.family": "hopper",
    "nvidia.com/gpu.memory": "81559",
    "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
    "nvidia.com/gpu.replicas": "1",
    "node.kubernetes.io/instance-type": "p5.48xlarge",
}
NVL_LABELS = {
    "nvidia.com/gpu.memory": "95830",
    "nvidia.com/gpu.product": "NVIDIA-H100-NVL",
    "nvidia.com/mig.strategy": "single",
}
