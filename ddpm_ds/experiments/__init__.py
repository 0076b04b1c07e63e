"""Experiments: sweeps of runs, comparisons of runs, and measurements of the data rate."""
