"""Section `data` of the run spec: images, conditions, captions, buckets of aspect. Does not import torch."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from ddpm_ds.ground.files import expanded
from ddpm_ds.schema import types
from ddpm_ds.schema.choices import SOURCES
from ddpm_ds.schema.section import Section, needs, only_with, plain, refuse
from ddpm_ds.unet.spec import Interface

ALPHA, BESIDE = "alpha", "beside"
"""Values of ``data.mask`` for a picture's own alpha, and for a file beside it that is named as by OneTrainer."""
Name = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(lambda name: str(expanded(name)))]


class ConditionSpec(Section):
    """Condition of each image: channels beside x_t that are never noised, and a vector beside the time embedding.

    Channels of the condition are in this order: stored or made ones, constants, grid.
    """

    kind: Annotated[
        Literal["stored", "reduced", "grey", "cut_out"] | None,
        needs("stored", "channels or data.source=folder", types.OF_FILES),
        needs("reduced", types.PIXELS),
        needs("grey", "data.channels=3", types.PIXELS),
    ] = None
    """Source of the condition's channels: a second array or picture of each image, or the image itself: reduced by
    `factor` and enlarged again (super-resolution), its grey values (colourisation), or the image with a part cut out
    and a channel that is 1 there (inpainting). Null has none of these."""
    path: Annotated[types.FilePath | None, only_with("kind=stored|cut_out or constants or vector", types.OF_FILES)] = (
        None
    )
    """File of arrays with the stored condition; null means `data.path`. Of a folder of images, a folder with a picture
    of the same name and size for each image: the condition or, for cut_out, a mask that is white where to cut."""
    held_out_path: Annotated[types.FilePath | None, only_with("path or data.sources", "data.held_out_path")] = None
    """The same for the images in `data.held_out_path`."""
    variables: Annotated[tuple[types.Variable, ...], only_with("kind=stored", types.OF_ARRAYS)] = ()
    """Names of the arrays that are the stored condition, (N, h, w) or (N, C, h, w) each; [] means one that is named
    condition, or the only one in a `path` of its own."""
    channels: Annotated[int, Field(ge=0, le=256), only_with("kind=stored", types.OF_ARRAYS)] = 0
    """Channels of the stored condition of arrays; pictures have those of the images."""
    scaled: Annotated[bool, only_with("kind=stored", types.LATENTS)] = True
    """Whether latents of the stored condition are scaled as the images' (Marigold) or as the encoder makes them
    (InstructPix2Pix)."""
    resize: Annotated[Literal["nearest", "bilinear", "bicubic"], only_with("kind=stored|reduced")] = "bilinear"
    """How a condition of another size is resized to the image's."""
    normalise: Annotated[types.Normalise, only_with("kind=stored or constants", types.OF_ARRAYS)] = None
    """Scaling of the stored condition and the constants, by channel, as `data.normalise` scales fields."""
    factor: Annotated[int, Field(ge=2, le=64), only_with("kind=reduced")] = 4
    """Pixels of the image, each way, in one pixel of the reduced image."""
    noise: Annotated[float, Field(ge=0.0, le=1.0), only_with("kind=reduced", types.OF_NOISE)] = 0.0
    """Highest level of the noise that is mixed into a reduced image, x -> sqrt(1 - level^2) x + level noise: each image
    has a random level up to this one, which the U-Net also reads. Samples have level 0."""
    cut: Annotated[tuple[types.Small, types.Small], only_with("kind=cut_out")] = (0.25, 0.75)
    """Smallest and largest side of the rectangle that is cut out, as a share of the image's."""
    variants: Annotated[int, Field(ge=1, le=types.MOST_VARIANTS), only_with("kind=cut_out", types.LATENTS)] = 4
    """Number of cut images whose latents are stored for each image; each time one of them is drawn."""
    unmasked: Annotated[float, Field(ge=0.0, le=1.0), only_with("kind=cut_out", types.LATENTS)] = 0.1
    """Share of these from which everything is cut out."""
    constants: Annotated[tuple[types.Variable, ...], only_with(types.OF_ARRAYS), needs("*", "constant_channels")] = ()
    """Names of arrays in `path`, (H, W) or (C, H, W), that all images share, such as the land's height; they are
    stored once."""
    constant_channels: Annotated[int, Field(ge=0, le=256), needs("*", "constants")] = 0
    """Channels of all `constants`."""
    grid_channels: Annotated[int, Field(ge=0, le=64, multiple_of=4), only_with(types.PIXELS)] = 0
    """Channels with the position of each pixel, sinusoids of 1, 2, ... periods: sine and cosine, downwards and to the
    right."""
    vector: Annotated[tuple[types.Variable, ...], only_with(types.OF_ARRAYS), needs("*", "vector_size")] = ()
    """Names of arrays in `path`, (N,) or (N, K), such as a lead time or parameters, which are added to the time
    embedding."""
    vector_size: Annotated[int, Field(ge=0, le=4096), needs("*", "vector")] = 0
    """Numbers in all arrays of `vector` together."""
    drop: types.Fraction = 0.0
    """Share of the images whose condition, vector included, is replaced by zeros; needed for guidance. The U-Net gets a
    flag, unless it learns latents. With `data.text.drop` one draw decides both, and the half of its images with the
    lower draws keep their condition."""

    def input_channels(self, image_channels: int) -> int:
        """Return all channels of the condition."""
        made = {"reduced": image_channels, "grey": 1, "cut_out": image_channels + 1}
        made["stored"] = self.channels or image_channels
        return (made[self.kind] if self.kind else 0) + self.constant_channels + self.grid_channels

    @property
    def numbers(self) -> int:
        """Size of the U-Net's vector: the data's numbers, and a flag of a dropped condition."""
        return self.vector_size + (self.drop > 0.0)

    @property
    def copies(self) -> int:
        """Number of latents of the condition that are stored for each image; given masks differ by `unmasked` alone."""
        return self.variants if self.kind == "cut_out" and (self.path is None or self.unmasked) else 1


