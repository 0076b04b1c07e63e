"""What a run keeps in its folder between two processes, however the first one ended."""

import contextlib
import errno
import itertools
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock, Mock

import pytest
import torch
from PIL import Image, ImageSequence

from ddpm_ds.checkpoint.folder import checkpoint_name
from ddpm_ds.checkpoint.manifest import read_manifest
from ddpm_ds.checkpoint.writer import Writer
from ddpm_ds.ground.errors import CheckpointError, OutputError
from ddpm_ds.tracking.pictures import Drawn
from ddpm_ds.tracking.progress import ProgressLine
from ddpm_ds.tracking.recorder import SAMPLES_KEY, Recorder, origin_tags, recorded
from ddpm_ds.tracking.run_folder import (
    FOLDER_TAG,
    LOCK,
    METRICS,
    NOTE_TAG,
    RESUMES,
    RunFolder,
    check_output,
    checkpoints_of,
    claim_folder,
    disk_errors_reported,
    labels,
    write_labels,
)
from ddpm_ds.tracking.tracker import RunStart, Tracker
from ddpm_ds.training.resume import claim_run, find_checkpoint
from ddpm_ds.training.saving import Saver
from tests.checkpoint.saving import describe, fragments_of, scalars
from tests.launching import tiny_spec
from tests.tracking.stored import full_disk

SPEC = tiny_spec()
SHAPES: dict[str, tuple[int, ...]] = {"0.weight": (3, 2)}


def save(run_dir: Path, images: int) -> Path:
    """A checkpoint of a run of one rank."""
    writer = Writer(checkpoints_of(run_dir), log=pytest.fail)
    writer.begin("rank0", fragments_of(images, 0, 6, SHAPES), describe(images, SHAPES), scalars(images))
    assert writer.wait()
    return checkpoints_of(run_dir) / checkpoint_name(images)


def found(run_dir: Path, resume: str, log: Callable[[str], None] = pytest.fail) -> Path | None:
    """What a run of one rank goes on from."""
    claim_run(run_dir, 0, ["a"], lambda value: [value])
    checkpoint = find_checkpoint(run_dir, resume, log)
    return checkpoint.path if checkpoint else None


def test_a_run_resumes_from_its_newest_checkpoint_by_default(tmp_path: Path) -> None:
    assert found(tmp_path, "auto") is None
    assert [path.name for path in tmp_path.iterdir()] == [LOCK], "looking leaves nothing that makes it a run's folder"
    old, new = save(tmp_path, 8), save(tmp_path, 16)
    assert found(tmp_path, "auto") == new
    assert found(tmp_path, "never") is None
    assert found(tmp_path / "elsewhere", str(old)) == old
    assert found(tmp_path / "elsewhere", str(tmp_path)) == new
    with pytest.raises(CheckpointError, match="this run has no checkpoint yet; name one that has saved"):
        (tmp_path / "young" / "checkpoints").mkdir(parents=True)
        found(tmp_path / "elsewhere", str(tmp_path / "young"))


def test_a_run_that_began_from_another_goes_on_from_its_own_checkpoints_when_started_again(tmp_path: Path) -> None:
    first, run_dir, said = save(tmp_path / "first", 8), tmp_path / "longer", list[str]()
    back, own = save(run_dir, 16), save(run_dir, 24)
    assert found(run_dir, str(first)) == first, "as from a copy"
    RunFolder(run_dir).add_resume(first, [])
    created = read_manifest(own).created
    later = (run_dir / RESUMES).read_text().replace(f"{created:%Y-}", f"{created.year + 1}-")
    (run_dir / RESUMES).write_text(later)
    assert found(run_dir, str(first)) == first, "it has not saved since"
    (run_dir / RESUMES).write_text(later.replace(f"{created.year + 1}-", f"{created.year - 1}-"))
    for start in (first, tmp_path / "first"):  # the checkpoint, and its run
        assert found(run_dir, str(start), said.append) == own
    assert len(said) == 2 and said[0].endswith("has saved since: it goes on from its own checkpoints")
    RunFolder(run_dir).add_resume(own, [])
    assert found(run_dir, str(own)) == own and found(run_dir, str(back)) == back, "it may go back"


