"""Who may send what, and how much of it: decided before anything is decoded or written."""

from dataclasses import dataclass

from auditor.errors import AuthError, ForbiddenError
from auditor.grants import Grant, Grants
from auditor.proto import audit_pb2 as pb
from auditor.rates import Rate


@dataclass(frozen=True, slots=True)
class Admission:
    """records, size: the rates of one job, which is its token where that is bound to runs, or else its run."""

    grants: Grants
    records: Rate
    size: Rate

    def authenticate(self, authorization: str | bytes) -> Grant:
        """The caller's grant; AuthError."""
        grant = self.grants(authorization)
        if grant is None:
            raise AuthError("the call carries no valid token; send metadata `authorization: Bearer TOKEN`")
        return grant

    def admit(self, batch: pb.Batch, grant: Grant) -> None:
        """ForbiddenError or RateError, for the whole batch: nothing of it is taken then."""
        runs = _runs(batch) if not grant.covers_all or self._limited else ()
        for run_id in runs:
            if not grant.covers(run_id):
                raise ForbiddenError(f"the token of {grant.name!r} is for runs {', '.join(grant.runs)}, not {run_id!r}")
        if self._limited and runs:
            job = f"run {min(runs)!r}" if grant.covers_all else f"the token of {grant.name!r}"
            self.records.take(job, len(batch.records))
            if self.size.limited:
                self.size.take(job, batch.ByteSize())

    @property
    def _limited(self) -> bool:
        return self.records.limited or self.size.limited


def _runs(batch: pb.Batch) -> set[str]:
    """The runs that a batch has records of. A record of no side at all counts for a run without a name."""
    sides = (r.rollout if r.HasField("rollout") else r.trainer for r in batch.records)
    return {side.common.run_id for side in sides}
