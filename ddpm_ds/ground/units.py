"""Limits of counts and sizes, and how numbers and tables are written."""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

Precision = Literal["fp32", "fp16", "bf16"]
"""Type of the numbers of a run, of a drawing U-Net or of a file."""

MOST_PROCESSES, MOST_BATCH = 2**16, 2**20
"""Most processes of a run, and most images of a step."""
MOST_IMAGES, MOST_COUNT = 10**15, 10**6
"""Most images or optimizer steps of a run, and most of anything else that is counted, such as images to draw."""
MOST_IMAGE, MOST_SEED = 2**48, 2**32 - 1
"""Highest number of an image among all those drawn from one seed, and highest such seed."""
MOST_MEMBERS = 4096
"""Most images that are drawn for one input."""
MOST_BYTES, MOST_BANDWIDTH, MOST_FLOPS = 2**60, 1e18, 1e21
"""Most memory of a device in bytes, bytes per second of a link, and flops per second."""


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> list[str]:
    """Return the lines of a table with columns as wide as their widest cell, right-aligned except ``left`` ones."""
    columns = list(zip(*rows, strict=True))
    for number, column in enumerate(columns):
        width = max(map(len, column))
        columns[number] = tuple(cell.ljust(width) if number in left else cell.rjust(width) for cell in column)
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def table(rows: Sequence[Mapping[str, str]], left: Collection[str] = ()) -> list[str]:
    """Return the lines of a table with a column for each key that some row has a cell for; see :func:`aligned`."""
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    cells = [names, *([row[name] for name in names] for row in rows)]
    return aligned(cells, [number for number, name in enumerate(names) if name in left])


GIB = 2**30


def limit(value: float) -> str:
    """Format the end of a range: ``512``, ``65,536``, or a long one as a power, ``10^15``."""
    powers = (f"{base}^{power}" for base in (10, 2) for power in range(6, 64) if base**power == value > 10**6)
    return next(powers, f"{value:,.15g}")


def counted(number: int, what: str) -> str:
    """Format a count with its noun: ``1 process``, ``2 stages``, ``2 micro-batches``."""
    plural = f"{what}es" if what.endswith(("ch", "ss")) else f"{what}s"
    return f"{number:,} {what if number == 1 else plural}"


def rounded(value: float, digits: int = 3) -> str:
    """Format a number with some significant digits, thousands separators and no exponent: ``0.0123``, ``2,570``."""
    return f"{float(f'{value:.{digits}g}'):,.15g}"


def about(seconds: float) -> str:
    """Format a duration that is roughly known: ``about 40 s``, ``about 21 min``, ``about 2.5 h``."""
    units = ((86400, "days"), (3600, "h"), (60, "min"))
    size, unit = next((one for one in units if seconds >= 2 * one[0]), (1, "s"))
    return f"about {rounded(seconds / size, 2)} {unit}"


def gib(size: float) -> str:
    """Format a size in GiB, or in MiB below 0.1 GiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
