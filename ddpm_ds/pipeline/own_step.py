"""An optimizer's step for which the host neither waits nor has a new number: a function of tensors on the device.

Learning rate, loss scale and whether a step is skipped are tensors: a CUDA graph would replay the numbers that the host
had when it was captured. The host reads them where people see them, at log points and in checkpoints.

AdamW whose moments take 8 bits is on the flat tensors of DeepSpeed's optimizers, where neither bitsandbytes' nor
torchao's optimizer fits: on a flat tensor their blocks would straddle parameters, on tensors of their own they launch
kernels for each, and the steps that bitsandbytes counts on the host can't be in a CUDA graph. Here the elements of all
weights are handled some millions at a time::

    gradients of a chunk's weights ─▶ rows of one block each ─▶ moments ─▶ steps of the weights
                                    8-bit codes, scales ◀─ rounded ─┘
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from ddpm_ds.checkpoint.manifest import BLOCK, MOMENTS, blocks_of
from ddpm_ds.checkpoint.reader import code_of
from ddpm_ds.checkpoint.writer import Fragment
from ddpm_ds.config.ds_config import BUCKET_ELEMENTS
from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline.deepspeed_insides import OwnedPiece

CHUNK_BLOCKS = BUCKET_ELEMENTS // BLOCK
"""Number of blocks that are stepped at a time."""

Picks = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
"""Function that picks some tensors of a sequence."""


@dataclass
class _Chunk:
    """Elements that are stepped together, in rows of a block each."""

    rows: slice
    sizes: list[int]
    """Sizes of the parts of these rows, with those that no element is in."""
    masters: list[Tensor]
    """Weights of the parts that hold elements."""
    slots: Picks
    """Picks these parts from all parts of the rows."""
    tiles: Picks
    """Picks their gradients from the parts of all gradients."""


class Adam8bit(torch.optim.Optimizer):
    """AdamW with the first and second moments of weights in 8 bits (:mod:`ddpm_ds.checkpoint.reader`), and those of
    norms and biases in fp32.

    A block is 256 consecutive elements of a parameter, the last one of what is left. Where the partition of a replica
    begins or ends inside a block, each of the two replicas has a scale for its own part of it.

    A step is a function of tensors: the learning rate is one, and ``found_inf`` = 1 skips a step and changes nothing.
    """

    found_inf: Tensor
    """0.0, or 1.0 to skip the step; set before each."""

    def __init__(self, parameters: Iterable[Any], **settings: Any) -> None:
        """Take AdamW's ``lr``, ``betas``, ``eps`` and ``weight_decay``. Call :meth:`own` before the first step."""
        super().__init__(parameters, {**settings, "fused": True})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: DeepSpeed calls this when it is built, and only :meth:`take` steps."""

    def own(self, pieces: Sequence[OwnedPiece]) -> None:
        """Allocate the moments of these pieces of parameters, zeros; all that this rank steps."""
        self._masters: list[Tensor] = [master for group in self.param_groups for master in group["params"]]
        device = self._masters[0].device
        self._codes = {moment: code_of(moment, device) for moment in MOMENTS}
        self._steps = torch.zeros((), device=device)
        self._first: dict[str, int] = {}  # place of a piece's first element, in the rows or among norms and biases
        self._sizes: list[list[int]] = []  # of the parts of each gradient
        weights: list[tuple[int, Tensor, int]] = []  # part of the gradients, weights in it, first place in the rows
        vectors: list[tuple[int, Tensor, int]] = []
        rows = elements = part = 0
        for master in self._masters:
            sizes: list[int] = []
            for piece in sorted((one for one in pieces if one.master is master), key=lambda one: one.offset):
                if gap := piece.offset - sum(sizes):
                    sizes.append(gap)
                if piece.dimensions <= 1:
                    self._first[piece.name] = elements
                    vectors.append((part + len(sizes), piece.of(master), elements))
                    elements += piece.length
                    sizes.append(piece.length)
                    continue
                self._first[piece.name] = place = rows * BLOCK + piece.first % BLOCK
                rows += len(blocks_of(piece.first, piece.length))
                left = piece.of(master)
                while len(left):  # a chunk ends within large weights
                    length = min(len(left), BLOCK * CHUNK_BLOCKS - place % (BLOCK * CHUNK_BLOCKS))
                    weights.append((part + len(sizes), left[:length], place))
                    sizes.append(length)
                    left, place = left[length:], place + length
            if gap := master.numel() - sum(sizes):
                sizes.append(gap)
            self._sizes.append(sizes)
            part += len(sizes)
        self._state = {  # codes and scales
            moment: (
                torch.full((rows, BLOCK), code.zero, dtype=torch.uint8, device=device),
                torch.zeros(rows, device=device),
            )
            for moment, code in self._codes.items()
        }
        self._plain = {moment: torch.zeros(elements, device=device) for moment in MOMENTS}
        starts = range(0, rows, CHUNK_BLOCKS)
        self._chunks = [_chunk(weights, slice(first, min(first + CHUNK_BLOCKS, rows))) for first in starts]
        self._vectors = _chunk(vectors, slice(0, 1), elements) if elements else None
        self.state[self._masters[0]] = {"step": self._steps}

    @torch.no_grad()
    def take(self, gradients: Sequence[Tensor], factor: Tensor | None) -> None:
        """Step with the gradient of each tensor, times ``factor``."""
        (group,) = self.param_groups
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        found, taken = self.found_inf != 0, 1 - self.found_inf
        self._steps.add_(taken)
        steps, rate = self._steps.clamp(min=1), group["lr"] * taken
        if decay:
            torch._foreach_mul_(self._masters, 1 - rate * decay)
        shares = (1 - beta1) * taken, (1 - beta2) * taken
        size, wide = -rate / (1 - beta1**steps), (1 - beta2**steps).sqrt()
        tiles = [*chain(*(one.reshape(-1).split(sizes) for one, sizes in zip(gradients, self._sizes, strict=True)))]

        def stepped(chunk: _Chunk, first: Tensor, second: Tensor) -> None:
            """Update two moments of a chunk, and add to its weights."""
            packed = torch.zeros_like(first)
            torch._foreach_copy_(chunk.slots(packed.view(-1).split(chunk.sizes)), chunk.tiles(tiles))
            if factor is not None:
                packed.mul_(factor)
            packed.masked_fill_(found, 0.0)
            first.lerp_(packed, shares[0])
            second.lerp_(packed.square_(), shares[1])
            torch.sqrt(second, out=packed).div_(wide).add_(group["eps"])
            torch.div(first, packed, out=packed).mul_(size)
            torch._foreach_add_(chunk.masters, list(chunk.slots(packed.view(-1).split(chunk.sizes))))

        if self._vectors is not None:
            stepped(self._vectors, *self._plain.values())
        for chunk in self._chunks:
            own = {moment: [part[chunk.rows] for part in state] for moment, state in self._state.items()}
            wide_own = [self._codes[moment].decode(codes, scales[:, None]) for moment, (codes, scales) in own.items()]
            stepped(chunk, *wide_own)
            for (moment, parts), values in zip(own.items(), wide_own, strict=True):
                for part, new in zip(parts, self._codes[moment].encode(values), strict=True):
                    part.copy_(new)

    # ---------------------------------------------------------------- checkpoints

    def fragments(self, piece: OwnedPiece) -> list[Fragment]:
        """Return the moments of a piece, views of them: codes with their scales, or fp32."""
        (places, rows), about = self._places(piece), (piece.name, piece.first)
        if piece.dimensions <= 1:
            return [
                Fragment(moment, *about, values[places], shard=piece.shard) for moment, values in self._plain.items()
            ]
        return [
            Fragment(moment, *about, codes.view(-1)[places], scales[rows], piece.shard)
            for moment, (codes, scales) in self._state.items()
        ]

    @torch.no_grad()
    def load(self, piece: OwnedPiece, moment: str, values: Tensor) -> None:
        """Set a moment of a piece to fp32 values in host memory, rounded unless they are in 8 bits already."""
        (places, rows), (codes, scales) = self._places(piece), self._state[moment]
        if piece.dimensions <= 1:
            self._plain[moment][places].copy_(values)
            return
        blocks = torch.zeros_like(codes[rows], dtype=torch.float32)
        blocks.view(-1)[places.start % BLOCK :][: piece.length].copy_(values)
        codes[rows], scales[rows] = self._codes[moment].encode(blocks)

    def set_steps(self, steps: int) -> None:
        """Set the number of steps taken, and forget the moments if it is 0."""
        self._steps.fill_(steps)
        if steps == 0:
            for moment, (codes, scales) in self._state.items():
                codes.fill_(self._codes[moment].zero)
                scales.zero_()
                self._plain[moment].zero_()

    def _places(self, piece: OwnedPiece) -> tuple[slice, slice]:
        """Return the places of a piece's elements, in all rows or among norms and biases, and the rows they are in."""
        first = self._first[piece.name]
        blocks = blocks_of(first, piece.length)
        return slice(first, first + piece.length), slice(blocks.start, blocks.stop)


