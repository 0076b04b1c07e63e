"""Speed of this machine: seconds of each layer, peak flops of matrix products, and start-up times of layers.

The first two are measured once and stored in the user's cache folder; start-up times are kept with each run.
"""

import contextlib
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from pydantic import PositiveFloat, TypeAdapter
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, spawn

from ddpm_ds.ground.device import DTYPES, wait_for_device
from ddpm_ds.ground.files import replace_file
from ddpm_ds.ground.formats import read_json
from ddpm_ds.ground.host import processes_on_host
from ddpm_ds.ground.outputs import cache_folder
from ddpm_ds.ground.units import Precision
from ddpm_ds.pipeline.messages import all_gather_objects, barrier
from ddpm_ds.processes.process_group import decided_by_rank_0
from ddpm_ds.unet.blocks import set_context, transformer_blocks
from ddpm_ds.unet.layers import DownsampleLayer, EmbedLayer, Layer, Rows, TransformerBlockLayer, UpsampleLayer
from ddpm_ds.unet.model import build_layer
from ddpm_ds.unet.operations import arithmetic_dtype, set_image_index
from ddpm_ds.unet.space import SpaceGroup
from ddpm_ds.unet.tensor_group import TensorGroup

ENOUGH_SECONDS = 0.2  # seconds of timing after which a layer is not run again; it runs at least once
MOST_TIMES = 20
SIZES = {"cpu": (512, 1024), "cuda": (4096, 8192)}
"""Rows of square matrices; a device reaches its peak on large ones that fit its caches."""
PEAK_SECONDS = 0.15  # seconds of matrix products timed for each size
SHORT, LONG, SWAPS, TURNS, LEAST_SWAP = 2**9, 2**22, 20, 5, 1e-3
"""Bytes of a short and a long swap, their number in a turn, turns, and the least time of one, in products."""
SPEED = "speed.json"


class Remembered:
    """Measurements of this machine in a file of the user's cache folder: positive numbers by the facts they depend on.

    A damaged file is replaced, and one that can't be written is left.
    """

    def __init__(self, name: str) -> None:
        self._file = cache_folder() / name
        try:
            self._known = TypeAdapter(dict[str, list[PositiveFloat]]).validate_python(read_json(self._file))
        except (OSError, ValueError):
            self._known = {}

    def get(self, facts: Sequence[object]) -> list[float] | None:
        return self._known.get(json.dumps(facts, sort_keys=True))

    def set(self, facts: Sequence[object], values: list[float]) -> None:
        self._known[json.dumps(facts, sort_keys=True)] = values
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._file, json.dumps(self._known).encode())


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    capability = torch.backends.cpu.get_cpu_capability()  # chooses between ways in unet/operations.py
    return f"{platform.processor() or platform.machine()} {capability} x {torch.get_num_threads()}"


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of a layer's forward and backward pass of one micro-batch on one device."""

    forward: float
    backward: float

    def times(self, factor: float) -> "LayerSeconds":
        """Return the seconds of a device on which passes take so many times as long."""
        return LayerSeconds(self.forward * factor, self.backward * factor)


LayerTimes = Callable[[Sequence[Layer], int], Sequence[LayerSeconds]]
"""Function from layers and the images of a micro-batch to the seconds of each layer, without sums of tensor groups."""


def measured_times(
    device: torch.device, precision: Precision, progress: Callable[[Layer, int], None] = lambda layer, images: None
) -> LayerTimes:
    """Return a function that measures layers: each shape once for each micro-batch, on ``device`` in ``precision``.

    Results are cached. ``progress`` is called before a layer is timed.
    """
    known = Remembered("layer_times.json")

    def seconds(layer: Layer, images: int) -> LayerSeconds:
        shape = {name: value for name, value in asdict(layer).items() if name != "name"}
        facts = [_name(device), type(layer).__name__, shape, images, precision, "channels_last", torch.__version__]
        if (found := known.get(facts)) is None:
            progress(layer, images)
            known.set(facts, found := list(astuple(time_layer(layer, images, device, DTYPES[precision][1]))))
        return LayerSeconds(*found)

    return lambda layers, images: [seconds(layer, images) for layer in layers]


