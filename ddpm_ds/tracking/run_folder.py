"""A run's folder: its reader and writer, its lock, the events kept for MLflow, and how much of them MLflow has.

Does not import torch.

An event is a JSON object on a line, appended by rank 0, with the ``time`` in milliseconds:

    {"start": {...}}                                see ``RunStart``; again whenever the run is resumed
    {"metrics": {name: value}, "step": int}         without a step: seconds since the run began
    {"artifact": path, "folder": name}
    {"image": path, "key": name, "step": int}
    {"text": content, "name": file name}

    {"tags": {name: value}}
    {"finish": "FINISHED" | "FAILED" | "KILLED"}
"""

import errno
import fcntl
import itertools
import json
import math
import re
import shlex
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, harmonic_mean
from typing import Any, BinaryIO

from pydantic import NonNegativeInt, TypeAdapter

from ddpm_ds.checkpoint.folder import PROBE, checkpoint_name, images_of, names
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.config.spec_file import load_spec, parse_yaml
from ddpm_ds.ground import files
from ddpm_ds.ground.errors import OutputError
from ddpm_ds.ground.formats import read_json
from ddpm_ds.ground.secret import public_address
from ddpm_ds.schema.section import flatten
from ddpm_ds.tracking.address import resolve_uri

SPEC, DS_CONFIG, STAGES, MACHINE = "spec.yaml", "ds_config.json", "stages.txt", "machine.json"
"""Files of a run: the spec, the DeepSpeed JSON, the table of stages and the machine that was planned for."""
ASKED_SPEC, ASKED_CONFIG = "asked_spec.yaml", "asked_ds_config.json"
"""Files of a run that it was started with from Python or by a sweep, not from files of the user's."""
METRICS, EVALUATIONS, OBSERVATIONS = POINTS = ("metrics.jsonl", "evaluations.jsonl", "observations.jsonl")
"""Files of a run with log points, held-out losses and observers' measurements."""
VERDICT, ANIMATION, RESUMES, LABELS = "verdict.txt", "progress.gif", "resumes.jsonl", "tags.json"
"""Files of a run: where its time went; pictures drawn while training, one after the other; every resume; tags given by
a sweep."""
IDENTITY, LOCK = "identity", ".lock"
"""Files of a run: the identity of its MLflow run, and a file that its process keeps locked."""
EVENTS = "events.jsonl"
"""File of a training run's events; other kinds of runs have ``events-KIND-IDENTITY.jsonl``."""
OUTPUT_ROOT = Path("runs")
"""Default output root: the folder of run folders."""

KIND_TAG, FOLDER_TAG = "kind", "run_dir"
"""Tags: the kind of a run that is not a training run (evaluate, sample, export, benchmark, sweep), and its folder."""
START_TAG = "ddpm_ds.start"
"""Tag with a run's identity, by which it is found again."""
PARENT_TAG, NOTE_TAG = "mlflow.parentRunId", "mlflow.note.content"
"""Tags by which MLflow shows a run under another one, and as its description."""
RESULT, RULE = "**Layout:**", "\n\n---\n\n"
"""Beginning of the result that a run's end puts on top of its description, and its end, above the user's note."""
SAMPLES_KEY, RATE = "eval/samples_ema", "perf/images_per_second"
"""Key of the pictures drawn while training; metric of the speed since the last point."""
DERIVED = "derived."
"""Prefix of settings that follow from spec and DeepSpeed JSON."""
Record = dict[str, Any]

REFUSALS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EINVAL),
}
"""Disk errors that a user can fix."""
LAST_BYTES = 100  # of a file, which hold the whole record of a run's end
_CURSOR, _POINT = TypeAdapter(dict[str, NonNegativeInt]), TypeAdapter(dict[str, int | float])


def new_run_dir(name: str) -> Path:
    """Return a folder for a run without ``--run-dir``: the time, to the second, and the spec's name."""
    return OUTPUT_ROOT / f"{datetime.now():%Y%m%d-%H%M%S}-{name}"


