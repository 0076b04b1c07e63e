"""Which layout trains a U-Net fastest on given devices: predicted, not tried. Only `measured` computes anything."""
