"""Optimizer step as a function of tensors on the device: the host neither waits for it nor gives it a number.

Learning rate, loss scale and whether a step is skipped are tensors: a CUDA graph would replay the numbers that the host
had when it was captured. The host reads them where people see them, at log points and in checkpoints.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline.adam8bit import Adam8bit
from ddpm_ds.pipeline.deepspeed_insides import OwnedPiece
from ddpm_ds.unet.tensor_group import shard_of


class LossScale:
    """Loss scale of fp16; moves as DeepSpeed's: down after ``hysteresis`` overflows, up after a window without."""

    def __init__(self, settings: insides.ScaleSettings, device: torch.device) -> None:
        self.settings = settings
        self.value = torch.full((), settings.first, device=device)
        self.overflows_at_floor = torch.zeros((), device=device)
        """Number of steps in a row, up to the last, that overflowed although the scale could fall no further."""
        self._stable = torch.full((), -1.0, device=device)  # steps since the scale moved, without the first of them
        self._hysteresis = torch.full((), float(settings.hysteresis), device=device)
        self._updates = 0

    @torch.no_grad()
    def update(self, invalid: Tensor, found: Tensor) -> None:
        """Move the scale after a step; ``invalid`` is whether it overflowed, ``found`` the same as 0.0 or 1.0."""
        own = self.settings
        self.overflows_at_floor.add_(1).mul_(found).mul_(self.value <= own.floor)
        if not own.moves:
            return
        falls = found * (self._hysteresis <= 1)
        self._stable.add_(1).masked_fill_(invalid, -1.0)
        grows = self._stable == own.window
        self._stable.masked_fill_(grows, 0.0)
        self.value.addcmul_(self.value, grows, value=own.factor - 1)
        self.value.addcmul_(self.value, falls, value=1 / own.factor - 1).clamp_(min=own.floor)
        if own.hysteresis > 1:
            restored = ~invalid if own.restores_at_once else grows
            self._hysteresis.sub_(found).clamp_(min=1).masked_fill_(restored, float(own.hysteresis))

    def tensors(self) -> list[Tensor]:
        """Return the tensors that :meth:`update` changes."""
        return [self.value, self.overflows_at_floor, self._stable, self._hysteresis]

    def count(self) -> None:
        """Count a step on the host, for checkpoints."""
        self._updates += 1

    def state(self) -> dict[str, float]:
        """Return the state under DeepSpeed's names; empty if the scale is fixed. Waits for the device."""
        if not self.settings.moves:
            return {}
        stable, hysteresis = int(self._stable), int(self._hysteresis)
        values = (float(self.value), self._updates, self._updates - 2 - stable, hysteresis)
        return dict(zip(insides.SCALER_FIELDS, values, strict=True))

    def load(self, state: dict[str, float]) -> None:
        """Restore the values of :meth:`state` that are given, and forget overflows."""
        self.overflows_at_floor.zero_()
        if not self.settings.moves or "cur_scale" not in state:
            return
        self._updates = int(state["cur_iter"])
        stable = self._updates - 2 - state["last_overflow_iter"]
        self.value.fill_(state["cur_scale"])
        self._stable.fill_(stable % self.settings.window if stable > 0 else stable)
        self._hysteresis.fill_(min(state.get("cur_hysteresis", 1), self.settings.hysteresis))


