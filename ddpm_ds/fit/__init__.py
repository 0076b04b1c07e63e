"""Search, by trials on the device, for the largest micro-batch that fits and for the one to train with."""
