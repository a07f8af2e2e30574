"""Exit codes with a meaning of their own, known to the ranks and to the launcher."""

from __future__ import annotations

RESUME_EXIT_CODE = 75
"""The job was asked to end and has saved: start it again. EX_TEMPFAIL of sysexits.h, "the user is invited to retry"."""
