"""What the auditor is started with. An unknown key or an unsafe combination is refused before anything opens."""

import difflib
import ipaddress
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from auditor.errors import ConfigError
from auditor.grants import Grants
from auditor.object_store import StoreAccess, is_url
from auditor.tls import TlsFiles
from auditor.weights_place import WeightsPlace
from auditor.workers import find
from auditor.yaml_tree import read_yaml

_LONGEST_S: Final = 1e9  # more is beyond what a thread can wait


class Config(BaseModel):
    """Every setting; each is a flag too (`--grpc`, `--recompute-rate`, …)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    grpc: Annotated[str, Field(description="host:port for records; port 0 takes a free one")] = "127.0.0.1:50051"
    http: Annotated[str, Field(description="host:port for API, page and metrics")] = "127.0.0.1:9464"
    ledger: Annotated[str, Field(description="file of the ledger, or a postgresql:// URL")] = "auditor.db"
    weights_root: Annotated[
        str | None,
        Field(description="folder or s3:// URL with v000001, v000002, …; without it nothing is recomputed"),
    ] = None
    weights_cache: Annotated[
        Path | None, Field(description="folder for copies of weights where weights_root is a URL; each is fetched once")
    ] = None
    weights_keep: Annotated[int, Field(ge=1, le=1000, description="versions that stay in it")] = 8
    store_endpoint: Annotated[
        str,
        Field(description="http(s):// URL of an S3 service that is not Amazon's, for all three places"),
    ] = ""
    store_region: Annotated[str, Field(description="its region, where it wants one")] = ""
    recompute_rate: Annotated[
        float, Field(ge=0, le=1, description="share of agreeing samples that the reference recomputes")
    ] = 0.05
    recompute_every: Annotated[int, Field(ge=0, description="and all samples of every n-th step; 0: none")] = 0
    recompute_first: Annotated[int, Field(ge=0, description="and the first k samples of each step")] = 0
    recompute_per_stratum: Annotated[
        int, Field(ge=0, description="and the first k of each engine and response length (by powers of two)")
    ] = 0
    recompute_workers: Annotated[int, Field(ge=1, le=1024, description="workers that run the reference")] = 1
    recompute_idle: Annotated[
        bool, Field(description="workers run only on cores that nothing else wants: a job beside them loses no time")
    ] = False
    recompute_pool: Annotated[
        str, Field(description="where they run: process (here), ray (the cluster of RAY_ADDRESS), or MODULE:NAME")
    ] = "process"
    recompute_queue: Annotated[
        int,
        Field(ge=1, le=1_000_000, description="mismatches that may wait for the reference; half as many of the rest"),
    ] = 20_000
    recompute_timeout_s: Annotated[
        float, Field(gt=0, description="seconds after which a worker that is at one sample is killed")
    ] = 600.0
    recompute_retry_s: Annotated[
        float,
        Field(ge=0, description="seconds for which a sample is tried anew while its weights' store does not answer"),
    ] = 3600.0
    diagnose_per_step: Annotated[
        int,
        Field(
            ge=0,
            le=1_000_000,
            description="mismatching samples of a step whose causes are searched for, after the verdict; and of a run"
            " that wait for it",
        ),
    ] = 2
    diagnose_seconds: Annotated[
        float, Field(gt=0, description="of a core, spent on one of them and side at most; what was found is ranked")
    ] = 30.0
    pair_wait_s: Annotated[
        float,
        Field(ge=0, description="seconds that a sample waits for its other side before it is given up; 0: for ever"),
    ] = 86_400.0
    retain_days: Annotated[
        float, Field(ge=0, description="days after which the content of settled records is dropped; 0: never")
    ] = 0.0
    archive: Annotated[
        str, Field(description="folder or s3:// URL that dropped content is written to before, as Parquet")
    ] = ""
    evidence: Annotated[
        Literal["none", "mismatches", "recomputed", "all"],
        Field(description="samples whose tokens are written to evidence_place as Parquet once they are judged"),
    ] = "none"
    evidence_place: Annotated[str, Field(description="folder or s3:// URL for them")] = ""
    retain_look_s: Annotated[float, Field(gt=0, description="seconds between two looks for what is that old")] = 60.0
    token_file: Annotated[
        Path | None,
        Field(description="file with a bearer token for every run; read again when it changes"),
    ] = None
    tokens_file: Annotated[
        Path | None,
        Field(description="YAML list of bearer tokens, each for some runs only; read again when it changes"),
    ] = None
    rate_records: Annotated[
        float, Field(ge=0, description="records a second that one caller (its token, or its address) may send; 0: any")
    ] = 0.0
    rate_bytes: Annotated[float, Field(ge=0, description="bytes a second that one caller may send; 0: any")] = 0.0
    rate_reads: Annotated[float, Field(ge=0, description="HTTP requests a second of one caller; 0: any")] = 0.0
    rate_burst_s: Annotated[float, Field(gt=0, description="seconds' worth of each rate that may come at once")] = 5.0
    tls_certificate: Annotated[
        Path | None, Field(description="PEM chain for both ports; read again when it changes")
    ] = None
    tls_key: Annotated[Path | None, Field(description="PEM key of that certificate")] = None
    tls_client_ca: Annotated[
        Path | None, Field(description="PEM authority that must have signed every client's certificate")
    ] = None
    insecure: Annotated[
        bool, Field(description="serve beyond this machine without a token: whoever reaches the port may write")
    ] = False
    stop_at_eof: Annotated[
        bool, Field(description="stop when standard input ends, as it does when the process that started this one dies")
    ] = False
    ports_file: Annotated[Path | None, Field(description="written at start: the bound addresses as JSON")] = None
    write_queue: Annotated[int, Field(ge=1, le=65536, description="batches that may wait for the ledger")] = 32
    message_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 30, description="largest gRPC message")] = 16 << 20
    sample_tokens: Annotated[int, Field(ge=1, le=1 << 24, description="most tokens of one sample")] = 1 << 20
    shown_runs: Annotated[
        int, Field(ge=1, le=10_000, description="runs in /metrics; beyond it the one that was silent longest leaves")
    ] = 1000
    shown_idle_s: Annotated[
        float, Field(ge=0, description="seconds without a record after which a run leaves /metrics; 0: never")
    ] = 86_400.0

    @model_validator(mode="before")
    @classmethod
    def _is_written_as_meant(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """`recompute_workers: true` is no number, though Python takes it for 1."""
        for name, value in settings.items():
            if isinstance(value, bool) and cls.model_fields[name].annotation is not bool:
                raise ValueError(f"{name}: a value is expected, not {str(value).lower()}")
        return settings

    @model_validator(mode="after")
    def _is_safe(self) -> Self:
        for name in type(self).model_fields:
            if name.endswith(("_s", "_seconds")) and getattr(self, name) > _LONGEST_S:
                raise ValueError(f"{name}: {getattr(self, name):g} s is longer than {_LONGEST_S:g}, 30 years")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key are given together or not at all")
        if self.tls_client_ca is not None and self.tls_key is None:
            raise ValueError("tls_client_ca needs tls_certificate and tls_key")
        for name, address in (("grpc", self.grpc), ("http", self.http)):
            host, _ = split_address(name, address)
            guarded = bool(self.token_file or self.tokens_file or self.tls_client_ca)
            if not (_is_loopback(host) or guarded or self.insecure):
                raise ValueError(
                    f"{name}: {address} can be reached from other machines;"
                    " give token_file, tokens_file, tls_client_ca, or insecure: true"
                )
        return self


def load_config(path: Path | None, flags: dict[str, Any]) -> Config:
    """The file's settings with the flags over them; ConfigError in one line."""
    settings = _read(path) if path else {}
    known = sorted(Config.model_fields)
    for key in settings:
        if key not in Config.model_fields:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"{path}: unknown key {key!r}; {hint}")
    try:
        config = Config.model_validate({**settings, **flags})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{path or 'flags'}: {field}{': ' if field else ''}{message}") from None
    _check_paths(config)
    return config


