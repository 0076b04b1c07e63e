"""Frozen encoders of captions, from a folder that diffusers has written, used as its pipelines use them.

SD 1.5 and 2 read the last hidden state of one encoder, normalised. SDXL reads the states before the last layer of two,
joined along the channels, and the second's projection of the whole text, the pooled text. Source: diffusers'
``StableDiffusionPipeline.encode_prompt`` and ``StableDiffusionXLPipeline.encode_prompt``.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ddpm_ds.data.hub import from_hub
from ddpm_ds.data.sources.base import MOST_REASON, one_line
from ddpm_ds.data.spec import TextSpec
from ddpm_ds.ground.errors import DataError, SpecError
from ddpm_ds.ground.files import expanded, read_bytes, sha256_of, until_changed
from ddpm_ds.ground.formats import parse_json
from ddpm_ds.schema.types import Width
from ddpm_ds.unet.spec import CrossAttentionSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CONFIG = "config.json"
EXPECTED = (
    "name the folder of a pipeline of diffusers with tokenizer and text_encoder, and for SDXL tokenizer_2 and "
    "text_encoder_2, or its name on the Hugging Face hub"
)
SUFFIXES = ("", "_2")
MOST_TOKENS = 4096
TEXTS_AT_ONCE = 8
"""Texts that are encoded together, padded if they are fewer: products of other shapes may be rounded differently."""
INDEX = "model_index.json"
DOWNLOADED = [INDEX, *(f"{part}{suffix}/*" for part in ("tokenizer", "text_encoder") for suffix in SUFFIXES)]


class Encoded(NamedTuple):
    """Encoded texts."""

    tokens: Tensor  # (N, tokens, channels) float16 or float32
    pooled: Tensor | None = None  # (N, channels) of the same dtype; None if the U-Net reads none

    def each(self, change: Callable[[Tensor], Tensor]) -> Encoded:
        """Return both after a ``change``."""
        return Encoded(change(self.tokens), None if self.pooled is None else change(self.pooled))

    def on(self, device: torch.device) -> Encoded:
        """Return both on a device."""
        return self.each(lambda part: part.to(device))

    def rounded(self) -> Encoded:
        """Return both in float16, as they are stored."""
        return self.each(lambda part: part.half())


class _Config(BaseModel):
    """Keys of an encoder's ``config.json`` that this code reads, with the defaults of transformers."""

    model_config = ConfigDict(frozen=True)

    architectures: tuple[Literal["CLIPTextModel", "CLIPTextModelWithProjection"]]
    vocab_size: Annotated[int, Field(ge=1, le=2**24)] = 49408
    hidden_size: Width = 512
    intermediate_size: Width = 2048
    num_hidden_layers: Annotated[int, Field(ge=1, le=1024)] = 12
    projection_dim: Width = 512
    max_position_embeddings: Annotated[int, Field(ge=2, le=MOST_TOKENS)] = 77

    @property
    def projects(self) -> bool:
        """Whether the encoder makes a pooled text."""
        return self.architectures[0] == "CLIPTextModelWithProjection"

    @property
    def parameters(self) -> int:
        """Parameters of the encoder."""
        width, inner = self.hidden_size, self.intermediate_size
        layer = 4 * width * (width + 1) + 2 * width * inner + width + inner + 4 * width
        embedded = (self.vocab_size + self.max_position_embeddings) * width
        return embedded + self.num_hidden_layers * layer + 2 * width + self.projects * width * self.projection_dim


@dataclass(frozen=True)
class FilesOfEncoder:
    """Folders of a tokenizer and its encoder; neither is loaded."""

    tokenizer: Path
    encoder: Path
    config: _Config
    variant: Literal["fp16"] | None


