"""Runs the tests of the native code with it built under the address and undefined-behaviour sanitizers.

python packages/dsx-ops/tests/sanitize.py [pytest arguments]
"""

import sys
from pathlib import Path

from dsx_testkit.sanitizers import run_under_sanitizers

TESTS = Path(__file__).resolve().parent
FILES = sorted(p for p in TESTS.glob("test_ops_*.py") if p.name != "test_ops_build.py")

if __name__ == "__main__":
    sys.exit(run_under_sanitizers(TESTS.parent, "dsx_ops", FILES, sys.argv[1:]))
