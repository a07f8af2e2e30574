"""Parameters: the flat buffers they lie in, and what their users see between uses at stage 3.

`flat` and `memory` the buffers, `storage` and `partitioned_unit` memory that comes and goes, `partitioned` (with
`sources`, `partitioned_view`, `tensor_kinds`, `conversions`, `tensors`) the parameter without values, `whole` reading
and writing whole tensors of which each rank holds a slice, `init` parameters that are partitioned when they are made,
`restored` what an object of before stands for now.
"""
