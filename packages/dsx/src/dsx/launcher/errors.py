"""What can go wrong before or while starting a job, as exceptions of our own.

Each message says what was got, what was expected and what to do. The command line prints the message without a
traceback and exits with 2 (a mistake in the command) or 1 (a host that cannot be reached, a rendezvous that times out).
"""


class LaunchError(RuntimeError):
    """A job that could not be started or kept running for a reason outside the user's program."""


class ResourceError(ValueError):
    """A hostfile, filter or option that does not describe usable resources."""
