"""Starting a program on all devices of one machine or of many.

The work on each machine is done by torch's elastic agent, which torchrun runs as well; this package decides what to
start where, reaches the other hosts, reports the first failure and leaves nothing behind. In order of reading:
`options` (the command line), `resources` (hostfile and filters), `plan` (everything decided, nothing started), `host`
(the ranks of this machine), `hosts` and `runners` (several machines), `failures` (what is printed), `elastic` (ranks
that are started again, with as many hosts as there are).

Nothing here imports torch before processes are started.
"""

from .errors import LaunchError, ResourceError

__all__ = ["LaunchError", "ResourceError"]
