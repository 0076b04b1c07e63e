"""The one translation to and from diffusers: U-Nets, schedulers, folders, and what is exported and imported."""
