"""A run from start to end: the parts are made and wired here, and taken down in the reverse order."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from auditor.client import Counts
from rl_kernel.contracts import model_contract
from rl_kernel.ops import device_of
from services.alert import mismatch_alert
from services.audit_sink import AuditTarget
from services.auditor_access import AuditorAccess
from services.cluster import Place, RolloutHandle, TrainerHandle, ray_cluster
from services.config import Config
from services.ending import conclude, give_account, shown
from services.engines import RolloutEngine, TrainerEngine
from services.lock import held
from services.loop import Parts, StepResult, run_steps
from services.memory import PeakMemory, Usage
from services.metrics import JobMetrics
from services.preflight import gpus
from services.records import WeightVersion
from services.redo import UnderWay, check_redone
from services.referee import OwnAuditor, wait_until_ready
from services.report import Report, StepLine
from services.run_folder import Checkpoint, RunFolder
from services.summary import Summary
from services.tasks import Task, make_task
from services.threads import thread_variables
from services.verdicts import AuditorApi, Verdicts
from services.weights import WeightStore, confirm

_FIRST_VERSION = 1
_READY_SECONDS = 10.0
_VERDICT_SECONDS = 5.0
_LAST_FLUSH_SECONDS = 5.0
_LAST_ANSWER_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Run:
    """What is open while a run goes on.

    start: where it goes on from, None for a new run. own: the auditor, unless it runs by itself.
    """

    config: Config
    folder: RunFolder
    start: Checkpoint | None
    report: Report
    own: OwnAuditor | None
    api: AuditorApi
    store: WeightStore
    rollout: RolloutHandle
    trainer: TrainerHandle
    parts: Parts

    @property
    def first_step(self) -> int:
        """The first step that this process does."""
        return self.start.next_step if self.start else 0

    @property
    def samples_per_step(self) -> int:
        """Responses in each step."""
        return self.config.task.prompts_per_step * self.config.task.samples_per_prompt


def run_job(config: Config, model: Path, resume: RunFolder | None) -> int:
    """Run `config`, or go on with `resume`; print as it goes; return the exit code. model: a checked model folder."""
    began = time.monotonic()
    task = make_task(config, model)
    folder = resume or RunFolder.create(config)
    with folder.lock(), weights_lock(config, folder):
        start = resume.newest_checkpoint() if resume else None
        if start:
            check_redone(folder.under_way, _under_way(config, start.next_step), start.next_step)
            folder.keep_config(config)
        steps = folder.step_log.go_on(start.next_step if start else 0)
        memory = PeakMemory()
        with Report(config.run.steps, start.next_step if start else 0) as report, ExitStack() as stack:
            report.say(f"run {folder.run_id} in {shown(folder.path)}")
            auditor = _auditor(config, folder, stack, report)
            run = _open(config, model, task, folder, start, auditor, stack, report)
            weights = _first_weights(run, model)
            folder.point_latest()
            setup_seconds = time.monotonic() - began
            try:
                _train(run, weights, steps)
                summary = _gather(run, steps, *_settle(run))
                alert = mismatch_alert(run.api.metrics(), folder.run_id)
            except BaseException as error:
                counts, silent = _last_counts(run)
                summary = _gather(run, steps, counts, run.api.run() or Verdicts(), _reason(error))
                summary = replace(summary, setup_seconds=setup_seconds, total_seconds=time.monotonic() - began)
                give_account(replace(summary, peak=memory.stop()), silent, folder, report)
                raise
            if steps and summary.total.settled and summary.total.by_verdict.keys() == {"match"}:
                # Nobody has anything left to look up in the older ones.
                newest = steps[-1].weights.version
                run.store.prune(newest, oldest_needed=newest, keep=1)
            # Before anything is taken down, which may hang or be interrupted.
            own, access = auditor
            summary = replace(summary, setup_seconds=setup_seconds, total_seconds=time.monotonic() - began)
            code = conclude(replace(summary, peak=memory.stop()), folder, report, alert, None if own else access)
            report.waiting("stopping")
        return code


def _gather(run: Run, steps: list[StepResult], records: Counts, total: Verdicts, error: str = "") -> Summary:
    """What the job and the auditor know of the run by now, without the times and the memory."""
    answers = total.samples > 0
    return Summary(
        run_id=run.folder.run_id,
        numerics=run.config.numerics.mode,
        steps=steps,
        verdicts=[(run.api.step(result.step) if answers else None) or Verdicts() for result in steps],
        total=total,
        samples=run.config.run.steps * run.samples_per_step,
        records=records,
        setup_seconds=0.0,
        total_seconds=0.0,
        peak=Usage(),
        auditor_restarts=run.own.restarts if run.own else 0,
        error=error,
    )


def _reason(error: BaseException) -> str:
    return str(error) or ("interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__)


def _auditor(
    config: Config, folder: RunFolder, stack: ExitStack, report: Report
) -> tuple[OwnAuditor | None, AuditorAccess]:
    """The auditor that the config names, or one of our own on the run's ledger."""
    report.waiting("starting the auditor")
    own: OwnAuditor | None = None
    if config.auditor.grpc:
        it = config.auditor
        access = AuditorAccess(it.grpc, it.http, it.token_file, it.tls_ca, it.tls_certificate, it.tls_key)
        wait_until_ready(access, _READY_SECONDS)
        access.require_grpc(_READY_SECONDS)
    else:
        root = weights_root(config, folder)
        root.mkdir(parents=True, exist_ok=True)
        arguments = ["--ledger", str(folder.path / "ledger.sqlite"), "--weights-root", str(root)]
        arguments += ["--recompute-rate", str(config.auditor.recompute_rate)]
        ports = (config.auditor.grpc_port, config.auditor.http_port)
        own = OwnAuditor(folder.path / "auditor", arguments, *ports, restart=config.auditor.restart)
        stack.callback(own.stop)
        access = own.start()
    report.say(f"auditor: {access.http} (page, API, /metrics), gRPC {access.grpc}")
    return own, access


