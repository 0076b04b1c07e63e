"""Runs beside one another: varied, compared, diagnosed, and what was learned from them."""
