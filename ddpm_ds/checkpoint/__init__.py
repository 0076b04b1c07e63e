"""Checkpoints that are complete or do not exist, and that any layout can read: fragments of fp32 tensors by name."""
