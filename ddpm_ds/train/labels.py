"""Tags by which people and tools find a run in MLflow again, beside those that say how it was made. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from ddpm_ds.train.run_folder import identity_of

NOTE_TAG = "mlflow.note.content"
"""What MLflow shows as the description of a run."""
FOLDER_TAG = "run_dir"
LABELS, NOTE = "tags.json", "note.txt"
"""Files of a run's folder: tags given by what has started it, and the note that it began with."""


def write_labels(run_dir: Path, tags: dict[str, str]) -> None:
    """Give a run that is about to start in ``run_dir`` tags of its own."""
    (run_dir / LABELS).write_text(json.dumps(tags, indent=2) + "\n")


def labels(run_dir: Path, note: str | None, say: Callable[[str], None]) -> dict[str, str]:
    """The tags of the folder's run. Call it before the folder has an identity: a note is for a run that begins.

    A run that goes on may have been written about since, in MLflow, so its note is left as it is.
    """
    given, first = run_dir / LABELS, run_dir / NOTE
    tags: dict[str, str] = json.loads(given.read_text()) if given.exists() else {}
    tags[FOLDER_TAG] = str(run_dir.resolve())
    if note is None:
        return tags
    if identity_of(run_dir) is None:
        first.write_text(note)
        tags[NOTE_TAG] = note
    elif not first.exists() or first.read_text() != note:
        say(f'--note is for a run that begins, and this one goes on; add to its note: ddpm-ds note {run_dir} "..."')
    return tags
