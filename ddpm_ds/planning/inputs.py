"""Inputs of every prediction: a machine, by its discounted data sheet, and a run without its layout.

PyTorch is not imported.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ddpm_ds.checkpoint.manifest import BLOCK, blocks_of
from ddpm_ds.config.ds_model import DsConfig
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.ground.errors import LayoutError
from ddpm_ds.ground.units import GIB, Precision
from ddpm_ds.pipeline.cuts import Stage, describe, stages_of
from ddpm_ds.schema.layout import BUCKET_ELEMENTS, ELEMENT_BYTES, WHOLE, Layout, Schedule, Split
from ddpm_ds.unet.layers import EmbedLayer, Layer, context_elements, unet_layers
from ddpm_ds.unet.names import trained_layers
from ddpm_ds.unet.shards import row_layers, split_layers

if TYPE_CHECKING:
    from ddpm_ds.observe.device_speed import LayerSeconds  # imports PyTorch

REACHED_HALF, REACHED_SINGLE, REACHED_CORE = 0.2, 0.5, 0.4
"""Shares of the data sheet's dense flops that convolutions reach in training: of a GPU's in half and in single
precision, and of a processor core's. The first two fit what was measured and published (docs/planner.md)."""
LAUNCH_SECONDS = 5.5e-5
"""Seconds in which a host prepares and launches one of a GPU's kernels: 45 to 80 microseconds were measured beside an
H100 and an H200 (docs/gpu.md)."""
SUM_SECONDS = 1.3e-3
"""Seconds that a sum over two processes takes in a step on a CPU; 1.0 to 1.6 ms were measured on two cores."""
REACHED_MEMORY = 0.8  # share of the data sheet's memory bandwidth that normalisations and activations reach
REACHED_LINK = 0.7  # share of a link's nominal bandwidth that long messages reach
HOST_BANDWIDTH = 6.4e10
"""Bytes per second of a host's memory that steps of Adam reach, shared by its devices: 1.4 billion parameters a second
with averaged weights, 1.9 without. Published are 11.6 in 8.2 s (DeepSpeed's pull request 735) and, on hosts of 8 A100,
18 in 10 s (its issue 6834)."""
PCIE_BANDWIDTH = 2.2e10  # bytes per second between a device and its host, at most
USABLE_MEMORY = 0.94  # share of a GPU's memory for tensors; the rest goes to the driver and the allocator's gaps

NEARLY, TIGHT = 0.02, 0.05
"""Share of the fastest step within which layouts are ordered by memory, and little of the usable memory, as a share."""


@dataclass(frozen=True)
class DeviceKind:
    """Data sheet: nominal rates of one device, in one direction for links in a node and for its network."""

    half_teraflops: float
    single_teraflops: float  # TFLOP/s in fp32; TF32 where convolutions use it by default
    memory_gib: float
    memory_gigabytes_per_second: float
    link_gigabytes_per_second: float
    network_gigabytes_per_second: float
    multiprocessors: int  # 0 of a CPU


KINDS = {
    "b300": DeviceKind(2250, 1125, 268, 8000, 900, 100, 148),
    "b200": DeviceKind(2250, 1125, 180, 8000, 900, 50, 148),
    "h200": DeviceKind(989, 494, 141, 4800, 450, 50, 132),
    "h100": DeviceKind(989, 494, 80, 3350, 450, 50, 132),
    "a100-80": DeviceKind(312, 156, 80, 2039, 300, 25, 108),
    "a100-40": DeviceKind(312, 156, 40, 1555, 300, 25, 108),
    "l40s": DeviceKind(362, 183, 48, 864, 32, 12.5, 142),
    "a10": DeviceKind(125, 62, 24, 600, 32, 12.5, 72),
    "l4": DeviceKind(121, 60, 24, 300, 32, 12.5, 58),
    "mi300x": DeviceKind(1307, 654, 192, 5300, 448, 50, 304),
    "v100": DeviceKind(125, 15.7, 32, 900, 150, 12.5, 80),
    "t4": DeviceKind(65, 8.1, 16, 320, 16, 6.25, 40),
    "rtxpro6000": DeviceKind(504, 252, 96, 1792, 64, 12.5, 188),
    "rtx5090": DeviceKind(209, 105, 32, 1792, 64, 12.5, 170),
    "a6000": DeviceKind(155, 77, 48, 768, 32, 12.5, 84),
    "rtx4090": DeviceKind(165, 82, 24, 1008, 32, 12.5, 128),
    "rtx3090": DeviceKind(71, 36, 24, 936, 32, 12.5, 82),
    "cpu": DeviceKind(0.1, 0.1, 8, 10, 2.5, 1.25, 0),
}
"""Data sheets by ``--device-kind``; ``cpu`` is one core, which computes half precision in single.

Sources: data sheets of NVIDIA's HGX, RTX A6000 and RTX PRO 6000 Blackwell and of AMD's Instinct MI300X, and the white
paper of the RTX Blackwell architecture (5090). Tensor cores are dense, with sums in fp32, and links in one direction.
"""


