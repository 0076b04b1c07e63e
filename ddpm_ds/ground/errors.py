"""Errors that a user can cause and fix, and the exit codes of every program (docs/exit_codes.md).

A message is one line for each fault, naming the key, the value and the fix.
"""

import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence

EXIT_BAD_INPUT = 2
EXIT_BAD_NUMBERS = 3
EXIT_PREEMPTED = 75
"""Exit code after a signal stopped the run and it was saved: start it again (EX_TEMPFAIL of sysexits.h)."""
EXIT_PEER_LOST = 76
"""Exit code after a rank died or hung and the others ended: the run can resume from its newest checkpoint."""

LONGEST_LINE = 2000
"""Maximum characters of an error line; a longer one loses its middle, since file and fix stand at its ends."""
ERROR, COMMAND_ERROR = "ddpm_ds: error: ", "ddpm-ds: error: "
"""Beginning of a line in which a rank, or the command, names its error."""
LAST_LINES = 8
"""Lines of output that are shown where a program failed without naming an error."""
MOST_FAULTS = 40
"""Maximum faults of a file that are named at once."""
OUT_OF_MEMORY = (
    "can't allocate memory",  # PyTorch's allocator on a CPU
    "Cannot allocate memory",
    "out of memory",  # also in PyTorch's OutOfMemoryError, of each of its allocators on a GPU
    "ALLOC_FAILED",  # cuBLAS and cuDNN
    "ALLOCATION_FAILED",  # cuDNN 9
    "CUBLAS_STATUS_NOT_INITIALIZED",  # no memory for cuBLAS's workspace
    "bad_alloc",
)
"""Texts in the errors of libraries that ran out of memory."""


def one_line(text: str) -> str:
    """Return a text for one line of any terminal: :func:`shortened`, with escapes such as ``\\n`` and ``\\x1b``."""
    text = shortened(text)
    return shortened("".join(part if part.isprintable() else part.encode("unicode_escape").decode() for part in text))


def shortened(text: str, most: int = LONGEST_LINE) -> str:
    """Return a text without its middle if it has more than ``most`` characters."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


class UserError(Exception):
    """Wrong input. Each argument is a fault, shown as one line, without a traceback; exit code 2."""

    exit_code = EXIT_BAD_INPUT

    def __str__(self) -> str:
        return "\n".join(one_line(str(fault)) for fault in self.args)


class SpecError(UserError):
    """The run spec (YAML or ``--set``) or an option can't be read or describes something that can't be trained."""


class OptionError(SpecError):
    """The value of an option or of an environment variable can't be parsed."""


class DsConfigError(UserError):
    """The DeepSpeed JSON has a key or value that is unknown, ignored or broken under a pipeline."""


class DataError(UserError):
    """A data source or a data-set cache is missing, damaged or empty."""


class LayoutError(UserError):
    """Stages, replicas and batch don't fit the processes or the U-Net."""


class HostError(UserError):
    """The hosts of a run differ, or one of them can't take part."""


class OutputError(UserError):
    """The output folder can't be used."""


class CheckpointError(UserError):
    """A checkpoint is damaged, incomplete or in another format, or does not fit the run."""


class NoCheckpointError(CheckpointError):
    """There are checkpoints, but all ranks agree that none can be used."""


class EvaluationError(UserError):
    """A requested score can't be computed here, or not from so few images, or an image is not finite."""


class ProgramError(UserError):
    """A program that was started has failed; it has the lines that explain why, and the program's exit code."""

    def __init__(self, lines: Sequence[str], code: int) -> None:
        super().__init__(*(line.removeprefix(ERROR).removeprefix(COMMAND_ERROR) for line in lines))
        self.exit_code = code


class BadNumbersError(Exception):
    """The loss is not finite, or the loss scale is at its floor; exit code 3."""

    exit_code = EXIT_BAD_NUMBERS


class Preempted(Exception):
    """The run was asked to stop and has been saved; exit code 75."""

    exit_code = EXIT_PREEMPTED


class LauncherLostError(Preempted):
    """The launcher of some ranks died, so the run was saved and stopped and can be resumed; exit code 76."""

    exit_code = EXIT_PEER_LOST


class PeerLostError(Exception):
    """Another rank died or hangs, so the run can't continue; exit code 76."""

    exit_code = EXIT_PEER_LOST


KNOWN_TO_ALL_RANKS = (BadNumbersError, Preempted)
"""Errors that every rank raises at the same step, so that all ranks can shut down together."""


@contextlib.contextmanager
def faults_logged(what: str, log: Callable[[str], None]) -> Iterator[None]:
    """Log any error of this block as one line, since a missing report must not end a run."""
    try:
        yield
    except (UserError, OSError) as error:
        log(f"no {what}: {one_line(str(error))}")
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(place.filename)}:{place.lineno}"
        log(f"no {what}, because of a bug: {one_line(repr(error))} in {where}; all else is kept")


def print_to_stderr(line: str) -> None:
    """Print a line; on a terminal in place of the bar that another process may have drawn there."""
    print("\r\x1b[K" * sys.stderr.isatty() + line, file=sys.stderr, flush=True)


print_once = functools.cache(print_to_stderr)
"""Print a line as :func:`print_to_stderr`, unless this process has printed it before."""


def explanation(output: str) -> tuple[str, ...]:
    """Return the lines of a program's output that explain its failure: its errors, or else the last lines."""
    lines = [line.rstrip() for line in output.splitlines()]
    errors = [line for line in lines if line.startswith((ERROR, COMMAND_ERROR))]
    return tuple(errors or [line for line in lines if line and not line.startswith("[20")][-LAST_LINES:])


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the device or the host ran out of memory."""
    named = isinstance(error, (RuntimeError, OSError)) and any(words in str(error) for words in OUT_OF_MEMORY)
    return named or isinstance(error, MemoryError)
