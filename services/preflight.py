"""Everything that can be known to be wrong before anything is started: one line each, the thing and what is right."""

import os
import shutil
import ssl
import tempfile
import urllib.parse
from pathlib import Path

import psutil

from rl_kernel.contract import PROFILES
from rl_kernel.contracts import model_contract
from rl_kernel.errors import ContractError, PlanError, RlKernelError
from rl_kernel.ops import device_of
from rl_kernel.reference.config import ARCHITECTURES, DecoderConfig
from rl_kernel.reference.weights import read_json
from services.config import Config
from services.errors import ConfigError
from services.rollout.options import EngineOptions, check_tensors
from services.tasks import make_task

_MIB = 2**20
_THREADS_A_CORE = 4
_MOST_SAMPLES = 1_000_000  # of a step: the job holds them all, and the auditor their records


def check(config: Config, model: Path) -> DecoderConfig:
    """Check the config against the model folder and this machine; return the model's shape. Raises ConfigError."""
    _check_amounts(config)
    device = _device(config)
    shape = _check_model(model)
    strict = config.numerics.mode == "strict"
    for side, tp_size in (("rollout", config.rollout.tp_size), ("trainer", config.trainer.tp_size)):
        check_tp(f"{side}.tp_size", tp_size, shape, config.numerics.segments if strict else None)
    if strict:
        _check_segments(config.numerics.segments, shape)
    if not (config.ray.address or os.environ.get("RAY_ADDRESS")):
        _check_machine(config, device)
    _check_lengths(config, shape)
    _check_kv_cache(config, shape)
    _check_prompts(config, model, shape)
    _check_auditor(config)
    _check_disk(config, model)
    return shape


def _check_amounts(config: Config) -> None:
    samples = config.task.prompts_per_step * config.task.samples_per_prompt
    if samples > _MOST_SAMPLES:
        raise ConfigError(
            f"task.prompts_per_step = {config.task.prompts_per_step} times task.samples_per_prompt = "
            f"{config.task.samples_per_prompt} are {samples} samples a step; use {_MOST_SAMPLES} or less"
        )


def _device(config: Config) -> str:
    """`cpu` or `cuda`: what the profile's arithmetic is of."""
    profile, segments = config.numerics.profile, config.numerics.segments
    try:
        model_contract(segments=segments)
    except ContractError as error:
        raise ConfigError(f"numerics.segments = {segments}: {error}") from None
    try:
        return device_of(model_contract(profile, segments=segments))
    except PlanError as error:
        run = ", ".join(name for name in PROFILES if _runs(name))
        raise ConfigError(f"numerics.profile = {profile!r}: {error}; profiles that run: {run}") from None
    except ContractError as error:
        raise ConfigError(f"numerics.profile = {profile!r}: {error}") from None


def _runs(profile: str) -> bool:
    try:
        device_of(model_contract(profile))
    except PlanError:
        return False
    return True


