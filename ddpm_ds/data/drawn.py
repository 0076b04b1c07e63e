"""Pictures of drawn images beside what they were drawn for: input, members, mean, spread, truth; fields in colours."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from ddpm_ds.data.pictures import GREY, grid

COLOURS = (
    *((68, 1, 84), (71, 44, 122), (59, 81, 139), (44, 113, 142), (33, 144, 141)),
    *((39, 173, 129), (92, 200, 99), (170, 220, 50), (253, 231, 37)),
)
"""Evenly spaced colours of fields, from the lowest value to the highest: every ninth of matplotlib's viridis."""
MOST_ROWS, MOST_MEMBERS = 16, 4
"""Maximum inputs in a picture, and members of each."""


@dataclass(frozen=True)
class Drawn:
    """Images that were drawn, and what a picture shows beside them."""

    images: Tensor
    """(N, C, H, W) uint8, or float32 in physical units for fields"""
    members: int = 1
    """Number of images of each input: image i is one of input i // members."""
    given: Tensor | None = None
    """What the images were drawn for, (inputs, c, H, W) float32 in the units in which it is stored"""
    truths: Tensor | None = None
    """True images of the inputs, (inputs, C, H, W) float32 in the units of `images`"""
    channels: tuple[str, ...] = ()
    """Names of the channels of fields."""
    given_channels: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    """What the images were asked for by, in turn; () if that is not known."""

    def picture(self, title: str, labels: Sequence[str] = (), channel: int = 0) -> Image.Image:
        """Return a grid of the images or, of images with inputs, a row for each input: what was given, some members,
        their mean and spread, and the truth. Of fields it shows a ``channel``, in colours whose range stands below.
        """
        between = self._range(channel)
        name = self.channels[channel] if self.channels else f"channel {channel}"
        said = [f"{name}: {between[0]:.4g} to {between[1]:.4g}"] if self.are_fields else []
        if self.given is None and self.truths is None:
            images = coloured(self.images[:, channel], *between) if self.are_fields else self.images
            return grid(images, title, labels, footer="".join(said))
        rows = min(len(self.images) // self.members, MOST_ROWS)
        members = self.images[: rows * self.members].unflatten(0, (rows, self.members)).float()  # (rows, K, C, H, W)
        columns: dict[str, Tensor] = {}
        if self.given is not None:
            columns["input"] = self._given(self.given[:rows].cpu(), name, said)
        for number in range(min(self.members, MOST_MEMBERS)):
            title_of = f"member {number + 1}" if self.members > 1 else "drawn"
            columns[title_of] = self._bytes(members[:, number], channel, between)
        if self.members > 1:
            columns["mean"] = self._bytes(members.mean(dim=1), channel, between)
            spread = members.std(dim=1)  # (rows, C, H, W)
            spread = spread[:, channel] if self.are_fields else spread.mean(dim=1)
            columns["spread"] = coloured(spread, 0.0, float(spread.max()))
            said.append(f"spread: 0 to {float(spread.max()):.4g}")
        if self.truths is not None:
            columns["truth"] = self._bytes(self.truths[:rows].cpu(), channel, between)
        cells = torch.stack([*columns.values()], dim=1).flatten(0, 1)  # (rows x columns, 3, H, W)
        return grid(cells, title, [*columns] * rows, columns=len(columns), footer="\n".join(said))

    @property
    def are_fields(self) -> bool:
        """Whether the images are fields."""
        return self.images.is_floating_point()

    def _range(self, channel: int) -> tuple[float, float]:
        """Return the smallest and the largest value of a channel of fields, drawn and true."""
        parts = [part[:, channel].float().nan_to_num() for part in (self.images, self.truths) if part is not None]
        return min(float(part.min()) for part in parts), max(float(part.max()) for part in parts)

    def _bytes(self, images: Tensor, channel: int, between: tuple[float, float]) -> Tensor:
        return coloured(images[:, channel], *between) if self.are_fields else _rgb(images)

    def _given(self, given: Tensor, name: str, said: list[str]) -> Tensor:
        """Return what was given as colours: of fields the channel of this ``name``, else the first; add its range."""
        if not self.are_fields and given.shape[1] in (1, 3):
            return _rgb(given)
        number = self.given_channels.index(name) if name in self.given_channels else 0
        low, high = float(given[:, number].min()), float(given[:, number].max())
        called = "".join(f" {each}" for each in self.given_channels[number : number + 1])
        said.append(f"input{called}: {low:.4g} to {high:.4g}")
        return coloured(given[:, number], low, high)


def _rgb(images: Tensor) -> Tensor:
    """Return grey or coloured pictures from 0 to 255 as uint8 colours (N, 3, H, W)."""
    return images.round().clamp(0.0, 255.0).to(torch.uint8).expand(-1, 3, -1, -1)


def coloured(values: Tensor, low: float, high: float) -> Tensor:
    """Return values (N, H, W) from ``low`` to ``high`` as uint8 colours (N, 3, H, W) whose lightness rises evenly; NaN
    is grey.
    """
    table = torch.tensor(COLOURS, dtype=torch.float32)  # (colours, 3)
    values = values.float().cpu()
    place = ((values - low) / ((high - low) or 1.0)).clamp(0.0, 1.0).nan_to_num() * (len(table) - 1)
    below = place.long().clamp(max=len(table) - 2)
    found = torch.lerp(table[below], table[below + 1], (place - below)[..., None])  # (N, H, W, 3)
    found = torch.where(values.isnan()[..., None], float(GREY), found)
    return found.round().to(torch.uint8).permute(0, 3, 1, 2)