def test_a_damaged_checkpoint_is_passed_over_with_a_line_and_refused_when_it_is_named(tmp_path: Path) -> None:
    old, new = save(tmp_path, 8), save(tmp_path, 16)
    (new / "state.json").write_text("{}")
    said: list[str] = []
    assert found(tmp_path, "auto", said.append) == old and len(said) == 1 and new.name in said[0]
    for name, message in (
        (new, new.name),
        (tmp_path / "none.here", r"none\.here is unusable: manifest.json can't be read"),
        (tmp_path / ("x" * 300), r"x can't be used \(a name has 255 bytes at most"),
    ):
        with pytest.raises(CheckpointError, match=message):
            found(tmp_path, str(name))
    old.rename(old.with_name(f".replaced-{old.name}"))  # replacing it was interrupted
    assert found(tmp_path, "auto", said.append) == old and read_manifest(old).images == 8


@pytest.mark.usefixtures("alone")
def test_a_rollback_goes_to_the_newest_good_checkpoint_of_its_own_past(tmp_path: Path) -> None:
    """After a resume from an older one, later checkpoints lie in the folder until the next is saved."""
    (good, damaged, _later), said = [save(tmp_path, images) for images in (8, 16, 32)], list[str]()
    (damaged / "state.json").write_text("{}")
    saver = Mock(_folder=checkpoints_of(tmp_path), _engine=Mock(images_seen=24), _log=said.append)
    checkpoint = Saver.before_now(saver)
    assert checkpoint is not None and checkpoint.path == good
    assert len(said) == 1 and damaged.name in said[0]


POINT = {"train/seen_images": 8.0, "train/loss": 0.5, "perf/images_per_second": 1.0}


def recorder(run_dir: Path) -> tuple[Recorder, list[str], Mock]:
    """What records a run that was resumed in the folder, the lines that it shows, and what stands for MLflow."""
    line, tracking = MagicMock(spec=ProgressLine), Mock(spec=Tracker)
    said: list[str] = []
    line.log.side_effect = said.append
    return Recorder(line, tracking, RunFolder(run_dir), SPEC), said, tracking


def steps(tracking: Mock) -> list[int]:
    """The steps of the metrics that were logged."""
    return [call.args[1] for call in tracking.metrics.call_args_list]


def test_a_step_that_is_repeated_is_not_logged_again(tmp_path: Path) -> None:
    first, _, tracking = recorder(tmp_path)
    for step in (10, 20):
        first.point(POINT, step, fp16=False)
        first.checkpoint(0.1, step)
    assert steps(tracking) == [10, 10, 20, 20]
    tracking.metrics.side_effect = KeyboardInterrupt  # stands for the end of the process
    with pytest.raises(KeyboardInterrupt):
        first.point(POINT, 30, fp16=False)
    for expected in ([30], []):
        second, said, tracking = recorder(tmp_path)
        second.evaluation({"eval/loss": 0.25}, 30)  # which the process before did not come to
        assert steps(tracking) == expected and said == ["held-out loss 0.2500"]
    for step in (20, 40):  # the process before may have sent 30, so it is left out
        second.point(POINT, step, fp16=False)
        second.checkpoint(0.1, step)
    assert steps(tracking) == [40, 40]
    second.rolled_back("went back", 1, 80, 20)
    second.point(POINT, 30, fp16=False)
    assert said[1:] == ["went back"] and steps(tracking) == [40, 40, 20, 30], "a new course is logged"
    assert tracking.metrics.call_args_list[2].args == ({"train/rollbacks": 1}, 20)


def test_the_result_of_a_run_has_its_layout_loss_and_verdict(tmp_path: Path) -> None:
    made, _, tracking = recorder(tmp_path)
    made.result("1 stage", 0.12345, "where the time went\n\n  bubble  12.0%\n\nlargest cost: bubble\n")
    (tags,) = tracking.tags.call_args.args
    conclusion = "**Verdict:** largest cost: bubble"
    assert tags == {NOTE_TAG: f"**Layout:** 1 stage  \n**Final loss:** 0.1235  \n{conclusion}\n\n---\n\n"}


