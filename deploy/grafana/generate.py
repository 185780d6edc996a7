"""Write the dashboards: `make dashboards`. A test holds the committed files to this."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from deploy.grafana import auditor, drift, rl_job

FOLDER = Path(__file__).parent / "dashboards"
DASHBOARDS: Mapping[str, Callable[[], Dashboard]] = {
    "drift": drift.build,
    "auditor": auditor.build,
    "rl_job": rl_job.build,
}


def text(name: str) -> str:
    """A dashboard as the JSON that Grafana imports."""
    page = DASHBOARDS[name]().build()
    for number, panel in enumerate(page.panels or [], 1):
        panel.id_val = number
    return json.dumps(page, cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def main() -> int:
    """Write every dashboard."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name in DASHBOARDS:
        (FOLDER / f"{name}.json").write_text(text(name), "utf-8")
        print(FOLDER / f"{name}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
