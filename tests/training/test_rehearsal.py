"""``train --steps``: a few steps of a run that leave no checkpoint and no record."""

import json
from pathlib import Path

import pytest

from ddpm_ds.cli import train as command
from ddpm_ds.diffusion.levels import levels_of
from ddpm_ds.diffusion.spec import check_sampler
from ddpm_ds.ground.errors import SpecError
from ddpm_ds.schema.choices import SAMPLERS, SCHEDULES
from tests.launching import REPOSITORY, drafted
from tests.training.ranks import Ranks

DIGITS = REPOSITORY / "launch" / "specs" / "digits.yaml"
MAIN = REPOSITORY / "ds_configs" / "zero2_fp16.json"


@pytest.mark.launch
def test_a_rehearsal_leaves_the_time_of_its_steps_and_the_memory_of_its_ranks_alone(tmp_path: Path) -> None:
    with Ranks(tmp_path / "run", options=["--steps", "2"]) as ranks:
        assert ranks.codes() == [0, 0], ranks.said
    assert {path.name for path in (tmp_path / "run").iterdir()} <= {"rehearsal.json", ".lock"}
    found = json.loads((tmp_path / "run" / "rehearsal.json").read_text())
    assert len(found["step_seconds"]) == len(found["rank_peak_bytes"]) == 2
    assert min(found["step_seconds"]) > 0 and min(found["rank_peak_bytes"]) > 2**27
    assert found["checkpoint_interval"] == 0


def test_a_rehearsal_draws_by_one_evaluation_with_every_sampler_and_schedule() -> None:
    tried = 0
    for schedule in SCHEDULES:
        for kind in SAMPLERS:
            overrides = [f"diffusion.schedule={schedule}", f"sampler.kind={kind}", "sampler.guidance_between=[0.2,3]"]
            try:
                draft = drafted(DIGITS, overrides, MAIN, world_size=1, stages=1)
            except SpecError:
                continue  # a schedule that this sampler does not know
            spec = command._rehearsed(draft.spec)
            check_sampler(spec.sampler, spec.diffusion, classes=spec.unet.classes)
            assert len(levels_of(spec.diffusion).visits(spec.sampler)) == 1
            tried += 1
    assert tried >= 10


def test_a_rank_that_runs_out_of_memory_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def training(*_: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.get(name, "0"))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(command, "_train", training)
    with pytest.raises(RuntimeError):
        command.main(["--deepspeed_config", str(MAIN), "--run-dir", str(tmp_path / "run"), "--steps", "1"])
    assert "ddpm_ds: error: rank 0 ran out of memory; ddpm-ds fit finds" in capsys.readouterr().err