def _chunk(parts: Sequence[tuple[int, Tensor, int]], rows: slice, width: int = BLOCK) -> _Chunk:
    """Return the chunk of these rows of a width; parts are as in :meth:`Adam8bit.own`, in rising order."""
    at, stop = rows.start * width, rows.stop * width
    own = [part for part in parts if at <= part[2] < stop]
    sizes: list[int] = []
    slots = []
    for _, weights, place in own:
        if gap := place - at:
            sizes.append(gap)
        slots.append(len(sizes))
        sizes.append(len(weights))
        at = place + len(weights)
    if gap := stop - at:
        sizes.append(gap)
    return _Chunk(rows, sizes, [weights for _, weights, _ in own], _picks(slots), _picks([one[0] for one in own]))


def _picks(places: list[int]) -> Picks:
    """Return a function that picks these items of a sequence."""
    pick = itemgetter(*places)
    return pick if len(places) > 1 else lambda parts: (pick(parts),)


class LossScale:
    """Loss scale of fp16, which moves as DeepSpeed's does: it falls after ``hysteresis`` overflows and grows after a
    window of steps without one.
    """

    def __init__(self, settings: insides.ScaleSettings, device: torch.device) -> None:
        self.settings = settings
        self.value = torch.full((), settings.first, device=device)
        self.overflows_at_floor = torch.zeros((), device=device)
        """Number of consecutive steps, up to the last, that overflowed although the scale could fall no further."""
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
        """Count a step on the host, which checkpoints do too."""
        self._updates += 1

    def state(self) -> dict[str, float]:
        """Return the state under DeepSpeed's names; empty if the scale is fixed. Waits for the device."""
        if not self.settings.moves:
            return {}
        stable, hysteresis = int(self._stable), int(self._hysteresis)
        values = (float(self.value), self._updates, self._updates - 2 - stable, hysteresis)
        return dict(zip(insides.SCALER_FIELDS, values, strict=True))

    def load(self, state: dict[str, float]) -> None:
        """Restore the state of :meth:`state`, as far as it is there, and forget overflows."""
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
        """Whether the optimizer takes gradients as they were added up, and the factor on them."""
        self._scale = LossScale(insides.scale_settings(engine), engine.device) if engine.fp16_enabled() else None
        self._checks = insides.checks_gradients(engine)
        self._rate = torch.zeros((), device=engine.device)
        self._norm = torch.full((), float("nan"), device=engine.device)  # of all graphs of a step, so at one address
        self._invalid = torch.zeros((), dtype=torch.bool, device=engine.device)
        self._skipped = torch.zeros((), device=engine.device)
        self._withheld = torch.zeros((), device=engine.device)  # 1 skips a step whatever its gradients are

    @property
    def scale(self) -> Tensor | float:
        """Factor on the loss before the backward."""
        return 1.0 if self._scale is None else self._scale.value

    def begin_step(self) -> None:
        """Set the numbers of a step that the host knows: the learning rate of the optimizer's groups."""
        (rate,) = {group["lr"] for group in self._optimizer.param_groups}
        self._rate.fill_(rate)

    @contextlib.contextmanager
    def withheld(self) -> Iterator[None]:
        """Skip the steps inside this context and forget them, so that the state is that of before."""
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
        """Surround a step with gradients of this scaled norm over all stages; yields whether the host takes it.

        Where DeepSpeed is told not to check, an invalid norm becomes -1 and clips nothing.
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
        """Step the optimizer, with the learning rate on the device if it can take that; with these gradients, one for
        each of its tensors, and the factor on them, if it :attr:`_widens` gradients.
        """
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        try:
            for group in groups if self.decides_itself else ():
                group["lr"] = self._rate
            if isinstance(self._optimizer, Adam8bit):
                self._optimizer.take(gradients, factor)
            else:
                self._optimizer.step()
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    # ---------------------------------------------------------------- what the host counts and reads

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