def _check_machine(config: Config, device: str) -> None:
    """What this machine must have, where no other one runs the actors."""
    cores, threads = os.cpu_count() or 1, config.numerics.threads
    if threads > _THREADS_A_CORE * cores:
        raise ConfigError(f"numerics.threads = {threads} is far more than this machine's {cores} cores; use {cores}")
    rollout = config.rollout
    needs = [("ray.object_store_mb", config.ray.object_store_mb)]
    # vLLM has a row of token ids, int32, for each sequence.
    needs.append(("rollout.max_num_seqs times max_model_len", 4 * rollout.max_num_seqs * rollout.max_model_len // _MIB))
    if device == "cpu":
        needs.append(("rollout.kv_cache_mb on all ranks", rollout.kv_cache_mb * rollout.tp_size))
    there = psutil.virtual_memory().total // _MIB
    for what, need in needs:
        if need > there:
            raise ConfigError(f"{what} asks for {need} MiB, and this machine has {there}; use less")
    if device != "cpu":
        import torch  # noqa: PLC0415  no other job's driver has a use for it

        rollout_gpus, rank_gpus = gpus(config, device)
        asked, found = rollout_gpus + config.trainer.tp_size * rank_gpus, torch.cuda.device_count()
        if asked > found:
            raise ConfigError(
                f"numerics.profile = {config.numerics.profile!r} is a GPU's, of which this job needs {asked:g} and "
                f"this machine has {found}; numerics.profile = portable runs on any CPU"
            )


def gpus(config: Config, device: str) -> tuple[float, float]:
    """GPUs of the rollout actor and of each trainer rank: none for a CPU's arithmetic; two single ones share a GPU."""
    if device == "cpu":
        return 0.0, 0.0
    if config.rollout.tp_size == config.trainer.tp_size == 1:
        return 0.5, 0.5
    return float(config.rollout.tp_size), 1.0


def _check_model(model: Path) -> DecoderConfig:
    try:
        shape = DecoderConfig.read(model)
        check_tensors(shape, model)
        if not read_json(model / "config.json").get("architectures"):  # vLLM chooses its model class by it
            raise ConfigError(f"{model}/config.json has no 'architectures'; add [{ARCHITECTURES[shape.model_type]!r}]")
    except RlKernelError as error:
        raise ConfigError(str(error)) from None
    return shape


# What a run is: changed in the middle, its steps could not be compared with each other, nor its samples named.
_OF_THE_WHOLE_RUN = (
    *("numerics.mode", "numerics.profile", "numerics.segments", "run.seed", "run.name", "model.path"),
    *("task.name", "task.prompts_per_step", "task.samples_per_prompt", "task.shots"),
)


def check_resumed(was: Config, now: Config) -> None:
    """Raise ConfigError if `now` goes on with a run by other numerics, names or seeds than it was started with."""
    for key in _OF_THE_WHOLE_RUN:
        section, name = key.split(".")
        before, after = (getattr(getattr(config, section), name) for config in (was, now))
        if before != after:
            raise ConfigError(
                f"{key} = {after!r}: the run that is resumed has {before!r} in all its steps; start a new run for that"
            )


def check_tp(key: str, tp_size: int, shape: DecoderConfig, segments: int | None) -> None:
    """Raise ConfigError unless `tp_size` ranks can share the heads and the segments (None: no contract)."""
    for name, count in (
        ("attention heads", shape.heads),
        ("key-value heads", shape.kv_heads),
        ("MLP columns", shape.intermediate),
    ):
        if count % tp_size:
            fits = [str(t) for t in range(1, shape.kv_heads + 1) if _fits(t, shape, strict=segments is not None)]
            raise ConfigError(f"{key} = {tp_size} does not divide the model's {count} {name}; use {' or '.join(fits)}")
    if segments and segments % tp_size:
        if tp_size & (tp_size - 1):
            raise ConfigError(
                f"{key} = {tp_size} is no power of two, and segments are; strict numerics need 1, 2, 4, …"
            )
        raise ConfigError(
            f"{key} = {tp_size} does not divide numerics.segments = {segments}; set numerics.segments = {tp_size}"
        )


def _fits(tp_size: int, shape: DecoderConfig, *, strict: bool) -> bool:
    whole = all(count % tp_size == 0 for count in (shape.heads, shape.kv_heads, shape.intermediate))
    return whole and not (strict and tp_size & (tp_size - 1))


def _check_segments(segments: int, shape: DecoderConfig) -> None:
    for name, width in (("attention", shape.heads * shape.head_dim), ("MLP", shape.intermediate)):
        if width % segments:
            most = max(s for s in (1, 2, 4, 8, 16) if width % s == 0)
            raise ConfigError(
                f"numerics.segments = {segments} does not divide the {name} width of {width}; use {most} or less"
            )


def _check_lengths(config: Config, shape: DecoderConfig) -> None:
    length, most = config.rollout.max_model_len, shape.max_position
    if length > most:
        raise ConfigError(f"rollout.max_model_len = {length} is more than the model's {most} positions")
    if config.rollout.max_new_tokens >= length:
        raise ConfigError(
            f"rollout.max_new_tokens = {config.rollout.max_new_tokens} leaves no room for a prompt "
            f"in rollout.max_model_len = {length}"
        )


def _check_prompts(config: Config, model: Path, shape: DecoderConfig) -> None:
    task = make_task(config, model)
    if task.largest_id() >= shape.vocab:
        raise ConfigError(
            f"{model}: the tokenizer has ids up to {task.largest_id()}, and the model a vocabulary of {shape.vocab}; "
            f"use the tokenizer.json that the model was trained with"
        )
    longest, room = task.longest_prompt(), config.rollout.max_model_len
    if longest + config.rollout.max_new_tokens > room:
        raise ConfigError(
            f"rollout.max_model_len = {room} has no room for a prompt of {longest} tokens and "
            f"rollout.max_new_tokens = {config.rollout.max_new_tokens}; use {longest + config.rollout.max_new_tokens}, "
            f"or lower task.shots"
        )


def _check_kv_cache(config: Config, shape: DecoderConfig) -> None:
    """VLLM refuses to start where one sequence of full length does not fit."""
    ranks, block = config.rollout.tp_size, EngineOptions.of(config).block_size
    blocks = -(-config.rollout.max_model_len // block) + 1  # vLLM keeps one to itself
    per_token = 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim // ranks  # keys and values, bf16
    needed = -(-blocks * block * per_token // 2**20)
    if config.rollout.kv_cache_mb < needed:
        raise ConfigError(
            f"rollout.kv_cache_mb = {config.rollout.kv_cache_mb} is too small for one sequence of "
            f"rollout.max_model_len = {config.rollout.max_model_len}; use at least {needed}"
        )


def _check_auditor(config: Config) -> None:
    auditor = config.auditor
    if auditor.grpc_port == auditor.http_port != 0:
        raise ConfigError(
            f"auditor.grpc_port and auditor.http_port are both {auditor.grpc_port}; they need two, or 0 for any"
        )
    if bool(auditor.grpc) != bool(auditor.http):
        missing = "auditor.http" if auditor.grpc else "auditor.grpc"
        raise ConfigError(f"{missing} is empty; a running auditor needs both auditor.grpc and auditor.http")
    if auditor.http and not auditor.http.startswith(("http://", "https://")):
        raise ConfigError(f"auditor.http = {auditor.http!r} should be a URL such as http://127.0.0.1:8080")
    try:
        url = urllib.parse.urlsplit(auditor.http)
        if auditor.http and not (url.hostname and url.port != 0):
            raise ValueError("no host, or port 0")
    except ValueError as error:
        raise ConfigError(
            f"auditor.http = {auditor.http!r}: {error}; it should be like http://127.0.0.1:8080"
        ) from None
    if bool(auditor.tls_certificate) != bool(auditor.tls_key):
        raise ConfigError("auditor.tls_certificate and auditor.tls_key are given together or not at all")
    if auditor.tls_certificate and not auditor.tls_ca:
        raise ConfigError(
            "auditor.tls_ca is empty; auditor.tls_certificate is shown only to an auditor of that authority"
        )
    for name in ("token_file", "tls_ca", "tls_certificate", "tls_key"):
        if file := getattr(auditor, name):
            _check_secret(f"auditor.{name}", file, is_token=name == "token_file")
    _check_certificates(auditor.tls_ca, auditor.tls_certificate, auditor.tls_key)


def _check_secret(key: str, name: str, *, is_token: bool) -> None:
    """`name` must be a file that can be read; a token must fit into a header."""
    try:
        content = Path(name).read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{key} = {name!r} does not exist") from None
    except OSError as error:
        raise ConfigError(f"{key} = {name!r} cannot be read: {error.strerror}; it should be a file") from None
    token = content.strip()
    if is_token and not (token and all(0x20 <= byte < 0x7F for byte in token)):
        raise ConfigError(f"{key} = {name!r} holds no bearer token; it should be one line of printable ASCII")


def _check_certificates(authority: str, certificate: str, private_key: str) -> None:
    if not authority:
        return
    try:
        context = ssl.create_default_context(cafile=authority)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"auditor.tls_ca = {authority!r} holds no certificate in PEM: {error}") from None
    if certificate:
        try:
            context.load_cert_chain(certificate, private_key, password=lambda: "")  # an empty one: never ask for it
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"auditor.tls_certificate = {certificate!r} and auditor.tls_key = {private_key!r} are not a "
                f"certificate and its key, without a passphrase, in PEM: {error}"
            ) from None


def _check_disk(config: Config, model: Path) -> None:
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    runs = _directory("run.directory", config.run.directory)
    weights = _directory("weights.directory", config.weights.directory) if config.weights.directory else runs
    # Every version that is kept while the auditor has work left on it, and one more while the next is written; a short
    # run has one a step, and the first.
    versions = (min(max(config.weights.keep, config.weights.keep_waiting), config.run.steps) + 1) * size
    # Masters and two moments in fp32, of which the older goes once the newer is there. The last step has one, too.
    every = config.run.checkpoint_every
    checkpoints = min(2, -(-config.run.steps // every)) * 6 * size if every else 0
    if runs.stat().st_dev == weights.stat().st_dev:
        needs = [("run.directory", runs, versions + checkpoints, "weights and checkpoints")]
    else:
        needs = [
            ("run.directory", runs, checkpoints, "checkpoints"),
            ("weights.directory", weights, versions, "weights"),
        ]
    for key, folder, need, what in needs:
        free = shutil.disk_usage(folder).free
        if free < need:
            raise ConfigError(
                f"{folder} has {free // _MIB} MiB free; {what} need up to {need // _MIB} MiB: free some space, "
                f"set {key} to another disk, or lower weights.keep_waiting"
            )


def _directory(key: str, name: str) -> Path:
    folder = Path(name).resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"{key} = {name!r} is a file, or lies below one; it should be a folder") from None
    except OSError as error:
        raise ConfigError(
            f"{key} = {name!r} cannot be written to: {error.strerror}; use a folder that this user may write to"
        ) from None
    return folder
