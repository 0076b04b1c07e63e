"""Real runs with a planted fault each, which the verdict names; and the verb, on runs it can judge and on others."""

import os
import re
import shutil
from pathlib import Path

import pytest
import yaml

from ddpm_ds.cli.main import main
from ddpm_ds.planning.finished_run import facts_of
from ddpm_ds.planning.verdict import SHOWN, verdict
from tests.launching import REPOSITORY, place_empty_store, run_ranks, tiny_spec
from tests.planning.planted_facts import Bench, write_run
from tests.tracking.stored import Store

PLANTED = {"data wait": (16, 8), "bubble": (64, 1), "communication": (16, 8)}
"""Images and micro-batches of a step by planted fault: waits that are many times longer than anything else, on a busy
machine too."""
ATTEMPTS = 3  # neighbours of this machine may do more to a traced step than what was planted
CHANGES = (
    "ds.pipeline.activation_checkpoint_interval=0",
    *("evaluation.every_images=null", "samples.every_images=null", "optimizer.warmup_images=0"),
    "ds.pipeline.partition=[9]",  # which gives two ranks about as many flops of the U-Net below
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the folder of a run of three steps for each fault, the last two traced."""
    folder, worker = tmp_path_factory.mktemp("faults"), Path(__file__).with_name("faulty.py")
    place_empty_store(folder)
    unet = {"channels": 16, "attention_resolutions": [], "dropout": 0.0}
    spec = tiny_spec(data={"image_size": 16}, unet=unet)
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    files = ["--spec", str(folder / "spec.yaml"), "--deepspeed_config", str(REPOSITORY / "ds_configs/zero0_fp32.json")]
    for fault, (images, micro_batches) in PLANTED.items():
        length = (f"train.batch_images={images}", f"train.images={3 * images}", f"train.accumulation={micro_batches}")
        changes = (*CHANGES, *length, f"data.store_root={folder / 'data'}")
        words = [*files, "-p", "2", "--trace-steps", "2-3", "--run-dir", str(folder / fault)]
        words += [part for change in changes for part in ("--set", change)]
        for _ in range(ATTEMPTS):
            shutil.rmtree(folder / fault, ignore_errors=True)
            done = run_ranks(2, worker, *words, FAULT=fault, MLFLOW_TRACKING_URI="", XDG_CACHE_HOME=str(folder))
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
            if verdict(facts_of(folder / fault)).top == fault:
                break
    return folder


@pytest.mark.launch
@pytest.mark.parametrize("fault", PLANTED)
def test_the_planted_fault_of_a_real_run_is_named(folder: Path, fault: str) -> None:
    found = verdict(facts_of(folder / fault))
    printed = (folder / fault / "verdict.txt").read_text()
    assert found.top == fault and f"largest cost: {SHOWN.get(fault, fault)}, " in printed, printed
    assert sum(found.shares.values()) == pytest.approx(1.0) and found.change is not None, printed


@pytest.fixture
def store(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An output root with the run `slow`, whose loader is slow, in its folder and in MLflow."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    store = Store(tmp_path)
    write_run(tmp_path / "slow", Bench(read_seconds=5e-4).traced())
    store.run("slow")
    return store


def test_a_run_is_diagnosed_and_the_verdict_is_kept(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(store.root / "slow")]) == 0
    printed = capsys.readouterr().out
    assert "largest cost: data wait" in printed
    assert (store.root / "slow" / "verdict.txt").read_text() == printed
    (run,) = store.client.search_runs([store.experiment_id])
    tags = {"verdict.top": "data wait", "verdict.try": "--set data.workers=3", "verdict.share": "23.1%"}
    assert tags.items() <= run.data.tags.items()
    kept = store.client.download_artifacts(run.info.run_id, "verdict.txt", str(store.root))
    assert Path(kept).read_text() == printed


def test_a_folder_that_mlflow_does_not_know_is_diagnosed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path / os.fsdecode(b"al\xffone"), Bench(cuts=(3,)).traced())
    assert main(["diagnose", str(run_dir)]) == 0
    printed = capsys.readouterr()
    assert "largest cost: imbalance" in printed.out and "al\\xffone/spec.yaml" in printed.out
    (line,) = printed.err.splitlines()
    assert line.startswith("ddpm-ds diagnose: not kept in MLflow: ")


def test_a_run_that_can_not_be_judged_is_one_line(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (store.root / "slow" / "trace" / "summary.json").unlink()
    for name, printed in (
        ("slwo", "slwo is not the folder of a run; name one that has a spec.yaml"),
        ("empty", "is not the folder of a run"),
        ("slow", "no step was traced; train with --trace-steps FIRST-LAST"),
    ):
        assert main(["diagnose", str(store.root / name)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(printed, line), line
