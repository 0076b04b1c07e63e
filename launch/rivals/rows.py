"""Rows of a benchmark: common parts, and plain PyTorch loops of our U-Net and of others."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from deepspeed.runtime import lr_schedules
from torch import Tensor, nn

from ddpm_ds.data.cache import DatasetCache, Subset
from ddpm_ds.data.loader import MicroBatch, Share
from ddpm_ds.data.prepare import How, prepare
from ddpm_ds.evaluate.diffusers.unet import to_diffusers
from ddpm_ds.evaluate.diffusers.unet_config import diffusers_config
from ddpm_ds.ground.device import DTYPES, share_threads
from ddpm_ds.ground.errors import LayoutError
from ddpm_ds.ground.outputs import cache_folder
from ddpm_ds.pipeline.build import quiet_deepspeed, use_host_accelerator
from ddpm_ds.planning.run_plan import RunDraft, RunPlan, machine_here, make_plan, with_decisions
from ddpm_ds.schema.layout import Schedule
from ddpm_ds.training.objective import Denoising, Noised, fields_read, replica_batches
from ddpm_ds.training.start import check_store
from ddpm_ds.unet.model import UNet, choose_kernels, compile_layers
from ddpm_ds.unet.operations import use_kernels
from ddpm_ds.unet.shards import whole_layers
from rivals.choice import bounds_of

"""Spec of a U-Net as wide as denoising-diffusion-pytorch's here."""


class Row(Protocol):
    """Way of training, from the same weights, on the same images in the same order."""

    name: str
    comparable: bool
    """Whether its losses should be the first row's; with other random draws or another U-Net they are not."""

    @property
    def note(self) -> str:
        """What a reader of the row's numbers should know, or nothing."""

    def step(self) -> Tensor:
        """Take one optimizer step on the next batch; every process calls it, and it may return before its device.

        Returns this process's part of the batch's mean loss, a scalar: the sum over processes is that loss.
        """


@dataclass(frozen=True)
class Setting:
    """Setting that all rows share."""

    plan: RunPlan
    """Plan for the device, without the keys of reports."""
    store: DatasetCache
    device: torch.device
    verbose: bool = False

    @classmethod
    def prepare(cls, draft: RunDraft, device: torch.device, *, verbose: bool) -> Setting:
        """Prepare images, threads and plan, before any process group exists."""
        use_host_accelerator()
        share_threads(device)
        store = prepare(draft.spec.data, How(progress=int(os.environ["LOCAL_RANK"]) == 0))
        check_store(store, draft.spec)
        ds, hosts = draft.ds.without_reports(), draft.grid.hosts
        plan = make_plan(replace(draft, ds=ds), hosts, machine_here(ds.precision, len(hosts)))
        return cls(plan, store, device, verbose)

    def under(self, schedule: Schedule, stages: int | None = None) -> RunPlan:
        """Return the plan under ``schedule``, with the cuts and the order that a run would have; collective."""
        plan = self.plan
        ds = plan.ds.with_layout(schedule=schedule, stages=stages or plan.ds.layout.stages)
        return with_decisions(replace(plan, ds=ds, bounds=bounds_of(plan, schedule, stages)), self.device)

    def objective(self) -> Denoising:
        store = self.store
        return Denoising(self.plan.spec, self.device, store.meta.statistics, store.constants, store.empty_text)

    def batches(self, replicas: int, replica: int) -> Iterator[MicroBatch]:
        """Yield the endless micro-batches of one of ``replicas``, from the first image on."""
        spec, layout = self.plan.spec, self.plan.ds.layout
        share = Share(layout.micro_batch_images, replicas, replica)
        fields = fields_read(spec, first=True, last=True, text=spec.unet.text is not None)
        return replica_batches(spec, Subset.of(self.store), share, self.device, fields=fields)


class Optimizer:
    """AdamW with loss scale, fp32 masters of 16-bit weights, clipping and learning rates."""

    def __init__(
        self, setting: Setting, parameters: Iterable[nn.Parameter], *, fused: bool = False, scaled: bool = False
    ) -> None:
        spec, config = setting.plan.spec.optimizer, setting.plan.ds.config
        self._parameters = list(parameters)
        narrow = self._parameters[0].dtype is not torch.float32
        self.masters = [nn.Parameter(one.detach().float()) for one in self._parameters] if narrow else []
        for master in self.masters:
            master.grad = torch.empty_like(master)
        self._trained = self.masters or self._parameters
        self._clip_norm = config.gradient_clipping
        self._adamw = torch.optim.AdamW(
            self._trained,
            lr=spec.learning_rate,
            betas=spec.betas,
            eps=spec.epsilon,
            weight_decay=spec.weight_decay,
            fused=True if fused else None,  # False would keep PyTorch from choosing foreach
        )
        self._scheduler = None
        if scheduler := config.given.get("scheduler"):
            with quiet_deepspeed(verbose=False):  # DeepSpeed's own learning rates
                self._scheduler = getattr(lr_schedules, scheduler["type"])(self._adamw, **scheduler["params"])
        first = config.fp16.loss_scale or 2.0**config.fp16.initial_scale_power
        window = 2**31 - 1 if config.fp16.loss_scale else config.fp16.loss_scale_window
        self.scaler = torch.amp.GradScaler(setting.device.type, first, growth_interval=window, enabled=scaled)

    @torch.no_grad()
    def step(self, norm_group: dist.ProcessGroup | None = None) -> None:
        """Unscale and clip gradients by their global norm, step, and free the gradients.

        Processes of ``norm_group`` share one model's parameters.
        """
        if self.masters:
            narrow = [one.grad for one in self._parameters if one.grad is not None]
            torch._foreach_copy_([one.grad for one in self.masters if one.grad is not None], narrow)
        self.scaler.unscale_(self._adamw)
        if self._clip_norm:
            norm = torch.nn.utils.get_total_norm([one.grad for one in self._trained if one.grad is not None])
            if norm_group is not None:
                squared = norm.square()
                dist.all_reduce(squared, group=norm_group)
                norm = squared.sqrt()
            torch.nn.utils.clip_grads_with_norm_(self._trained, self._clip_norm, norm)
        self.scaler.step(self._adamw)
        self.scaler.update()
        if self._scheduler is not None:
            self._scheduler.step()
        if self.masters:
            torch._foreach_copy_(tuple(self._parameters), tuple(self.masters))
        for parameter in self._parameters:
            parameter.grad = None


