"""Files that public projects ship: nothing breaks, and each finding is one that was judged by hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from toolkit.linting.engine import lint

_REPOSITORY = Path(__file__).resolve().parents[2]
_PLACES = [os.environ.get("TOOLKIT_SHARED", ""), _REPOSITORY / "shared", _REPOSITORY.parent / "shared"]
CONFIGS = next((p for p in (Path(place) / "public-configs" for place in _PLACES) if p.is_dir()), Path("gone"))
FILES = sorted(path for path in CONFIGS.glob("*/*") if path.is_file())

pytestmark = pytest.mark.skipif(not FILES, reason="the public configuration files are not here")

# docs/lint-public-configs.md, finding by finding; AU305, MM602, FS402 and FS418 stand on many files.
JUDGED = {
    "accelerate/deepspeed.yaml": {"KY104"},
    "accelerate/fsdp.yaml": {"FS402", "FS418", "SV705"},
    "accelerate/zero_stage3_config.json": {"SV701", "AU305"},
    "accelerate/zero_stage3_offload_config.json": {"SV701", "AU305", "MM602"},
    "LLaMA-Factory/ds_z2_autotp_config.json": {"AU305", "DS234"},
    "LLaMA-Factory/ds_z3_fp8_config.json": {"AU305", "MM602", "MM603", "DS101"},
    "trl/alst_ulysses_4gpu.yaml": {"AC102"},
    "trl/context_parallel_2gpu.yaml": {"FS410"},
}


def test_only_judged_findings(subtests: pytest.Subtests) -> None:
    for path in FILES:
        name = f"{path.parent.name}/{path.name}"
        with subtests.test(name):
            findings = lint([str(path)]).findings
            assert not [f.message for f in findings if f.severity == "error"]
            expected = JUDGED.get(name, {"AU305", "MM602", "FS402", "FS418"})
            assert {f.code for f in findings} <= expected
            if name in JUDGED:
                assert {f.code for f in findings} == expected


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.parent.name == "LLaMA-Factory" and p.suffix == ".json"], ids=lambda p: p.name
)
def test_auto_is_fine_under_the_trainer(path: Path) -> None:
    findings = lint([str(path)], reader="trainer").findings
    assert not [f.code for f in findings if f.code.startswith("AU")]


def test_all_at_once() -> None:
    report = lint([str(path) for path in FILES])
    assert report.apart
    assert not [f.message for f in report.findings if f.severity == "error"]
