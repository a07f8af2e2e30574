"""The parts that two packages of dsx or more need: errors with codes, files, locks, agreement of ranks, strict JSON.

Each module is one noun:

- `errors`: errors with a stable code, and the nearest known name for a mistyped one.
- `console`: a program ends quietly with the reader of its output or on Ctrl-C, and names the word that was meant.
- `files`: replaces a file so that readers see the old or the new content, never a part.
- `holding`: folders that are in use as long as a process lives that holds them.
- `host_memory`: tells a simulated device of accesses of native code to host memory.
- `locks`: the kernel's lock on an open file, for one descriptor alone.
- `modules`: hooks and calls that dsx puts on a user's modules, and the blocks of a model.
- `open_files`: raises the limit of open files of this process.
- `progress`: a progress bar on standard error.
- `together`: runs an action on all ranks, so that all raise the same error when one fails; compares facts of ranks.
- `strict_json`: reads JSON that may be damaged or hostile.
- `device`: streams, events, memory and random state of any device. It imports torch, and is imported by its name.

Nothing else here imports torch (`modules` does where it is called), another package, or anything heavy; nothing has
an effect at import. Left out on purpose: whatever only one package needs. Such code stays there.
"""

from ._version import __version__ as __version__
from .console import CommandParser as CommandParser
from .console import end_with_reader as end_with_reader
from .console import run_program as run_program
from .errors import CodedError as CodedError
from .errors import Finding as Finding
from .errors import nearest as nearest
from .errors import shorten as shorten
from .errors import with_code as with_code
from .files import replace_text as replace_text
from .files import replacing as replacing
from .files import sync_folder as sync_folder
from .together import RanksDifferError as RanksDifferError
from .together import Together as Together

__all__ = [
    "CodedError",
    "CommandParser",
    "Finding",
    "RanksDifferError",
    "Together",
    "end_with_reader",
    "nearest",
    "replace_text",
    "replacing",
    "run_program",
    "shorten",
    "sync_folder",
    "with_code",
]
