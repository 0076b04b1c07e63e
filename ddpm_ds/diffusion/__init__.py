"""Mathematics of diffusion on tensors: schedules, objectives, the process and samplers."""
