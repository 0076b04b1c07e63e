"""Where a run is recorded: MLflow in its own process, the run folder, the progress line. Training never waits."""
