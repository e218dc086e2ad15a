"""Rates of attention by kernel, head size, length, pass and device."""

from __future__ import annotations

import itertools

import pytest

from toolkit.planning.attention_rates import NARROW, SLOWER, TABLE, family, part
from toolkit.planning.hardware import devices
from toolkit.planning.reached import MATMUL
from toolkit.planning.work import Attention

LONG = Attention("flash", False, 128, 8192, True)


def rate(kernel: Attention, device: str, attention: str | None = "flash_attention_2") -> float:
    """TFLOP/s on a device of the table."""
    return part(kernel, device, attention) * devices()[device].rate("bfloat16")


def test_published_rates_are_given_back() -> None:
    assert rate(LONG, "a100-80gb") == pytest.approx(217)
    assert rate(LONG._replace(backward=True), "a100-80gb") == pytest.approx(173)
    assert rate(LONG, "h100", "flash_attention_3") == pytest.approx(602)
    assert rate(LONG._replace(length=4096), "b200") == pytest.approx(343)
    assert rate(LONG._replace(length=2048, backward=True), "rtx4090") == pytest.approx(99.2)


def test_between_lengths_and_beyond_them() -> None:
    lengths = [128, 256, 512, 1024, 1500, 2048, 3000, 4096, 6000, 8192]
    for device in ("h100", "b200"):
        found = [rate(LONG._replace(length=length), device) for length in lengths]
        assert found == sorted(found)
    assert rate(LONG._replace(length=128), "h100") == pytest.approx(191 / 4)  # a quarter of 512 tokens
    assert rate(LONG._replace(length=1 << 20), "a100-80gb") == pytest.approx(199)
    assert rate(LONG._replace(length=4096, causal=False), "a100-80gb") == pytest.approx(217)


def test_narrow_heads_are_slower_and_wide_ones_are_not() -> None:
    wide, narrow = (rate(LONG._replace(width=width), "h100") for width in (256, 64))
    assert wide == rate(LONG, "h100")
    assert narrow == pytest.approx(wide * NARROW["flash2"][0])
    assert narrow < rate(LONG._replace(width=96), "h100") < wide


def test_torch_chooses_its_kernel_by_device() -> None:
    assert rate(LONG, "a100-80gb", "sdpa") == pytest.approx(217 * SLOWER["torch"])
    assert rate(LONG, "h100", None) == pytest.approx(655)  # cuDNN's
    assert rate(LONG, "b200", "sdpa") == pytest.approx(1171)
    efficient = LONG._replace(name="efficient")
    assert rate(efficient, "h100", "sdpa") == pytest.approx(333 * SLOWER["efficient"])
    before_ampere = part(LONG, "t4", "sdpa")
    clock = MATMUL["t4"] / MATMUL["a100"]
    assert before_ampere == part(efficient, "t4", "sdpa") == pytest.approx(217 / 312 * SLOWER["efficient"] * clock)


def test_every_device_has_rates() -> None:
    kernels = (None, "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "varlen")
    for device, attention, backward in itertools.product(devices(), kernels, (False, True)):
        assert 0 < part(LONG._replace(backward=backward), device, attention) <= 1.1, (device, attention, backward)


def test_every_rate_has_its_source_and_families_have_a_table() -> None:
    assert all(measured.source and measured.peak for measured in TABLE.values())
    named = {family(device) for device in devices()} - {"turing"}
    assert named == {kind for kind, _ in TABLE}
