"""The values of a sharded model by parameter name: reading, loading, moving and counting them.

`slices` lists what a rank owns, `loading` fills it, `local` makes and loads a rank's own `state_dict`, `templates`
knows the optimizer's states before the first step, `weight_files` reads safetensors files, `moving` moves states to
host memory for a while.
"""