class RandomDenoising(Denoising):
    """Objective with PyTorch's random draws, as in other people's loops."""

    def prepare(self, micro_batch: MicroBatch) -> Noised:
        images, labels, index = (tensor.to(self._device, non_blocking=True) for tensor in micro_batch[:3])
        if self._spec.data.horizontal_flips:
            flips = torch.rand(len(images), device=self._device) < 0.5
            images = torch.where(flips[:, None, None, None], images.flip(-1), images)
        x0 = images.float().div_(127.5).sub_(1.0)
        t = torch.randint(self._spec.diffusion.timesteps, (len(images),), device=self._device)
        return Noised(x0, t, torch.randn_like(x0), None if self._spec.unet.classes is None else labels, index)


class Loop:
    """Plain PyTorch loop in the first process, which the others wait for."""

    def __init__(
        self, setting: Setting, model: nn.Module, name: str, *, fused: bool = False, objective: Denoising | None = None
    ) -> None:
        self.name, self.note, self.model = name, "", model
        self.comparable = objective is None
        self.optimizer = Optimizer(setting, model.parameters(), fused=fused, scaled=setting.plan.ds.precision == "fp16")
        self._batches, self._micro_batches = setting.batches(1, 0), setting.plan.ds.layout.micro_batches
        self._device, self._objective = setting.device, objective or setting.objective()

    def predict(self, inputs: Sequence[Tensor], images: Tensor) -> Tensor:
        """Return (N, C, H, W) of (x_t, t) or (x_t, t, labels); ``images`` (N,) are positions, as loaded."""
        return self.model(*inputs, images=images.to(self._device, non_blocking=True))

    def step(self) -> Tensor:
        total = torch.zeros((), device=self._device)
        if dist.is_initialized() and dist.get_rank():
            return total
        for micro_batch in itertools.islice(self._batches, self._micro_batches):
            prepared = self._objective.prepare(micro_batch)
            prediction = self.predict(self._objective.inputs(prepared), micro_batch.index)
            loss = self._objective.loss(prediction, prepared) / self._micro_batches
            self.optimizer.scaler.scale(loss).backward()
            total += loss.detach()
        self.optimizer.step()
        return total


def our_loop(setting: Setting) -> Loop:
    """Return the loop of our U-Net in the precision of this JSON."""
    plan, ds = setting.plan, setting.plan.ds
    unet = UNet(whole_layers(plan.layers), plan.spec.train.seed).to(setting.device, DTYPES[ds.precision][1])
    use_kernels(unet.layers, choose_kernels(ds.config.kernels, setting.device, captured=False))
    if ds.config.compile:
        compile_layers(list(unet.layers), cache_folder() / "compiled")
    name = f"plain PyTorch loop, {ds.precision}"
    return Loop(setting, unet, name, fused=bool(ds.config.optimizer.params.fused))


class AutocastLoop(Loop):
    """Loop as other people write it: fp32 weights, and a forward under ``torch.autocast`` in the run's precision."""

    def __init__(
        self, setting: Setting, model: nn.Module, name: str, call: Callable[..., Tensor], *, randn: bool = False
    ) -> None:
        precision = setting.plan.ds.precision
        objective = RandomDenoising(setting.plan.spec, setting.device) if randn else None
        self._call = call
        self._autocast = torch.autocast(setting.device.type, DTYPES[precision][1], enabled=precision != "fp32")
        name += f"{', torch.randn' if randn else ''}, autocast {precision}, AdamW"
        super().__init__(setting, model.to(setting.device), name, objective=objective)

    def predict(self, inputs: Sequence[Tensor], images: Tensor) -> Tensor:
        with self._autocast:
            return self._call(*inputs)


def diffusers_loop(setting: Setting, variant: str = "") -> Loop:
    """Return the loop of a ``UNet2DModel`` with our configuration and weights; LayoutError if it can't have them.

    ``variant`` may be "compiled", or "randn" for PyTorch's random draws.
    """
    from diffusers import UNet2DModel

    plan = setting.plan
    try:
        model: Any = UNet2DModel(**diffusers_config(plan.spec.unet, plan.spec.data.interface))
    except ValueError as error:
        raise LayoutError(f"--rows diffusers: {error}; leave the row out") from None
    model.load_state_dict(to_diffusers(UNet(plan.layers, plan.spec.train.seed).layers.state_dict(), plan.layers))

    def call(x_t: Tensor, t: Tensor, labels: Tensor | None = None) -> Any:
        return model(x_t, t, class_labels=labels, return_dict=False)[0]

    name = "diffusers UNet2DModel"
    if variant == "compiled":
        model.compile()
        name += ", torch.compile"
    return AutocastLoop(setting, model, name, call, randn=variant == "randn")