def _open(
    config: Config,
    model: Path,
    task: Task,
    folder: RunFolder,
    start: Checkpoint | None,
    auditor: tuple[OwnAuditor | None, AuditorAccess],
    stack: ExitStack,
    report: Report,
) -> Run:
    """Join or start Ray and start the actors, each with an engine of its own."""
    report.waiting("starting Ray, vLLM and Megatron-core")
    ranks = config.trainer.tp_size
    contract = model_contract(config.numerics.profile, segments=config.numerics.segments)
    rollout_gpus, rank_gpus = gpus(config, device_of(contract))
    stack.enter_context(ray_cluster(config.ray, 1 + ranks, rollout_gpus + ranks * rank_gpus))
    own, access = auditor
    target = AuditTarget(
        access=access,
        run_id=folder.run_id,
        spool=folder.path / "spool",
        contract=contract,
        queue_size=config.auditor.queue_size,
    )
    logs = folder.path / "logs"
    environment = thread_variables(config.numerics.threads)
    place = Place(environment, logs / "rollout.log", rollout_gpus)
    rollout = RolloutHandle(partial(make_rollout, config, model), target, place)
    stack.callback(rollout.close)
    # Ranks that were killed leave it, and new ones would wait for those in it.
    (folder.path / "rendezvous").unlink(missing_ok=True)
    trainer = TrainerHandle(
        partial(_trainer_of_rank, config, model, folder.path / "rendezvous"),
        target,
        Place(environment, logs / "trainer.log", rank_gpus),
        ranks,
    )
    stack.callback(trainer.close)
    rollout.wait()
    trainer.wait()
    store = WeightStore(weights_root(config, folder), config.weights.keep)
    parts = Parts(task, rollout, trainer, store)
    api = AuditorApi(access, folder.run_id)
    return Run(config, folder, start, report, own, api, store, rollout, trainer, parts)


def _first_weights(run: Run, model: Path) -> WeightVersion:
    """Bring both engines to the weights that the first step samples from, and have both confirm them."""
    run.report.waiting("loading weights")
    if run.start is None:
        weights = run.store.import_model(_FIRST_VERSION, model)
        held = run.trainer.load(weights)
    else:
        it = run.start
        weights = WeightVersion(it.weight_version, it.weight_digest, run.store.folder(it.weight_version))
        held = run.trainer.load_checkpoint(it.folder, weights)
        # Published anew from the checkpoint, since the version itself may have been removed.
        run.trainer.publish(run.store, it.weight_version)
    confirm(weights, "the trainer", held)
    confirm(weights, "the rollout engine", run.rollout.load(weights))
    return weights