@dataclass(frozen=True)
class Machine:
    """Devices in equal nodes, the rates that they reach, and times measured on them: a run's ``machine.json``."""

    kind: str
    devices: int
    nodes: int
    memory_bytes: int  # bytes of memory of one device
    flops: float  # flops per second of one device, in large convolutions
    memory_bandwidth: float  # bytes per second that one device reads or writes
    link_bandwidth: float  # bytes per second from one device to another of its node
    network_bandwidth: float  # bytes per second from one device to another node
    host_bandwidth: float
    """Bytes per second of the host's memory that each device of a node has, to step there and to copy."""
    layer_seconds: float  # fixed seconds of a layer's forward: on a CPU, which computes and calls Python in turn
    launch_seconds: float  # seconds of the host for each kernel of a GPU, which computes meanwhile; 0 for a CPU
    layer_times: tuple[LayerSeconds, ...] | None = None
    """Seconds of each layer's passes for a micro-batch; None if they were not measured."""
    startup: Mapping[str, LayerSeconds] = field(default_factory=dict)
    """Seconds of a layer's passes that do not depend on the images, by kind of layer; empty if not measured."""
    swap: tuple[float, float] | None = None
    """Seconds that a swap between two devices of a node waits, and bytes per second that each of them sends meanwhile;
    None if not measured (:func:`ddpm_ds.observe.device_speed.measure_swap`)."""

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

    @property
    def sum_seconds(self) -> float:
        """Seconds of each of the log2 T rounds of a sum over T ranks; on a CPU gloo's threads hinder the others."""
        return SUM_SECONDS if self.is_cpu else 2 * self.latency_seconds

    @property
    def swap_speed(self) -> tuple[float, float]:
        """The measured :attr:`swap`, or else assumed numbers."""
        return self.swap or (self.sum_seconds, self.link_bandwidth)

    def on(self, hosts: Sequence[Hashable]) -> Machine:
        """Return the machine with its devices on ``hosts``, one for each rank, if they are known and of equal size."""
        nodes = len(set(hosts)) if len(set(Counter(hosts).values())) == 1 else 1
        return replace(self, nodes=nodes, host_bandwidth=self.host_bandwidth * nodes / self.nodes)

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
        host_bandwidth=HOST_BANDWIDTH * nodes / devices,
        layer_seconds=2e-4 if kind == "cpu" else 0.0,
        launch_seconds=0.0 if kind == "cpu" else LAUNCH_SECONDS,
    )


def kind_of(name: str) -> str | None:
    """Return the kind of a device by CUDA's name, such as ``NVIDIA A100-SXM4-80GB``, or ``cpu``; None if unknown."""
    plain = name.lower().replace("rtx ", "rtx").replace("pro ", "pro")
    if re.search(r"a100(?!\d)", plain):
        return "a100-80" if "80gb" in plain else "a100-40"
    return next((kind for kind in KINDS if re.search(rf"{kind}(?!\d)", plain)), None)  # an L40 is no L4


def machine_like(name: str, memory_bytes: int, *, half: bool, devices: int, nodes: int = 1) -> Machine:
    """Return devices of a name (CUDA's, or ``cpu``) and memory; an unknown GPU is like the one of similar memory."""
    gpus = (kind for kind in KINDS if kind != "cpu")
    alike = min(gpus, key=lambda kind: abs(KINDS[kind].memory_gib * GIB - memory_bytes))
    found = machine(kind_of(name) or alike, half=half, devices=devices, nodes=nodes)
    return replace(found, memory_bytes=memory_bytes)