class TagsSpec(Section):
    """Captions as lists of tags, some of which are shuffled and dropped each time an image is seen.

    The held-out loss and pictures have all tags, in the order of the caption.
    """

    separator: Annotated[str, Field(min_length=1, max_length=20)] = ","
    """Text between two tags."""
    keep: Annotated[int, Field(ge=0, le=1000)] = 0
    """Number of first tags that are neither shuffled nor dropped."""
    keep_separator: Annotated[str, Field(min_length=1, max_length=20)] | None = None
    """Text, such as three bars, that ends the tags to keep; a second one in a caption begins last tags that are kept
    too. Other captions keep the first `keep`."""
    shuffle: bool = False
    """Shuffle the tags that are not kept."""
    drop: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Probability with which each tag that is not kept is left out."""
    prefix: Annotated[str, Field(max_length=1000)] = ""
    """Text before each caption, which becomes part of its first tag."""


class TextSpec(Section):
    """Captions of the images, encoded by frozen encoders while the data are prepared or while training."""

    encoders: Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(lambda name: str(expanded(name)))]
    """Folder of a pipeline of diffusers, or its name on the Hugging Face hub, with `tokenizer` and `text_encoder`, and
    for SDXL `tokenizer_2` and `text_encoder_2`."""
    layer: Literal["last", "penultimate"] = "last"
    """Hidden states that the U-Net reads: the last, normalised (SD 1.5 and 2), or those before the last layer
    (SDXL)."""
    tokens: Literal[77, 152, 227] | None = None
    """Tokens of a caption, start, end and padding included. More than the encoders read at once, 77, are encoded in
    chunks of 75, as in sd-scripts, and the pooled text is the first chunk's. Null means as many as they read at
    once."""
    captions: Annotated[str, Field(min_length=1, max_length=200)] = "text"
    """Name of the captions: a key of `metadata.jsonl`, `metadata.csv` or an image's .json, or a column. A caption is a
    text, or a list of texts, of which one is drawn each time an image is seen. Other images have their caption in a
    .txt or .caption file of their name."""
    missing: Literal["refuse", "empty"] = "refuse"
    """Response to images without a caption: refuse them, or learn them with the empty text."""
    drop: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    """Share of captions that are dropped in training, for guidance."""
    drop_to: Literal["empty", "zeros"] = "empty"
    """Replacement of a dropped caption: the encoded empty text (SD 1.5 and 2), or zeros (SDXL)."""
    stored: Literal["float16", "ids", "text"] = "float16"
    """How captions are stored: encoded in 16 bits; as the tokenizers' ids, in a five-hundredth of the space, which each
    rank that reads text encodes while it trains; or as text, which such a rank tokenizes too."""
    tags: Annotated[TagsSpec | None, needs("*", "stored=text")] = None
    """How captions that are lists of tags change each time an image is seen; null leaves captions as they are."""

    @property
    def encoded_in_training(self) -> bool:
        """Whether ranks that read text encode it while they train."""
        return self.stored in ("ids", "text")


class BucketsSpec(Section):
    """Buckets of aspect: images of one bucket have one height and width, all buckets about as many pixels."""

    step: Annotated[int, Field(ge=8, le=1024, multiple_of=8)] = 64
    """Heights and widths are multiples of this many pixels."""
    sizes: Literal["nearest", "sdxl", "sd_scripts"] = "nearest"
    """Sizes of the buckets. nearest: for each height the width that comes nearest to the pixels of `image_size`, and
    for each width the height, if within 6 %. sdxl: all sizes with 90 to 100 % of these pixels; at 1024 pixels they are
    SDXL's own (41 with `widest` 4). sd_scripts: for each side from `minimum` to `maximum` the largest other side with
    at most these pixels, as in kohya's scripts."""
    widest: Annotated[float, Field(ge=1.0, le=16.0), only_with("sizes=nearest|sdxl")] = 2.0
    """Largest ratio of the longer side to the shorter."""
    minimum: Annotated[int, Field(ge=8, le=2**16)] | None = None
    """Smallest side in pixels. Null means a quarter of a square's side for sd_scripts, else `step`."""
    maximum: Annotated[int, Field(ge=8, le=2**16)] | None = None
    """Largest side in pixels. Null means two sides of a square for sd_scripts, else no limit."""
    no_upscale: bool = False
    """Give images with fewer pixels than `image_size` buckets of their own size, with sides cut to multiples of `step`,
    where there are enough of a size; others go to the bucket that keeps most of their pixels."""
    images: Annotated[int, Field(ge=1, le=2**30)] | None = None
    """Number of consecutive images of training that share a bucket, a multiple of the images of a micro-batch on all
    replicas; null means `train.batch_images`. A bucket with fewer images gives them to the next-best ones."""