def make_run_dir(run_dir: Path) -> Path:
    """Make the folder of :func:`new_run_dir` and return it, with a number added if another run has the name."""
    path = run_dir
    with disk_errors_reported(run_dir):
        for number in itertools.count(2):
            try:
                path.mkdir(parents=True)
                break
            except FileExistsError:
                path = run_dir.with_name(f"{run_dir.name}-{number}")
    return path


def remove_if_empty(run_dir: Path) -> None:
    """Remove the folder of a run that did not begin, and then the output root, unless they hold files."""
    with suppress(OSError):
        run_dir.rmdir()
        run_dir.parent.rmdir()


def checkpoints_of(run_dir: Path) -> Path:
    """Return the folder of a run's checkpoints."""
    return run_dir / "checkpoints"


def check_output(run_dir: Path, resume: str) -> None:
    """Raise OutputError if a run folder can't be written, or holds anything but a run to resume; changes nothing."""
    checkpoints = checkpoints_of(run_dir)
    for folder in (run_dir, checkpoints):
        if folder.exists() and not folder.is_dir():
            raise OutputError(f"--run-dir {run_dir}: {folder} is no folder; remove it, or name another run folder")
    # A start that is killed before it has written its spec leaves these.
    begun_ones = (ASKED_SPEC, ASKED_CONFIG, LOCK, f".{SPEC}.tmp", checkpoints.name)
    others = [path for path in run_dir.glob("*") if path.name not in begun_ones]
    others += [path for path in checkpoints.glob("*") if not path.name.startswith(PROBE)]
    if others and not (run_dir / SPEC).exists():
        raise OutputError(f"--run-dir {run_dir} is neither empty nor the folder of a run; name a new one")
    if others and resume == "never":
        raise OutputError(f"--run-dir {run_dir} holds a run and --resume is never; name a new one")
    existing = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise OutputError(
            f"--run-dir {run_dir} can't be written ({error.strerror}: {existing}); name a folder that can"
        ) from None


@contextmanager
def disk_errors_reported(run_dir: Path) -> Iterator[None]:
    """Turn the OSErrors of a full or read-only disk, or of a folder that has been replaced, into an OutputError."""
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        raise OutputError(
            f"{error.filename or run_dir} can't be written ({error.strerror}); make it writable, with room, and start "
            "the same command again"
        ) from error