@dataclass(frozen=True)
class Workload:
    """Run without its layout: spec, DeepSpeed JSON, and the kind of device that it trains on."""

    spec: RunSpec
    config: DsConfig  # checked DeepSpeed JSON; a layout replaces some of its keys
    on_cpu: bool
    sizes: tuple[tuple[tuple[int, int], float], ...] = ()
    """Height and width of the images of each bucket of aspect, and the share of images that are in it; () without."""
    encoder_elements: int = 0
    """Elements of the encoders on each device that encodes captions while training, in fp16, on a CPU in fp32."""
    split: Split = WHOLE  # what groups of ranks share of the layers
    _by_split: dict[object, Workload] = field(default_factory=dict, init=False, compare=False, repr=False)

    def of(self, layout: Layout) -> Workload:
        """Return the run with its layers split as in a layout; the same one for the same split."""
        if layout.split == self.split:
            return self
        return self._by_split.setdefault(layout.split, replace(self, split=layout.split))

    @functools.cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Layers of the U-Net for images of ``data.image_size``."""
        return layers_for(self.spec, self.spec.data.size, self.split)

    @functools.cached_property
    def largest_layers(self) -> tuple[Layer, ...]:
        """Layers for images of the largest bucket, which need most memory."""
        sizes = [size for size, _ in self.sizes]
        return layers_for(self.spec, max(sizes, key=math.prod), self.split) if sizes else self.layers

    @functools.cached_property
    def mean_macs(self) -> float:
        """Multiply-accumulates of the mean image of all buckets, as a multiple of those at ``data.image_size``."""
        return self._mean(lambda size: sum(layer.macs for layer in layers_for(self.spec, size, self.split)))

    @property
    def mean_pixels(self) -> float:
        """Pixels of the mean image of all buckets, as a multiple of those at ``data.image_size``."""
        return self._mean(math.prod)

    def _mean(self, of: Callable[[tuple[int, int]], int]) -> float:
        if not self.sizes:
            return 1.0
        return sum(share * of(size) for size, share in self.sizes) / of(self.spec.data.size)

    def chunk_elements(self, own: Sequence[Stage], zero_stage: int) -> int:
        """Return the elements of a chunk of a rank's flat weights: those of a bucket, or of the largest parameter."""
        asked = self.config.zero_optimization.reduce_bucket_size if zero_stage else "auto"
        layers = (layer for stage in own for layer in self.layers[stage.start : stage.stop])
        largest = max((elements for layer in layers for _, elements in layer.trained_elements), default=1)
        return max(BUCKET_ELEMENTS if asked == "auto" else asked, largest)

    @functools.cached_property
    def precision(self) -> Precision:
        return self.config.precision

    @property
    def stored_bytes(self) -> int:
        """Bytes of a weight, of an element on the wire between stages and of a gradient."""
        return ELEMENT_BYTES[self.precision]

    @functools.cached_property
    def arithmetic_bytes(self) -> int:
        """Bytes of an activation; a CPU may compute half precision in single."""
        from ddpm_ds.ground.device import DTYPES
        from ddpm_ds.unet.operations import arithmetic_dtype

        return arithmetic_dtype("cpu" if self.on_cpu else "cuda", DTYPES[self.precision][1]).itemsize

    def takes_graphs(self, *, whole: bool) -> bool:
        """Return whether steps may be CUDA graphs, if each device has the ``whole`` U-Net or only a part."""
        asked, able = self.config.graphs, self.is_fused or self.config.is_8bit
        return able and not self.on_cpu and (asked is True or (asked == "auto" and whole))

    def is_replayed(self, layout: Layout) -> bool:
        """Return whether CUDA graphs replay each step of a layout."""
        flat = not layout.offload and (layout.zero_stage > 0 or self.precision == "bf16")
        return flat and self.takes_graphs(whole=layout.stages == layout.tensor.size == layout.space.size == 1)

    @property
    def is_fused(self) -> bool:
        """Whether PyTorch's fused Adam steps, in place."""
        return not self.config.is_8bit and bool(self.config.optimizer.params.fused)

    @functools.cached_property
    def moment_bytes(self) -> tuple[int, ...]:
        """Bytes of Adam's two moments of each layer: in fp32, or of weights in 8 bits, with a scale for each block."""

        def size(dimensions: int, elements: int) -> int:
            wide = dimensions == 1 or not self.config.is_8bit
            return 8 * elements if wide else 2 * (BLOCK + 4) * len(blocks_of(0, elements))

        return tuple(sum(size(len(one.shape), own) for one, own in layer.trained_elements) for layer in self.layers)


def encoding_ranks(layers: Sequence[Layer], bounds: Sequence[int], schedule: Schedule) -> tuple[int, ...]:
    """Return the ranks that read encoded text: those with transformer blocks, and the first if it reads pooled text."""
    first = layers[0]
    pooled = isinstance(first, EmbedLayer) and first.pooled_channels > 0
    return tuple(
        rank
        for rank, own in enumerate(rank_stages(layers, bounds, schedule))
        if (rank == 0 and pooled) or context_elements(layers, *((stage.start, stage.stop) for stage in own))
    )


def layers_for(spec: RunSpec, size: tuple[int, int], split: Split) -> tuple[Layer, ...]:
    """Return the layers of a run's U-Net for images of some size (height, width), as groups of ranks share them."""
    tensor, space = split
    layers = unet_layers(spec.unet, replace(spec.data.interface, size=size))
    layers = trained_layers(layers, spec.optimizer.train, spec.optimizer.rates)
    return row_layers(split_layers(layers, tensor), space)


@functools.lru_cache(maxsize=4096)
def rank_stages(layers: Sequence[Layer], bounds: Sequence[int], schedule: Schedule) -> tuple[tuple[Stage, ...], ...]:
    """Return the stages of each rank by phase: one under 1F1B, two in the fold."""
    stages = describe(layers, bounds, schedule)
    ranks = 1 + max(stage.rank for stage in stages)
    return tuple(tuple(stages[stage] for stage in stages_of(rank, ranks, schedule)) for rank in range(ranks))
