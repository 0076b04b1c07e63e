"""The preflight check: can several hosts train together? Each is asked as DeepSpeed's launcher would start it."""
