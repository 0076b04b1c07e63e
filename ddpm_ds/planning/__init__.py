"""From files, options and devices to one frozen plan of a run."""
