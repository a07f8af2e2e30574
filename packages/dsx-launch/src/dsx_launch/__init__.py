"""Starting a program on all devices of one machine or of many.

On each machine torch's elastic agent, which torchrun uses too, starts and watches the ranks. This package decides what
to start where, connects to the other hosts, reports the first failure and leaves no process behind. In order of
reading: `options` (the command line), `resources` (hostfile and filters), `plan` (everything is decided, and nothing is
started), `host` (the ranks of this machine), `hosts` and `runners` (several machines), `failures` (the printed report),
`elastic` (ranks that are started again, with as many hosts as are available).

Nothing here imports torch before processes are started.
"""

from .errors import LaunchError, ResourceError

__all__ = ["LaunchError", "ResourceError"]