def test_a_picture_is_drawn_and_logged_once_for_each_step_of_a_course(tmp_path: Path) -> None:
    images = Drawn(torch.zeros(2, 1, 8, 8, dtype=torch.uint8))
    for _ in range(2):  # the second process resumes from before the first one's last picture
        made, _, tracking = recorder(tmp_path)
        made.samples(images, 0.1, 80, 10)
        made.samples(images, 0.1, 160, 20)
    assert not tracking.image.called
    made.rolled_back("went back", 1, 80, 10)
    made.samples(images, 0.1, 160, 20)
    folder = RunFolder(tmp_path)
    assert tracking.image.call_args.args == (folder.samples(160), SAMPLES_KEY, 20)
    assert folder.samples(80).exists() and folder.samples(160).exists()


def test_pictures_are_in_the_order_of_their_images_beyond_a_billion_too(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    drawn = [folder.samples(images_seen) for images_seen in (0, 2, 10**9 - 1, 10**9, 10**10)]
    drawn[0].parent.mkdir()
    for path in (*drawn, drawn[0].with_name("images-mine.png")):
        path.touch()
    folder.forget_samples(10**9)
    assert folder.all_samples() == drawn[:-1]


def test_code_without_git_is_of_an_unknown_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    tags = origin_tags()
    assert (tags["git_commit"], tags["git_dirty"]) == ("unknown", "unknown")


def test_a_run_ends_with_all_its_pictures_as_an_animation_however_often_it_was_resumed(tmp_path: Path) -> None:
    path = tmp_path / "progress.gif"
    for number, images_seen in enumerate((80, 160, 240)):
        made, said, tracking = recorder(tmp_path)
        assert path.exists() == (number == 2), "one picture shows no progress"
        made.samples(Drawn(torch.full((2, 1, 8, 8), 80 * number, dtype=torch.uint8)), 0.1, images_seen, images_seen)
        made.finish("KILLED" if number < 2 else "FINISHED")
        assert tracking.artifact.called == (number > 0) and not said
    assert tracking.artifact.call_args.args == (path,)
    with Image.open(path) as gif:
        frames = [gif.convert("L").getpixel((100, gif.height - 100)) for _ in ImageSequence.Iterator(gif)]
    assert frames == [0, 80, 160]
    RunFolder(tmp_path).samples(240).write_bytes(b"cut off")
    made.finish("FINISHED")
    assert len(said) == 1 and said[0].startswith(f"no {path}: ")


def test_a_disk_that_refuses_points_and_pictures_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, said, tracking = recorder(tmp_path)
    images = Drawn(torch.zeros(2, 1, 8, 8, dtype=torch.uint8))
    made.samples(images, 0.1, 80, 10)
    made.samples(images, 0.1, 160, 20)
    refusal = PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path))
    with monkeypatch.context() as patch:
        for owner, name in ((Path, "stat"), (Path, "unlink"), (RunFolder, "append")):
            patch.setattr(owner, name, Mock(side_effect=refusal))
        made.point(POINT, 10, fp16=False)
        made.samples(images, 0.1, 240, 30)
        made.rolled_back("went back", 1, 80, 10)
        made.finish("FINISHED")
    assert steps(tracking)[-1] == 10 and tracking.image.call_count == 2 and tracking.finish.called
    said.remove("went back")
    assert len(said) == 4 and all("Permission denied" in line for line in said), said


def begin(run_dir: Path, written: dict[str, str]) -> None:
    line = MagicMock(spec=ProgressLine)
    recorded(RunStart("", run_dir, params={}, tags={}), line, SPEC, files=written).__enter__()


class Killed(BaseException):
    """No ``except`` and no ``suppress`` of the program stops it."""


class Kill:
    """Ends this process's work at its n-th change of a folder below ``root``; audit hooks can't be removed."""

    root, left = "", -1

    def __call__(self, event: str, details: tuple[Any, ...]) -> None:
        changes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
        changes |= event == "open" and bool((details[2] or 0) & os.O_CREAT)
        if self.left >= 0 and changes and str(details[0]).startswith(self.root):
            self.left -= 1
            if self.left < 0:
                raise Killed


KILL = Kill()
sys.addaudithook(KILL)


