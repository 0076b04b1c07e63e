"""Recording of a run: MLflow in its own process, the run folder, the progress line. Training never waits for it."""
