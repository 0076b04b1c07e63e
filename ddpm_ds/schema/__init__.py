"""How a section of a configuration file is written and checked: bounded types, choices, a layout in numbers."""
