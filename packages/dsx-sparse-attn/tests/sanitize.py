"""Runs the tests of the native code with it built under the address and undefined-behaviour sanitizers.

python packages/dsx-sparse-attn/tests/sanitize.py [pytest arguments]
"""

import sys
from pathlib import Path

from dsx_testkit.sanitizers import run_under_sanitizers

TESTS = Path(__file__).resolve().parent
SKIPPED = ("triton", "flex", "huggingface", "causal_models", "dispatch")  # they run no native code, or through others
FILES = sorted(p for p in TESTS.glob("test_sparse_*.py") if not p.name.removeprefix("test_sparse_").startswith(SKIPPED))

if __name__ == "__main__":
    sys.exit(run_under_sanitizers(TESTS.parent, "dsx_sparse_attn", FILES, sys.argv[1:]))
