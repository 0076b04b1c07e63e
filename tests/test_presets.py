"""What a wheel holds is enough to train: it has the presets that a clone has beside the package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.launching import PATIENCE_SECONDS, REPOSITORY


def test_an_installed_package_has_every_preset_and_starts_the_main_job_from_any_folder(tmp_path: Path) -> None:
    built, elsewhere = tmp_path / "built", tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run([*command, "build_py", "--build-lib", str(built)], cwd=REPOSITORY, check=True, capture_output=True)
    for folder, kept in (("launch/specs", "specs"), ("ds_configs", "ds_configs")):
        names = {path.name for path in (REPOSITORY / folder).iterdir() if path.suffix in (".yaml", ".json")}
        assert {path.name for path in (built / "ddpm_ds" / "presets" / kept).iterdir()} == names
    train = [sys.executable, "-m", "ddpm_ds.cli.main", "train", "--dry-run", "--deepspeed_config"]
    for config in ("ds_configs/zero2_fp16.json", "zero2_fp16"):
        done = subprocess.run(
            [*train, config],
            cwd=elsewhere,
            env={**os.environ, "PYTHONPATH": str(built)},
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert done.returncode == 0 and "digits" in done.stdout, done.stderr
    assert list(elsewhere.iterdir()) == []
