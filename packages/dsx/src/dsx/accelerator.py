"""`dsx_compat.accelerator` under the name that scripts use: both names mean the same module. It needs dsx-compat."""

import sys

from .deepspeed_names import finder

try:
    sys.modules[__name__] = finder("dsx")("accelerator")
except AttributeError as error:
    raise ImportError(str(error), name=__name__) from error
