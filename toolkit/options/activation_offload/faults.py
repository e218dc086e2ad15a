"""What `verify` says where checkpointed blocks keep their inputs on the device."""

from __future__ import annotations

from toolkit.verification.diagnose.known import MISSING, Known

FAULTS = ()
DIAGNOSES = {"activations-not-offloaded": Known("some inputs of checkpointed blocks were not in host memory", MISSING)}
