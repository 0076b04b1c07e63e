"""Images to pixels of one size: limits by their headers, and large ones without copies."""

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from ddpm_ds.data import decoding
from ddpm_ds.data.decoding import decode, fit
from tests.forking import REPOSITORY
from tests.launching import PATIENCE_SECONDS

# Prints by how many bytes the memory of this process rises while it decodes the file on its command line.
PEAK = """
import sys
from ddpm_ds.data import decoding
from ddpm_ds.data.sources.base import formats

def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

formats()
open("/proc/self/clear_refs", "w").write("5")  # from now on
before = peak()
content = open(sys.argv[1], "rb").read()
decoding.decode(content, (64, 64), 3)
print(peak() - before)
"""


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """An image whose every pixel is anything, and partly transparent."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8))


def file_of(image: Image.Image, kind: str, **options: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "I;16"])
def test_images_turn_and_fit_as_pillow_does_it_in_one_go(mode: str) -> None:
    for width, height in ((97, 40), (40, 97), (1, 9), (33, 33)):
        if mode == "I;16":
            image = Image.fromarray(np.asarray(noise(width, height))[..., 0].astype(np.uint16) * 257)
        else:
            image = noise(width, height).convert(mode)
        for orientation in range(1, 9):
            image.getexif()[0x0112] = orientation
            for size, channels in (((16, 16), 1), ((16, 16), 3), ((16, 40), 3), ((25, 10), 1)):
                turned = ImageOps.exif_transpose(image)
                pixels = fit(turned, turned.size[::-1], channels)
                upright = Image.fromarray(pixels if channels == 3 else pixels[..., 0])
                whole = ImageOps.fit(upright, size[::-1], Image.Resampling.LANCZOS)
                assert (fit(image, size, channels) == np.array(whole).reshape(*size, channels)).all()


def test_transparent_pixels_are_white_and_images_of_the_size_are_unchanged() -> None:
    assert (fit(Image.new("RGBA", (4, 4), (0, 0, 0, 0)), (4, 4), 1) == 255).all()
    pixels = np.asarray(noise(5, 5).convert("RGB"))
    assert (fit(Image.fromarray(pixels), (5, 5), 3) == pixels).all()


@pytest.mark.parametrize(
    ("width", "height"), [(500, 333), (333, 501), (257, 257), (129, 1000), (1023, 513), (65, 67), (64, 64), (40, 30)]
)
def test_a_jpeg_that_its_decoder_scales_down_is_not_stretched(width: int, height: int) -> None:
    coarse = noise(width // 48 + 2, height // 48 + 2).convert("RGB")  # so smooth that scaling twice costs little
    image = coarse.resize((width, height), Image.Resampling.BICUBIC)
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        content = file_of(image, "jpeg", quality=95, exif=exif)
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
        for size in ((8, 8), (16, 16), (31, 31), (32, 32), (64, 64), (16, 40), (60, 20)):
            expected = np.array(ImageOps.fit(upright, size[::-1], Image.Resampling.LANCZOS))
            error = np.square(decode(content, size, 3).astype(float) - expected).mean()
            assert error <= 255**2 / 10**4.4, (orientation, size)  # 44 dB


@pytest.mark.parametrize(
    ("kind", "options", "most"),
    [
        ("png", {}, 75),
        ("webp", {"lossless": True}, 17),
        ("jpeg2000", {}, 12),
        ("tiff", {"compression": "tiff_lzw"}, 30),
        ("avif", {}, 18),
        ("jpeg", {"progressive": True}, 50),
        ("jpeg", {}, None),
    ],
)
def test_what_would_take_too_much_is_refused_by_its_header(
    kind: str, options: dict[str, Any], most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = file_of(noise(400, 400).convert("RGB"), kind, **options)
    budget = decoding.MOST_DECODING_BYTES * 0.16  # of an image of so many million pixels
    monkeypatch.setattr(decoding, "MOST_DECODING_BYTES", len(content) + budget / ((most or 40) - 3))
    assert decode(content, (8, 8), 3).shape == (8, 8, 3)
    if most is not None:
        monkeypatch.setattr(decoding, "MOST_DECODING_BYTES", len(content) + budget / (most + 3))
        monkeypatch.setattr(decoding, "fit", None)
        with pytest.raises(ValueError, match=r"^400 x 400 pixels take \d MB to decode, more than \d; scale it down$"):
            decode(content, (8, 8), 3)
    monkeypatch.setattr(decoding, "MOST_DECODING_BYTES", 1000)
    with pytest.raises(ValueError, match="17 x 16 pixels take 0 MB to decode"):
        decode(np.zeros((16, 17, 3), np.uint8), (8, 8), 3)


def test_big_images_are_decoded_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []

    class Context:
        def __enter__(self) -> None:
            entered.append(1)

        def __exit__(self, *_: object) -> None:
            entered.append(-1)

    monkeypatch.setattr(decoding, "BIG", Context())
    big, small = noise(2100, 2000).convert("L"), noise(500, 500).convert("L")
    for image, kind, expected in ((big, "png", [1, -1]), (small, "png", []), (big, "jpeg", [])):
        entered.clear()
        decode(file_of(image, kind), (8, 8), 1)
        assert entered == expected, "a JPEG is scaled down while it is decoded"


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "side", "options"),
    [
        ("png", 4200, {"compress_level": 1}),
        ("png", 3800, {"compress_level": 1, "exif": 6}),
        ("png16", 6000, {"compress_level": 1}),
        ("tiff", 3600, {"compression": "tiff_lzw"}),
        ("webp", 3200, {}),
        ("jpeg2000", 2800, {}),
        ("avif", 3200, {"speed": 10}),
        ("jpeg", 8192, {}),
        ("jpeg", 7000, {"progressive": True, "subsampling": 0}),
    ],
)
def test_an_image_takes_less_memory_than_is_allowed(
    kind: str, side: int, options: dict[str, Any], tmp_path: Path
) -> None:
    image = noise(32, 32).resize((side, side), Image.Resampling.NEAREST)
    if kind == "png16":
        image = Image.fromarray(np.asarray(image)[..., 0].astype(np.uint16) * 257)
    if "exif" in options:
        exif = Image.Exif()
        exif[0x0112] = options["exif"]
        options = options | {"exif": exif}
    path = tmp_path / "image"
    path.write_bytes(file_of(image.convert("RGB") if kind == "jpeg" else image, kind.removesuffix("16"), **options))
    command = [sys.executable, "-c", PEAK, str(path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1.05 * decoding.MOST_DECODING_BYTES
