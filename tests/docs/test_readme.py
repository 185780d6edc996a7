"""The README's program runs and says what the README says, and its links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")]


def test_the_ten_lines_show_the_defect_and_its_absence():
    text = (ROOT / "README.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len([line for line in program.splitlines() if line.strip()]) <= 10
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    torch_line, strict_line = done.stdout.splitlines()
    # How many rows change under torch depends on the CPU; under strict it must not.
    assert re.fullmatch(r"torch  \d+ of 64 rows change when the others leave the batch", torch_line)
    assert strict_line == "strict 0 of 64 rows change when the others leave the batch"
    assert strict_line in text


def test_every_link_between_the_pages_leads_to_a_file():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
