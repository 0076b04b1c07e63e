"""Pictures of drawn images: grids with a title and labels, PNG files, animations of them; for images that were drawn
for inputs, rows of input, members, mean, spread and truth.

A grid may enlarge its images for viewing; read the tensors to get exact pixels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor

from ddpm_ds.diffusion.spec import DiffusionSpec, SamplerSpec
from ddpm_ds.ground.files import temporary_beside

GUTTER_PIXELS = 2
GREY = 208
"""Grey value of the gutters and of the background of title and labels."""
SMALLEST_SIDE_PIXELS = 512
"""Minimum width or height of a grid, reached by enlarging its images by a whole factor."""
SMALLEST_LABEL_PIXELS = 11
MOST_FRAMES, MOST_FRAME_PIXELS = 32, 720  # frames of an animation; pixels of its longer side
FRAME_MS, LAST_FRAME_MS = 300, 2000
WEIGHTS = {"ema": "averaged weights", "raw": "weights as trained", "export": "exported weights"}
MOST_ROWS, MOST_MEMBERS = 16, 4
"""Maximum inputs in a picture, and members of each."""


def picture(image: Tensor) -> Image.Image:
    """Convert a uint8 (C, H, W) image, grey or RGB, to a Pillow image."""
    pixels = image.permute(1, 2, 0).cpu().numpy()
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def grid_title(run: str, images_seen: int | None, sampler: SamplerSpec, diffusion: DiffusionSpec, weights: str) -> str:
    """Return the two lines above a grid of samples: run and images seen; sampler and kind of weights.

    ``weights`` is the field of :class:`ddpm_ds.evaluate.trained.Trained`.
    """
    seen = "" if images_seen is None else f", {images_seen:,} images seen"
    kind, _, length = weights.partition("-")
    of_length = f" of length {length}" if length else ""
    return f"{run}{seen}\n{sampler.kind} in {sampler.steps_of(diffusion)} steps, {WEIGHTS[kind]}{of_length}"


def grid(
    images: Tensor, title: str = "", labels: Sequence[str] = (), *, columns: int | None = None, footer: str = ""
) -> Image.Image:
    """Arrange uint8 images (N, C, H, W) row by row in one picture, as square as possible unless ``columns`` is given.

    ``title`` is above all images, each of the ``labels`` below its image, and ``footer`` at the bottom.
    """
    if columns is None:
        columns = min(len(images), math.ceil(math.sqrt(len(images) * images.shape[2] / images.shape[3])))
    rows = math.ceil(len(images) / columns)
    factor = math.ceil(SMALLEST_SIDE_PIXELS / max(columns * images.shape[3], rows * images.shape[2]))
    images = images.cpu().repeat_interleave(factor, 2).repeat_interleave(factor, 3)
    _, channels, height, width = images.shape
    blank = torch.full((rows * columns - len(images), channels, height, width), GREY, dtype=torch.uint8)
    title_size = max(1, columns * width // 30)
    title_font = ImageFont.load_default(title_size)
    words, size = {" ".join(label.split()) for label in labels}, min(title_size, height // 6)
    while size > SMALLEST_LABEL_PIXELS and any(ImageFont.load_default(size).getlength(word) > width for word in words):
        size -= 1  # until all labels fit
    font = ImageFont.load_default(max(size, SMALLEST_LABEL_PIXELS))
    label_height = _line_height(font) if labels else 0
    cells = F.pad(torch.cat([images, blank]), (0, GUTTER_PIXELS, 0, GUTTER_PIXELS + label_height), value=GREY)
    _, _, h, w = cells.shape  # size of a cell, with the gutters to its right and below
    tiles = cells.view(rows, columns, channels, h, w).permute(2, 0, 3, 1, 4).reshape(channels, rows * h, columns * w)
    lines = title.splitlines()
    top = GUTTER_PIXELS + len(lines) * _line_height(title_font)
    below = footer.splitlines()
    bottom = len(below) * _line_height(title_font)
    drawn = picture(F.pad(tiles, (GUTTER_PIXELS, 0, top, bottom), value=GREY))
    pen = ImageDraw.Draw(drawn)
    for first, text in ((GUTTER_PIXELS, lines), (top + rows * h, below)):
        for number, line in enumerate(text):
            at = (2 * GUTTER_PIXELS, first + number * _line_height(title_font))
            pen.text(at, _shortened(line, title_font, columns * w), fill="black", font=title_font)
    short = {label: _shortened(label, font, width) for label in set(labels)}
    for number, label in enumerate(labels):
        row, column = divmod(number, columns)
        middle = GUTTER_PIXELS + column * w + width // 2
        pen.text((middle, top + row * h + height), short[label], fill="black", font=font, anchor="ma")
    return drawn


def _line_height(font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> int:
    return math.ceil(font.getbbox("Ág")[3]) + GUTTER_PIXELS


def _shortened(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """Return the beginning of a line, at most ``width`` pixels wide."""
    text = " ".join(text.split())
    length = len(text)
    while length and font.getlength(text[:length] + "..." * (length < len(text))) > width:
        length -= 1
    return text[:length] + "..." * (length < len(text))


def write_png(image: Image.Image, path: Path) -> None:
    """Write a PNG file atomically."""
    temporary = temporary_beside(path)
    image.save(temporary, format="PNG")
    temporary.replace(path)


def write_animation(files: Sequence[Path], path: Path) -> None:
    """Write picture files as a GIF, atomically, in the size of the last one but at most 720 pixels.

    Of more than 32 files it shows 32, including the first and the last.
    """
    count = min(len(files), MOST_FRAMES)
    with Image.open(files[-1]) as last:
        size = ImageOps.contain(last, (min(max(last.size), MOST_FRAME_PIXELS),) * 2).size
    frames = []
    for number in range(count):
        with Image.open(files[number * (len(files) - 1) // max(1, count - 1)]) as image:
            frame = ImageOps.pad(image, size, color="lightgrey")
            fast = Image.Quantize.FASTOCTREE  # the default takes seconds for a frame of noise
            frames.append(frame if frame.mode == "L" else frame.quantize(method=fast, dither=Image.Dither.NONE))
    durations = [FRAME_MS] * (count - 1) + [LAST_FRAME_MS]
    temporary = temporary_beside(path)
    frames[0].save(temporary, "GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0)
    temporary.replace(path)


@dataclass(frozen=True)
class Drawn:
    """Drawn images, and images that a picture shows beside them."""

    images: Tensor
    """(N, C, H, W) uint8, or float32 in physical units for fields"""
    members: int = 1
    """Number of images of each input: image i belongs to input i // members."""
    given: Tensor | None = None
    """Inputs, (inputs, c, H, W) float32 in the units in which they are stored"""
    truths: Tensor | None = None
    """True images of the inputs, (inputs, C, H, W) float32 in the units of `images`"""
    channels: tuple[str, ...] = ()
    """Names of the channels of fields."""
    given_channels: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    """Prompts, used in turn; () if unknown."""

    def picture(self, title: str, labels: Sequence[str] = (), channel: int = 0) -> Image.Image:
        """Return a grid of the images or, with inputs, a row for each: input, some members, mean, spread, truth.

        Fields show one ``channel`` in colours, with their range below.
        """
        shown = [part[:, channel].float().nan_to_num() for part in (self.images, self.truths) if part is not None]
        between = min(float(part.min()) for part in shown), max(float(part.max()) for part in shown)
        name = self.channels[channel] if self.channels else f"channel {channel}"
        ranges = [f"{name}: {between[0]:.4g} to {between[1]:.4g}"] if self.are_fields else []
        if self.given is None and self.truths is None:
            images = coloured(self.images[:, channel], *between) if self.are_fields else self.images
            return grid(images, title, labels, footer="".join(ranges))
        rows = min(len(self.images) // self.members, MOST_ROWS)
        members = self.images[: rows * self.members].unflatten(0, (rows, self.members)).float()  # (rows, K, C, H, W)
        columns: dict[str, Tensor] = {}
        if self.given is not None:
            given = self.given[:rows].cpu()
            if self.are_fields or given.shape[1] not in (1, 3):  # fields show this channel, others the first
                number = self.given_channels.index(name) if name in self.given_channels else 0
                low, high = float(given[:, number].min()), float(given[:, number].max())
                called = "".join(f" {each}" for each in self.given_channels[number : number + 1])
                ranges.append(f"input{called}: {low:.4g} to {high:.4g}")
                columns["input"] = coloured(given[:, number], low, high)
            else:
                columns["input"] = _rgb(given)
        for number in range(min(self.members, MOST_MEMBERS)):
            title_of = f"member {number + 1}" if self.members > 1 else "drawn"
            columns[title_of] = self._bytes(members[:, number], channel, between)
        if self.members > 1:
            columns["mean"] = self._bytes(members.mean(dim=1), channel, between)
            spread = members.std(dim=1)  # (rows, C, H, W)
            spread = spread[:, channel] if self.are_fields else spread.mean(dim=1)
            columns["spread"] = coloured(spread, 0.0, float(spread.max()))
            ranges.append(f"spread: 0 to {float(spread.max()):.4g}")
        if self.truths is not None:
            columns["truth"] = self._bytes(self.truths[:rows].cpu(), channel, between)
        cells = torch.stack([*columns.values()], dim=1).flatten(0, 1)  # (rows x columns, 3, H, W)
        return grid(cells, title, [*columns] * rows, columns=len(columns), footer="\n".join(ranges))

    @property
    def are_fields(self) -> bool:
        """Whether the images are fields."""
        return self.images.is_floating_point()

    def _bytes(self, images: Tensor, channel: int, between: tuple[float, float]) -> Tensor:
        return coloured(images[:, channel], *between) if self.are_fields else _rgb(images)


def _rgb(images: Tensor) -> Tensor:
    """Return grey or coloured pictures from 0 to 255 as uint8 colours (N, 3, H, W)."""
    return images.round().clamp(0.0, 255.0).to(torch.uint8).expand(-1, 3, -1, -1)


def coloured(values: Tensor, low: float, high: float) -> Tensor:
    """Return values (N, H, W) from ``low`` to ``high`` as uint8 colours (N, 3, H, W) of viridis; NaN is grey."""
    from matplotlib import colormaps  # slow to import

    shares = ((values.float().cpu() - low) / ((high - low) or 1.0)).clamp(0.0, 1.0)
    colours = torch.from_numpy(colormaps["viridis"](shares.numpy(), bytes=True)[..., :3])  # (N, H, W, 3)
    return torch.where(shares.isnan()[..., None], GREY, colours).to(torch.uint8).permute(0, 3, 1, 2)
