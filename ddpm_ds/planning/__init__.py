"""Predictions of a training step's time, memory and traffic, for layouts and devices that need not be there."""
