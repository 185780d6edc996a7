"""Write the golden file of the contract in force: `python -m tests.golden.freeze`.

One file a contract digest. A file that exists is never rewritten with other bits: numerics that change need a new
version of the contract, which gives a new digest and so a new file.
"""

import hashlib
import json
import sys
from pathlib import Path

from rl_kernel.contract import PROFILES
from rl_kernel.contracts import model_contract
from tests.contracts.cases import all_cases
from tests.contracts.subjects import ReferenceSubject

FOLDER = Path(__file__).parent


def golden_path(profile: str) -> Path:
    """Where the golden bits of a profile's contract are kept."""
    return FOLDER / f"{profile}-{model_contract(profile).digest()[:16]}.json"


def bits_of(profile: str) -> dict[str, str]:
    """Case name → sha256 (16 hex digits) of all its results."""
    reference = ReferenceSubject(profile)
    found: dict[str, str] = {}
    for case in all_cases(reference):
        digest = hashlib.sha256()
        for array in case.run(reference):
            digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
        assert case.name not in found, f"two cases are called {case.name}"
        found[case.name] = digest.hexdigest()[:16]
    return found


def freeze() -> int:
    """Write what is missing; return 1 if an existing file holds other bits."""
    for profile in PROFILES:
        path, bits = golden_path(profile), bits_of(profile)
        if path.exists():
            known = json.loads(path.read_text())
            changed = [name for name, value in known.items() if bits.get(name) != value]
            if changed:
                print(f"{path.name}: {len(changed)} cases have other bits, {changed[0]} first: a new version is needed")
                return 1
        path.write_text(json.dumps(bits, indent=0, sort_keys=True) + "\n")
        print(f"{path.name}: {len(bits)} cases")
    return 0


if __name__ == "__main__":
    sys.exit(freeze())