def _train(run: Run, weights: WeightVersion, results: list[StepResult]) -> None:
    """The loop, with what happens between two steps. results: those of earlier processes; each step's is added."""
    run.report.begin()
    _begin_step(run, run.first_step)
    waiting = [(run.first_step, weights.version)]
    metrics = JobMetrics(run.folder.run_id, run.config.numerics.mode)
    for result in run_steps(run.config, run.parts, run.first_step, weights):
        metrics.step(result)
        metrics.records("rollout", run.rollout.flush(0.0))
        metrics.records("trainer", run.trainer.flush(0.0))
        results.append(result)
        run.folder.step_log.append(result)
        run.report.step(StepLine(result, run.api.step(result.step, run.samples_per_step, _VERDICT_SECONDS)))
        _checkpoint(run, result)
        waiting = [(step, version) for step, version in waiting if not run.api.is_settled(step)]
        oldest = min((version for _, version in waiting), default=result.weights.version)
        run.store.prune(result.weights.version, max(oldest, result.weights.version - run.config.weights.keep_waiting))
        waiting.append((result.step + 1, result.weights.version))
        _begin_step(run, result.step + 1)


def _begin_step(run: Run, step: int) -> None:
    """Before the first record of a step can be under way."""
    if step < run.config.run.steps:
        run.folder.begin_step(_under_way(run.config, step))


def _under_way(config: Config, step: int) -> UnderWay:
    return UnderWay.now(step, config, local=not (config.ray.address or os.environ.get("RAY_ADDRESS")))


def _checkpoint(run: Run, result: StepResult) -> None:
    every, next_step = run.config.run.checkpoint_every, result.step + 1
    if every == 0 or (next_step % every and next_step != run.config.run.steps):
        return
    with run.folder.checkpoint(next_step) as scratch:
        run.trainer.save_checkpoint(scratch)
        run.folder.finish_checkpoint(Checkpoint(scratch, next_step, result.weights.version, result.weights.digest))


def _settle(run: Run) -> tuple[Counts, Verdicts]:
    """Deliver every record, then wait (not forever) until the auditor has judged and recomputed what it wanted to."""
    run.report.waiting("waiting for the auditor's last verdicts")
    seconds = 0.0 if run.own and run.own.gave_up else run.config.auditor.settle_seconds
    deadline = time.monotonic() + seconds
    sides = [side.flush(max(0.0, deadline - time.monotonic())) for side in (run.rollout, run.trainer)]
    samples = run.config.run.steps * run.samples_per_step
    return _sum(sides), run.api.settle(samples, max(0.0, deadline - time.monotonic())) or Verdicts()


def _last_counts(run: Run) -> tuple[Counts, list[str]]:
    """What became of the records of each side that answers, and which does not: it died, or waits for one that did."""
    answers: dict[str, Counts] = {}
    sides: dict[str, RolloutHandle | TrainerHandle] = {"rollout": run.rollout, "trainer": run.trainer}

    def ask(name: str) -> None:
        with suppress(Exception):  # why the run ends is said already
            answers[name] = sides[name].flush(_LAST_FLUSH_SECONDS)

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in sides]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _LAST_ANSWER_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    known = dict(answers)
    return _sum(list(known.values())), [name for name in sides if name not in known]


def _sum(sides: list[Counts]) -> Counts:
    return Counts(*(sum(getattr(side, name) for side in sides) for name in Counts.__slots__))


def weights_root(config: Config, folder: RunFolder) -> Path:
    """A folder of this run's own also where runs share a disk: each counts its versions from one."""
    shared = config.weights.directory
    return Path(shared).resolve() / folder.run_id if shared else folder.path / "weights"


def weights_lock(config: Config, folder: RunFolder) -> AbstractContextManager[None]:
    """Copies of a run have one id, and so one folder on a shared disk for weights; one of them at a time may use it."""
    if not config.weights.directory:
        return nullcontext()
    root = weights_root(config, folder)
    root.mkdir(parents=True, exist_ok=True)
    advice = "; set weights.directory to another for a copy of that run"
    return held(root / ".lock", f"weights.directory: {root}", folder.path, advice)


def make_rollout(config: Config, model: Path) -> RolloutEngine:
    """Build vLLM; called in the rollout actor's process, so that only that process imports it."""
    from services.rollout import engine  # noqa: PLC0415

    return engine.RolloutEngine(model, engine.EngineOptions.of(config))


def make_trainer(config: Config, model: Path, rank: int, rendezvous: Path) -> TrainerEngine:
    """Build one rank of Megatron-core; called in that rank's process, so that only those processes import it."""
    from services.trainer import engine  # noqa: PLC0415

    return engine.TrainerEngine(model, engine.TrainerOptions.of(config, rank=rank, rendezvous=f"file://{rendezvous}"))


def _trainer_of_rank(config: Config, model: Path, rendezvous: Path, rank: int) -> Callable[[], TrainerEngine]:
    return partial(make_trainer, config, model, rank, rendezvous)
