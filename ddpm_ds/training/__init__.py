"""A training run: what its ranks agree on, the loop, its meters, averaged weights, checkpoints and validation."""
