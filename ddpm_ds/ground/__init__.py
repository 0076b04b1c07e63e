"""What every room stands on: errors, files, options, units, the device, random numbers."""
