"""single and ddp: every process holds the whole state."""

from __future__ import annotations

from toolkit.strategies.base import Strategy


class Single(Strategy):
    name = "single"
    title = "one process, nothing spread"
    distributed_type = "NO"
    engine = "toolkit.strategies.engines.replicated:SingleEngine"
    ledger = "toolkit.strategies.ledgers.replicated:SingleLedger"


class DistributedDataParallel(Strategy):
    name = "ddp"
    title = "whole state on every process, gradients averaged"
    distributed_type = "MULTI_GPU"
    engine = "toolkit.strategies.engines.replicated:DdpEngine"
    ledger = "toolkit.strategies.ledgers.replicated:DdpLedger"
