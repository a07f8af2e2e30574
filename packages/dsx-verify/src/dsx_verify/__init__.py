"""Checks a training step of any system against plain torch, and names the first wrong tensor, step and kind.

`audit` is the entry. Files, from the bottom: `oracle` (plain training in one process), `compare` and `report` (how much
tensors may differ, what differs), `seen` (what hooks see of a forward pass), `system` and `adapters` (how whole tensors
of a system are read), `expected` (what a step should compute), `comparing` (each kind of value), `case`,
`gradient_faults`, `update_faults` and `explaining` (the kind of a fault), `receipt`, `ranks`, `auditing`, and
`loops` with `audit_loops` for loops that train by themselves.
Beside it: `flight` and `watching` (why a job hangs), and `museum` (public bugs).
"""

from ._version import __version__ as __version__
from .adapters import EngineSystem as EngineSystem
from .adapters import Fsdp1System as Fsdp1System
from .adapters import MegatronSystem as MegatronSystem
from .adapters import TorchSystem as TorchSystem
from .adapters import adapter_for as adapter_for
from .audit_loops import audit_loop as audit_loop
from .auditing import audit as audit
from .compare import Tolerance as Tolerance
from .errors import AuditError as AuditError
from .expected import Expected as Expected
from .flight import Hang as Hang
from .flight import explain_dumps as explain_dumps
from .flight import read_dumps as read_dumps
from .loops import LightningLoop as LightningLoop
from .loops import Loop as Loop
from .loops import ModelLoop as ModelLoop
from .loops import TitanLoop as TitanLoop
from .loops import TrainerLoop as TrainerLoop
from .receipt import KINDS as KINDS
from .receipt import Fault as Fault
from .receipt import Receipt as Receipt
from .receipt import WrongStepError as WrongStepError
from .report import Difference as Difference
from .report import VerifyError as VerifyError
from .report import VerifyReport as VerifyReport
from .system import System as System
from .watching import Watch as Watch
from .watching import watch as watch

__all__ = [
    "KINDS",
    "AuditError",
    "Difference",
    "EngineSystem",
    "Expected",
    "Fault",
    "Fsdp1System",
    "Hang",
    "LightningLoop",
    "Loop",
    "MegatronSystem",
    "ModelLoop",
    "Receipt",
    "System",
    "Tolerance",
    "TitanLoop",
    "TorchSystem",
    "TrainerLoop",
    "VerifyError",
    "VerifyReport",
    "Watch",
    "WrongStepError",
    "adapter_for",
    "audit",
    "audit_loop",
    "explain_dumps",
    "read_dumps",
    "watch",
]
