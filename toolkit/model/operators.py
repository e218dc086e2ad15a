"""What torch says of its operators. One that a version of torch does not have is asked for by its name alone."""

from __future__ import annotations

import functools
from typing import Any

from torch.fx.operator_schemas import get_signature_for_torch_op


def operator_name(func: Any) -> str:
    """Its name without namespace and overload: ``_to_copy`` of ``aten::_to_copy.default``."""
    return str(func.name()).partition("::")[2].partition(".")[0]


@functools.cache
def schema_of(func: Any) -> Any:
    """Its schema: ``arguments`` and ``returns``, each with ``alias_info`` where it shares memory. None without one."""
    _, schemas = get_signature_for_torch_op(func, return_schemas=True)
    return schemas[0] if schemas else None
