"""Search for the largest micro-batch that fits a device, run on the device, and for the one to train with."""
