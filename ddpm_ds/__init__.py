"""Train pixel-space diffusion U-Nets on DeepSpeed's pipeline engine, from a laptop CPU to many nodes."""

__version__ = "0.2.0"
