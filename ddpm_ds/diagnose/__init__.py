"""Verdict on a finished run: where its time went, and the one change to try next."""

VERDICT = "verdict.txt"
"""Name of the verdict's file in a run's folder."""
