"""What a wheel holds is enough to train: it has the presets and examples that a clone has beside the package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import PATIENCE_SECONDS, REPOSITORY

BESIDE = ("launch/specs", "launch/examples", "ds_configs")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    command += ["build_py", "--build-lib", str(folder / "built")]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    return folder / "built"


def ddpm_ds(built: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command, variables = [sys.executable, "-m", "ddpm_ds.cli.main", *words], {**os.environ, "PYTHONPATH": str(built)}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=PATIENCE_SECONDS)


def test_an_installed_package_has_every_preset_and_starts_the_main_job_from_any_folder(
    built: Path, tmp_path: Path
) -> None:
    for folder in BESIDE:
        names = {path.name for path in (REPOSITORY / folder).iterdir() if path.suffix in (".yaml", ".json", ".py")}
        assert {path.name for path in (built / "ddpm_ds" / "presets" / Path(folder).name).iterdir()} == names
    for config in ("ds_configs/zero2_fp16.json", "zero2_fp16"):
        done = ddpm_ds(built, tmp_path, "train", "--dry-run", "--deepspeed_config", config)
        assert done.returncode == 0 and "digits" in done.stdout, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", [Path(folder).name for folder in BESIDE])
def test_a_package_without_its_data_says_so_in_one_line(missing: str, built: Path, tmp_path: Path) -> None:
    shutil.copytree(built, tmp_path / "built")
    shutil.rmtree(tmp_path / "built" / "ddpm_ds" / "presets" / missing)
    words = ["init", "--fields", "new"] if missing == "examples" else ["train", "--deepspeed_config", "zero2_fp16"]
    done = ddpm_ds(tmp_path / "built", tmp_path, *words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"presets/{missing} is missing: ddpm_ds was installed without its data" in done.stderr
    assert not (tmp_path / "new").exists() and not (tmp_path / "runs").exists()
