"""Whether several hosts can train together: asked of each host as DeepSpeed's launcher would start it, and compared."""
