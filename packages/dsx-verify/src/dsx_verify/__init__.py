"""Checks a training step against plain torch, and names the first wrong tensor, step and kind.

Files: `oracle` (plain training in one process), `compare` (how much tensors may differ), `report` (what differs).
"""

from ._version import __version__ as __version__
from .compare import Tolerance as Tolerance
from .report import Difference as Difference
from .report import VerifyError as VerifyError
from .report import VerifyReport as VerifyReport

__all__ = ["Difference", "Tolerance", "VerifyError", "VerifyReport"]
