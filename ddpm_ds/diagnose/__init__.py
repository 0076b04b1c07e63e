"""Verdict on a finished run: where its time went, and the one change to try next."""
