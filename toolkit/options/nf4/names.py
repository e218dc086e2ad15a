"""NF4 in the files of other tools, where a key says nothing else."""

from __future__ import annotations

from toolkit.importing.table import Off, Rule, nothing

_TYPE = Off("the recipe has nf4", ("nf4",))
_DOUBLE = "the recipe quantises doubly"
RULES: dict[str, dict[str, Rule]] = {
    "trl": {
        **nothing("the base's 4 bits: the recipe has nf4, doubly quantised", "bnb_4bit_quant_storage"),
        "bnb_4bit_quant_type": _TYPE,
        "use_bnb_nested_quant": Off(f"without a second quantisation: {_DOUBLE}", (True,)),
    },
    "llamafactory": {
        "quantization_method": Off("the recipe quantises to nf4 itself", (None, "bnb", "bitsandbytes")),
        "quantization_type": _TYPE,
        "double_quantization": Off(_DOUBLE, (True,)),
    },
    "swift": {
        "bnb_4bit_quant_type": _TYPE,
        "bnb_4bit_use_double_quant": Off(_DOUBLE, (True,)),
    },
}
"""By the id of the tool's table (toolkit/importing)."""
