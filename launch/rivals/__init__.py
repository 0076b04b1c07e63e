"""Ways of training one U-Net, timed in turn in one run and held to the same losses."""
