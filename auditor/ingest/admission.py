"""Who may send what, and how much of it: decided before anything is decoded or written."""

from dataclasses import dataclass

from auditor.errors import AuthError, ForbiddenError
from auditor.grants import Grant, Grants
from auditor.proto import audit_pb2 as pb
from auditor.rates import Rate


@dataclass(frozen=True, slots=True)
class Admission:
    """records, size: the rates of one caller: its token where that has a name, or else the address that it calls from.

    Not its run: a caller names as many runs as it likes.
    """

    grants: Grants
    records: Rate
    size: Rate

    def authenticate(self, authorization: str | bytes) -> Grant:
        """The caller's grant; AuthError."""
        grant = self.grants(authorization)
        if grant is None:
            raise AuthError("the call carries no valid token; send metadata `authorization: Bearer TOKEN`")
        return grant

    def admit(self, batch: pb.Batch, grant: Grant, peer: str) -> None:
        """ForbiddenError or RateError, for the whole batch: nothing of it is taken then. peer: as gRPC names it."""
        for run_id in () if grant.covers_all else _runs(batch):
            if not grant.covers(run_id):
                raise ForbiddenError(f"the token of {grant.name!r} is for runs {', '.join(grant.runs)}, not {run_id!r}")
        caller = caller_of(grant, peer)
        self.records.take(caller, len(batch.records))
        if self.size.limited:
            self.size.take(caller, batch.ByteSize())


def caller_of(grant: Grant, peer: str) -> str:
    """Whose rates and places a call takes. peer: as gRPC names it."""
    return f"the token of {grant.name!r}" if grant.name else _host(peer)


def _host(peer: str) -> str:
    """`ipv4:10.0.0.7:40112` without its port, which is another one at each connection."""
    return peer.rpartition(":")[0] or peer


def _runs(batch: pb.Batch) -> set[str]:
    """The runs that a batch has records of. A record of no side at all counts for a run without a name."""
    sides = (r.rollout if r.HasField("rollout") else r.trainer for r in batch.records)
    return {side.common.run_id for side in sides}
