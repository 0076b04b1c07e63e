"""The U-Net as one ordered list of layers, and the modules and operations made from it."""
