"""The optimizers; import them from `dsx_ops`."""