def tls_files(config: Config) -> TlsFiles | None:
    """The certificate files, or None where the ports speak plain text."""
    if config.tls_certificate is None or config.tls_key is None:
        return None
    return TlsFiles(config.tls_certificate, config.tls_key, config.tls_client_ca)


def left_open(config: Config, addresses: Mapping[str, str]) -> Iterator[str]:
    """What others can do or see, a sentence each. addresses: the bound ones, of `grpc` and `http`."""
    if not (config.token_file or config.tokens_file or config.tls_client_ca):
        yield f"no token_file, tokens_file or tls_client_ca: whoever reaches {addresses['grpc']} may write records"
    for name, address in addresses.items():
        if config.tls_key is None and not _is_loopback(split_address(name, address)[0]):
            yield (
                f"{name}: {address} speaks plain text: tokens and records can be read on their way;"
                " give tls_certificate and tls_key, or put what speaks TLS in front"
            )


def store_access(config: Config) -> StoreAccess:
    """How object stores are reached."""
    return StoreAccess(config.store_endpoint, config.store_region)


def weights_place(config: Config) -> WeightsPlace | None:
    """Where workers find weights, or None where nothing is recomputed."""
    if config.weights_root is None:
        return None
    cache = str(config.weights_cache) if config.weights_cache else ""
    return WeightsPlace(config.weights_root, cache, config.weights_keep, store_access(config))


def split_address(name: str, address: str) -> tuple[str, int]:
    """Host and port of `host:port`; ValueError names the setting."""
    host, separator, port = address.rpartition(":")
    is_number = port.isascii() and port.isdigit() and len(port) <= 5
    if not (separator and host and is_number) or int(port) > 65535:
        raise ValueError(f"{name}: {address[:100]!r} is no host:port with a port of 0..65535")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`: an IPv6 host stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"config {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"config {path}: not UTF-8 text") from None
    settings = read_yaml(text, f"config {path}")
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise ConfigError(f"config {path}: a mapping of settings is expected, not a {type(settings).__name__}")
    return settings


def _check_paths(config: Config) -> None:
    root = config.weights_root
    if root is not None and not is_url(root) and not Path(root).is_dir():
        raise ConfigError(f"weights_root {root} is no folder; make it before the auditor starts")
    if root is not None and is_url(root) and config.weights_cache is None:
        raise ConfigError(f"weights_root {root} is a URL and needs weights_cache, a folder for copies")
    # With weights a pool is begun, which looks further; `ray` asks for a cluster.
    if root is None and (config.recompute_idle or config.recompute_pool != "ray"):
        find(config.recompute_pool, config.recompute_idle)
    Grants(config.token_file, config.tokens_file)
    if config.archive and not config.retain_days:
        raise ConfigError("archive is given and retain_days is 0: nothing would ever be written to it")
    if (config.evidence == "none") != (not config.evidence_place):
        raise ConfigError(
            "evidence (mismatches, recomputed or all) and evidence_place are given together or not at all"
        )
    folder = Path(config.ledger).parent
    if "://" not in config.ledger and not folder.is_dir():
        raise ConfigError(f"ledger {config.ledger}: folder {folder} does not exist")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
