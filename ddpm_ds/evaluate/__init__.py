"""Samples and scores of a trained U-Net, and its conversion to and from diffusers."""

OF_INCEPTION = ("fid", "kid", "pr")
"""Names of the scores that need features of Inception v3."""
METRICS = (*OF_INCEPTION, "pixel", "loss")
"""Names of all scores, as ``--metrics`` takes them."""
FEWEST_IMAGES = 10
"""Minimum number of images to compare; with fewer, no score means anything and some can't be computed."""
USUAL_COUNT, USUAL_MEMBERS = 64, 8
"""Images, or inputs at most, that are drawn unless another number is asked for, and members of each input."""
