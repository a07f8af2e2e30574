"""The errors of the launcher, before and while it starts a job.

Each message says what was found, what was expected and what to do. The command line prints the message without a
traceback and exits with 2 (a mistake in the command) or 1 (a host that cannot be reached, a rendezvous that times out).
"""

from dsx_core import CodedError


class LaunchError(CodedError, RuntimeError):
    """A job that could not be started or kept running for a reason outside the user's program."""

    code = "DSX202"


class ResourceError(CodedError, ValueError):
    """A hostfile, filter or option that does not describe usable resources."""

    code = "DSX201"
