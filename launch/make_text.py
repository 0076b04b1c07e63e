"""Write a small pipeline folder's text encoders, with random weights, for the words of a text-to-image job.

    python3 launch/make_text.py data/shapes/encoders red green blue circle square triangle a

Random weights that never change are enough for few words: each becomes another direction, which a U-Net can learn to
read. The folder has `tokenizer` and `text_encoder`, as `data.text.encoders` asks for it.
"""

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

START, END = "<|startoftext|>", "<|endoftext|>"
LAST = "</w>"
"""Mark of the last symbol of a word."""


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
    """Write ``tokenizer`` and ``text_encoder`` into ``folder``, and for a ``second`` encoder of another width
    ``tokenizer_2`` and ``text_encoder_2``, which projects to ``pooled`` channels.
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
    """Write a ``CLIPTokenizer`` that has one token for each of ``words``, and tokens of letters for others; return its
    vocabulary.
    """
    merges = _merges(sorted({word.lower() for word in words}))
    letters = _letters()
    symbols = [*letters, *(letter + LAST for letter in letters), *("".join(pair) for pair in merges), START, END]
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    settings = {"tokenizer_class": "CLIPTokenizer", "model_max_length": tokens, "pad_token": END}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *map(" ".join, merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return vocabulary


def _letters() -> list[str]:
    """Return the symbols of the 256 bytes: printable ones are themselves, the others follow after 255."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _merges(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of symbols that are merged, in order, until each word is one symbol (byte-pair encoding)."""
    parts = [[*word[:-1], word[-1] + LAST] for word in words]
    merges = []
    while pairs := Counter(pair for symbols in parts for pair in itertools.pairwise(symbols)):
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        parts = [_merged(symbols, best) for symbols in parts]
    return merges


def _merged(symbols: list[str], pair: tuple[str, str]) -> list[str]:
    found: list[str] = []
    for symbol in symbols:
        if found and (found[-1], symbol) == pair:
            found[-1] += symbol
        else:
            found.append(symbol)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the pipeline, made if needed")
    parser.add_argument("words", nargs="+", help="words that are one token each")
    parser.add_argument("--width", type=int, default=64, help="channels of the encoded tokens; default: 64")
    parser.add_argument("--tokens", type=int, default=77, help="tokens of a caption; default: 77")
    options = parser.parse_args()
    write_encoders(options.folder, options.words, width=options.width, tokens=options.tokens)
