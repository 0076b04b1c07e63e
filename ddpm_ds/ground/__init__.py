"""Foundations of every room: errors, files, options, units, the device, random numbers."""