class SourceSpec(Section):
    """One of several folders of images."""

    path: types.FilePath
    """Folder of images; its subfolders are searched too."""
    repeats: Annotated[float, Field(gt=0.0, le=10_000.0)] | None = None
    """Times that an image comes while the images of a source with 1 come once. Null means the number in the name of a
    folder such as `10_cat`, for captioned images, or else 1."""
    loss_weight: Annotated[float, Field(ge=0.0, le=1e6)] = 1.0
    """Factor of the loss of these images."""
    captions: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Name of the captions in this folder; null means `data.text.captions`."""
    caption: Annotated[str, Field(max_length=10_000)] | None = None
    """Caption of images without one. Null means the name in a folder such as `10_cat`, or else none."""
    mask: Name | None = None
    """Masks of these images; null means `data.mask`, or else that they count whole."""
    condition: types.FilePath | None = None
    """Folder of the conditions of these images; null means `data.condition.path`."""


class DataSpec(Section):
    """Images that the U-Net learns."""

    source: Annotated[str, types.one_of(SOURCES), types.listed("Where images come from", SOURCES)]
    path: Annotated[types.FilePath | None, only_with(types.read_by_source("path"), "name=null")] = None
    """Path that the source reads: a folder of images for `folder`, whose subfolders are classes; a file for
    `arrays` and `hdf5`; a folder for `zarr`; either for `huggingface` and `netcdf`. Other sources refuse a path."""
    name: Annotated[
        Annotated[str, Field(pattern=r"^[A-Za-z0-9._/-]+$", max_length=200)] | None,
        only_with(types.read_by_source("name")),
    ] = None
    """Name of the data set on the Hugging Face hub: `OWNER/NAME`, or `OWNER/NAME/CONFIGURATION` if it has several."""
    split: Annotated[
        Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$", max_length=200)] | None,
        only_with(types.read_by_source("split")),
    ] = None
    """Split of the data set that `huggingface` reads; null means train, or else the only split."""
    image_column: Annotated[types.Variable | None, only_with(types.read_by_source("image_column"))] = None
    """Column of images that `huggingface` reads; null means the only image column."""
    label_column: Annotated[types.Variable | None, only_with(types.read_by_source("label_column"))] = None
    """Column of labels that `huggingface` reads; null means the only column of class labels, or else a column of whole
    numbers or names that is named label."""
    sources: Annotated[tuple[SourceSpec, ...], Field(max_length=1000), only_with("source=folder", "path=null")] = ()
    """Several folders of images, instead of `path`. Each comes to training in proportion to its number of images times
    its repeats."""
    image_size: types.Size
    """Size in pixels of the images, which are scaled up or down and centre-cropped, or of `autoencoder`'s latents: a
    number for squares, or [height, width]. Fields have this size already."""
    crop_from: Annotated[
        types.Size | None, only_with(types.PIXELS, types.ONE_SIZE, "residual_of=null", "unet.text.pooled_channels=null")
    ] = None
    """Size in pixels of the prepared images. Training takes a random crop of `image_size` each time an image is seen,
    evaluation the centre; null prepares images of `image_size`."""
    channels: types.ImageChannels
    """Channels of the images (1 grey, 3 RGB), of fields, or of `autoencoder`'s latents."""
    variables: Annotated[tuple[types.Variable, ...], only_with(types.OF_ARRAYS)] = ()
    """Names of the arrays in `path` that are the fields to learn, (N, H, W) or (N, C, H, W) each, joined along the
    channels; [] means the only array that fits, or one that is named image or images."""
    values: Annotated[Literal["bytes", "float16", "float32"], only_with(types.OF_ARRAYS)] = "bytes"
    """How values are stored: bytes for pictures, floats for fields."""
    normalise: Annotated[types.Normalise, only_with(types.OF_FIELDS)] = None
    """Scaling of fields, by channel: "statistics" subtracts the mean and divides by the standard deviation, "range"
    maps the smallest and the largest value to -1 and 1. Both are computed while the data are prepared, and undone in
    samples and scores. Null keeps the values; pictures are always mapped to [-1, 1]."""
    mask: Annotated[Name | None, only_with(types.OF_FILES)] = None
    """Name of an array in `path`, (N, H, W), (H, W) or (N, C, H, W), that is 1 where a pixel counts in the loss and 0
    elsewhere; or "nan", which masks NaN in the fields. Masked values, and NaN in a condition, are read as the mean of
    their channel. Null refuses fields that are not finite. Of a folder of images, a folder with a picture of the same
    name and size for each image, whose greys are weights; or "alpha" for the images' own; or "beside" for files such as
    `1-masklabel.png` beside `1.png`. The last two count images without a mask whole."""
    held_out: types.HeldOut = "random"
    """Which images are held out: random ones, the last, or ten evenly spaced ranges of neighbours, for images that
    resemble those beside them, such as hours of weather."""
    held_out_path: Annotated[types.FilePath | None, only_with(types.read_by_source("path"), "name=null")] = None
    """Path of a separate source of held-out images, read by the same keys as `path`, such as a folder of validation
    images or the file of another year; all images of `path` are trained on. Null holds out images of `path`."""
    flips_negate: Annotated[tuple[types.Variable | int, ...], only_with("horizontal_flips", types.OF_FIELDS)] = ()
    """Channels whose sign changes in a mirrored image, such as eastward wind: numbers from 0, first the fields' and
    then the stored condition's, or names in `variables`, if each variable has one channel."""
    condition: Annotated[ConditionSpec | None, only_with("autoencoder or buckets=null")] = None
    """Condition of each image; null learns images alone."""
    autoencoder: types.FilePath | None = None
    """Autoencoder whose latents are learned (latent diffusion): a folder saved by diffusers' AutoencoderKL or
    AutoencoderKLFlux2, or a name on the Hugging Face hub. `ddpm-ds prepare --encode` makes the latents; null learns
    pixels."""
    latent_scale: Annotated[types.LatentScale | None, only_with("autoencoder")] = None
    """Factor of latents less `latent_shift`, one or one of each channel; null means the autoencoder's own."""
    latent_shift: Annotated[types.LatentShift | None, only_with("autoencoder")] = None
    """Number subtracted from latents, one or one of each channel; null means the autoencoder's own."""
    text: Annotated[
        TextSpec | None, only_with("unet.text", types.those("source", SOURCES, lambda source: source.captions))
    ] = None
    """Captions, for a U-Net with `unet.text`; null trains without text."""
    buckets: BucketsSpec | None = None
    """Buckets of aspect, whose images have about as many pixels as `image_size`, and each bucket its own height and
    width; null has one size."""
    residual_of: Annotated[
        types.FilePath | None,
        only_with(types.OF_FIELDS, "condition", "data.condition.kind=null|stored", types.OF_NOISE),
    ] = None
    """Folder of a run with `diffusion.objective: regression` whose predictions are subtracted from the fields:
    the residuals are learned, and samples are the sum of both. `ddpm-ds prepare --residual RUN_DIR` makes
    them; null learns the fields themselves."""
    horizontal_flips: bool = False
    """Mirror an image with probability 1/2 each time it is seen. Latents of mirrored images are stored too."""
    held_out_images: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Number of images that are held out of training, for the held-out loss. This number and `held_out` alone decide
    which images; each bucket of aspect gives about the same share. 0 holds out none, or all of `held_out_path`."""
    max_bad_fraction: types.Fraction = 0.01
    """Share of images, mostly unreadable ones, that preparation may leave out before it fails; skipped.txt names
    them."""
    store_root: types.FilePath = Path("data")
    """Folder of data-set caches; a cache is named after its source, size, channels and contents."""
    workers: Annotated[int, Field(ge=1, le=64)] = 2
    """Threads that read ahead, of each rank that loads data."""

    @property
    def folders(self) -> tuple[SourceSpec, ...]:
        """Sources of a kind that reads folders of images, with their masks and conditions; one of `path` alone."""
        usual = {"mask": self.mask, "condition": None if self.condition is None else self.condition.path}
        given = self.sources or (() if self.path is None else (SourceSpec(path=self.path),))
        return tuple(
            each.model_copy(update={key: getattr(each, key) or value for key, value in usual.items()}) for each in given
        )

    @property
    def origin(self) -> str:
        """Key and value of the images' path, for messages."""
        return f"data.sources = {len(self.sources)} folders" if self.sources else f"data.path = {self.path}"

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels of the images that are learned."""
        return types.height_and_width(self.image_size)

    @property
    def stored_size(self) -> tuple[int, int]:
        """Height and width in pixels of the prepared images."""
        return types.height_and_width(self.crop_from or self.image_size)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape (C, H, W) of the images that are learned."""
        return (self.channels, *self.size)

    @property
    def stored_shape(self) -> tuple[int, int, int]:
        """Shape (C, H, W) of the prepared images."""
        return (self.channels, *self.stored_size)

    @property
    def interface(self) -> Interface:
        """What a U-Net for these data takes and predicts."""
        condition = self.condition or ConditionSpec()
        return Interface(
            channels=self.channels,
            size=self.size,
            condition_channels=condition.input_channels(self.channels),
            numbers=condition.numbers if self.autoencoder is None else 0,
            condition_level=condition.noise > 0.0,
        )

    @property
    def is_masked(self) -> bool:
        """Whether the loss of pixels is weighed by masks."""
        return self.mask is not None or any(each.mask for each in self.sources)

    @property
    def condition_is_stored(self) -> bool:
        """Whether the cache has a condition of each image, instead of what it is made from."""
        kind = None if self.condition is None else self.condition.kind
        return kind == "stored" or (kind == "cut_out" and self.autoencoder is not None)

    @property
    def are_fields(self) -> bool:
        """Whether the images are fields of floats instead of pictures of bytes."""
        return self.values != "bytes"

    @property
    def is_unbounded(self) -> bool:
        """Whether fields come to the U-Net with values beyond [-1, 1]."""
        return self.are_fields and self.normalise != "range"

    @property
    def named_arrays(self) -> dict[str, object]:
        """Values of the keys that only a source of named arrays reads, by key, if they are given."""
        condition = self.condition or ConditionSpec()
        given = {f"data.{key}": getattr(self, key) for key in ("values", "variables", "mask")}
        of_condition = ("kind", "path", "variables", "constants", "vector")
        given |= {f"data.condition.{key}": getattr(condition, key) for key in of_condition}
        usual = {"data.values": {"bytes"}, "data.condition.kind": {"reduced", "grey", "cut_out"}}
        return {key: value for key, value in given.items() if value and value not in usual.get(key, ())}

    @property
    def reads_arrays(self) -> bool:
        """Whether images are named arrays of their final size, instead of pictures that are decoded and scaled."""
        return SOURCES[self.source].arrays and (not SOURCES[self.source].pictures or bool(self.named_arrays))


