"""Data: image sources, the data-set cache, and the loader that puts micro-batches on the device."""
