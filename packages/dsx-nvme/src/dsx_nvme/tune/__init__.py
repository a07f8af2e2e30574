"""The programs `dsx-nvme tune` and `dsx-nvme bench`: measurement, search and display."""