def check_source(data: DataSpec) -> None:
    """Check that a source has the keys that it needs, and no other source's; raises ValueError with one line."""
    source = SOURCES[data.source]
    takes = {f"data.{key}": word for key, word in (("path", source.path), ("name", source.name)) if word is not None}
    ways = " or ".join(f"--set {key}={word}" for key, word in takes.items())
    pictures_alone = {"autoencoder": data.autoencoder, "text": data.text, "buckets": data.buckets}
    given = data.held_out_path and data.is_masked and not data.reads_arrays
    reads = data.condition is not None and (data.condition_is_stored or data.condition.kind == "cut_out")
    refuse(
        {
            f"{' or '.join(takes)} is missing; source {data.source} needs it: {ways}": takes
            and not (data.path or data.name or data.sources)
        }
        | {
            f"data.{key} needs pictures, and data.source = {data.source} has arrays here; use null": data.reads_arrays
            and value is not None
            for key, value in pictures_alone.items()
        }
        | {
            f"data.mask = {data.mask} has no masks of data.held_out_path; use {ALPHA} or {BESIDE}": given
            and data.mask not in (ALPHA, BESIDE),
            "data.sources has a condition, which only data.condition.kind = stored or cut_out reads; remove it": (
                any(each.condition for each in data.sources) and not reads
            ),
        }
    )


