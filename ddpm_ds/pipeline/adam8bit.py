"""AdamW whose moments take 8 bits, on the flat tensors of DeepSpeed's optimizers.

Neither bitsandbytes' nor torchao's optimizer fits there: on a flat tensor their blocks would straddle parameters, on
tensors of their own they launch kernels for each, and the steps that bitsandbytes counts on the host can't be in a CUDA
graph. Here the elements of all weights are handled some millions at a time::

    gradients of a chunk's weights ─▶ rows of one block each ─▶ moments ─▶ steps of the weights
                                    8-bit codes, scales ◀─ rounded ─┘

Weights of 16 bits without fp32 masters are rounded up or down at random, so that the mean of many roundings is exact:
to the nearest, most steps would vanish. The random bits are a function of (seed, step, element).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter

import torch
from torch import Tensor

from ddpm_ds.checkpoint.manifest import BLOCK, MOMENTS, blocks_of
from ddpm_ds.checkpoint.reader import code_of
from ddpm_ds.checkpoint.writer import Fragment
from ddpm_ds.ground import keyed
from ddpm_ds.pipeline.deepspeed_insides import OwnedPiece
from ddpm_ds.schema.layout import BUCKET_ELEMENTS

STEP_BITS, NUMBER_BITS, SHARD_BITS = 39, 25, 21
"""Bits below the step, the number of the parameter and the rank of a tensor group in the key of a row's roundings."""
CHUNK_BLOCKS = BUCKET_ELEMENTS // BLOCK
"""Number of blocks that are stepped at a time."""

_Part = tuple[int, Tensor, int, float]
"""Part of the gradients, weights in it, first place in the rows, factor on the learning rate over the first group's."""
Picks = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
"""Function that picks some tensors of a sequence."""


@dataclass
class _Chunk:
    """Elements that are stepped together, in rows of a block each."""

    rows: slice
    sizes: list[int]
    """Sizes of the parts of these rows, empty ones too."""
    masters: list[Tensor]
    """Weights of the parts that hold elements."""
    slots: Picks
    """Picks these parts from all parts of the rows."""
    tiles: Picks
    """Picks their gradients from the parts of all gradients."""
    rates: list[float]
    """Factors on their learning rate over the first group's."""
    index: Tensor
    """Number of each row, or element if there is one row, to draw its roundings by: (N,) int64."""


