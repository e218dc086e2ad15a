"""Findings for machines: the contract's JSON, SARIF 2.1.0, GitHub's workflow commands."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import time
from pathlib import PurePath
from typing import Any

import toolkit
from toolkit.linting.engine import Report
from toolkit.linting.keys import PACKAGES
from toolkit.linting.keys import versions as known_versions
from toolkit.linting.model import Finding
from toolkit.linting.registry import all_rules

_LEVELS = {"error": "error", "warning": "warning", "note": "note"}


def as_json(report: Report, started: float) -> dict[str, Any]:
    """The contract's result: findings[], and what every result carries."""
    return envelope("lint", started) | {
        "keys": {name: list(known_versions(name)) for name in PACKAGES},
        "findings": [finding_json(finding) for finding in report.findings],
        "unread": report.unread,
    }


def finding_json(finding: Finding) -> dict[str, Any]:
    """One of ``findings``. Lines and columns count from 1."""
    return {
        "code": finding.code,
        "severity": finding.severity,
        "file": str(finding.place.file),
        "line": finding.place.line,
        "column": finding.place.column,
        "key": finding.key,
        "message": finding.message,
        "fix": finding.fix.title if finding.fix else None,
        "reader": finding.reader,
    }


def envelope(command: str, started: float) -> dict[str, Any]:
    """What every result carries; no recipe and no device are active here."""
    return {
        "schema": f"toolkit.{command}/1",
        "command": command,
        "recipe_sha256": None,
        "versions": versions(),
        "device": None,
        "started": datetime.datetime.fromtimestamp(started, datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(time.time() - started, 3),
    }


def versions() -> dict[str, str | None]:
    """Installed versions, from their metadata: nothing is imported."""
    found: dict[str, str | None] = {"python": platform.python_version(), "toolkit": toolkit.__version__}
    for name in ("torch", "accelerate", "deepspeed", "transformers", "peft"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def as_sarif(report: Report) -> dict[str, Any]:
    """SARIF 2.1.0, for code scanning (https://docs.oasis-open.org/sarif/sarif/v2.1.0/)."""
    used = sorted({finding.code for finding in report.findings})
    rules = all_rules()
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "toolkit lint",
                        "version": toolkit.__version__,
                        "rules": [
                            {
                                "id": code,
                                "shortDescription": {"text": rules[code].title},
                                "fullDescription": {"text": rules[code].reason or rules[code].title},
                                "help": {"text": f"Source: {rules[code].source}"},
                                "defaultConfiguration": {"level": _LEVELS[rules[code].severity]},
                            }
                            for code in used
                        ],
                    }
                },
                "results": [
                    {
                        "ruleId": finding.code,
                        "ruleIndex": used.index(finding.code),
                        "level": _LEVELS[finding.severity],
                        "message": {"text": finding.message},
                        "locations": [
                            {
                                "physicalLocation": {
                                    "artifactLocation": {"uri": PurePath(str(finding.place.file)).as_posix()},
                                    "region": {
                                        "startLine": finding.place.line or 1,
                                        "startColumn": finding.place.column or 1,
                                        "endColumn": (finding.place.column or 1) + finding.width,
                                    },
                                }
                            }
                        ],
                    }
                    for finding in report.findings
                ],
            }
        ],
    }


def as_github(report: Report) -> str:
    """One workflow command a finding: GitHub shows it at the line of the change."""
    names = {"error": "error", "warning": "warning", "note": "notice"}
    lines = []
    for finding in report.findings:
        place = f"file={_property(str(finding.place.file))},line={finding.place.line},col={finding.place.column}"
        message = finding.message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
        lines.append(f"::{names[finding.severity]} {place},title={finding.code}::{message}")
    return "\n".join(lines)


def _property(text: str) -> str:
    for character, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A"), (":", "%3A"), (",", "%2C")):
        text = text.replace(character, code)
    return text
