"""Images to pixels of one size: limits by their headers, and large ones without copies."""

import io
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from ddpm_ds.data import decoding
from ddpm_ds.data.decoding import decode, fit


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


def test_what_would_take_too_much_is_refused_by_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "MOST_PIXELS", 400 * 400 - 1)
    monkeypatch.setattr(decoding, "fit", lambda *_: np.zeros((8, 8, 3), np.uint8))
    for kind, options, fits in (("png", {}, False), ("jpeg", {}, True), ("jpeg", {"progressive": True}, False)):
        content = file_of(noise(400, 400).convert("RGB"), kind, **options)
        with nullcontext() if fits else pytest.raises(ValueError, match=r"^400 x 400 are more than 159,999 pixels; sc"):
            decode(content, (8, 8), 3)
    with pytest.raises(ValueError, match="410 x 400 are more"):
        decode(np.zeros((400, 410, 3), np.uint8), (8, 8), 3)


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
