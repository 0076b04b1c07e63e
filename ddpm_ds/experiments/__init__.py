"""Experiments: sweeps of runs, and comparisons of runs."""
