"""The programs `dsx-nvme tune` and `dsx-nvme bench`: what they measure, how they search, how they show it."""
