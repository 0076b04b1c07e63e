"""The loop, its meters and its tracking."""