def check_images(data: DataSpec) -> None:
    """Check sizes and channels of the images; raises ValueError with one line."""
    kept, size = types.written(data.stored_size), types.written(data.size)
    refuse(
        {
            f"data.crop_from = {kept} is below data.image_size = {size}, the size of the crops; use {size} or more, or "
            "null for no crops": any(side < crop for side, crop in zip(data.stored_size, data.size, strict=True)),
            f"data.channels = {data.channels} should be 1 (grey) or 3 (RGB); other numbers are of the latents of "
            "data.autoencoder, which is null, or of fields (data.values)": (
                data.autoencoder is None and not data.are_fields and data.channels not in (1, 3)
            ),
        }
        | {
            f"data.{key} has {len(value)} numbers, and data.channels = {data.channels}; give one, or one of each "
            "channel": len(value) != data.channels
            for key in ("latent_scale", "latent_shift")
            if isinstance(value := getattr(data, key), tuple)
        }
    )


def check_buckets(data: DataSpec, levels: int) -> None:
    """Check sizes of buckets for a U-Net with so many levels; raises ValueError with one line."""
    if data.buckets is None:
        return
    step, multiple, size = data.buckets.step, 2 ** (levels - 1), types.written(data.size)
    refuse(
        {
            f"data.buckets.step = {step} can't be halved {levels - 1} times, as the levels of unet.multipliers ask; "
            f"use a multiple of {multiple}, or fewer levels": step % multiple,
            f"data.image_size = {size} is no multiple of data.buckets.step = {step}; use one, or another "
            "step": data.autoencoder is None and any(side % step for side in data.size),
        }
    )


