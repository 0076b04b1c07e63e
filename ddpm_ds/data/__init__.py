"""From image files to micro-batches on the device: sources, the data-set cache, the loader."""
