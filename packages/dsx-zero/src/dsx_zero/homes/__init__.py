"""Homes of state between its uses: on the device, in host memory, in a store on disk, or where a user's tier puts
it.

`home` has the protocol, the two homes in memory, and the functions that read and write any home; `stored` has homes in
a `TensorStore`; `tiers` makes homes and says which tier each class of state has (`Placement`); `chosen` makes that
choice from the configuration.
"""
