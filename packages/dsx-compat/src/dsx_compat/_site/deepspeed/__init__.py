"""DeepSpeed's interface over dsx; see `dsx_compat`. This file is all there is of the package: `dsx_compat.modules`
makes its names and its modules, each on first use.
"""

import dsx_compat.modules

dsx_compat.modules.take_over(__name__)
