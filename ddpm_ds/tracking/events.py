"""The file of events that a run writes for its trackers, and the file that says how much of it each of them has.

One JSON object per line, appended by rank 0, with the ``time`` in milliseconds:

    {"start": {...}}                                which run: see ``Tracker.start``; again whenever it is resumed
    {"metrics": {name: value}, "step": int}         without a step: seconds since the run began
    {"artifact": path, "folder": name}
    {"image": path, "key": name, "step": int}
    {"text": content, "name": file name}
    {"numbers": {name: value}, "step": int}         measured once: tags in MLflow, so no charts
    {"tags": {name: value}}
    {"finish": "FINISHED" | "FAILED" | "KILLED"}
"""

import json
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ddpm_ds.files import append_line, open_regular, read_json, replace_file
from ddpm_ds.secret import public_address
from ddpm_ds.tracking.address import resolve_uri

Record = dict[str, Any]

EVENTS = "events.jsonl"
"""File of a training run's events; that of another kind of run is ``events-KIND-IDENTITY.jsonl``."""
SYSTEM_METRICS = "system_metrics"  # folder of a run's folder with a file of metrics for each host
MLFLOW = "mlflow"
LAST_BYTES = 100  # of a file, which hold the whole record of a run's end
_POSITIONS = TypeAdapter(dict[str, dict[str, int]])


class EventFile:
    """Writer of an event file. A disk that refuses is said once, by ``log``; it never raises OSError."""

    def __init__(self, path: Path, log: Callable[[str], None]) -> None:
        self.path, self._log, self._refused = path, log, False

    def append(self, record: Record) -> bool:
        """Append a record with the current time; return whether the disk has taken it."""
        try:
            append_line(self.path, json.dumps(record | {"time": now_ms()}).encode())
            return True
        except OSError as error:
            if not self._refused:
                self._log(
                    f"{self.path} can't be written ({error.strerror}); training continues, and trackers miss what "
                    "happens until it can"
                )
            self._refused = True
            return False


def now_ms() -> int:
    """Return milliseconds since 1970, the unit of MLflow's times."""
    return time.time_ns() // 1_000_000


def lines(path: Path, begin: int = 0) -> Iterator[tuple[bytes, int]]:
    """Yield the whole lines from byte ``begin`` on, each with the byte where it ends; none if there is no file."""
    with suppress(FileNotFoundError), open_regular(path) as file:
        file.seek(begin)
        for line in file:
            if not line.endswith(b"\n"):  # it is being written
                return
            begin += len(line)
            yield line, begin


def read(path: Path, begin: int, most: int) -> list[tuple[Record, int]]:
    """Return at most ``most`` records from byte ``begin`` on, each with the byte where it ends.

    A damaged line, such as one that a crash has cut off, is an empty record.
    """
    return [(_parsed(line), end) for line, end in islice(lines(path, begin), most)]


def _parsed(line: bytes) -> Record:
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def begun(path: Path, until: float = float("inf")) -> tuple[Record, int] | None:
    """Return the last start up to byte ``until``, with the byte where it ends; None if there is none."""
    last = None
    for line, end in lines(path):
        if end <= until and line.startswith(b'{"start"'):
            last = (_parsed(line), end)
    return last


class Cursor:
    """Bytes that each tracker has of an event file, and of the hosts' files of system metrics beside it.

    Kept in a small file, which the sender alone writes. Without it everything is sent again, which changes nothing.
    """

    def __init__(self, events: Path) -> None:
        self.path, self._lock = events.with_suffix(".sent.json"), threading.Lock()
        self._sent: dict[str, dict[str, int]] = {}
        with suppress(OSError, ValueError):
            self._sent = _POSITIONS.validate_python(read_json(self.path), strict=True)

    def sent(self, tracker: str, file: Path) -> int:
        """Return the bytes of a file that a tracker has; 0 if the file is now shorter."""
        sent = self._sent.get(tracker, {}).get(self._name(file), 0)
        return sent if sent and sent <= file.stat().st_size else 0

    def move(self, tracker: str, file: Path, sent: int) -> None:
        """Note, until the next :meth:`save`, how much of a file a tracker has."""
        with self._lock:
            self._sent.setdefault(tracker, {})[self._name(file)] = sent

    def _name(self, file: Path) -> str:
        return str(file.relative_to(self.path.parent))

    def save(self) -> None:
        """Write the file; a disk that refuses only has more sent again."""
        with self._lock, suppress(OSError):
            replace_file(self.path, json.dumps(self._sent).encode() + b"\n")


def trackers_of(start: Record) -> list[str]:
    """Return the names of the trackers that a start names, MLflow first."""
    return [MLFLOW, *start["start"]["trackers"]]


def place_of(tracker: str, start: Record) -> str:
    """Return a tracker as the user is shown it: of MLflow, where it is."""
    return f"MLflow at {public_address(resolve_uri(start['start']['output_root']))}" if tracker == MLFLOW else tracker


def is_ended(events: Path) -> bool:
    """Return whether the end of a run is the last line of a file."""
    with suppress(OSError), open_regular(events) as file:
        file.seek(max(0, events.stat().st_size - LAST_BYTES))
        return file.read().rpartition(b"\n{")[2].startswith(b'"finish"')
    return False


def unsent(events: Path) -> str | None:
    """Return a line on the records of a file that could not be sent, with the command that sends them, or None."""
    cursor, left = Cursor(events), []
    with suppress(OSError):  # which was said when it was written
        if (last := begun(events)) is None:
            return None
        for name in trackers_of(last[0]):
            if count := sum(1 for _ in lines(events, cursor.sent(name, events))):
                left.append(f"{count:,} {'record' if count == 1 else 'records'} to {place_of(name, last[0])}")
    return f"not sent: {', '.join(left)}; to send them: {send_command(events)}" if left else None


def send_command(events: Path) -> str:
    """Return the command that sends what is left of a file."""
    return f"ddpm-ds send {shlex.quote(str(events.parent))}"


def discard(events: Path) -> None:
    """Remove a file that all trackers have, with its cursor, unless it is that of a training run."""
    if events.name.startswith("events-"):
        with suppress(OSError):
            events.unlink()
            Cursor(events).path.unlink(missing_ok=True)
