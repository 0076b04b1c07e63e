"""Ways of training one U-Net, timed in turn in one run with the same losses."""
