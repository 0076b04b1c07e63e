"""Conversion of uint8 tensors to PNG files and to grids with a title and labels, and of grids to an animation.

Images in a grid may be enlarged for viewing; read the tensors to get exact pixels.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor

from ddpm_ds.config.spec import DiffusionSpec, SamplerSpec
from ddpm_ds.files import temporary_beside

GUTTER_PIXELS = 2
GREY = 208
"""Grey value of the gutters and of the background of title and labels."""
SMALLEST_SIDE_PIXELS = 512
"""Minimum width or height of a grid, reached by enlarging its images by a whole factor."""
SMALLEST_LABEL_PIXELS = 11
MOST_FRAMES, MOST_FRAME_PIXELS = 32, 720  # frames of an animation; pixels of its longer side
FRAME_MS, LAST_FRAME_MS = 300, 2000
WEIGHTS = {"ema": "averaged weights", "raw": "weights as trained", "export": "exported weights"}


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
    """Arrange uint8 images (N, C, H, W) row by row in one picture, as square as possible or in so many ``columns``.

    The title's lines are above, and the labels, one for each image or none at all, below their images; the lines of
    the ``footer`` are at the bottom.
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
    font = _label_font(labels, min(title_size, height // 6), width)
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


def _label_font(labels: Sequence[str], size: int, width: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return the largest font up to ``size`` in which all labels fit into ``width``, or the smallest."""
    for pixels in range(size, SMALLEST_LABEL_PIXELS, -1):
        font = ImageFont.load_default(pixels)
        if all(font.getlength(" ".join(label.split())) <= width for label in set(labels)):
            return font
    return ImageFont.load_default(SMALLEST_LABEL_PIXELS)


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
    """Write a PNG file that is complete or does not exist."""
    temporary = temporary_beside(path)
    image.save(temporary, format="PNG")
    temporary.replace(path)


def write_animation(files: Sequence[Path], path: Path) -> None:
    """Write picture files as a GIF that is complete or does not exist, in the size of the last, at most 720 pixels.

    If there are more than 32 files, 32 are shown, including the first and the last.
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
