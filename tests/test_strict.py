"""Real runs under a transport that is as strict as NCCL: none locks, and each comes where it came before."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.forking import REPOSITORY
from tests.launching import fork_ranks, place_digits, place_empty_store, write_json
from tests.pipeline.ladder_worker import Case
from tests.strict import LOCKED, MUTANTS
from tests.training.ranks import TRAIN, arguments, checkpoints, points

pytestmark = pytest.mark.launch

LADDER = REPOSITORY / "tests" / "pipeline" / "ladder_worker.py"
STRICT = REPOSITORY / "tests" / "strict.py"
SECONDS = 500.0
DEEP = ("unet.multipliers=[1,1]", "unet.blocks_per_level=2")
"""A U-Net that folds onto four ranks."""
LENGTH = ("train.images=128", "train.batch_images=16", "train.accumulation=8")
"""Eight steps of eight micro-batches, with samples and held-out losses after the fifth and the last."""
FEW = (*LENGTH, "train.accumulation=4")
"""With as many micro-batches as two ranks need: a profile takes long to read the operators of each."""
WATCHED = ("--profile-kernels", "5-5", "--trace-steps", "6-7")


def run(processes: int, *words: str, log: Path, **environment: str) -> list[int]:
    place_empty_store(log.parent)
    place_digits(log.parent)
    ranks = fork_ranks(processes, STRICT, *words, stdout=log, stderr=log, MLFLOW_TRACKING_URI="", **environment)
    try:
        return [rank.wait(SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def config_of(folder: Path, schedule: str) -> str:
    """The main JSON under a schedule, with a flops profile of the fourth step."""
    config = json.loads((REPOSITORY / "ds_configs" / "zero2_fp16.json").read_text())
    config["flops_profiler"] = {"enabled": True, "profile_step": 4}
    config["pipeline"]["schedule"] = schedule
    path = folder / "ds.json"
    path.write_text(json.dumps(config))
    return str(path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "layout"),
    [
        pytest.param("folded", ("-p", "2"), id="fold of 2 x 2 replicas"),
        pytest.param("planned", ("-p", "2"), id="planned order of 2 x 2 replicas"),
    ],
)
def test_a_run_that_is_watched_in_every_way_does_not_lock(
    schedule: str, layout: tuple[str, str], tmp_path: Path
) -> None:
    """ZeRO-2, samples, held-out losses, checkpoints, flops, kernels and a trace; losses are those of plain gloo."""
    config, log = config_of(tmp_path, schedule), tmp_path / "log"
    words = arguments(tmp_path / "run", FEW, config, (*layout, *WATCHED))
    assert run(4, str(TRAIN), *words, log=log) == [0] * 4, log.read_text()[-6000:]
    said = log.read_text()
    assert all(words in said for words in ("flops of step 4", "traced steps 6-7", "held-out loss")), said
    assert list((tmp_path / "run" / "samples").glob("*.png")) and checkpoints(tmp_path / "run")
    assert (tmp_path / "run" / "kernels" / "rank3.txt").exists()

    plain = arguments(tmp_path / "plain", FEW, config, layout)
    ranks = fork_ranks(4, TRAIN, *plain, stdout=log, stderr=log, MLFLOW_TRACKING_URI="")
    assert [rank.wait(SECONDS) for rank in ranks] == [0] * 4, log.read_text()[-6000:]
    strict_losses, losses = ([point["train/loss"] for point in points(tmp_path / of)] for of in ("run", "plain"))
    assert strict_losses == losses


@pytest.mark.long
def test_a_resume_on_another_layout_does_not_lock_and_hosts_with_folders_of_their_own_end_at_the_start(
    tmp_path: Path,
) -> None:
    log, length = tmp_path / "log", ("data.store_root=data", *DEEP, *LENGTH)
    first = arguments(tmp_path / "run", length, config_of(tmp_path, "1f1b"), ("-p", "4"))
    assert run(4, str(TRAIN), *first, log=log) == [0] * 4, log.read_text()[-6000:]
    longer = (*length, "train.images=192")
    second = arguments(tmp_path / "run", longer, "folded_zero2_fp16.json", ("-p", "2"))
    assert run(4, str(TRAIN), *second, log=log) == [0] * 4, log.read_text()[-6000:]
    assert points(tmp_path / "run")[-1]["train/seen_images"] == 192

    folders = [tmp_path / host for host in "aabb"]
    for folder in set(folders):
        folder.mkdir()
    apart = arguments(Path("run"), length, config_of(tmp_path, "1f1b"), ("-p", "4"))
    hosts = {"STRICT_FOLDERS": ":".join(map(str, folders))}
    assert run(4, str(TRAIN), *apart, log=log, **hosts) == [2] * 4, log.read_text()[-6000:]
    assert "name a --run-dir that all hosts share" in log.read_text()


@pytest.mark.long
def test_ranks_that_read_text_sum_or_swap_do_not_lock(tmp_path: Path) -> None:
    """Four ranks of a fold, of which all read it, in a random order of passes; two stages of tensor groups, and of
    ranks that share images; four ranks that share one."""
    cases = [
        Case(4, 1, 2, "fp32", 2, micro_batches=8, schedule="folded", process="text", random_programs=1),
        Case(2, 1, 1, "fp32", 1, schedule="folded", process="text", random_programs=1, tensor=2),
        Case(1, 2, 2, "fp32", 0, process="heads", tensor=2),
        Case(2, 1, 2, "fp32", 1, schedule="folded", process="text", random_programs=1, space=2),
        Case(1, 1, 1, "fp16", 0, process="heads", space=4, levels=(0, 1)),
    ]
    file = write_json(tmp_path / "cases.json", [asdict(case) for case in cases])
    log = tmp_path / "log"
    assert run(4, str(LADDER), str(file), str(tmp_path), log=log) == [0] * 4, log.read_text()[-6000:]


@pytest.mark.long
def test_the_benchmark_does_not_lock(tmp_path: Path) -> None:
    """The rows of this project's engines; DistributedDataParallel can't use a process group written in Python."""
    bench, log = REPOSITORY / "launch" / "bench.py", tmp_path / "log"
    words = arguments(tmp_path / "run", FEW, "zero1_fp32.json", ("-p", "2"))[2:]
    effort = ("--rows", "1f1b,folded,planned", "--rounds", "1", "--steps-per-round", "1", "--compared-steps", "3")
    assert run(2, str(bench), *words, *effort, log=log) == [0] * 2, log.read_text()[-6000:]


@pytest.mark.parametrize(
    "mutant", ["a wait in a forward", *(pytest.param(one, marks=pytest.mark.long) for one in list(MUTANTS)[::2])]
)
def test_what_nccl_would_not_survive_locks_here(mutant: str, tmp_path: Path) -> None:
    config, log = config_of(tmp_path, "folded"), tmp_path / "log"
    words = arguments(tmp_path / "run", (*DEEP, *LENGTH), config, ("-p", "4"))
    codes = run(4, str(TRAIN), *words, log=log, STRICT_MUTANT=mutant, STRICT_SECONDS="3")
    assert LOCKED in codes, log.read_text()[-6000:]
