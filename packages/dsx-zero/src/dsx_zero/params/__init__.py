"""Parameters: their flat buffers, and the objects that users see between uses at stage 3.

`flat` and `memory` have the buffers, `storage` and `partitioned_unit` memory that is freed and filled again,
`partitioned` (with `sources`, `partitioned_view`, `tensor_kinds`, `conversions`, `tensors`) the parameter without
values, `whole` reads and writes whole tensors of which each rank holds a slice, `init` partitions parameters when they
are made, `restored` finds the present parameter of an earlier object.
"""
