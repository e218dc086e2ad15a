"""Float8 products in the files of other tools: recipes of their own, with other scales."""

from __future__ import annotations

from toolkit.importing.table import nothing, off

RULES = {
    "axolotl": {
        **off("another number format", "fp8"),
        **nothing("settings of a method that another key turns on", "fp8_enable_fsdp_float8_all_gather"),
    },
    "llamafactory": {
        **off("a float8 recipe of its own", "fp8 fp8_enable_fsdp_float8_all_gather"),
        **nothing("settings of a method that another key turns on", "fp8_backend"),
    },
}
"""By the id of the tool's table (toolkit/importing)."""
