"""Exit codes with a special meaning, for the ranks and the launcher."""

from __future__ import annotations

RESUME_EXIT_CODE = 75
"""The job was asked to end and has saved: start it again. EX_TEMPFAIL of sysexits.h, "the user is invited to retry"."""
