"""Configuration: the run spec and the DeepSpeed JSON, checked and resolved for a number of processes. No torch."""