def time_layer(layer: Layer, images: int, device: torch.device, dtype: torch.dtype) -> LayerSeconds:
    """Return median seconds of a layer's forward and backward, after a warm-up that is not counted."""
    rows = layer.rows
    space = SpaceGroup(rows.rank, max(len(rows.arriving), len(rows.leaving)))
    module = build_layer(layer, 0, 0, TensorGroup(0, layer.shards), space)  # which send nothing
    module.to(device=device, dtype=dtype)
    set_image_index(module.modules(), torch.arange(images, device=device))
    inputs = _inputs(layer, images, device, dtype)
    if isinstance(layer, TransformerBlockLayer):
        shape = (images, layer.tokens, layer.context_channels)
        set_context(transformer_blocks([module]), torch.randn(shape, device=device))
    times: list[tuple[float, float]] = []
    begin = time.perf_counter()
    while len(times) < 2 or (len(times) <= MOST_TIMES and time.perf_counter() - begin < ENOUGH_SECONDS):
        for tensor in (*inputs, *module.parameters()):
            tensor.grad = None
        start = _now(device)
        outputs = module(inputs)
        h = outputs if isinstance(outputs, Tensor) else outputs[isinstance(layer, EmbedLayer)]  # it computes emb
        middle = _now(device)
        if h.requires_grad:  # else nothing of the first layer is trained
            torch.autograd.backward([h], [torch.ones_like(h)])
        times.append((middle - start, _now(device) - middle))
    forwards, backwards = zip(*times[1:], strict=True)
    return LayerSeconds(statistics.median(forwards), statistics.median(backwards))


