"""The U-Net as one ordered list of layers, and everything that walks it."""
