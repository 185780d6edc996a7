"""Write schemas.json from a folder of CRDs as KubeRay and prometheus-operator publish them.

    python -m tests.deploy.crds.reduce FOLDER

Kept is what a validator asks: fields, types, bounds, of the versions and parts that the chart uses. Left out are
descriptions and status; what occurs more than once, such as a pod, is written once and referred to.
"""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

SCHEMAS = Path(__file__).with_name("schemas.json")
KINDS = {
    ("ray.io", "v1"): ("RayCluster", "RayJob"),
    ("monitoring.coreos.com", "v1"): ("PodMonitor", "PrometheusRule", "ServiceMonitor"),
}
# Notes for kubectl and for merges, which say nothing about what is valid.
_LEFT_OUT = {"description", "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-map-type", "default"}
_WORTH_A_NAME = 300  # bytes


def reduced(folder: Path) -> dict[str, Any]:
    """`$defs`, and by `group/version Kind` the schema of each kind, which refers to them."""
    whole: dict[str, Any] = {}
    for file in sorted(folder.glob("*.yaml")):
        definition = yaml.load(file.read_text("utf-8"), yaml.CSafeLoader)["spec"]
        kind = definition["names"]["kind"]
        for version in definition["versions"]:
            if kind in KINDS.get((definition["group"], version["name"]), ()):
                schema = bare(version["schema"]["openAPIV3Schema"])
                schema["properties"].pop("status", None)
                whole[f"{definition['group']}/{version['name']} {kind}"] = schema
    wanted = {f"{group}/{version} {kind}" for (group, version), kinds in KINDS.items() for kind in kinds}
    if missing := wanted - whole.keys():
        raise SystemExit(f"{folder} has no CRD of {', '.join(sorted(missing))}")
    seen: Counter[str] = Counter()
    for schema in whole.values():
        count(schema, seen)
    named: dict[str, tuple[str, Any]] = {}
    kinds = {key: shared(schema, "", seen, named) for key, schema in sorted(whole.items())}
    return {"$defs": dict(sorted(named.values())), "kinds": kinds}


def bare(schema: Any) -> Any:
    """A schema without what says nothing about validity. Names of properties are no keywords."""
    if isinstance(schema, list):
        return [bare(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: bare(each) for name, each in value.items()} if key == "properties" else bare(value)
        for key, value in schema.items()
        if key not in _LEFT_OUT
    }


def text(value: Any) -> str:
    """One line, the same for the same schema."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def count(schema: Any, seen: Counter[str]) -> None:
    """How often each object's schema occurs; what lies in one that was seen is not counted again."""
    if isinstance(schema, dict):
        if schema.get("type") == "object" and "properties" in schema:
            said = text(schema)
            seen[said] += 1
            if seen[said] > 1:
                return
        for value in schema.values():
            count(value, seen)


def shared(schema: Any, name: str, seen: Counter[str], named: dict[str, tuple[str, Any]]) -> Any:
    """The schema with a reference where the same object occurs elsewhere too.

    name: of the property that it is of. named: by the text of a schema, its name and what it refers to.
    """
    if not isinstance(schema, dict):
        return schema
    said = text(schema)
    made = {
        key: {n: shared(each, n, seen, named) for n, each in value.items()}
        if key == "properties"
        else shared(value, name, seen, named)
        for key, value in schema.items()
    }
    if seen[said] < 2 or len(said) < _WORTH_A_NAME:
        return made
    key, _ = named.setdefault(said, (f"{name or 'object'}-{hashlib.sha256(said.encode()).hexdigest()[:6]}", made))
    return {"$ref": f"#/$defs/{key}"}


def lines(schemas: dict[str, Any]) -> str:
    """JSON with a definition a line, so that a change is seen where it is."""
    parts = []
    for part in ("$defs", "kinds"):
        rows = ",\n".join(f"{json.dumps(key)}:{text(value)}" for key, value in schemas[part].items())
        parts.append(f'"{part}":{{\n{rows}\n}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main(arguments: Sequence[str]) -> int:
    """Write the file; its exit code."""
    SCHEMAS.write_text(lines(reduced(Path(arguments[0]))), "utf-8")
    print(f"{SCHEMAS}: {SCHEMAS.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
