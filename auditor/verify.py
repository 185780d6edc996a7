"""Check a ledger's hash chain: `python -m auditor.verify LEDGER [--head HEX] [--evidence PLACE]`.

Exit code 0 where every entry follows from the one before and everything that is held is what was written, 1 where not,
2 where the ledger cannot be read. A tail that was cut off leaves a sound, shorter ledger, and only `--head` tells: the
head that was written down elsewhere must still be there. Totals of steps and runs must be those of their samples, but
for drift, which is not in the chain. `--evidence` checks token rows that were written away, too: each sample's must be
those of its verdict's entry, and of the records wherever the ledger holds them still, and none may be missing of those
that the ledger says were written to PLACE, which is to be named as in the auditor's `evidence_place`.
"""

import argparse
import sys

from auditor.command import end
from auditor.errors import AuditorError, ChainError, ConfigError
from auditor.object_store import StoreAccess
from auditor.storage.chain import verify
from auditor.storage.database import open_database
from auditor.storage.reader import Reader
from auditor.token_check import check_rows


def main(arguments: list[str]) -> int:
    """Verify; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m auditor.verify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ledger", help="file of the ledger, or a postgresql:// URL")
    parser.add_argument("--head", default="", help="hash of an earlier last entry that must still be there")
    parser.add_argument("--evidence", default="", metavar="PLACE", help="folder or s3:// URL with token rows to check")
    parser.add_argument("--store-endpoint", default="", help="URL of an S3 service that is not Amazon's")
    given = parser.parse_args(arguments)
    try:
        database = open_database(given.ledger, writer=False)
        found = verify(database)
        if given.head and not database.all("SELECT seq FROM entries WHERE hash = ?", (_bytes(given.head),)):
            raise ChainError(f"no entry has the hash {given.head}: history was written anew")
        rows = None
        if given.evidence:
            reader = Reader(lambda: open_database(given.ledger, writer=False))
            rows = check_rows(reader, given.evidence, StoreAccess(given.store_endpoint))
    except ChainError as error:
        print(f"verify: {error}", file=sys.stderr)
        return 1
    except AuditorError as error:
        print(f"verify: {error}", file=sys.stderr)
        return 2
    retired = found.entries - found.payloads
    print(f"{found.entries} entries verify ({retired} with content retired), head {found.head}")
    if rows is not None:
        print(
            f"{rows.files} files have the token rows of {rows.samples} samples ({rows.twice} of them twice);"
            f" {rows.compared} were compared with their records"
        )
        if not rows.marked:
            print(
                f"the ledger knows of no export to {given.evidence}: whether rows are missing there was not looked at"
            )
        elif rows.retired:
            print(f"{rows.retired} samples whose records are retired have no rows there")
    return 0


def _bytes(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ConfigError(f"--head {text!r} is no hash in hex") from None


if __name__ == "__main__":
    end("verify", main)
