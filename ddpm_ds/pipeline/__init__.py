"""Cost, cuts, the pipeline module and the engine: how one list of layers runs on many processes."""