def _inputs(layer: Layer, images: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return a carry as the layer takes it, with gradients; for the first layer x_t, t and labels."""
    h = torch.randn(images, layer.in_channels, *layer.in_size, device=device, dtype=dtype)
    if isinstance(layer, EmbedLayer):
        t = torch.zeros(images, dtype=torch.int64, device=device)
        labels = () if layer.classes is None else (t,)
        text = (torch.randn(images, layer.text_numbers, device=device),) if layer.text_numbers else ()
        return (h, t, *labels, *text)
    emb = torch.randn(images, layer.embedding_channels, device=device, dtype=dtype)
    carry = [h, emb]
    if layer.skip_channels:
        carry.append(torch.randn(images, layer.skip_channels, *layer.in_size, device=device, dtype=dtype))
    if layer.closes:
        carry.append(torch.randn_like(h))
    formats = {2: torch.contiguous_format, 4: torch.channels_last}
    return tuple(tensor.contiguous(memory_format=formats[tensor.ndim]).requires_grad_() for tensor in carry)


def _now(device: torch.device) -> float:
    wait_for_device(device)
    return time.perf_counter()


def known_swap(name: str) -> tuple[float, float] | None:
    """Return what :func:`measure_swap` has found between devices of a ``name``, such as ``cpu``; None if nothing."""
    found = Remembered("swap_speed.json").get(_swap_facts(name))
    return None if found is None else (found[0], found[1])


def _swap_facts(name: str) -> list[object]:
    return [name, platform.machine(), torch.__version__]


def measure_swap(name: str, device: torch.device) -> None:
    """Measure a swap of two processes on this machine, unless it is known or there is one GPU alone: the seconds that
    a short one takes, and the bytes per second that each sends in a long one. Between swaps both compute.
    """
    if known_swap(name) is not None or (device.type == "cuda" and torch.cuda.device_count() < 2):
        return
    with TemporaryDirectory() as folder, contextlib.suppress(ProcessException):  # where no process may start
        spawn(_swap, (device.type, folder, torch.get_num_threads()), nprocs=2)
        Remembered("swap_speed.json").set(_swap_facts(name), read_json(Path(folder, SPEED)))


def _swap(rank: int, kind: str, folder: str, threads: int) -> None:
    torch.set_num_threads(threads)
    device, backend = torch.device(kind), "gloo"
    if kind == "cuda":
        device, backend = torch.device(kind, rank), "nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", world_size=2, rank=rank)
    group, a = SpaceGroup(rank, 2, dist.group.WORLD), torch.randn((SIZES[kind][0],) * 2, device=device)

    def seconds(size: int) -> float:
        """Least over turns of the mean seconds of a product and a swap of so many bytes; 0 swaps nothing."""
        message, found = torch.zeros(size, dtype=torch.uint8, device=device), list[float]()
        for _ in range(TURNS + 1):  # the first connects
            begin = _now(device)
            for _ in range(SWAPS):
                torch.mm(a, a)
                if size:
                    group.swap({1 - rank: [message]}, {1 - rank: [(message.shape, message.dtype)]}, device)()
            found.append((_now(device) - begin) / SWAPS)
        return min(found[1:])

    alone, short, long = map(seconds, (0, SHORT, LONG))
    if rank == 0:
        least = alone * LEAST_SWAP
        speed = [max(short - alone, least), LONG / max(long - short, least)]
        Path(folder, SPEED).write_text(json.dumps(speed))
    dist.destroy_process_group()


def shared_peak(device: torch.device, precision: Precision) -> float:
    """Return flops per second of one device, the mean over all ranks; collective, with the same result on each rank.

    Rank 0 caches it. All ranks measure at once, so that processes on one CPU share it as they do in training.
    """
    dtype = arithmetic_dtype(device.type, DTYPES[precision][1])
    where = _name(device) if device.type == "cuda" else f"{_name(device)} x {processes_on_host()}"
    facts = [where, str(dtype), torch.__version__]
    known = decided_by_rank_0(lambda: Remembered("matmul_peak.json").get(facts), list[float] | None)
    if known is not None:
        return known[0]
    barrier()
    peak = statistics.fmean(all_gather_objects(matmul_peak(device, dtype), float))
    if dist.get_rank() == 0:
        Remembered("matmul_peak.json").set(facts, [peak])
    return peak


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the flops per second of the fastest product of square matrices, in TF32 where convolutions use it."""
    matmul, peak = torch.backends.cuda.matmul, 0.0
    before = matmul.allow_tf32
    matmul.allow_tf32 = torch.backends.cudnn.allow_tf32
    try:
        for size in SIZES[device.type]:
            a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
            out = torch.mm(a, b)  # the first one chooses a kernel
            fastest, end = float("inf"), time.perf_counter() + PEAK_SECONDS
            while time.perf_counter() < end or fastest == float("inf"):
                begin = _now(device)
                torch.mm(a, b, out=out)
                fastest = min(fastest, _now(device) - begin)
            peak = max(peak, 2 * size**3 / fastest)
        return peak
    finally:
        matmul.allow_tf32 = before


FEW_PIXELS = 2  # height and width of an image on which a layer computes next to nothing


def startup_times(layers: Sequence[Layer], device: torch.device, precision: Precision) -> dict[str, LayerSeconds]:
    """Return the seconds of a pass that do not depend on images (kernel starts, Python, reading weights) by layer kind.

    The smallest layer of each kind is timed on one tiny image, which takes 0.1 to 0.2 s.
    """
    smallest: dict[str, Layer] = {}
    for layer in sorted(layers, key=lambda layer: layer.parameters):
        smallest.setdefault(type(layer).__name__, layer)
    startup = {}
    for kind, layer in smallest.items():
        side_in, side_out = (FEW_PIXELS * (1 + isinstance(layer, each)) for each in (DownsampleLayer, UpsampleLayer))
        tiny = replace(layer, in_size=(side_in, side_in), out_size=(side_out, side_out), rows=Rows())
        startup[kind] = time_layer(tiny, 1, device, DTYPES[precision][1])
    return startup