def claim_folder(run_dir: Path) -> BinaryIO:
    """Make the run's folder and lock it while the returned file is open; OutputError if another process uses it."""
    with disk_errors_reported(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        locked = lock(run_dir / LOCK)
    if locked is None:
        raise OutputError(f"--run-dir {run_dir} is in use by a run that is still going; stop it or name another")
    return locked


def lock(path: Path) -> BinaryIO | None:
    """Lock a file, made if it is missing, for as long as the returned file is open; None if another process has it."""
    file = files.open_regular(path, "ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:  # a file system without locks
        pass
    return file


def identity_of(run_dir: Path) -> str | None:
    """Return the identity of the folder's MLflow run; None if nothing was trained in it. Changes nothing.

    Raises:
        OutputError: the file can't be read, or is damaged.
    """
    file = run_dir / IDENTITY
    try:
        if not file.is_file():
            return None
        found = files.read_text(file).strip()
    except OSError as error:
        raise OutputError(f"{file} can't be read ({error.strerror}); allow it, or restore it from a copy") from None
    if re.fullmatch(r"[\w.-]{1,64}", found, re.ASCII) is None:
        raise OutputError(f"{file} is damaged; restore it from a copy, or delete it, and MLflow begins a new run")
    return found


def write_labels(run_dir: Path, tags: dict[str, str]) -> None:
    """Give a run that is about to start in ``run_dir`` tags of its own."""
    files.replace_file(run_dir / LABELS, json.dumps(tags, indent=2).encode() + b"\n")


def labels(run_dir: Path, note: str | None, log: Callable[[str], None]) -> dict[str, str]:
    """Return the tags of the folder's run, with the ``note`` of a new one; raises OutputError for damaged labels.

    Call it before the folder has an identity. A resumed run keeps its note, which may have been edited in MLflow.
    """
    given = run_dir / LABELS
    try:
        found = read_json(given) if given.exists() else {}
        tags = TypeAdapter(dict[str, str]).validate_python(found, strict=True)
    except (OSError, ValueError):
        raise OutputError(f"{given} is damaged; delete it, which only loses the run's tags") from None
    tags[FOLDER_TAG] = str(run_dir.resolve())
    if note is not None and identity_of(run_dir) is None:
        tags[NOTE_TAG] = note
    elif note is not None:
        log("this run is resumed and keeps its note, which MLflow's page of the run edits")
    return tags


def mean_of_points(name: str, points: Sequence[tuple[int, float]]) -> float:
    """Return the mean over a run of a time or rate, from the (step, value) of each log point.

    The first point, which includes the start, is left out unless it is the only one. Times are weighted by the steps
    since the previous point and rates by seconds, so that images per second are all images over all seconds.
    """
    if len(points) < 2:
        return points[0][1]
    steps = [after - before for (before, _), (after, _) in itertools.pairwise(points)]
    return (fmean if name.endswith("_seconds") else harmonic_mean)([value for _, value in points[1:]], steps)


@dataclass(frozen=True)
class RunFolder:
    """Files of a run, which rank 0 writes. Every property reads its file anew; a missing one raises OSError."""

    folder: Path

    @property
    def spec(self) -> RunSpec:
        """Run spec; raises SpecError if it can't be read."""
        return load_spec(self.folder / SPEC)

    @property
    def ds_config(self) -> dict[str, Any]:
        """DeepSpeed JSON that the run trains with, every ``auto`` resolved."""
        config: dict[str, Any] = read_json(self.folder / DS_CONFIG)
        return config

    @property
    def settings(self) -> dict[str, str]:
        """All settings of the last start, by dotted names: parameters, derived ones, spec and DeepSpeed JSON.

        A damaged file raises SpecError, ValueError or AttributeError.
        """
        found = flatten(parse_yaml(files.read_text(self.folder / SPEC), SPEC))
        if (self.folder / DS_CONFIG).exists():
            found |= flatten({"ds_config": self.ds_config})
        if last := begun(self.folder / EVENTS):
            start = last[0]["start"]
            derived = {name: value for name, value in start["tags"].items() if name.startswith(DERIVED)}
            found = {**start["params"], **derived, **found}
        return found

    @property
    def status(self) -> str:
        """Status of the run in MLflow's words: RUNNING, FINISHED, FAILED or KILLED."""
        return ending(self.folder / EVENTS) or "RUNNING"

    @property
    def bounds(self) -> tuple[int, ...]:
        """First layer of each stage and, last, the number of layers: the cuts of the last start."""
        table = files.read_text(self.folder / STAGES)
        rows = re.findall(r"^ *\d+(?: on rank \d+)? +(\d+) ", table, re.MULTILINE)
        return tuple(itertools.accumulate(map(int, rows), initial=0))

    def points(self, name: str) -> list[dict[str, float]]:
        """Return the points of a file of :data:`POINTS`, each a ``step`` and numbers; raises OSError.

        Damaged lines, such as one cut off by a full disk, are skipped.
        """
        found: list[dict[str, float]] = []
        if (path := self.folder / name).is_file():
            with files.open_regular(path) as file:
                while line := file.readline(files.CHUNK_BYTES):
                    with suppress(ValueError):
                        point = _POINT.validate_json(line, strict=True)
                        step = point.get("step", math.nan)
                        if 0 <= step < math.inf and step == int(step):
                            found.append(point)
        return found

    def columns(self, name: str) -> dict[str, list[float]]:
        """Return :meth:`points` as columns of one length, by metric and ``step``, in the order of steps.

        Points that a rollback has discarded are left out; missing values are NaN.
        """
        points: list[dict[str, float]] = []
        for point in self.points(name):
            while points and points[-1]["step"] >= point["step"]:
                points.pop()
            points.append(point)
        every = dict.fromkeys(key for point in points for key in point)
        return {key: [point.get(key, math.nan) for point in points] for key in every}

    @property
    def metrics(self) -> dict[str, list[float]]:
        """Columns of the log points, by the metrics' names in MLflow."""
        return self.columns(METRICS)

    @property
    def evaluations(self) -> dict[str, list[float]]:
        """Columns of the held-out losses."""
        return self.columns(EVALUATIONS)

    @property
    def last_metrics(self) -> dict[str, float]:
        """Newest value of each metric, of all files."""
        return {name: points[-1][1] for name, points in self.histories().items()}

    def histories(self) -> dict[str, list[tuple[int, float]]]:
        """Return every metric's points (step, value), of all files."""
        found = {}
        for columns in map(self.columns, POINTS):
            for name, values in columns.items():
                points = [(int(step), value) for step, value in zip(columns["step"], values, strict=True)]
                found[name] = [point for point in points if not math.isnan(point[1])]
        return {name: points for name, points in found.items() if points}

    @property
    def checkpoints(self) -> list[Path]:
        """Folders of the complete checkpoints, oldest first; their checksums are not verified."""
        return [checkpoints_of(self.folder) / name for name in names(checkpoints_of(self.folder))]

    @property
    def verdict(self) -> str | None:
        """Text of the verdict; None before the end, or if no step was traced."""
        file = self.folder / VERDICT
        return file.read_text() if file.is_file() else None

    def identity(self) -> str:
        """Return the identity of the folder's MLflow run, which is made if it is missing."""
        if (found := identity_of(self.folder)) is None:
            found = uuid.uuid4().hex
            files.write_file(self.folder / IDENTITY, f"{found}\n".encode())
        return found

    def logged_step(self, name: str) -> int:
        """Return the step of the last point in a file of :data:`POINTS`, 0 without any; a rollback lowers it."""
        return int(next(reversed(self.points(name)), {"step": 0})["step"])

    def append(self, name: str, values: Mapping[str, float], step: int) -> None:
        """Append a point to a file of :data:`POINTS`."""
        files.append_line(self.folder / name, json.dumps({"step": step, **values}).encode())

    def samples(self, images_seen: int) -> Path:
        """Return the path of the picture drawn after ``images_seen`` images."""
        return self.folder / "samples" / f"{checkpoint_name(images_seen)}.png"

    def all_samples(self) -> list[Path]:
        """Return the paths of the pictures that exist, in the order of their images."""
        found = (images_of(path.stem) for path in (self.folder / "samples").glob("images-*.png"))
        return [self.samples(images_seen) for images_seen in sorted(one for one in found if one is not None)]

    def forget_samples(self, images_seen: int) -> None:
        """Remove the pictures drawn after more than ``images_seen``, of steps that the run has discarded."""
        for path in self.all_samples():
            if (images_of(path.stem) or 0) > images_seen:
                path.unlink(missing_ok=True)

    def forget_after(self, step: int, images_seen: int) -> None:
        """Remove the points after ``step`` and the pictures drawn after ``images_seen``; the run makes new ones."""
        for name in POINTS:
            points = self.points(name)
            kept = [point for point in points if point["step"] <= step]
            if len(kept) < len(points):
                files.replace_file(self.folder / name, "".join(json.dumps(point) + "\n" for point in kept).encode())
        self.forget_samples(images_seen)

    def add_resume(self, checkpoint: Path, changed: Sequence[str]) -> int:
        """Add a resume and its changed settings to :data:`RESUMES`; return the number of resumes."""
        file, now = self.folder / RESUMES, datetime.now(UTC).isoformat(timespec="seconds")
        record = {"at": now, "from": checkpoint.name, "path": str(checkpoint.resolve()), "changed": list(changed)}
        files.append_line(file, json.dumps(record).encode())
        return len(files.read_text(file).splitlines())


def note_of(description: str) -> str:
    """Return the user's part of a run's description in MLflow."""
    result, rule, note = description.partition(RULE)
    return note if rule and result.startswith(RESULT) else description


def append_event(events: Path, record: Record) -> None:
    """Append a record with the current time; raises OSError."""
    files.append_line(events, json.dumps(record | {"time": now_ms()}).encode())


def now_ms() -> int:
    """Return milliseconds since 1970, the unit of MLflow's times."""
    return time.time_ns() // 1_000_000


def records(path: Path, begin: int = 0) -> Iterator[tuple[Record, int]]:
    """Yield the records from byte ``begin`` on, each with the byte where it ends; none if there is no file.

    A damaged line, such as one that a crash has cut off, is an empty record.
    """
    with suppress(FileNotFoundError), files.open_regular(path) as file:
        file.seek(begin)
        for line in file:
            if not line.endswith(b"\n"):  # it is being written
                return
            begin += len(line)
            record: Any = {}
            with suppress(ValueError):
                record = json.loads(line)
            yield record if isinstance(record, dict) else {}, begin


def begun(path: Path, until: float = math.inf) -> tuple[Record, int] | None:
    """Return the last ``start`` record up to byte ``until``, with the byte where it ends; None without any."""
    starts = [(record, end) for record, end in records(path) if end <= until and "start" in record]
    return starts[-1] if starts else None


def cursor_file(events: Path) -> Path:
    """Return the file in which the sender notes how many bytes of an event file MLflow has."""
    return events.with_suffix(".sent.json")


def bytes_sent(events: Path) -> int:
    """Return how many bytes of an event file MLflow has; 0 if unknown, since sending again changes nothing."""
    with suppress(OSError, ValueError, KeyError):
        sent = _CURSOR.validate_python(read_json(cursor_file(events)), strict=True)["sent"]
        return sent if sent <= events.stat().st_size else 0
    return 0


def place_of(start: Record) -> str:
    """Return a name for the MLflow of a start, without secrets."""
    return f"MLflow at {public_address(resolve_uri(start['start']['output_root']))}"


def ending(events: Path) -> str | None:
    """Return the end of a file's run: FINISHED, FAILED or KILLED; None if the last record is no end."""
    with suppress(OSError, ValueError), files.open_regular(events) as file:
        file.seek(max(0, events.stat().st_size - LAST_BYTES))
        last = json.loads(b"{" + file.read().rpartition(b"\n{")[2])
        return str(last["finish"]) if "finish" in last else None
    return None


def end_killed(events: Path) -> None:
    """End the run of a file as KILLED, if it has no end; no other process may write the file now."""
    with suppress(OSError):  # a full disk
        if events.is_file() and ending(events) is None:
            append_event(events, {"finish": "KILLED"})


def unsent(events: Path) -> str | None:
    """Return a line on a file's records that were not sent, with the command that sends them; None without any."""
    with suppress(OSError):  # which its writer has reported
        last, count = begun(events), sum(1 for _ in records(events, bytes_sent(events)))
        if last is not None and count:
            several = f"{count:,} record{'s' * (count > 1)}"
            return f"not sent: {several} to {place_of(last[0])}; to send them: {send_command(events)}"
    return None


def send_command(events: Path) -> str:
    """Return the command that sends the rest of a file."""
    return f"ddpm-ds send {shlex.quote(str(events.parent))}"


def discard(events: Path) -> None:
    """Remove an event file that MLflow has, with its cursor; a training run's file stays."""
    if events.name.startswith("events-"):
        with suppress(OSError):
            events.unlink()
            cursor_file(events).unlink(missing_ok=True)
