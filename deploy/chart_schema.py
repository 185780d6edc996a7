"""Write into the chart's values.schema.json what auditor and job themselves say of their settings.

    python -m deploy.chart_schema

The rest of the schema is written by hand and stays as it is.
"""

import argparse
import json
from pathlib import Path
from typing import Any, Final

from auditor.config import Config
from services.config import Run

SCHEMA: Final = Path(__file__).parents[1] / "helm" / "rl-kernel" / "values.schema.json"
# What the chart sets itself, and what has no place in a pod.
CHARTS_OWN: Final = (
    *("grpc", "http", "ledger", "weights_root", "token_file", "tokens_file", "insecure", "ports_file"),
    *("tls_certificate", "tls_key", "tls_client_ca", "stop_at_eof"),
)
_KEPT: Final = ("type", "description", "minimum", "maximum", "exclusiveMinimum", "pattern")


def with_settings(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with `auditor.config` and `job.config.run.name` as the programs have them."""
    properties = {
        name: _setting(given)
        for name, given in Config.model_json_schema()["properties"].items()
        if name not in CHARTS_OWN
    }
    schema["properties"]["auditor"]["properties"]["config"] = {
        "type": "object",
        "description": "Further settings by their own names; those that the chart sets are refused here.",
        "propertyNames": {"not": {"enum": list(CHARTS_OWN)}},
        "additionalProperties": False,
        "properties": properties,
    }
    name = _setting(Run.model_json_schema()["properties"]["name"])
    schema["properties"]["job"]["properties"]["config"] = {
        "type": "object",
        "description": "The job's config tree.",
        "properties": {"run": {"type": "object", "properties": {"name": name}}},
    }
    return schema


def schema_text() -> str:
    """The file as it should be."""
    return json.dumps(with_settings(json.loads(SCHEMA.read_text("utf-8"))), indent=1, ensure_ascii=False) + "\n"


def _setting(given: dict[str, Any]) -> dict[str, Any]:
    """A setting without what helm has no use for. A number may be in quotes, for `helm --set` puts fractions there."""
    kept: dict[str, Any] = {key: given[key] for key in _KEPT if key in given}
    if "anyOf" in given:
        kept["type"] = [each["type"] for each in given["anyOf"]]
    if kept["type"] == "number":
        kept.update(type=["number", "string"], pattern="^[0-9]+([.][0-9]+)?$")
    return kept


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    SCHEMA.write_text(schema_text(), "utf-8")
