"""Names that a run spec can choose: sources of images, noise schedules, objectives and samplers.

Each has its words here, for the spec and the command lines, and the keys that it reads. Its code is under the same name
in :mod:`ddpm_ds.data.sources` or :mod:`ddpm_ds.diffusion.choices`; a test compares the names.
"""

from dataclasses import dataclass

MOST_SIGMA = 1e6
"""Largest noise over signal; pure noise, where the ratio is infinite, counts as this."""


@dataclass(frozen=True)
class Choice:
    """A name, and the words for it in the documentation of the spec."""

    about: str


@dataclass(frozen=True)
class SourceChoice(Choice):
    """Kind of source of images, and the keys that it reads."""

    path: str | None = None
    """Word for what `data.path` names, such as FOLDER; None means that it reads no path."""
    name: str | None = None
    """Word for what `data.name` names; None means that it reads no name. A source with both words reads either."""
    labels: str = "its images have one each"
    """Where the labels come from, for an error."""
    keys: tuple[str, ...] = ()
    """Other keys that it reads, among `split`, `image_column` and `label_column`."""
    pictures: bool = True
    """Whether it has pictures, which are decoded and scaled."""
    arrays: bool = False
    """Whether it has arrays by name: fields, conditions, masks and vectors, each of its own size."""
    captions: bool = False
    """Whether its images can have captions."""

    def reads(self, key: str) -> bool:
        """Return whether it reads a key of the spec."""
        return key in self.keys or getattr(self, key, None) is not None


@dataclass(frozen=True)
class ScheduleChoice(Choice):
    """Noise schedule: with timesteps (DDPM), or with continuous noise levels (EDM, flow matching)."""

    betas: tuple[float, float] | None = None
    """Usual `diffusion.beta_start` and `diffusion.beta_end` of a schedule that goes from one to the other."""
    beta_root: int = 1
    """Which root of its betas rises on a line."""
    objective: str | None = None
    """Objective of a schedule with continuous levels; None means that it has timesteps, and takes any."""

    @property
    def continuous(self) -> bool:
        """Whether it has continuous noise levels instead of timesteps."""
        return self.objective is not None


@dataclass(frozen=True)
class ObjectiveChoice(Choice):
    """What the U-Net predicts."""

    diffuses: bool = True
    """Whether images are noised. Else x_t and t are 0, and one evaluation predicts the image from its condition."""


@dataclass(frozen=True)
class SamplerChoice(Choice):
    """Kind of sampler, its default and the options that it reads."""

    steps: int | None
    """Default number of evaluations of the U-Net per image; None means all timesteps."""
    options: frozenset[str] = frozenset()
    """Options that it reads, `eta` or `variance`."""


LABELS_ARRAY = "they are the array labels, (N,)"
SOURCES = {
    "digits": SourceChoice("scikit-learn's, 8x8 pixels"),
    "cifar10": SourceChoice("torchvision's, downloaded"),
    "folder": SourceChoice(
        "image files, `path` names their folder",
        path="FOLDER",
        labels="folders in data.path are classes, so move the images of each class to a folder of its own",
        captions=True,
    ),
    "arrays": SourceChoice(
        "`path` is a .npy or .npz of images or fields",
        path="FILE",
        labels="they are the array labels of a .npz",
        arrays=True,
    ),
    "huggingface": SourceChoice(
        "a data set of the datasets library, of parquet or of arrow files or of WebDataset's tar shards at `path`, or "
        "on the hub by `name`",
        path="PATH",
        name="OWNER/NAME",
        labels="name their column with --set data.label_column=COLUMN",
        keys=("split", "image_column", "label_column"),
        captions=True,
    ),
    "hdf5": SourceChoice(
        "fields in the HDF5 file `path`", path="FILE", labels=LABELS_ARRAY, pictures=False, arrays=True
    ),
    "zarr": SourceChoice(
        "fields in the Zarr folder `path`", path="FOLDER", labels=LABELS_ARRAY, pictures=False, arrays=True
    ),
    "netcdf": SourceChoice(
        "fields in the NetCDF file `path`, or in a Zarr folder that xarray has written",
        path="PATH",
        labels=LABELS_ARRAY,
        pictures=False,
        arrays=True,
    ),
}
"""Sources by `data.source`."""
SCHEDULES = {
    "linear": ScheduleChoice("betas on a line, DDPM", betas=(1e-4, 0.02)),
    "scaled_linear": ScheduleChoice("their roots on a line, Stable Diffusion", betas=(0.00085, 0.012), beta_root=2),
    "cosine": ScheduleChoice("Improved DDPM"),
    "sigmoid": ScheduleChoice("Jabri et al."),
    "edm": ScheduleChoice("log-normal sigmas, Karras et al.", objective="v"),
    "flow": ScheduleChoice(
        "a line between image and noise, Lipman et al.",
        objective="velocity",
    ),
}
"""Noise schedules by `diffusion.schedule`."""
OBJECTIVES = {
    "eps": ObjectiveChoice("the noise"),
    "x0": ObjectiveChoice("the clean image"),
    "v": ObjectiveChoice("Salimans and Ho; under edm what Karras et al. call -F"),
    "velocity": ObjectiveChoice("noise minus image, flow matching"),
    "regression": ObjectiveChoice("the image from its condition alone, without noise", diffuses=False),
}
"""What the U-Net predicts, by `diffusion.objective`."""
SAMPLERS = {
    "ddpm": SamplerChoice("ancestral, DDPM", steps=None, options=frozenset({"variance"})),
    "ddim": SamplerChoice("DDIM, with as much noise as `eta` says", steps=50, options=frozenset({"eta"})),
    "euler": SamplerChoice("as others call ddim without noise", steps=20),
    "euler_ancestral": SamplerChoice("as others call ddim with `eta` 1, not for flow", steps=20),
    "dpm_solver": SamplerChoice("DPM-Solver++ 2M, fast and deterministic", steps=20),
}
"""Samplers by `sampler.kind`."""
