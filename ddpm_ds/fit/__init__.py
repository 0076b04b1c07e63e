"""The largest micro-batch that fits a device, found on the device, and the one to train with."""
