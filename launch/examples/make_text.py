"""Make pictures of coloured shapes with captions, and encoders of the words: ``python make_text.py``.

A picture, 16x16 pixels, shows one shape of a random size at a random place on light grey; its caption reads "a red
circle". The encoders are a tokenizer and a text model whose random weights never change. They are enough for few words:
each word gets its own direction, which a U-Net can learn to read. Their folder has `tokenizer` and `text_encoder`, as
`data.text.encoders` needs. `prompts.txt` has all captions, to draw pictures for.
"""

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Plane = NDArray[np.float64]

SIDE, FINE = 16, 8
"""Pixels along a picture's side, and points along a pixel's side whose mean is its colour."""
SMALLEST, LARGEST = 5.0, 6.5
"""Half of a shape's height, in pixels."""
COLOURS = {
    "red": (214, 39, 40),
    "yellow": (245, 196, 30),
    "green": (44, 160, 68),
    "blue": (40, 84, 212),
    "purple": (150, 60, 180),
    "black": (30, 30, 30),
}
SHAPES: dict[str, Callable[[Plane, Plane], Plane]] = {
    "circle": lambda x, y: np.hypot(x, y),
    "square": lambda x, y: np.maximum(np.abs(x), np.abs(y)) / 0.9,
    "triangle": lambda x, y: np.maximum(y, 2.0 * np.abs(x) - y),
    "cross": lambda x, y: np.where(np.minimum(np.abs(x), np.abs(y)) < 0.3, np.maximum(np.abs(x), np.abs(y)), np.inf),
}
"""Functions of the place, x to the right and y down, that are below 1 within a shape of height 2."""
START, END = "<|startoftext|>", "<|endoftext|>"
LAST = "</w>"
"""Mark that ends a word's last symbol."""
WIDTH, TOKENS = 64, 8
"""Channels of the encoded tokens, and tokens of a caption with its start, end and padding."""


def draw(caption: str, generator: np.random.Generator) -> NDArray[np.uint8]:
    """Draw one picture (16, 16, 3) for a caption, at a random place and in a random size."""
    _, colour, shape = caption.split()
    half = generator.uniform(SMALLEST, LARGEST)
    across, down = generator.uniform(half, SIDE - half, size=2)
    points = (np.arange(SIDE * FINE) + 0.5) / FINE
    within = SHAPES[shape]((points[None, :] - across) / half, (points[:, None] - down) / half) < 1.0
    covered = within.reshape(SIDE, FINE, SIDE, FINE).mean(axis=(1, 3))[:, :, None]
    ground = np.full(3, generator.uniform(215.0, 245.0))
    painted = np.array(COLOURS[colour]) + generator.normal(0.0, 8.0, size=3)
    return np.clip(ground + covered * (painted - ground), 0.0, 255.0).round().astype(np.uint8)


def captions() -> list[str]:
    """Return the captions: each colour of each shape."""
    return [f"a {colour} {shape}" for colour, shape in itertools.product(COLOURS, SHAPES)]


def write_pictures(folder: Path, count: int, seed: int = 0) -> None:
    """Write ``count`` pictures, which take the captions in turn, and `metadata.jsonl` with them into ``folder``."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    lines = []
    for number, caption in zip(range(count), itertools.cycle(captions()), strict=False):
        name = f"{number:05}.png"
        Image.fromarray(draw(caption, generator)).save(folder / name)
        lines.append(json.dumps({"file_name": name, "text": caption}) + "\n")
    (folder / "metadata.jsonl").write_text("".join(lines))


def write_encoders(
    folder: Path,
    words: Iterable[str],
    *,
    width: int = 64,
    layers: int = 2,
    tokens: int = 77,
    second: int | None = None,
    pooled: int = 48,
    seed: int = 0,
) -> None:
    """Write ``tokenizer`` and ``text_encoder`` into ``folder``.

    A ``second`` encoder, of that width, adds ``tokenizer_2`` and ``text_encoder_2``, which projects to ``pooled``
    channels.
    """
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    kinds = [("", width, CLIPTextModel), *([] if second is None else [("_2", second, CLIPTextModelWithProjection)])]
    for suffix, channels, kind in kinds:
        vocabulary = write_tokenizer(folder / f"tokenizer{suffix}", words, tokens)
        config = CLIPTextConfig(
            vocab_size=len(vocabulary),
            hidden_size=channels,
            intermediate_size=4 * channels,
            num_hidden_layers=layers,
            num_attention_heads=max(1, channels // 16),
            max_position_embeddings=tokens,
            projection_dim=pooled,
            bos_token_id=vocabulary[START],
            eos_token_id=vocabulary[END],
            pad_token_id=vocabulary[END],
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            kind(config).save_pretrained(folder / f"text_encoder{suffix}")


def write_tokenizer(folder: Path, words: Iterable[str], tokens: int = 77) -> dict[str, int]:
    """Write a ``CLIPTokenizer`` and return its vocabulary: a token for each of ``words``, and letters for others."""

    def merged(one: list[str], pair: tuple[str, str]) -> list[str]:
        found: list[str] = []
        for symbol in one:
            if found and (found[-1], symbol) == pair:
                found[-1] += symbol
            else:
                found.append(symbol)
        return found

    parts, merges = [[*word[:-1], word[-1] + LAST] for word in sorted({word.lower() for word in words})], []
    while pairs := Counter(pair for one in parts for pair in itertools.pairwise(one)):  # byte-pair encoding
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        parts = [merged(one, best) for one in parts]
    printable, others = {*range(33, 127), *range(161, 173), *range(174, 256)}, itertools.count(256)
    letters = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    symbols = [*letters, *(letter + LAST for letter in letters), *("".join(pair) for pair in merges), START, END]
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    settings = {"tokenizer_class": "CLIPTokenizer", "model_max_length": tokens, "pad_token": END}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *map(" ".join, merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return vocabulary


def main(words: Sequence[str] | None = None) -> None:
    """Read the options and write pictures, prompts and encoders."""
    parser = argparse.ArgumentParser(description="Make captioned pictures of coloured shapes, and text encoders.")
    parser.add_argument("--out", type=Path, default=Path("shapes"), help="folder to write (default shapes)")
    parser.add_argument("--count", type=int, default=6000, metavar="N", help="pictures (default 6000)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all draws (default 0)")
    options = parser.parse_args(words)
    known = {word for caption in captions() for word in caption.split()}
    write_pictures(options.out / "pictures", options.count, options.seed)
    (options.out / "prompts.txt").write_text("".join(caption + "\n" for caption in captions()))
    write_encoders(options.out / "encoders", known, width=WIDTH, tokens=TOKENS, seed=options.seed)
    print(f"{options.out / 'pictures'}: {options.count:,} pictures; {options.out / 'encoders'}: {len(known)} words")


if __name__ == "__main__":
    main()
