"""The mathematics of diffusion: schedules, objectives and the process, as pure tensors."""

from ddpm_ds.diffusion.process import Diffusion

__all__ = ["Diffusion"]
