"""Several machines: which they are, how they are reached, and the environment that travels to them."""
