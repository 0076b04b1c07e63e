"""Sections of the run spec about text: the U-Net's cross-attention, captions and their encoding, buckets of aspect."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from ddpm_ds.config.section import Section
from ddpm_ds.files import expanded

Width = Annotated[int, Field(ge=1, le=2**16)]
Depth = Annotated[int, Field(ge=0, le=64)]
Heads = Annotated[int, Field(ge=1, le=1024)]


class CrossAttentionSpec(Section):
    """Text in the U-Net: transformer blocks after its residual blocks, in which pixels attend to each other and to the
    tokens of a caption.
    """

    context_channels: Width
    """Width of the encoded tokens: 768 for SD 1.5, 1024 for SD 2, 2048 for SDXL (diffusers: `cross_attention_dim`)."""
    tokens: Annotated[int, Field(ge=1, le=4096)] = 77
    """Tokens of a caption, padding included."""
    blocks: Annotated[tuple[Depth, ...], Field(min_length=1)]
    """Transformer blocks after each residual block, by level; 0 has none (`transformer_layers_per_block` in
    diffusers)."""
    middle_blocks: Annotated[int, Field(ge=1, le=64)] = 1
    """Transformer blocks between the two middle blocks, if `unet.middle_attention` is true."""
    heads: Annotated[tuple[Heads, ...], Field(min_length=1)]
    """Heads of each attention, by level; the middle has those of the last level (diffusers calls this number
    `attention_head_dim`)."""
    linear_projection: bool = False
    """Whether weights before and after the blocks are those of linear layers in diffusers, instead of those of 1x1
    convolutions, which compute the same (`use_linear_projection`)."""
    pooled_channels: Width | None = None
    """Width of the pooled text that is embedded beside the image's sizes: 1280 for SDXL; null embeds neither
    (diffusers: `addition_embed_type: text_time`)."""
    size_channels: Annotated[int, Field(ge=2, le=4096, multiple_of=2)] = 256
    """Width of the sinusoidal embedding of each of the six sizes (diffusers: `addition_time_embed_dim`)."""
    upcast_attention: bool = False
    """Whether diffusers, to which the U-Net is exported, may compute attention in fp32; here it changes nothing."""


class TextSpec(Section):
    """Captions of the images, encoded by frozen encoders while the data are prepared."""

    encoders: Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(lambda name: str(expanded(name)))]
    """Folder of a pipeline of diffusers, or its name on the Hugging Face hub, with `tokenizer` and `text_encoder`, and
    for SDXL `tokenizer_2` and `text_encoder_2`."""
    layer: Literal["last", "penultimate"] = "last"
    """Hidden states that the U-Net reads: the last, normalised (SD 1.5 and 2), or those before the last layer
    (SDXL)."""
    captions: Annotated[str, Field(min_length=1, max_length=200)] = "text"
    """Name of the captions: a key of `metadata.jsonl`, `metadata.csv` or an image's .json, or a column: a text, or a
    list of texts, of which one is taken each time an image is seen. Other images have their caption in a .txt or
    .caption of their name."""
    drop: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    """Share of captions that are dropped in training, for guidance."""
    drop_to: Literal["empty", "zeros"] = "empty"
    """What is read instead of a dropped caption: the encoded empty text (SD 1.5 and 2), or zeros (SDXL)."""
    stored: Literal["float16", "int8", "ids"] = "float16"
    """How captions are stored: encoded in 16 bits; in 8 with a scale for each token, in half of the space; or as the
    tokenizers' ids alone, in a five-hundredth, which each rank that reads text encodes while it trains."""


class BucketsSpec(Section):
    """Buckets of aspect: images of one bucket have one height and width, all buckets about as many pixels."""

    step: Annotated[int, Field(ge=8, le=1024, multiple_of=8)] = 64
    """Heights and widths are multiples of this many pixels."""
    sizes: Literal["nearest", "sdxl"] = "nearest"
    """Which sizes there are: for each height the width that comes nearest to the pixels of `image_size`, and for each
    width the height, if it is within 6 %; or all of 90 to 100 % of these pixels, which at 1024 pixels are those that
    SDXL was trained on (41 with `widest` 4)."""
    widest: Annotated[float, Field(ge=1.0, le=16.0)] = 2.0
    """Largest ratio of the longer side to the shorter."""
    images: Annotated[int, Field(ge=1, le=2**30)] | None = None
    """Number of consecutive images of training that share a bucket, a multiple of the images of a micro-batch on all
    replicas; null means `train.batch_images`. Images of buckets with fewer are in the next-best ones."""
