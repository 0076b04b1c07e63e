"""A run that is asked to stop, and started again, is the run that never was; nothing of it is written down twice."""

import json
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddpm_ds.checkpoint.folder import images_of
from tests.training.ranks import BATCH, Ranks, checkpoints, end_of, mlflow_run, points, the_same

pytestmark = pytest.mark.launch

LONGER = "train.images=80000"
CHECKPOINTS = ("checkpoint.every_images=4000", "checkpoint.keep_last=100")


@dataclass
class Story:
    """A run that was saved, stopped and resumed, and what was seen on the way."""

    run_dir: Path
    images: int
    """Length of the run, some steps after the stop."""
    saved: list[str]
    stopped: str
    """The checkpoint with which it stopped."""
    said: str


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    run_dir = tmp_path_factory.mktemp("runs") / "stopped"
    with Ranks(run_dir, LONGER, *CHECKPOINTS) as ranks:
        ranks.until_images(2 * BATCH)
        (run_dir / "save").touch()
        ranks.until(lambda: len(checkpoints(run_dir)) > 0)
        ranks.until_images(points(run_dir)[-1]["train/seen_images"] + 8 * BATCH)
        saved = checkpoints(run_dir)
        ranks.signal(1, signal.SIGTERM)
        assert ranks.codes() == [75, 75] and mlflow_run(run_dir)[1].info.status == "KILLED"
    stopped = checkpoints(run_dir)[-1]
    images = (images_of(stopped) or 0) + 8 * BATCH
    with Ranks(run_dir, f"train.images={images}", *CHECKPOINTS, "logging.log_every_images=40") as ranks:
        assert ranks.codes() == [0, 0], ranks.said[-4000:]
        return Story(run_dir, images, saved, stopped, ranks.said)


def test_save_is_done_once_and_a_signal_to_one_rank_stops_all_saved(story: Story) -> None:
    assert len(story.saved) == 1 and not (story.run_dir / "save").exists()
    assert story.stopped > story.saved[0] and "Traceback" not in story.said


def test_it_goes_on_from_where_it_was_and_lists_what_has_changed(story: Story) -> None:
    (resume,) = [json.loads(line) for line in (story.run_dir / "resumes.jsonl").read_text().splitlines()]
    assert resume["from"] == story.stopped
    assert f"resuming from {story.run_dir / 'checkpoints' / story.stopped}" in story.said
    assert resume["changed"] == ["logging.log_every_images: 16 -> 40", f"train.images: 80000 -> {story.images}"]
    assert all(f"changed since: {change}" in story.said for change in resume["changed"])


def test_it_ends_as_if_nothing_had_happened(story: Story) -> None:
    undisturbed = story.run_dir.with_name("undisturbed")
    with Ranks(undisturbed, f"train.images={story.images}", *CHECKPOINTS) as ranks:
        assert ranks.codes() == [0, 0], ranks.said[-4000:]
    assert images_of(checkpoints(story.run_dir)[-1]) == story.images
    assert the_same(end_of(story.run_dir), end_of(undisturbed))


def test_it_is_one_mlflow_run_with_every_step_once(story: Story) -> None:
    client, run = mlflow_run(story.run_dir)
    assert run.info.status == "FINISHED" and run.data.tags["resume_count"] == "1"
    for metric in ("train/loss", "usage/checkpoint_seconds"):
        steps = [point.step for point in client.get_metric_history(run.info.run_id, metric)]
        assert steps == sorted(set(steps)) and steps[-1] == story.images // BATCH, metric
    assert [point["step"] for point in points(story.run_dir)] == [
        point.step for point in client.get_metric_history(run.info.run_id, "train/loss")
    ]
    assert run.data.params["train.images"] == "80000", "params are those of the first start"
    assert "refused" not in story.said
