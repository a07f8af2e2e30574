"""`dsx.verify`: train a few steps as configured, and in plain torch on the same global batch, and compare everything.

    report = dsx.verify(model_fn, "dsx.json", batch_fn)      # on every rank, under the launcher or alone
    print(report)

The oracle, the comparison and the report are those of `dsx_verify`; here is what knows the engine. Rank 0 holds the
oracle: one process, one model, no sharding. Values are compared on *every* rank, because a mistake may show on one rank
only. Each step is judged separately: after a comparison the oracle takes
the engine's values, so that rounding errors do not accumulate and tolerances stay tight (`run.py`).
"""

from dsx_verify import Difference, Tolerance, VerifyError, VerifyReport

from .run import verify

__all__ = ["Difference", "Tolerance", "VerifyError", "VerifyReport", "verify"]
