"""Whether this machine's CPU multiplies 16-bit numbers itself."""

from __future__ import annotations


def cpu_emulates(dtype: str) -> bool:
    """Whether matrix products of ``dtype`` (torch's name) on the CPU run without instructions for it.

    oneDNN has kernels for bfloat16 and float16 where the CPU has AVX-512, AVX-NE-CONVERT or their like on ARM; without
    them torch falls back to loops of its own (aten/src/ATen/native/cpu/BlasKernel.cpp). False where it cannot be known:
    a torch without oneDNN has neither operator.
    """
    import torch

    asked = {"bfloat16": "_is_mkldnn_bf16_supported", "float16": "_is_mkldnn_fp16_supported"}.get(dtype)
    supported = getattr(torch.ops.mkldnn, asked, None) if asked else None
    return supported is not None and not supported()
