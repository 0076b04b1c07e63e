"""The one translation to and from diffusers: U-Nets, schedulers and folders, export and import."""
