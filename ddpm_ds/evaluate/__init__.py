"""What a trained U-Net is worth: samples, scores, and its way to and from diffusers."""

OF_INCEPTION = ("fid", "kid", "pr")
"""Scores from features of Inception v3."""
METRICS = (*OF_INCEPTION, "pixel", "digits")
FEWEST_IMAGES = 10
"""Of fewer, no score means anything, and some can't be computed."""
