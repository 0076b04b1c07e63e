"""Errors that a user can cause and fix, and the exit codes of every program.

A message is one line that names the key, the value and the fix. Exit codes are a contract with launchers and
schedulers; ``docs/exit_codes.md`` says what to do with each.
"""

EXIT_BAD_INPUT = 2
EXIT_BAD_NUMBERS = 3
EXIT_PREEMPTED = 75
"""Exit code after a signal asked for a stop and the run was saved: start it again (EX_TEMPFAIL of sysexits.h)."""
EXIT_PEER_LOST = 76
"""Exit code after a rank died or hangs and the others have ended: the run can be resumed from its newest checkpoint."""

LONGEST_LINE = 2000
"""Most characters of an error's line; a longer one loses its middle, since file and fix stand at its ends."""


def one_line(text: str) -> str:
    """Return a text that can be shown on one line of any terminal.

    Newlines, control characters and whatever else does not print are written as escapes, such as ``\\n`` and
    ``\\x1b``. Of a text beyond ``LONGEST_LINE`` characters the middle is left out.
    """
    text = _shortened(text)
    return _shortened("".join(part if part.isprintable() else part.encode("unicode_escape").decode() for part in text))


def _shortened(text: str) -> str:
    half = LONGEST_LINE // 2
    return text if len(text) <= LONGEST_LINE else f"{text[:half]} ... {text[-half:]}"


class UserError(Exception):
    """Wrong input. Shown as one line, without a traceback; exit code 2."""

    exit_code = EXIT_BAD_INPUT

    def __str__(self) -> str:
        return one_line(super().__str__())


class SpecError(UserError):
    """The run spec (YAML or ``--set``) or an option can't be read, or describes nothing that can be trained."""


class DsConfigError(UserError):
    """The DeepSpeed JSON has a key or value that is unknown, ignored or broken under a pipeline."""


class DeviceLostError(DsConfigError):
    """A kernel has broken a GPU for its process, which can't even leave its process group in order."""


class DataError(UserError):
    """A data source or a data-set cache is missing, damaged or empty."""


class LayoutError(UserError):
    """Stages, replicas and batch don't fit the processes or the U-Net."""


class HostError(UserError):
    """The hosts of a run are not alike, or one of them can't take part."""


class OutputError(UserError):
    """The output folder can't be used."""


class CheckpointError(UserError):
    """A checkpoint is damaged, incomplete, of another format, or does not fit the run."""


class NoCheckpointError(CheckpointError):
    """There are checkpoints, and none of them can be used; all ranks agree on that."""


class EvaluationError(UserError):
    """A score that was asked for can't be computed here, or not from so few images."""


class BadNumbersError(Exception):
    """The loss is not finite, or the loss scale is at its floor, so training can't continue; exit code 3."""

    exit_code = EXIT_BAD_NUMBERS


class Preempted(Exception):
    """The run was asked to stop and has been saved; exit code 75."""

    exit_code = EXIT_PREEMPTED


class LauncherLostError(Preempted):
    """The launcher of some ranks is gone, so the run was saved and stopped; it can be resumed; exit code 76."""

    exit_code = EXIT_PEER_LOST


class PeerLostError(Exception):
    """Another rank died or hangs, so nothing that needs all ranks can continue; exit code 76."""

    exit_code = EXIT_PEER_LOST


KNOWN_TO_ALL_RANKS = (BadNumbersError, Preempted)
"""Errors that every rank raises at the same step, so that all can still leave together."""
