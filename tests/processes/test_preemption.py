"""A run that is asked to stop, and started again, is the run that never was; nothing of it is written down twice."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from ddpm_ds.checkpoint.folder import images_of
from tests.train.ranks import BATCH, Ranks, checkpoints, end_of, mlflow_run, points, the_same

pytestmark = pytest.mark.launch

LONGER = "train.images=80000"
CHECKPOINTS = ("checkpoint.every_images=4000", "checkpoint.keep_last=100")


@dataclass
class Story:
    """A run that was stopped twice, and what was seen on the way."""

    run_dir: Path
    images: int = 0
    """Length of the run, some steps after the second stop."""
    saved: list[str] = field(default_factory=list)
    stops: list[tuple[list[int], str, str]] = field(default_factory=list)
    """Exit codes, MLflow status and the newest checkpoint after each stop."""
    said: str = ""

    def stopped(self, ranks: Ranks) -> None:
        codes = ranks.codes()
        self.stops.append((codes, mlflow_run(self.run_dir)[1].info.status, checkpoints(self.run_dir)[-1]))


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    story = Story(tmp_path_factory.mktemp("runs") / "stopped")
    with Ranks(story.run_dir, LONGER, *CHECKPOINTS) as ranks:
        ranks.until_images(2 * BATCH)
        (story.run_dir / "save").touch()
        ranks.until(lambda: len(checkpoints(story.run_dir)) > 0)
        asked_at = points(story.run_dir)[-1]["progress/images"]
        ranks.until_images(asked_at + 8 * BATCH)
        story.saved = checkpoints(story.run_dir)
        ranks.signal(1, signal.SIGTERM)
        story.stopped(ranks)
    with Ranks(story.run_dir, LONGER, *CHECKPOINTS) as ranks:
        before = points(story.run_dir)[-1]["progress/images"]
        ranks.until_images(before + 2 * BATCH)
        (story.run_dir / "save_and_stop").touch()
        story.stopped(ranks)
    story.images = (images_of(checkpoints(story.run_dir)[-1]) or 0) + 8 * BATCH
    with Ranks(story.run_dir, f"train.images={story.images}", *CHECKPOINTS, "logging.log_every_images=40") as ranks:
        assert ranks.codes() == [0, 0], ranks.said[-4000:]
        story.said = ranks.said
    return story


def test_save_is_done_once_and_training_goes_on(story: Story) -> None:
    assert len(story.saved) == 1
    assert not (story.run_dir / "save").exists()


def test_a_signal_to_one_rank_stops_all_saved(story: Story) -> None:
    codes, status, newest = story.stops[0]
    assert codes == [75, 75] and status == "KILLED"
    assert newest > story.saved[0] and "Traceback" not in story.said


def test_save_and_stop_stops_all_saved(story: Story) -> None:
    codes, status, newest = story.stops[1]
    assert codes == [75, 75] and status == "KILLED"
    assert newest > story.stops[0][2] and not (story.run_dir / "save_and_stop").exists()


def test_it_went_on_from_where_it_was(story: Story) -> None:
    resumes = [json.loads(line) for line in (story.run_dir / "resumes.jsonl").read_text().splitlines()]
    assert [resume["from"] for resume in resumes] == [newest for _, _, newest in story.stops]
    assert f"resuming from {story.run_dir / 'checkpoints' / story.stops[1][2]}" in story.said


def test_what_may_change_is_listed(story: Story) -> None:
    changed = json.loads((story.run_dir / "resumes.jsonl").read_text().splitlines()[-1])["changed"]
    assert changed == ["logging.log_every_images: 16 -> 40", f"train.images: 80000 -> {story.images}"]
    for change in changed:
        assert f"changed since: {change}" in story.said


def test_it_ends_as_if_nothing_had_happened(story: Story) -> None:
    undisturbed = story.run_dir.with_name("undisturbed")
    with Ranks(undisturbed, f"train.images={story.images}", *CHECKPOINTS) as ranks:
        assert ranks.codes() == [0, 0], ranks.said[-4000:]
    assert images_of(checkpoints(story.run_dir)[-1]) == story.images
    assert the_same(end_of(story.run_dir), end_of(undisturbed))


def test_it_is_one_mlflow_run_with_every_step_once(story: Story) -> None:
    client, run = mlflow_run(story.run_dir)
    assert run.info.status == "FINISHED" and run.data.tags["resume_count"] == "2"
    for metric in ("train/loss", "perf/checkpoint_seconds"):
        steps = [point.step for point in client.get_metric_history(run.info.run_id, metric)]
        assert steps == sorted(set(steps)) and steps[-1] == story.images // BATCH, metric
    assert [point["step"] for point in points(story.run_dir)] == [
        point.step for point in client.get_metric_history(run.info.run_id, "train/loss")
    ]
    assert run.data.params["train.images"] == "80000", "params are those of the first start"
    assert "refused" not in story.said


def refused(story: Story, *changes: str) -> str:
    """The one line with which a start of one process ends."""
    before = end_of(story.run_dir).path
    with Ranks(story.run_dir, f"train.images={story.images + 80}", *changes, count=1) as ranks:
        assert ranks.codes() == [2], ranks.said[-4000:]
        assert "Traceback" not in ranks.said and end_of(story.run_dir).path == before
        return ranks.said.splitlines()[-1]


def test_another_unet_is_refused(story: Story) -> None:
    said = refused(story, "unet.channels=16")
    assert "unet.channels: 8 -> 16" in said and "train.images" not in said


def test_other_images_are_refused(story: Story, tmp_path: Path) -> None:
    shutil.copytree(story.run_dir.parent / "data", tmp_path / "data")
    (images,) = tmp_path.glob("data/*/images.npy")
    np.save(images, np.load(images)[::-1])
    meta = json.loads(images.with_name("meta.json").read_text())
    meta["sha256"]["images.npy"] = hashlib.sha256(images.read_bytes()).hexdigest()
    images.with_name("meta.json").write_text(json.dumps(meta))
    assert "other images" in refused(story, f"data.store_root={tmp_path / 'data'}")


@pytest.mark.long
def test_a_finished_run_says_how_to_go_on(story: Story) -> None:
    with Ranks(story.run_dir, f"train.images={story.images}", count=1) as ranks:
        assert ranks.codes() == [0], ranks.said[-4000:]
        assert "raise train.images" in ranks.said
