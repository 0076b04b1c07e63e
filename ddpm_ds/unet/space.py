"""Ranks that share the rows of one image: each has all weights, and a band of rows of every activation.

A layer needs other ranks' rows where it looks beyond a pixel, and swaps them with its neighbours::

    rank 0   rows 0 to 3    ── row 3, statistics ─▶    rank 1   rows 4 to 7    ──▶
                            ◀─ row 4, statistics ──                            ◀──

A 3x3 convolution needs a row from each side. If a normalisation precedes it, the rows travel before they are
normalised, in one message with the normalisation's statistics. Attention gathers keys and values, or exchanges rows for
heads. In the backward the same ranks swap gradients. Each rank computes a part of every parameter's gradient: the sum
over ranks is the gradient, as among replicas. Sums are in the order of ranks, with the same bits on all of them.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ddpm_ds.ground.cuda_graphs import cached
from ddpm_ds.unet import fused_norm
from ddpm_ds.unet.weight_gradients import Weighted

Kind = tuple[torch.Size | tuple[int, ...], torch.dtype]
"""Shape and data type of a tensor to receive."""


class SpaceGroup:
    """This process's place in a group of ranks that share images; by default it is alone.

    Only swaps go over ``group``, in the order of the layers on every rank. Without one, received tensors are zeros, so
    that a rank's part can be timed.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.size, self.group = rank, size, group

    def swap(
        self, sent: Mapping[int, Sequence[Tensor]], wanted: Mapping[int, Sequence[Kind]], device: torch.device
    ) -> Callable[[], dict[int, list[Tensor]]]:
        """Begin to send tensors to some ranks, and to receive others from them; return a function that waits.

        Sent tensors may not change until then. What goes from one rank to another is one message; all messages are
        posted as one call. Pairs of ranks have one order everywhere, and of a pair the lower rank sends first, so that
        even a transport without such calls can't lock.
        """
        wanted = {rank: kinds for rank, kinds in wanted.items() if kinds}
        flat = {rank: [part.reshape(-1).view(torch.uint8) for part in parts] for rank, parts in sent.items() if parts}
        sends = {rank: torch.cat(parts) if len(parts) > 1 else parts[0] for rank, parts in flat.items()}
        make = torch.zeros if self.group is None else torch.empty
        sizes = {rank: [math.prod(shape) * dtype.itemsize for shape, dtype in kinds] for rank, kinds in wanted.items()}
        received = {rank: make(sum(own), dtype=torch.uint8, device=device) for rank, own in sizes.items()}
        works = self.post(sends, received)

        def finish() -> dict[int, list[Tensor]]:
            for work in works:
                work.wait()
            sends.clear()  # alive until now
            found = {}
            for rank, kinds in wanted.items():
                parts = zip(received[rank].split(sizes[rank]), kinds, strict=True)
                found[rank] = [part.view(dtype).view(shape) for part, (shape, dtype) in parts]
            return found

        return finish

    def post(self, sends: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> Sequence[Any]:
        """Post a message to each of some ranks and one from each; return the works to wait for."""
        if self.group is None:
            return []
        operations = []
        for rank in sorted({*sends, *received}):
            pair = [(dist.isend, sends.get(rank)), (dist.irecv, received.get(rank))]
            for does, message in pair if self.rank < rank else reversed(pair):
                if message is not None:
                    operations.append(dist.P2POp(does, message, group=self.group, group_peer=rank))
        return dist.batch_isend_irecv(operations)

    def exchange(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Give each rank its part, and return what each has given this one, of these shapes by rank."""
        own = parts[self.rank]
        others = [rank for rank in range(self.size) if rank != self.rank]
        kinds = {rank: [(shapes[rank], own.dtype)] for rank in others}
        found = self.swap({rank: [parts[rank]] for rank in others}, kinds, own.device)()
        return [found[rank][0] if rank in found else own for rank in range(self.size)]

    def trade(
        self, up: Tensor, down: Tensor, statistics: Tensor | None = None
    ) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
        """Begin to give rows (N, C, rows, W) to the ranks above and below, and statistics to all.

        Return a function that waits. It returns the rows from above, as many as go down, and from below, as many as go
        up, which are zeros beyond the image; then the statistics of all ranks, (ranks, ...).
        """
        alone = [] if statistics is None else [statistics]
        others = range(self.size) if alone else (self.rank - 1, self.rank + 1)
        sent = {rank: [*alone] for rank in others if rank != self.rank and 0 <= rank < self.size}
        wanted: dict[int, list[Kind]] = {rank: [(one.shape, one.dtype) for one in alone] for rank in sent}
        for rank, given, taken in ((self.rank - 1, up, down), (self.rank + 1, down, up)):
            if rank in sent and given.numel():
                sent[rank].append(given.permute(0, 2, 3, 1))
            if rank in sent and taken.numel():
                wanted[rank].append((taken.permute(0, 2, 3, 1).shape, taken.dtype))
        finish = self.swap(sent, wanted, up.device)

        def finished() -> tuple[Tensor, Tensor, Tensor]:
            found = finish()
            rows = []
            for rank, alike in ((self.rank - 1, down), (self.rank + 1, up)):
                parts = found.get(rank, [])[len(alone) :]
                rows.append(parts[0].permute(0, 3, 1, 2) if parts else torch.zeros_like(alike))
            everyone = [found[rank][0] if rank in found else own for rank in range(self.size) for own in alone]
            return *rows, torch.stack(everyone) if alone else up.new_empty(0)  # type: ignore[return-value]

        return finished


ALONE = SpaceGroup()


class Band(NamedTuple):
    """Rows of a level of the U-Net by rank of a group, of which this process has its own."""

    group: SpaceGroup
    rows: tuple[int, ...]

    @property
    def height(self) -> int:
        """Number of rows of all ranks."""
        return sum(self.rows)

    @property
    def first(self) -> int:
        """First of this rank's rows."""
        return sum(self.rows[: self.group.rank])

    @property
    def stop(self) -> int:
        """Row after this rank's last one."""
        return self.first + self.rows[self.group.rank]

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of images (N, C, H, W), which may have them alone already."""
        return whole[:, :, self.first : self.stop] if whole.shape[2] == self.height else whole

    def wide(self, x: Tensor, above: int = 1, below: int = 1) -> Tensor:
        """Return x (N, C, rows, W) with so many rows of the neighbours beside it, zeros beyond the image."""
        rows = x.shape[2]

        def widen(x: Tensor) -> Tensor:
            top, bottom, _ = self.group.trade(x[:, :, :below], x[:, :, rows - above :])()
            return torch.cat((top, x, bottom), dim=2)

        def narrow(gradient: Tensor) -> Tensor:
            end = above + rows
            up, down, _ = self.group.trade(gradient[:, :, :above], gradient[:, :, end:])()
            own = gradient[:, :, above:end].clone(memory_format=torch.channels_last)
            own[:, :, :below] += up
            own[:, :, rows - above :] += down
            return own

        return _Linear.apply(x, widen, narrow)

    def gathered(self, x: Tensor) -> Tensor:
        """Return the rows of all ranks in dimension 1; x (N, rows or pixels, ...) has this rank's."""
        size, shapes = self.group.size, self._shapes(x, *x.shape[2:])

        def gather(x: Tensor) -> Tensor:
            return torch.cat(self.group.exchange([x] * size, shapes), dim=1)

        def scatter(gradient: Tensor) -> Tensor:  # returns the sum over ranks of the gradients of this rank's rows
            parts = self._by_rank(gradient)
            return _total(self.group.exchange(parts, [x.shape] * size)).to(x.dtype)

        return _Linear.apply(x, gather, scatter)

    def image(self, x: Tensor) -> Tensor:
        """Return the whole images (N, C, H, W) of which x (N, C, rows, W) has this rank's rows."""
        return self.gathered(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def _shapes(self, x: Tensor, *inside: int) -> list[tuple[int, ...]]:
        """Return the shapes (N, rows or pixels, inside) by rank, if x (N, rows or pixels, ...) has this rank's."""
        each = x.shape[1] // self.rows[self.group.rank]
        return [(x.shape[0], each * rows, *inside) for rows in self.rows]

    def _by_rank(self, whole: Tensor) -> Sequence[Tensor]:
        """Return the parts of each rank's rows of a tensor (N, rows or pixels, ...)."""
        return whole.split([whole.shape[1] // self.height * rows for rows in self.rows], dim=1)

    def to_heads(self, x: Tensor) -> Tensor:
        """Return a rank's share of the heads at all pixels, from x (N, pixels, parts, C) with all heads at its own."""
        return _Linear.apply(x, self._to_heads, self._to_rows)

    def to_rows(self, x: Tensor) -> Tensor:
        """Return all heads at this rank's pixels: the inverse of :meth:`to_heads`."""
        return _Linear.apply(x, self._to_rows, self._to_heads)

    def _to_heads(self, x: Tensor) -> Tensor:
        parts = x.chunk(self.group.size, dim=3)
        return torch.cat(self.group.exchange(parts, self._shapes(x, *parts[0].shape[2:])), dim=1)

    def _to_rows(self, x: Tensor) -> Tensor:
        parts = self._by_rank(x)
        return torch.cat(self.group.exchange(parts, [parts[self.group.rank].shape] * self.group.size), dim=3)

    def normalised(
        self,
        x: Tensor,
        vectors: fused_norm.Vectors,
        groups: int,
        epsilon: float,
        *,
        silu: bool = True,
        fused: bool = False,
        parts: Sequence[Weighted] = (),
    ) -> Tensor:
        """Return SiLU(norm(x + add) * (1 + scale) + shift), with a row more on either side, zeros beyond the image.

        Without ``silu`` there are neither SiLU nor more rows. The kernels are ``fused`` ones, or PyTorch's. While
        gradients are swapped the backward computes the weight gradients of ``parts``, which read the result.
        """
        beside = [part for part in parts if part.queue is not None and part.queue is part.beside]
        how = _How(self, groups, epsilon, silu, fused_norm if fused else _Reference, beside)
        return _Norm.apply(x, *vectors, how, *(part.weight for part in beside))


@functools.cache
def leave_uncompiled() -> None:
    """Let ``torch.compile`` end a graph where ranks swap; a call, since importing the compiler takes seconds."""
    for swaps in (Band.wide, Band.gathered, Band.to_heads, Band.to_rows, Band.normalised):
        setattr(Band, swaps.__name__, torch.compiler.disable(swaps))


class _Linear(torch.autograd.Function):
    """Linear exchange of a tensor, and the exchange that its gradient takes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


class _How(NamedTuple):
    """What a normalisation is given beside tensors: the arguments of :meth:`Band.normalised`."""

    band: Band
    groups: int
    epsilon: float
    silu: bool
    kernels: Any
    """Functions of :mod:`ddpm_ds.unet.fused_norm`, or those of :class:`_Reference`."""
    parts: Sequence[Weighted]


class _Norm(torch.autograd.Function):
    """Group normalisation over the rows of all ranks, a function of each pixel once its statistics are known.

    Formulas and names are those of :mod:`ddpm_ds.unet.fused_norm_kernels`. ``halo`` has the rows from above and below.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        add: Tensor | None,
        scale: Tensor | None,
        shift: Tensor | None,
        how: _How,
        *weights: Tensor,
    ) -> Tensor:
        band, groups, epsilon, silu, kernels, _ = how
        x = x.contiguous(memory_format=torch.channels_last)  # as the fused kernels read it
        rows, beside, vectors = x.shape[2], int(silu), (weight, bias, add, scale, shift)
        own = kernels.moments(x, add, groups)  # (2, N, G)
        *others, both = band.group.trade(x[:, :, :beside], x[:, :, rows - beside :], own)()
        halo = torch.cat(others, dim=2).contiguous(memory_format=torch.channels_last)
        # Chan et al. 1979: moments of parts with different means
        share = _shares(band.rows, own.dtype, x.device)
        mean = _total(share * both[:, 0])  # (N, G)
        variance = _total(share * (both[:, 1] + (both[:, 0] - mean).square()))
        rstd = (variance + epsilon).rsqrt()
        ctx.save_for_backward(x, halo, *vectors, mean, rstd)
        ctx.how = how
        given = kernels.prepare(vectors, mean, rstd)
        images, channels, _, width = x.shape
        y = x.new_empty(images, rows + 2 * beside, width, channels).permute(0, 3, 1, 2)
        kernels.normalise(x, y[:, :, beside : rows + beside], given, silu)
        if silu:
            kernels.normalise(halo, edges := torch.empty_like(halo), given, silu)
            y[:, :, :: rows + 1] = _without_edges(edges, band.group)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, halo, *vectors, mean, rstd = ctx.saved_tensors
        weight, bias, add, scale, shift = vectors
        band, groups, _, silu, kernels, parts = ctx.how
        rows, beside, given = x.shape[2], int(silu), kernels.prepare(vectors, mean, rstd)
        dy = dy.contiguous(memory_format=torch.channels_last)
        both, du = kernels.gradient_sums(x, dy[:, :, beside : rows + beside], given, silu)  # (2, N, C)
        edges = halo
        if silu:
            edges = _without_edges(dy[:, :, :: rows + 1].clone(memory_format=torch.channels_last), band.group)
            more, edges = kernels.gradient_sums(halo, edges, given, silu)
            both = both + more
            edges = kernels.input_gradient(halo, edges, given, torch.zeros_like(both[:, :, :groups]), silu)
        gain, _ = _gain(weight, bias, scale, shift, mean.dtype)
        sums = (both * gain).unflatten(2, (groups, -1)).sum(-1)  # (2, N, G)
        finish = band.group.trade(edges[:, :, :beside], edges[:, :, beside:], sums)
        of_offset, of_gain = both
        of_scale = of_shift = None
        if scale is not None and shift is not None:
            of_scale, of_shift = (of_gain * weight + of_offset * bias).to(scale.dtype), of_offset.to(shift.dtype)
            of_gain, of_offset = of_gain * (1 + scale), of_offset * (1 + scale)
        found = dict[Tensor, Tensor]()
        for part in parts:
            part.beside.compute([part], [0], found.__setitem__)
        up, down, every = finish()
        of_dh = _total(every) / (band.height * x.shape[3] * (x.shape[1] // groups))
        dx = kernels.input_gradient(x, du, given, of_dh, silu)
        if silu:
            dx[:, :, :1] += up
            dx[:, :, -1:] += down
        of_add = None if add is None else dx.sum((2, 3), dtype=mean.dtype).to(add.dtype)
        of_vectors = of_gain.sum(0).to(weight.dtype), of_offset.sum(0).to(bias.dtype), of_add, of_scale, of_shift
        return dx, *of_vectors, None, *(found[part.weight] for part in parts)


class _Reference:
    """The functions of :mod:`ddpm_ds.unet.fused_norm` in operations of PyTorch, with few passes over memory."""

    @staticmethod
    def moments(x: Tensor, add: Tensor | None, groups: int) -> Tensor:
        x = x.to(_wide_type(x.dtype))
        each = [torch.stack(torch.batch_norm_update_stats(one, None, None, 0.0)) for one in x.split(1)]
        means, variances = torch.stack(each, dim=1).unflatten(2, (groups, -1))  # (N, G, C / G) each
        means = means if add is None else means + add.unflatten(1, (groups, -1))
        mean = means.mean(-1, keepdim=True)
        return torch.stack((mean[..., 0], (variances + (means - mean).square()).mean(-1)))

    @staticmethod
    def prepare(vectors: fused_norm.Vectors, mean: Tensor, rstd: Tensor) -> Sequence[Tensor]:
        """Return a and c of u = x a + c, and m and r of h = (x - m) r, (N, C) each."""
        weight, bias, add, scale, shift = vectors
        gain, offset = _gain(weight, bias, scale, shift, mean.dtype)
        m, r = (one.repeat_interleave(len(weight) // mean.shape[1], dim=1) for one in (mean, rstd))
        m = m if add is None else m - add
        a = r * gain
        return a, offset - m * a, m, r

    @staticmethod
    def normalise(x: Tensor, y: Tensor, given: Sequence[Tensor], silu: bool) -> None:
        a, c, _, _ = given
        u = torch.addcmul(_per_pixel(c), x.to(a.dtype), _per_pixel(a), out=y if y.dtype is a.dtype else None)
        u = F.silu(u, inplace=True) if silu else u
        if u is not y:
            y.copy_(u)

    @staticmethod
    def gradient_sums(x: Tensor, dy: Tensor, given: Sequence[Tensor], silu: bool) -> tuple[Tensor, Tensor]:
        a, c, m, r = given
        x, du = x.to(a.dtype), dy.to(a.dtype)
        if silu:
            u = torch.addcmul(_per_pixel(c), x, _per_pixel(a))
            du = torch.ops.aten.silu_backward.grad_input(du, u, grad_input=u)
        backward, wanted = torch.ops.aten.native_batch_norm_backward, [False, True, True]
        images = zip(du.split(1), x.split(1), m, r, strict=True)
        sums = [backward(of, one, mean, None, None, mean, rstd, True, 0.0, wanted) for of, one, mean, rstd in images]
        return torch.stack([torch.stack((of_offset, of_gain)) for _, of_gain, of_offset in sums], dim=1), du

    @staticmethod
    def input_gradient(x: Tensor, du: Tensor, given: Sequence[Tensor], of_dh: Tensor, silu: bool) -> Tensor:
        a, _, m, r = given
        of_dh, of_dh_h = of_dh.repeat_interleave(a.shape[1] // of_dh.shape[2], dim=2)
        slope = -of_dh_h * r.square()
        dx = torch.addcmul(_per_pixel(-of_dh * r - slope * m), du, _per_pixel(a), out=du if silu else None)
        return dx.addcmul_(x.to(a.dtype), _per_pixel(slope)).to(x.dtype)


def _per_pixel(vectors: Tensor) -> Tensor:
    """Return vectors (N, C) for every pixel."""
    return vectors[:, :, None, None]


def _gain(
    weight: Tensor, bias: Tensor, scale: Tensor | None, shift: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return factor and offset of normalised pixels, (C,) or (N, C) each."""
    weight, bias = weight.to(dtype), bias.to(dtype)
    return (weight, bias) if scale is None or shift is None else (weight * (1 + scale), bias * (1 + scale) + shift)


def _without_edges(y: Tensor, group: SpaceGroup) -> Tensor:
    """Return y with zeros in its first and last row, where they are beyond the image."""
    if group.rank == 0:
        y[:, :, 0].zero_()
    if group.rank == group.size - 1:
        y[:, :, -1].zero_()
    return y


@cached
def _shares(rows: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return each rank's share of the rows, (ranks, 1, 1)."""
    return (torch.tensor(rows, dtype=torch.float64) / sum(rows)).to(device, dtype)[:, None, None]


def _total(parts: Iterable[Tensor]) -> Tensor:
    """Return the sum of tensors, added up one after the other, in fp32 at least."""
    return functools.reduce(torch.add, (part.to(_wide_type(part.dtype)) for part in parts))


def _wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which numbers of a type are added up."""
    return dtype if dtype is torch.float64 else torch.float32
