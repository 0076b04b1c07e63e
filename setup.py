"""Packages of a wheel: those of ddpm_ds, and the presets, which a clone has beside them."""

from setuptools import find_packages, setup

PRESETS = {"ddpm_ds.presets.specs": "launch/specs", "ddpm_ds.presets.ds_configs": "ds_configs"}

setup(packages=[*find_packages(include=["ddpm_ds", "ddpm_ds.*"]), *PRESETS], package_dir=PRESETS)
