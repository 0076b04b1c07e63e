"""Packages of a wheel: those of ddpm_ds, and its presets and examples, which a clone has beside them."""

from setuptools import find_packages, setup

BESIDE = ("launch/specs", "launch/examples", "ds_configs")
PRESETS = {f"ddpm_ds.presets.{folder.rpartition('/')[2]}": folder for folder in BESIDE}

setup(packages=[*find_packages(include=["ddpm_ds", "ddpm_ds.*"]), *PRESETS], package_dir=PRESETS)