def check_condition(data: DataSpec) -> None:
    """Check the condition; raises ValueError with one line."""
    condition = data.condition
    if condition is None:
        return
    factor, size = condition.factor, types.written(data.size)
    folders = [each.condition for each in data.folders]
    of_each_image = condition.kind == "stored" or condition.vector or (condition.kind == "cut_out" and any(folders))
    refuse(
        {
            "data.condition has neither a kind nor constants, grid_channels or vector; give one, or use null": not (
                condition.kind or condition.constants or condition.grid_channels or condition.vector
            ),
            f"data.condition.kind = {condition.kind} needs a condition of each image; name the folder of their "
            "pictures in data.condition.path": (
                not data.reads_arrays and not all(folders) and (condition.kind == "stored" or any(folders))
            ),
            "data.condition.path has masks for kind: cut_out, and pixels are cut at random in training; remove it, or "
            "give data.autoencoder": (
                condition.kind == "cut_out"
                and any(folders)
                and data.autoencoder is None
                and not (condition.constants or condition.vector)
            ),
            f"data.condition.path = {condition.path} has the condition of data.path, and data.held_out_path = "
            f"{data.held_out_path} has none; name it by data.condition.held_out_path": (
                data.held_out_path and any(folders) and of_each_image and condition.held_out_path is None
            ),
            f"data.condition.factor = {factor} does not divide data.image_size = {size}; use a divisor": (
                condition.kind == "reduced" and any(side % factor for side in data.size)
            ),
            f"data.condition.cut = {plain(condition.cut)} should not fall; give the smaller side first": (
                condition.cut[0] > condition.cut[1]
            ),
        }
    )


def check_flips(data: DataSpec) -> None:
    """Check the channels that change sign in a mirrored image; raises ValueError with one line."""
    condition = data.condition or ConditionSpec()
    both, named = data.channels + condition.channels, list[str]()
    for names, count in ((data.variables, data.channels), (condition.variables, condition.channels)):
        named += names if len(names) == count else ()
    for one in data.flips_negate:
        refuse(
            {
                f"data.flips_negate has {one}, but the channels of the fields and of their stored condition are 0 to "
                f"{both - 1}; use those": isinstance(one, int) and not 0 <= one < both,
                f"data.flips_negate has {one}, which is no variable of one channel; use a name in data.variables, if "
                "each of them has one channel, or the channel's number": isinstance(one, str) and one not in named,
            }
        )
