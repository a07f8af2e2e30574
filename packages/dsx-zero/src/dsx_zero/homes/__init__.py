"""Where state lives between its uses: on the device, in host memory, in a store on disk, or where a user's tier puts
it.

`home` the protocol, the two homes in memory, and what readers and writers call; `stored` homes in a `TensorStore`;
`tiers` the makers of homes, and which of them each class of state has (`Placement`).
"""