class TextEncoders:
    """Encoders on a device, loaded when used: fp16 on CUDA, else fp32. Without a device only tokenizers load."""

    def __init__(self, spec: TextSpec, parts: Sequence[FilesOfEncoder], device: torch.device | None) -> None:
        self.spec, self.device, self._parts, self.count = spec, device, parts, len(parts)
        configs = [part.config for part in parts]
        self.channels = sum(each.hidden_size for each in configs)  # width of the encoded tokens
        self._chunk = configs[0].max_position_embeddings  # tokens that the encoders read at once
        self.tokens = spec.tokens or self._chunk  # tokens of a text, padding included
        if (self.tokens - 2) % (self._chunk - 2):
            raise DataError(
                f"data.text.tokens = {self.tokens} should be 2 more than a multiple of {self._chunk - 2}, since the "
                f"encoders at {spec.encoders} read {self._chunk} at once; use null"
            )
        self.pooled_channels = next((each.projection_dim for each in configs if each.projects), None)
        """Width of the pooled text; None if no encoder makes one."""
        self.parameters = sum(each.parameters for each in configs)
        states = (each.max_position_embeddings * (each.num_hidden_layers + 1) * each.hidden_size for each in configs)
        self.elements = self.parameters + TEXTS_AT_ONCE * sum(states)
        """Elements that a device holds while it encodes: parameters, and the states of all layers."""
        self._tokenizing = threading.Lock()  # a tokenizer keeps the padding of a call as a setting

    @classmethod
    def open(cls, spec: TextSpec, device: torch.device | None) -> TextEncoders:
        """Open the encoders of ``spec``, reading only their configurations; raises DataError."""
        if importlib.util.find_spec("transformers") is None:
            raise DataError(f"data.text.encoders = {spec.encoders} needs transformers: pip install 'ddpm_ds[text]'")
        return cls(spec, parts_of(spec), device)

    def check_learned(self, digest: str | None) -> None:
        """Refuse encoders without this ``digest``, if one is known; raises DataError."""
        if digest is not None and digest != self.digest:
            raise DataError(
                f"data.text.encoders = {self.spec.encoders} has other encoders or tokenizers than the run learned "
                "from; bring the old ones back"
            )

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the layer's name, the number of tokens and all files that decide how a text is encoded."""
        digest = hashlib.sha256(self.spec.layer.encode())
        if self.tokens != self._chunk:
            digest.update(b"%d" % self.tokens)
        for part in self._parts:
            words = sorted(path for path in part.tokenizer.iterdir() if path.suffix in (".json", ".txt"))
            for path in (*words, part.encoder / CONFIG, *_weights(part.encoder, part.variant)):
                digest.update(f"{path.parent.name}/{path.name} {_checksum(path)}".encode())
        return digest.hexdigest()

    @functools.cached_property
    def tokenizers(self) -> list[Any]:
        """Tokenizers of all encoders; raises DataError if they are damaged or of another kind."""

        def loaded(transformers: Any, part: FilesOfEncoder) -> Any:
            tokenizer = transformers.CLIPTokenizer.from_pretrained(part.tokenizer, local_files_only=True)
            if tokenizer.model_max_length != self._chunk:
                raise ValueError(f"model_max_length is {tokenizer.model_max_length}, the encoder's {self._chunk}")
            return tokenizer

        return [self._loaded(part.tokenizer, part, loaded) for part in self._parts]

    @functools.cached_property
    def models(self) -> list[Any]:
        """Encoders on the device; raises DataError if they are damaged or of another kind."""
        import torch

        assert self.device is not None, "opened without a device"
        device, dtype = self.device, torch.float16 if self.device.type == "cuda" else torch.float32
        given = {"use_safetensors": True, "local_files_only": True, "output_loading_info": True, "dtype": dtype}

        def loaded(transformers: Any, part: FilesOfEncoder) -> Any:
            kind = getattr(transformers, part.config.architectures[0])
            encoder, notes = kind.from_pretrained(part.encoder, variant=part.variant, **given)
            if missing := sorted(notes["missing_keys"]):
                raise ValueError(f"its weights lack {missing[0]}")
            return encoder.eval().requires_grad_(False).to(device)

        return [self._loaded(part.encoder, part, loaded) for part in self._parts]

    def _loaded(self, where: Path, part: FilesOfEncoder, load: Callable[[Any, FilesOfEncoder], Any]) -> Any:
        import transformers

        transformers.logging.set_verbosity_error()  # the error below replaces its warnings
        transformers.logging.disable_progress_bar()
        try:
            return load(transformers, part)
        except Exception as error:  # transformers may raise anything on damaged files
            raise _unusable(self.spec, f"{where} is damaged ({one_line(error)[:MOST_REASON]})") from None

    def ids(self, texts: Sequence[str]) -> Tensor:
        """Return the numbers of the texts' tokens, (N, encoders, tokens) int32; longer texts are cut."""
        import torch

        padded = {"padding": "max_length", "max_length": self.tokens, "truncation": True}
        with self._tokenizing:
            found = [tokenizer(list(texts), **padded, return_tensors="pt").input_ids for tokenizer in self.tokenizers]
        return torch.stack(found, dim=1).int()

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Return the encoded ``texts``, on the device, in the encoders' dtype; longer texts are cut."""
        return self.encode_ids(self.ids(texts))

    def encode_ids(self, ids: Tensor) -> Encoded:
        """Return the encoded texts from their :meth:`ids`, on the device, in the encoders' dtype."""
        import torch

        tokens: list[Tensor] = []
        projected: list[Tensor] = []
        with torch.no_grad():
            for piece in ids.to(self.device).long().split(TEXTS_AT_ONCE):
                count = len(piece)
                padded = torch.cat((piece, piece[-1:].expand(TEXTS_AT_ONCE - count, -1, -1)))
                each = [self._states(number, own) for number, own in enumerate(padded.unbind(dim=1))]
                tokens.append(torch.cat([states for states, _ in each], dim=-1)[:count])
                projected += [pooled[:count] for _, pooled in each if pooled is not None][:1]
        return Encoded(torch.cat(tokens), torch.cat(projected) if projected else None)

    def _states(self, number: int, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the states (N, tokens, channels) of one encoder, and the projected text of the first chunk, if any."""
        import torch

        tokenizer, pooled = self.tokenizers[number], None
        states: list[Tensor] = []
        for chunk in chunks(ids, self._chunk, tokenizer.eos_token_id, tokenizer.pad_token_id):
            found = self.models[number](chunk, output_hidden_states=True)
            pooled = pooled if states else getattr(found, "text_embeds", None)
            states.append(found.last_hidden_state if self.spec.layer == "last" else found.hidden_states[-2])
        inner = [each[:, 1:-1] for each in states]
        return torch.cat((states[0][:, :1], *inner, states[-1][:, -1:]), dim=1), pooled

    def excess(self, texts: Sequence[str]) -> list[int]:
        """Return how many tokens each text loses."""
        counts = [[len(ids) for ids in tokenizer(list(texts)).input_ids] for tokenizer in self.tokenizers]
        return [max(0, max(each) - self.tokens) for each in zip(*counts, strict=True)]


def chunks(ids: Tensor, size: int, end: int, pad: int) -> list[Tensor]:
    """Return texts' tokens (N, tokens) in chunks (N, ``size``): each has a start first, and ``end`` or ``pad`` last.

    A tokenizer that doesn't pad with its end gets one in each chunk: after a chunk's words, or first in an empty one::

        w1 ... w76 END 0 ...     START w1 ... w75 END   START w76 END 0 ... 0   START END 0 ... 0

    Source: sd-scripts' ``library/strategy_base.py``, ``TokenizeStrategy._get_input_ids``.
    """
    import torch

    found = []
    for first in range(1, ids.shape[1] - 1, size - 2):
        inner, last = ids[:, first : first + size - 2], ids[:, -1:]
        if pad != end:
            words = (inner[:, -1:] != end) & (inner[:, -1:] != pad)
            last = last.masked_fill(words, end)
            inner = torch.cat((inner[:, :1].masked_fill(inner[:, :1] == pad, end), inner[:, 1:]), dim=1)
        found.append(torch.cat((ids[:, :1], inner, last), dim=1))
    return found


def check_text(text: TextSpec | None, cross: CrossAttentionSpec | None) -> None:
    """Raise SpecError if the U-Net can't read the encoders' text, and DataError if they can't be opened."""
    if text is None or cross is None:
        return
    if (wrong := misfit(TextEncoders.open(text, None), cross)) is not None:
        key, wanted, found = wrong
        has, fix = ("none", "null") if found is None else (found, found)
        raise SpecError(
            f"unet.text.{key} = {wanted}, but data.text.encoders = {text.encoders} have {has}; --set unet.text.{key}="
            f"{fix}, or name other encoders"
        )


def misfit(encoders: TextEncoders, cross: CrossAttentionSpec) -> tuple[str, int, int | None] | None:
    """Return the first key of ``unet.text`` that doesn't fit the encoders, its value and theirs; None if all fit."""
    theirs = (encoders.tokens, encoders.channels, encoders.pooled_channels)
    for key, found in zip(("tokens", "context_channels", "pooled_channels"), theirs, strict=True):
        if (wanted := getattr(cross, key)) is not None and wanted != found:
            return key, wanted, found
    return None


def parts_of(spec: TextSpec) -> list[FilesOfEncoder]:
    """Return the tokenizers and encoders of ``spec``, downloaded if needed; raises DataError."""

    def opened(folder: Path) -> list[FilesOfEncoder]:
        try:
            index = parse_json(read_bytes(folder / INDEX))
            listed = {name for name, kind in index.items() if any(kind or ())}
        except (OSError, ValueError, TypeError, AttributeError):
            listed = set()  # a folder of encoders alone
        second = [f"{part}{SUFFIXES[1]}" for part in ("tokenizer", "text_encoder")]
        has_two = any(name in listed or (folder / name).exists() for name in second)
        found = list[FilesOfEncoder]()
        for suffix in SUFFIXES[: 1 + has_two]:
            tokenizer, encoder = folder / f"tokenizer{suffix}", folder / f"text_encoder{suffix}"
            if missing := next((part for part in (tokenizer, encoder) if not part.is_dir()), None):
                raise _unusable(spec, f"it has no folder {missing.name}")
            try:
                config = _Config.model_validate(parse_json(read_bytes(encoder / CONFIG)), strict=False)
            except ValidationError as error:
                fault = error.errors()[0]
                key = ".".join(map(str, fault["loc"])) or CONFIG
                raise _unusable(spec, f"{encoder.name}/{CONFIG} is of another kind ({key}: {fault['msg']})") from None
            except (OSError, ValueError) as error:
                raise _unusable(spec, f"{encoder.name}/{CONFIG} can't be read ({one_line(error)})") from None
            variant: Literal["fp16"] | None = None if _weights(encoder, None) else "fp16"
            if not _weights(encoder, variant):
                raise _unusable(spec, f"{encoder.name} has no weights in safetensors")
            found.append(FilesOfEncoder(tokenizer, encoder, config, variant))
        return found

    folder = expanded(spec.encoders)
    if folder.exists():
        return opened(folder)
    key = f"data.text.encoders = {spec.encoders}"
    return from_hub(spec.encoders, DOWNLOADED, opened, key=key, expected=EXPECTED)


_checksum = until_changed(sha256_of)


def _weights(encoder: Path, variant: str | None) -> list[Path]:
    """Return the files of an encoder's weights in this ``variant``, if any; None stands for full precision."""
    ending = rf"(\.{variant})?" if variant else ""
    whole = re.compile(rf"model{ending}(-\d+-of-\d+)?{ending}\.safetensors")
    return sorted(path for path in encoder.iterdir() if whole.fullmatch(path.name))


def _unusable(spec: TextSpec, what: str) -> DataError:
    return DataError(f"data.text.encoders = {spec.encoders} can't be used: {what}; {EXPECTED}")
