"""Pipeline of stages: cuts of the list of layers, messages between stages, and the engines that execute them."""
