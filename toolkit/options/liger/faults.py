"""What `verify` says where Liger's kernels do not run."""

from __future__ import annotations

from toolkit.verification.diagnose.known import MISSING, Known

FAULTS = ()
DIAGNOSES = {"liger-kernels-missing": Known("some operators are not those of liger_kernel", MISSING)}
