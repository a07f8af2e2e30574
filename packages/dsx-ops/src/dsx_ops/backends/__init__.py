"""One module per implementation; `dsx_ops.update` chooses."""
