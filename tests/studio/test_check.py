"""The page Check: findings at their lines, fixes, another strategy, a recipe."""

from __future__ import annotations

import json

from studio_server import Server

DEEPSPEED = '{\n  "zero_optimization": {"stage": 3},\n  "gradient_cliping": 1.0\n}\n'


def test_a_finding_has_its_line_and_its_fix(local: Server) -> None:
    found = local.ask("/api/check", {"files": {"ds.json": DEEPSPEED}}).json()
    finding = next(one for one in found["findings"] if one["code"] == "DS101")
    assert (finding["file"], finding["line"], finding["column"], finding["severity"]) == ("ds.json", 3, 3, "error")
    assert '-  "gradient_cliping": 1.0' in found["diff"]
    assert '+  "gradient_clipping": 1.0' in found["diff"]
    fixed = local.ask("/api/fix", {"files": {"ds.json": DEEPSPEED}}).json()
    again = local.ask("/api/check", {"files": fixed["files"]}).json()
    assert "DS101" not in {one["code"] for one in again["findings"]}


def test_files_are_checked_together_under_plain_names(local: Server) -> None:
    accelerate = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\nnum_processes: 2\n"
    found = local.ask(
        "/api/check", {"files": {"../../ds.json": DEEPSPEED, "C:\\x\\accelerate.yaml": accelerate}}
    ).json()
    assert set(found["files"]) == {"ds.json", "accelerate.yaml"}
    assert found["unread"] == []


def test_migrate_and_import(local: Server) -> None:
    files = {"accelerate.yaml": "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 2\nfsdp_config:\n"
             "  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"}  # fmt: skip
    made = local.ask("/api/migrate", {"files": files, "to": "zero3"}).json()
    assert made["files"], made["notes"]
    args = {"output_dir": "x", "per_device_train_batch_size": 2, "model_name_or_path": "m/n", "dataset_name": "d",
            "learning_rate": 1e-4, "max_steps": 3}  # fmt: skip
    found = local.ask("/api/import", {"files": {"args.json": json.dumps(args)}})
    assert found.status in (200, 422)
    assert local.ask("/api/migrate", {"files": files, "to": "zero9"}).status == 400


def test_explain(local: Server) -> None:
    assert "gradient_cl" in json.dumps(local.ask("/api/explain", {"code": "DS101"}).json())
    assert local.ask("/api/explain", {"code": "<b>"}).status == 422
