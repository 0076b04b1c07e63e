"""DeepSpeed PipelineModule of the U-Net's layers: building, running and warming up this rank's layers."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import DualPipeVModule, LayerSpec, PipelineModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline.cuts import segments
from ddpm_ds.pipeline.messages import edge_group
from ddpm_ds.pipeline.schedule import PassKind
from ddpm_ds.schema.layout import AcrossHosts, Schedule
from ddpm_ds.unet.blocks import Carry, pack, set_context, transformer_blocks, unpack, walk
from ddpm_ds.unet.layers import EmbedLayer, Layer, TransformerBlockLayer, boundary_shapes, has_residual
from ddpm_ds.unet.model import build_layer
from ddpm_ds.unet.operations import projections_of, set_image_index
from ddpm_ds.unet.shards import layers_of_rank
from ddpm_ds.unet.space import Band, SpaceGroup
from ddpm_ds.unet.tensor_group import TensorGroup
from ddpm_ds.unet.weight_gradients import weighted_parts


class UnetLayerSpec(LayerSpec):
    """Spec of a layer, which DeepSpeed builds if it is of this rank's stages."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__(nn.Module)
        self._build = build

    def build(self, log: bool = False) -> nn.Module:
        return self._build()


class UnetPipelineModule(PipelineModule):
    """One rank's layers of the U-Net, cut at ``bounds`` (see :mod:`ddpm_ds.pipeline.cuts`).

    Parameters are named ``{index in the list}.{name in the layer}``, whatever the cuts. Processes beyond one pipeline
    are data-parallel replicas; which process is which follows from ``across`` (:mod:`ddpm_ds.pipeline.placement`).
    ``first`` and ``stop`` are the layers that :meth:`forward` walks. ``others`` are the lists of layers for images of
    other sizes. ``group_sizes`` are the numbers of neighbouring ranks of a tensor group, which compute split layers
    together, and of a space group, which share each image. Weights have ``dtype``; the first replica draws them and the
    engine copies them to others, unless the caller writes all weights, since they are not ``drawn``.
    """

    schedule: Schedule = "1f1b"
    phases = 1
    """Number of stages that a rank holds."""

    def __init__(
        self,
        layers: Sequence[Layer],
        bounds: Sequence[int],
        seed: int,
        across: AcrossHosts = "stages",
        others: Sequence[Sequence[Layer]] = (),
        group_sizes: tuple[int, int] = (1, 1),
        dtype: torch.dtype = torch.float32,
        drawn: bool = True,
    ) -> None:
        stages, (tensor_size, self._space_size) = (len(bounds) - 1) // self.phases, group_sizes
        topology = insides.topology(across, stages, dist.get_world_size() // (stages * tensor_size), tensor_size)
        place = topology.get_coord(dist.get_rank()).data % self._space_size
        self.unet_layers = layers_of_rank(layers, place)
        self.sized_layers = (self.unet_layers, *map(tuple, others))
        """List of layers by the number of the images' size."""
        self._bounds, self._seed, self._dtype, self._drawn = tuple(bounds), seed, dtype, drawn
        specs = [UnetLayerSpec(partial(self._built, index)) for index in range(len(layers))]
        super().__init__(layers=specs, topology=topology)
        if self._grid.get_model_parallel_world_size() > 1:
            device = torch.device(get_accelerator().current_device_name())
            insides.sum_scalars_in(self._grid, partial(edge_group, device=device, blocks=1))

    @cached_property
    def tensor(self) -> TensorGroup:
        """Ranks that share this rank's stages."""
        return insides.tensor_group(self._grid)

    @cached_property
    def space(self) -> SpaceGroup:
        """Ranks that share this rank's images."""
        return insides.space_group(self._grid, self._space_size)

    @cached_property
    def band(self) -> Band | None:
        """This rank's rows of an image; None if it has all."""
        rows = self.unet_layers[0].rows.arriving
        return Band(self.space, rows) if rows else None

    def _built(self, index: int) -> nn.Module:
        """Return this rank's part of a layer, on the device: the host has one tensor at a time."""
        layer, device = self.unet_layers[index], get_accelerator().current_device_name()
        drawn = self._drawn and insides.gives_first_weights(self._grid)
        groups = self.tensor, self.space
        return build_layer(layer, index, self._seed, *groups, device=device, drawn=drawn).to(self._dtype)

    def _partition_layers(self, method: str = "uniform") -> None:
        self.parts = list(self._bounds)
        self.phase_bounds = list(segments(self._bounds, self.schedule, self.stage_id))
        ((self.first, self.stop),) = self.phase_bounds
        self._set_bounds(start=self.first, stop=self.stop)

    def own_layers(self, *phases: int) -> dict[int, nn.Module]:
        """Return the layers of this rank's stages of some phases (default: all), by their index in the list."""
        ends = (self.phase_bounds[phase] for phase in phases or range(self.phases))
        return {index: self.get_submodule(str(index)) for first, stop in ends for index in range(first, stop)}

    def arriving(self, phase: int, kind: PassKind) -> list[nn.Parameter]:
        """Return the trained parameters to which a pass of a phase gives gradients, in about the order of arrival."""
        layers = self.own_layers(phase).values()
        wait = {part.weight for layer in layers for part in weighted_parts(layer)}
        everything = [one for layer in reversed(layers) for one in reversed(list(layer.parameters()))]
        wanted = [one for one in everything if kind == "whole" or (one in wait) == (kind == "weights")]
        wanted = [one for one in wanted if one.requires_grad]
        last = {one for layer in layers for part in projections_of(layer) for one in part.parameters()}
        return sorted(wanted, key=last.__contains__)

    def in_flat_order(self) -> list[nn.Parameter]:
        """Return what this rank trains so that neighbours get their gradients in the same pass, one after another; or
        one number that is no parameter, since DeepSpeed needs something to train.
        """
        kinds: tuple[PassKind, ...] = "inputs", "weights"
        found = [one for phase in reversed(range(self.phases)) for kind in kinds for one in self.arriving(phase, kind)]
        return found or [self.placeholder]

    @cached_property
    def placeholder(self) -> nn.Parameter:
        """Parameter of no layer."""
        return nn.Parameter(torch.zeros(1, dtype=self._dtype, device=get_accelerator().current_device_name()))

    @cached_property
    def rates(self) -> dict[nn.Parameter, float]:
        """Factor on the learning rate of each parameter that this rank trains."""
        listed = (zip(layer.listed, layer.rates, strict=False) for layer in self.unet_layers)
        factors = {f"{index}.{one.name}": rate for index, own in enumerate(listed) for one, rate in own}
        return {one: factors.get(name, 1.0) for name, one in self.named_parameters() if one.requires_grad}

    def reached(self, cut: int) -> bool:
        """Return whether a backward crosses the cut before a layer: something before it is trained."""
        return self.unet_layers[cut - 1].reached

    def size_number(self, size: tuple[int, int]) -> int:
        """Return the index in :attr:`sized_layers` for images of this height and width."""
        return [layers[-1].output_shape[1:] for layers in self.sized_layers].index(size)

    def own_rows(self, inputs: Carry) -> Carry:
        """Return the inputs of the first layer with this rank's rows of the images, which are the first of them."""
        return inputs if self.band is None else (self.band.cut(inputs[0]), *inputs[1:])

    def whole(self, prediction: Tensor) -> Tensor:
        """Return the whole images (N, C, H, W) of a prediction of this rank's rows; collective over its space group."""
        return prediction if self.band is None else self.band.image(prediction)

    def walk(self, phase: int, carry: Carry) -> Any:
        """Run this rank's layers of a phase; return a carry, or after the last layer the prediction."""
        return self(carry)

    def unpacked(self, phase: int, received: Carry, kept: Carry) -> Carry:
        """Return the carry at a stage's beginning, from tensors received and tensors kept on this rank."""
        return unpack(received, self.unet_layers[self.first - 1])

    def packed(self, phase: int, carry: Carry) -> tuple[Carry, Carry]:
        """Split the carry at a stage's end into the tensors to send and those kept on this rank for its next phase."""
        return pack(carry, self.unet_layers[self.stop - 1]), ()

    def forward(self, inputs: Carry) -> Carry | Tensor:
        """Walk this stage's layers, recomputing groups of ``activation_checkpoint_interval`` of them in backward."""
        interval = self.activation_checkpoint_interval
        if not interval or not torch.is_grad_enabled():
            return self._walk(self.first, self.stop)(*inputs)
        carry: Any = inputs
        first = self.first
        if first == 0:  # its inputs need no gradient, so a reentrant checkpoint would detach emb
            carry, first = self._walk(0, 1)(*inputs), 1
        for start in range(first, self.stop, interval):
            carry = self._recomputed(start, min(start + interval, self.stop), carry)
        return carry

    def _walk(self, start: int, stop: int) -> Callable[..., Carry | Tensor]:
        layers = self.forward_funcs[start - self.first : stop - self.first]
        return lambda *carry: walk(layers, carry)

    def _recomputed(self, start: int, stop: int, carry: Carry) -> Carry | Tensor:
        """Run layers ``start`` to ``stop - 1`` under activation checkpointing.

        Skips that these layers leave alone go around the checkpoint, and a tensor that is both ``h`` and the newest
        skip leaves it once: an autograd function that returns a tensor twice, or returns its own input, loses or
        copies gradients under reentrant checkpointing. Dropout is keyed, so no RNG state is kept.
        """
        depth = lowest = 0
        for layer in self.unet_layers[start:stop]:
            depth -= layer.skip_channels > 0 or layer.closes
            lowest = min(lowest, depth)
            depth += layer.pushes or layer.opens
        passing, used = carry[2 : len(carry) + lowest], carry[len(carry) + lowest :]
        last = self.unet_layers[stop - 1]
        run_layers = self._walk(start, stop)

        def run(*inner: Tensor) -> Carry | Tensor:
            outputs = run_layers(*inner)
            return pack(outputs, last) if isinstance(outputs, tuple) else outputs

        outputs = self.activation_checkpoint_func(run, *carry[:2], *used)
        if isinstance(outputs, Tensor):
            return outputs
        h, emb, *skips = unpack(outputs, last)
        return (h, emb, *passing, *skips)


class FoldedUnetModule(UnetPipelineModule, DualPipeVModule):
    """Two stages of a rank of the fold; :meth:`forward` walks the one chosen by ``activate_phase``."""

    schedule: Schedule = "folded"
    phases = 2

    def _partition_layers(self, method: str = "uniform") -> None:
        self.num_stages *= 2  # as the parent counts them from here on
        self.parts = list(self._bounds)
        self.phase_bounds = list(segments(self._bounds, self.schedule, self.stage_id))

    def activate_phase(self, phase: int) -> None:
        """Make :meth:`forward` walk the stage of phase 0 (encoder side) or of phase 1 (decoder side)."""
        super().activate_phase(phase)
        self.first, self.stop = self.phase_bounds[phase]

    def walk(self, phase: int, carry: Carry) -> Any:
        self.activate_phase(phase)
        return self(carry)

    def unpacked(self, phase: int, received: Carry, kept: Carry) -> Carry:
        first = 2 - phase  # h and emb, or h; a residual follows
        return (*received[:first], *kept, *received[first:])

    def packed(self, phase: int, carry: Carry) -> tuple[Carry, Carry]:
        if phase == 0 and self.phase_bounds[0][1] == self.phase_bounds[1][0]:  # it turns
            return carry[:1], carry[1:]
        end = len(carry) - has_residual(self.unet_layers, self.stop)
        return carry[: 2 - phase] + carry[end:], () if phase else carry[1:end]


def warm_up(
    modules: Mapping[int, nn.Module], layers: Sequence[Layer], images: int, *, gradients: bool, recompute: bool
) -> None:
    """Run each of a stage's ``modules``, by their index in ``layers``, on ``images`` images of zeros, one by one.

    This makes all ranks compile, choose and load kernels at the same time, while none waits for a message of another.
    With ``gradients`` backwards as well; no gradient is kept and no hook of a parameter runs. With ``recompute``
    the backward runs each layer forwards once more, in the thread that differentiates: cuDNN's choices of algorithms
    are kept by thread.
    """
    for index, module in modules.items():
        parameters = list(module.parameters())
        trained = [one for one in parameters if one.requires_grad]
        set_image_index([module], torch.arange(images, device=parameters[0].device))
        inputs = _zeros(layers, index, images, parameters[0])
        if isinstance(layer := layers[index], TransformerBlockLayer):
            shape = (images, layer.tokens, layer.context_channels)
            set_context(transformer_blocks([module]), torch.zeros(shape, device=parameters[0].device))
        if not (gradients and layers[index].reached):
            with torch.no_grad():
                module(inputs)
            continue
        leaves = [tensor for tensor in inputs if tensor.is_floating_point()] if index else []
        for leaf in leaves[index == 1 and 0 in modules :]:  # the image needs no gradient, unless it was received
            leaf.requires_grad_()
        if recompute:
            outputs = checkpoint(module, inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            outputs = module(inputs)
        roots = [tensor for tensor in ([outputs] if isinstance(outputs, Tensor) else outputs) if tensor.requires_grad]
        wanted = [*(leaf for leaf in leaves if leaf.requires_grad), *trained]
        torch.autograd.grad(roots, wanted, [torch.zeros_like(root) for root in roots], allow_unused=True)


def forget_peaks(device: torch.device) -> None:
    """Reset a CUDA device's peak memory, after cuDNN's trials of algorithms, which take all that is free."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _zeros(layers: Sequence[Layer], index: int, images: int, like: Tensor) -> tuple[Tensor, ...]:
    """Return inputs of zeros for layer ``index``: a carry, or the inputs of the first layer."""
    layer = layers[index]
    if isinstance(layer, EmbedLayer):
        numbers = torch.zeros(images, dtype=torch.int64, device=like.device)
        image = torch.zeros((images, *layer.output_shape), device=like.device)
        others = [] if layer.classes is None else [numbers.clone()]
        others += [numbers.float()] if layer.condition_level else []
        vectors = [width for width in (layer.numbers, layer.text_numbers) if width]
        return (image, numbers, *others, *(torch.zeros((images, width), device=like.device) for width in vectors))

    def zeros(shape: tuple[int, ...]) -> Tensor:  # makes one-channel images with the strides of training
        memory_format = torch.channels_last if len(shape) == 4 else torch.contiguous_format
        return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=memory_format).zero_()

    tensors = tuple(zeros((images, *shape)) for shape in boundary_shapes(layers, index))
    return unpack(tensors, layers[index - 1])
