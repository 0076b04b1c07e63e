"""From image files to micro-batches: sources -> one prepared store -> micro-batches as a function of images seen.

:mod:`~ddpm_ds.data.sources` reads images, :mod:`~ddpm_ds.data.prepare` writes them once into a
:mod:`~ddpm_ds.data.cache`, :mod:`~ddpm_ds.data.loader` says which stored image comes when, and
:mod:`~ddpm_ds.data.loader` delivers them, which :mod:`~ddpm_ds.data.loader`
brings to the device.
"""