class Adam8bit(torch.optim.Optimizer):
    """AdamW with 8-bit moments of weights (:mod:`ddpm_ds.checkpoint.reader`), and fp32 moments of norms and biases.

    A block is 256 consecutive elements of a parameter; the last one may be shorter. If two replicas share a block, each
    has a scale for its own part.

    A step is a function of tensors: the learning rate is one, and ``found_inf`` = 1 skips a step and changes nothing.
    """

    found_inf: Tensor
    """0.0, or 1.0 to skip the step; set before each."""

    def __init__(self, parameters: Iterable[Tensor], **settings: object) -> None:
        """Take AdamW's ``lr``, ``betas``, ``eps`` and ``weight_decay``. Call :meth:`own` before the first step."""
        super().__init__(parameters, {**settings, "fused": True})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Do nothing: DeepSpeed calls this when it is built, and only :meth:`take` steps."""

    def own(self, pieces: Sequence[OwnedPiece], names: Iterable[str], seed: int) -> None:
        """Allocate moments of zeros for all pieces of parameters that this rank steps.

        The ``names`` of all parameters of the U-Net, in their order, and the ``seed`` decide how weights are rounded.
        """
        numbers, self._seed = {name: number << NUMBER_BITS for number, name in enumerate(names)}, seed
        numbered_rows, numbered_elements = [(range(0), 0)], list[tuple[range, int]]()  # with the number of the piece
        first_factor = self.param_groups[0].get("factor", 1.0)
        factors = [group.get("factor", 1.0) / first_factor for group in self.param_groups for _ in group["params"]]
        self._masters: list[Tensor] = [master for group in self.param_groups for master in group["params"]]
        device, self._rounds = self._masters[0].device, self._masters[0].dtype is not torch.float32
        self._codes = {moment: code_of(moment, device) for moment in MOMENTS}
        self._steps = torch.zeros((), device=device)
        self._first: dict[tuple[str, int], int] = {}  # place of a piece's first element, in the rows or among vectors
        self._sizes: list[list[int]] = []  # of the parts of each gradient
        weights: list[_Part] = []
        vectors: list[_Part] = []
        rows = elements = part = 0
        for master, rate in zip(self._masters, factors, strict=True):
            sizes: list[int] = []
            for piece in sorted((one for one in pieces if one.master is master), key=lambda one: one.offset):
                if gap := piece.offset - sum(sizes):
                    sizes.append(gap)
                number = numbers[piece.name] + ((piece.shard.rank if piece.shard else 0) << SHARD_BITS)
                if piece.dimensions <= 1:
                    self._first[piece.name, piece.first] = elements
                    vectors.append((part + len(sizes), piece.of(master), elements, rate))
                    numbered_elements.append((range(piece.first, piece.first + piece.length), number))
                    elements += piece.length
                    sizes.append(piece.length)
                    continue
                self._first[piece.name, piece.first] = place = rows * BLOCK + piece.first % BLOCK
                blocks = blocks_of(piece.first, piece.length)
                numbered_rows.append((blocks, number))
                rows += len(blocks)
                left = piece.of(master)
                while len(left):  # a chunk ends within large weights
                    length = min(len(left), BLOCK * CHUNK_BLOCKS - place % (BLOCK * CHUNK_BLOCKS))
                    weights.append((part + len(sizes), left[:length], place, rate))
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
        of_rows = of_vectors = torch.empty(0)
        if self._rounds:
            spans = (*numbered_rows, *numbered_elements)
            index = torch.cat([torch.arange(span.start, span.stop) + number for span, number in spans])
            of_rows, of_vectors = index.to(device).split([rows, elements])
        places = [slice(first, min(first + CHUNK_BLOCKS, rows)) for first in range(0, rows, CHUNK_BLOCKS)]
        self._chunks = [_chunk(weights, place, of_rows[place]) for place in places]
        self._vectors = _chunk(vectors, slice(0, 1), of_vectors, elements) if elements else None
        self.state[self._masters[0]] = {"step": self._steps}

    @torch.no_grad()
    def take(self, gradients: Sequence[Tensor], factor: Tensor | None) -> None:
        """Step with the gradient of each tensor, times ``factor``."""
        group = self.param_groups[0]
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        found, taken = self.found_inf != 0, 1 - self.found_inf
        self._steps.add_(taken)
        steps, rate = self._steps.clamp(min=1), group["lr"] * taken
        for one in self.param_groups if decay and not self._rounds else ():
            torch._foreach_mul_(one["params"], 1 - one["lr"] * taken * decay)
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
            steps = list(chunk.slots(packed.view(-1).split(chunk.sizes)))
            if self._rounds:
                new = torch.zeros_like(packed)
                parts = list(chunk.slots(new.view(-1).split(chunk.sizes)))
                torch._foreach_copy_(parts, chunk.masters)
                if decay:
                    packed.addcmul_(new, -rate * decay)
            if {*chunk.rates} != {1.0}:
                torch._foreach_mul_(steps, chunk.rates)
            if self._rounds:
                round_at_random(new.add_(packed), self._seed, (self._steps.long() << STEP_BITS) + chunk.index)
                torch._foreach_copy_(chunk.masters, parts)
            else:
                torch._foreach_add_(chunk.masters, steps)

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
        """Return views of a piece's moments: codes with their scales, or fp32."""
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
        first = self._first[piece.name, piece.first]
        blocks = blocks_of(first, piece.length)
        return slice(first, first + piece.length), slice(blocks.start, blocks.stop)


def round_at_random(values: Tensor, seed: int, index: Tensor) -> None:
    """Round fp32 ``values`` (N, n) to bf16 in place: up with the probability that makes the mean exact, else down.

    Random bits are a function of the seed, a number of ``index`` (N,) int64 and the place in its row; n is even or 1.
    """
    columns = values.numel() // len(index)
    words = keyed.Draws(seed, index, {keyed.Stream.ROUNDING: -(-columns // 2)}).bits(keyed.Stream.ROUNDING)
    bits = words.to(torch.int32).view(torch.int16)[:, :columns].to(torch.int32).bitwise_and_(0xFFFF)
    values.view(torch.int32).add_(bits.view(values.shape)).bitwise_and_(-(2**16))


def _chunk(parts: Sequence[_Part], rows: slice, index: Tensor, width: int = BLOCK) -> _Chunk:
    """Return the chunk of these rows of a width; parts are in rising order, and ``index`` has a number for each row,
    or for each element of the only row.
    """
    at, stop = rows.start * width, rows.stop * width
    own = [part for part in parts if at <= part[2] < stop]
    sizes: list[int] = []
    slots = []
    for _, weights, place, _ in own:
        if gap := place - at:
            sizes.append(gap)
        slots.append(len(sizes))
        sizes.append(len(weights))
        at = place + len(weights)
    if gap := stop - at:
        sizes.append(gap)
    tiles, masters, _, rates = map(list, zip(*own, strict=True))
    return _Chunk(rows, sizes, masters, _picks(slots), _picks(tiles), rates, index)


def _picks(places: list[int]) -> Picks:
    """Return a function that picks these items of a sequence."""
    pick = itemgetter(*places)
    return pick if len(places) > 1 else lambda parts: (pick(parts),)
