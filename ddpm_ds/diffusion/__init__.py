"""The mathematics of diffusion: schedules, objectives, the process and samplers, as pure tensors."""
