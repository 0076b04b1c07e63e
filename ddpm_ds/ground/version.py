"""Version of this package, in a module of its own, since files below the package's face name it."""

__version__ = "0.4.0"