def test_a_start_that_is_killed_after_any_file_leaves_a_folder_that_the_next_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpm_ds.tracking.recorder.Tracker", Mock())

    def start(run_dir: Path) -> None:
        check_output(run_dir, "auto")
        claim = claim_run(run_dir, 0, [""], lambda value: [value])
        with contextlib.closing(cast(Any, claim.lock)):
            begin(run_dir, {"spec.yaml": "one", "ds_config.json": "two"})

    left = set()
    for kills in itertools.count():
        run_dir = tmp_path / str(kills)
        KILL.root, KILL.left = str(run_dir), kills
        with contextlib.suppress(Killed):
            start(run_dir)
            break
        left |= {str(path.relative_to(run_dir)) for path in run_dir.rglob("*")}
        start(run_dir)
    KILL.left = -1
    assert {".lock", "checkpoints", ".spec.yaml.tmp", "spec.yaml", ".identity.tmp"} <= left
    assert any(path.startswith("checkpoints/.probe-") for path in left)


def test_a_start_that_was_killed_is_no_reason_to_refuse_a_folder_and_other_files_are(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / ".lock").touch()
    check_output(tmp_path, "auto")
    (tmp_path / "checkpoints" / "of another program").touch()
    with pytest.raises(OutputError, match="is neither empty nor the folder of a run"):
        check_output(tmp_path, "auto")
    with pytest.raises(OutputError, match=r"\.lock is no folder; remove it, or name another run folder"):
        check_output(tmp_path / ".lock", "auto")
    with claim_folder(tmp_path), pytest.raises(OutputError, match="is in use by a run that is still going"):
        claim_folder(tmp_path)


def test_a_start_on_a_full_disk_leaves_what_the_start_before_has_recorded(tmp_path: Path) -> None:
    before = dict.fromkeys(("spec.yaml", "stages.txt"), "before")
    for name, text in before.items():
        (tmp_path / name).write_text(text)
    with full_disk(0), pytest.raises(OSError, match="File too large"):
        begin(tmp_path, {"spec.yaml": "of this start"})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.ENOTDIR])
def test_a_disk_that_refuses_is_one_line_with_the_file(tmp_path: Path, number: int) -> None:
    line = r"^.*spec.yaml can't be written .*; make it writable, with room, and start"
    with pytest.raises(OutputError, match=line), disk_errors_reported(tmp_path):
        raise OSError(number, os.strerror(number), str(tmp_path / "spec.yaml"))
    with pytest.raises(ConnectionResetError), disk_errors_reported(tmp_path):
        raise ConnectionResetError(errno.ECONNRESET, "not a disk's")


def test_damaged_points_are_left_out_and_a_damaged_identity_is_one_line(tmp_path: Path) -> None:
    folder, bad = RunFolder(tmp_path), [b"\xff\xfe", b"[1]", b"[" * 10**5, b'{"step":' + b"1" * 5000 + b"}"]
    bad += [b'{"step": %s}' % step for step in (b'"3"', b"NaN", b"-1", b"1e400", b'2, "x": [1]')]
    (tmp_path / METRICS).write_bytes(b"\n".join(bad))  # the last is cut off, as by a full disk
    assert folder.points(METRICS) == [] and folder.logged_step(METRICS) == 0
    for step, loss in ((10, math.nan), (30, 0.5), (20, 0.5)):  # a rollback
        folder.append(METRICS, {"train/loss": loss}, step)
    assert folder.logged_step(METRICS) == 20 and folder.points(METRICS)[1:] == [
        {"step": step, "train/loss": 0.5} for step in (30, 20)
    ]
    assert folder.identity() == RunFolder(tmp_path).identity() != "", "made once"
    for content in (b"", b"\xff", b"a b", b"../x", b"x" * 10**6):
        (tmp_path / "identity").write_bytes(content)
        with pytest.raises(OutputError, match="identity") as caught:
            folder.identity()
        assert str(caught.value).isprintable()


def test_a_run_begins_with_its_note_and_goes_on_without_touching_it(tmp_path: Path) -> None:
    printed: list[str] = []
    write_labels(tmp_path, {"sweep.values": "precision=fp16"})
    given = {"sweep.values": "precision=fp16", FOLDER_TAG: str(tmp_path)}
    assert labels(tmp_path, "why not", printed.append) == {**given, NOTE_TAG: "why not"}
    (tmp_path / "identity").write_text("1234\n")
    assert labels(tmp_path, None, printed.append) == given and printed == []
    assert labels(tmp_path, "another reason", printed.append) == given
    assert len(printed) == 1 and "keeps its note" in printed[0]
