"""Devices to plan for: compute and network speeds, and memory, from discounted data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ddpm_ds.command_line import GIB
from ddpm_ds.errors import LayoutError

REACHED_HALF, REACHED_SINGLE, REACHED_CORE = 0.2, 0.5, 0.4
"""Shares of the data sheet's dense flops that convolutions reach in training: of a GPU's in half and in single
precision, and of a processor core's. The first two fit what was measured and published (docs/planner.md)."""
LAUNCH_SECONDS = 8e-5
"""Seconds in which a host prepares and launches one of a GPU's kernels, as measured beside an H100 (docs/gpu.md)."""
REACHED_MEMORY = 0.8
"""Share of the data sheet's memory bandwidth that normalisations and activations reach."""
REACHED_LINK = 0.7
"""Share of a link's nominal bandwidth that long messages reach."""
USABLE_MEMORY = 0.94
"""Share of a GPU's memory for tensors; the rest goes to the driver and the allocator's gaps."""


@dataclass(frozen=True)
class DeviceKind:
    """Data sheet: nominal rates of one device, in one direction for links."""

    half_teraflops: float
    single_teraflops: float
    """TFLOP/s in fp32; TF32 where convolutions use it by default."""
    memory_gib: float
    memory_gigabytes_per_second: float
    link_gigabytes_per_second: float
    """Gigabytes per second between devices of a node."""
    network_gigabytes_per_second: float
    """Gigabytes per second between nodes, per device."""


KINDS = {
    "b200": DeviceKind(2250, 1125, 180, 8000, 900, 50),
    "h200": DeviceKind(989, 494, 141, 4800, 450, 50),
    "h100": DeviceKind(989, 494, 80, 3350, 450, 50),
    "a100-80": DeviceKind(312, 156, 80, 2039, 300, 25),
    "a100-40": DeviceKind(312, 156, 40, 1555, 300, 25),
    "l40s": DeviceKind(362, 183, 48, 864, 32, 12.5),
    "a10": DeviceKind(125, 62, 24, 600, 32, 12.5),
    "l4": DeviceKind(121, 60, 24, 300, 32, 12.5),
    "v100": DeviceKind(125, 15.7, 32, 900, 150, 12.5),
    "t4": DeviceKind(65, 8.1, 16, 320, 16, 6.25),
    "rtx4090": DeviceKind(165, 82, 24, 1008, 32, 12.5),
    "rtx3090": DeviceKind(71, 36, 24, 936, 32, 12.5),
    "cpu": DeviceKind(0.1, 0.1, 8, 10, 2.5, 1.25),
}
"""Data sheets by ``--device-kind``; ``cpu`` is one core, which computes half precision in single."""


@dataclass(frozen=True)
class Machine:
    """Devices in equal nodes, with the rates that they reach."""

    kind: str
    devices: int
    nodes: int
    memory_bytes: int
    """Bytes of memory of one device."""
    flops: float
    """Flops per second of one device, in large convolutions."""
    memory_bandwidth: float
    """Bytes per second that one device reads or writes."""
    link_bandwidth: float
    """Bytes per second from one device to another of its node."""
    network_bandwidth: float
    """Bytes per second from one device to another node."""
    host_bandwidth: float
    """Bytes per second between a device and its share of the host's memory."""
    layer_seconds: float
    """Fixed seconds of a layer's forward: on a CPU, which computes and calls Python in turn."""
    launch_seconds: float
    """Seconds of the host for each kernel of a GPU, which computes meanwhile; 0 for a CPU."""

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    @property
    def usable_bytes(self) -> int:
        """Bytes of a device's memory that a plan may use."""
        return usable(self.memory_bytes, on_cpu=self.is_cpu)

    @property
    def devices_per_node(self) -> int:
        """Number of devices in a node; global ranks fill one node after the other."""
        return self.devices // self.nodes

    @property
    def latency_seconds(self) -> float:
        """Seconds from posting a message to its first byte."""
        return 1e-4 if self.is_cpu else 2e-5

    def words(self) -> str:
        """Return the devices and their rates in a line, for the output."""
        between = f", {self.network_bandwidth / 1e9:.3g} GB/s to other nodes" if self.nodes > 1 else ""
        nodes = f" in {self.nodes} nodes" if self.nodes > 1 else ""
        return (
            f"{self.devices} x {self.kind}{nodes}: {self.flops / 1e12:.3g} TFLOP/s reached, "
            f"{self.memory_bytes / GIB:.4g} GiB each, {self.link_bandwidth / 1e9:.3g} GB/s between devices{between}"
        )


def usable(memory_bytes: int, *, on_cpu: bool) -> int:
    """Return the bytes of a device's memory that tensors may take."""
    return memory_bytes if on_cpu else int(USABLE_MEMORY * memory_bytes)


def machine(kind: str, *, half: bool, devices: int, nodes: int) -> Machine:
    """Return devices of a kind in :data:`KINDS` that train in single precision or ``half`` (fp16 or bf16).

    Raises:
        LayoutError: there is no such kind, or the devices can't be divided evenly among the nodes.
    """
    if kind not in KINDS:
        raise LayoutError(f"--device-kind {kind} is not in the planner's table; use {' or '.join(KINDS)}")
    if devices % nodes:
        more = -(-devices // nodes) * nodes
        raise LayoutError(
            f"--processes {devices} can't be shared evenly by --nodes {nodes}; use --processes {more} or a number of "
            f"nodes that divides {devices}"
        )
    sheet = KINDS[kind]
    teraflops = REACHED_HALF * sheet.half_teraflops if half else REACHED_SINGLE * sheet.single_teraflops
    if kind == "cpu":
        teraflops = REACHED_CORE * sheet.single_teraflops
    return Machine(
        kind=kind,
        devices=devices,
        nodes=nodes,
        memory_bytes=int(sheet.memory_gib * GIB),
        flops=teraflops * 1e12,
        memory_bandwidth=REACHED_MEMORY * sheet.memory_gigabytes_per_second * 1e9,
        link_bandwidth=REACHED_LINK * sheet.link_gigabytes_per_second * 1e9,
        network_bandwidth=REACHED_LINK * sheet.network_gigabytes_per_second * 1e9,
        host_bandwidth=8e9,
        layer_seconds=2e-4 if kind == "cpu" else 0.0,
        launch_seconds=0.0 if kind == "cpu" else LAUNCH_SECONDS,
    )


def kind_of(name: str) -> str | None:
    """Return the kind of a device by CUDA's name, such as ``NVIDIA A100-SXM4-80GB``, or ``cpu``; None if unknown."""
    plain = name.lower().replace("rtx ", "rtx")
    if re.search(r"a100(?!\d)", plain):
        return "a100-80" if "80gb" in plain else "a100-40"
    return next((kind for kind in KINDS if re.search(rf"{kind}(?!\d)", plain)), None)  # an L40 is no L4


def machine_like(name: str, memory_bytes: int, *, half: bool, devices: int, nodes: int) -> Machine:
    """Return devices of a name and memory; of an unknown GPU, those of the table with the most similar memory.

    See :func:`machine`. ``name`` is CUDA's, or ``cpu``.
    """
    gpus = (kind for kind in KINDS if kind != "cpu")
    alike = min(gpus, key=lambda kind: abs(KINDS[kind].memory_gib * GIB - memory_bytes))
    found = machine(kind_of(name) or alike, half=half, devices=devices, nodes=nodes)
    return replace(found, memory_bytes=memory_bytes)
