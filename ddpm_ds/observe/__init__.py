"""Measurement of a run's time and flops; observers change nothing that is trained."""