class OwnStep:
    """Step of DeepSpeed's optimizer, clipped, or skipped if its gradients are not finite.

    With PyTorch's fused Adam and :class:`Adam8bit` the device decides whether a step is skipped. Other optimizers, and
    those in host memory, can't skip by themselves: then the host waits for the norm.
    """

    def __init__(self, engine: PipelineEngine) -> None:
        self._engine, self._optimizer = engine, engine.basic_optimizer
        self.decides_itself = bool(self._optimizer.param_groups[0].get("fused")) and not insides.offloads(engine)
        """Whether the optimizer takes the learning rate and whether to skip a step from the device."""
        self._widens = isinstance(self._optimizer, Adam8bit)
        """Whether the optimizer itself widens gradients and multiplies them by their factor."""
        self._scale = LossScale(insides.scale_settings(engine), engine.device) if engine.fp16_enabled() else None
        self._checks = insides.checks_gradients(engine)
        self._rate = torch.zeros((), device=engine.device)
        self._norm = torch.full((), float("nan"), device=engine.device)  # all graphs of a step use it, at one address
        self._invalid = torch.zeros((), dtype=torch.bool, device=engine.device)
        self._skipped = torch.zeros((), device=engine.device)
        self._withheld = torch.zeros((), device=engine.device)  # 1 skips any step
        self.frozen: list[OwnedPiece] = []
        """Parameters that are not trained. The replica that saves one keeps it in fp32, on the host if the layers have
        16 bits.
        """
        replicas = engine.dp_world_size if insides.is_partitioned(engine) else 1
        frozen = [(name, one) for name, one in engine.module.named_parameters() if not one.requires_grad]
        for number, (name, one) in enumerate(frozen):
            saved, master = number % replicas == engine.grid.get_data_parallel_id(), one.detach()
            if saved and one.dtype != insides.masters(engine)[0].dtype:
                master = master.to("cpu", torch.float32)
            self.frozen.append(OwnedPiece(name, 0, one.numel(), master, 0, one.dim(), shard_of(one), False, saved))

    @torch.no_grad()
    def load_frozen(self, read: Callable[[OwnedPiece], Tensor]) -> None:
        """Set all parameters that are not trained to fp32 values in host memory, (n,) each."""
        for piece in self.frozen:
            values, parameter = read(piece), self._engine.module.get_parameter(piece.name)
            piece.of(piece.master).copy_(values)
            parameter.copy_(values.view(parameter.shape))

    @property
    def scale(self) -> Tensor | float:
        """Factor on the loss before the backward."""
        return 1.0 if self._scale is None else self._scale.value

    def begin_step(self) -> None:
        """Set the numbers of a step that the host knows: the learning rate of the optimizer's first group."""
        self._rate.fill_(self._optimizer.param_groups[0]["lr"])

    @contextlib.contextmanager
    def withheld(self) -> Iterator[None]:
        """Skip the steps inside this context and restore the state afterwards."""
        kept = [self._skipped, *([] if self._scale is None else self._scale.tensors())]
        before = [tensor.clone() for tensor in kept]
        self._withheld.fill_(1.0)
        try:
            yield
        finally:
            self._withheld.zero_()
            for tensor, value in zip(kept, before, strict=True):
                tensor.copy_(value)

    @contextlib.contextmanager
    def _unless_invalid(self, norm: Tensor) -> Iterator[bool]:
        """Surround a step whose scaled gradients have this norm over all stages; yields whether the host takes it.

        Where DeepSpeed does not check, an invalid norm becomes -1 and clips nothing.
        """
        invalid = torch.ne(norm - norm, self._withheld, out=self._invalid)  # inf - inf is NaN
        takes = True
        if not self._checks:
            norm.masked_fill_(invalid, -1.0)
            torch.ne(self._withheld, 0, out=invalid)
        elif not self.decides_itself:
            takes = not bool(invalid)
        found = invalid.float()
        torch.div(norm, 1.0 if self._scale is None else self._scale.value, out=self._norm)
        self._skipped.add_(found)
        if self.decides_itself:
            self._optimizer.found_inf = found
        try:
            yield takes
        finally:
            vars(self._optimizer).pop("found_inf", None)
        if self._scale is not None:
            self._scale.update(invalid, found)

    def _factor(self, norm: Tensor) -> Tensor | None:
        """Return the factor that unscales gradients of this scaled norm and clips them; None if it is 1."""
        most = self._engine.gradient_clipping()
        if not most:
            return None if self._scale is None else self._scale.value.reciprocal()
        return (norm.add(self.scale, alpha=1e-6) / most).clamp_(min=self.scale).reciprocal_()

    def _take(self, gradients: Sequence[Tensor] = (), factor: Tensor | None = None) -> None:
        """Step the optimizer; only :class:`Adam8bit` needs the gradients, and the factor on them."""
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        try:
            for group in groups:
                rate = self._rate if self.decides_itself else rates[0]
                group["lr"] = rate * group["factor"] if group.get("factor", 1.0) != 1.0 else rate
            if isinstance(self._optimizer, Adam8bit):
                self._optimizer.take(gradients, factor)
            else:
                self._optimizer.step()
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    # ---------------------------------------------------------------- counted and read by the host

    def end_step(self) -> None:
        """Count the step, and let the scheduler set the learning rate of the next."""
        insides.count_step(self._engine)
        if self._scale is not None:
            self._scale.count()

    def was_applied(self) -> bool:
        """Return whether the last step was taken; waits for the device."""
        return not bool(self._invalid)

    def norm(self) -> float:
        """Return the norm of the last step's gradients before clipping, not finite if it was skipped; waits."""
        return float(self._norm)

    def skipped_steps(self) -> int:
        """Return the number of skipped steps since the last call; waits for the device."""
        skipped = int(self._skipped)
        self._skipped.zero_()
        return skipped

    def overflows_at_floor(self) -> int:
        """Return :attr:`LossScale.overflows_at_floor`; waits for the device."""
        return 0 if self._scale is None else int(self._scale.overflows_at_floor)

    def scaler_state(self) -> dict[str, float]:
        """Return the loss scaler's state for a checkpoint; waits for the device."""
        return {} if self._scale is None else self._scale.state()

    def load_scaler_state(self, state: dict[str, float]) -> None:
        """Restore the state of :meth:`scaler_state`."""
        if self._scale is not None:
            self._scale.load(state)
