"""`dsx.checkpoint` and `dsx_checkpoint` are two names of the same things, whichever is asked for first."""

import subprocess
import sys


def test_a_module_that_nobody_has_imported_yet_is_loaded_once():
    program = "from dsx.checkpoint import plan; import dsx_checkpoint.plan; print(plan is dsx_checkpoint.plan)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
    missing = subprocess.run(
        [sys.executable, "-c", "from dsx.checkpoint import nothing"], capture_output=True, text=True
    )
    assert "ImportError: cannot import name 'nothing'" in missing.stderr
