"""One frozen config tree, read from YAML, changed by dotted overrides. An unknown key is an error, never ignored.

Every field carries its meaning and unit, from which `--help` is printed (`describe`). What only another file can tell
(does the model exist, does TP divide its heads, is the port free) is checked in `services.preflight`.
"""

import difflib
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from services.errors import ConfigError
from services.yaml_tree import read_yaml

Numerics = Literal["strict", "native"]
MIN_TEMPERATURE: Final = 0.01  # of vLLM, which raises a lower one to it without a word

# Nothing here allocates before `services.preflight` has compared it with the machine; these bounds keep what is
# compared, and what is only waited for, within reason.
_COUNT, _MANY, _MIB, _SECONDS = 2**31 - 1, 1_000_000, 2**24, 7 * 86_400
_RUN_NAME: Final = "([A-Za-z0-9][A-Za-z0-9._-]{0,63})?"


def _pair(value: Any) -> Any:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise PydanticCustomError("pair", "input should be two numbers, such as [0.9, 0.99]")
    return value


Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of the tree: frozen, no unknown keys, no silent conversion of a string to a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        """Neither a file nor an address has a control character or half a surrogate pair in its name."""
        if isinstance(value, str) and any(c < " " or c == "\x7f" or "\ud800" <= c <= "\udfff" for c in value):
            raise PydanticCustomError("text", "use characters that can be printed only")
        return value


class Run(Section):
    """What is run, and where its results go."""

    steps: int = Field(default=5, ge=1, le=_COUNT, description="RL steps; with --resume the step to stop at")
    seed: int = Field(default=1, ge=0, le=2**63 - 1, description="prompts and sampling draw from it")
    name: str = Field(
        default="",
        description="its run ids begin with it and a dot, so that an auditor's token can be for them (NAME.*)",
        json_schema_extra={"pattern": f"^{_RUN_NAME}$"},
    )
    directory: str = Field(default="runs", description="each run gets a folder here, and `latest` points at the newest")
    checkpoint_every: int = Field(
        default=0, ge=0, le=_COUNT, description="steps between checkpoints (for --resume); 0 writes none"
    )

    @field_validator("name")
    @classmethod
    def _is_part_of_an_id(cls, name: str) -> str:
        if not re.fullmatch(_RUN_NAME, name):
            raise PydanticCustomError(
                "run_name", "use up to 64 letters, digits, '.', '_' and '-', the first a letter or a digit"
            )
        return name


class Model(Section):
    """The model that is trained."""

    path: str = Field(
        default="smollm2-135m-instruct", description="a Hugging Face folder, or the name of a packaged model"
    )
    cache: str = Field(default="models", description="where packaged models are kept once converted")


class Strictness(Section):
    """How numbers are computed, on both sides."""

    mode: Numerics = Field(
        default="strict", description="strict: every op by contract; native: stock vLLM and Megatron"
    )
    profile: str = Field(default="portable", description="MMA and exp2 model; portable = fma32 + poly")
    segments: int = Field(
        default=1, ge=1, le=1024, description="parts of each row-parallel sum; both TP sizes must divide it"
    )
    threads: int = Field(default=2, ge=1, le=1024, description="CPU threads of each engine (the two take turns)")


class Task(Section):
    """Where prompts and rewards come from."""

    name: Literal["arithmetic", "tokens"] = Field(
        default="arithmetic", description="tokens needs no tokenizer (tiny models)"
    )
    prompts_per_step: int = Field(default=8, ge=1, le=100_000, description="different prompts a step")
    samples_per_prompt: int = Field(
        default=8, ge=2, le=10_000, description="answers to each; their mean is the baseline (GRPO)"
    )
    shots: int = Field(default=2, ge=0, le=10_000, description="worked examples in each prompt")


class Rollout(Section):
    """The engine that samples: vLLM."""

    tp_size: int = Field(default=1, ge=1, le=1024, description="tensor-parallel ranks")
    temperature: float = Field(
        default=1.0,
        ge=MIN_TEMPERATURE,
        le=1000,
        description=f"of sampling, and of every logprob; {MIN_TEMPERATURE} is the lowest that vLLM has",
    )
    max_new_tokens: int = Field(default=6, ge=1, le=_COUNT, description="a response is cut after that many tokens")
    max_model_len: int = Field(default=256, ge=16, le=_COUNT, description="prompt and response, in tokens")
    max_num_seqs: int = Field(default=64, ge=1, le=16_384, description="sequences that vLLM decodes side by side")
    kv_cache_mb: int = Field(default=128, ge=1, le=_MIB, description="memory for keys and values, MiB")
    prefix_caching: bool = Field(default=True, description="share keys and values of equal prompt prefixes")


class Trainer(Section):
    """The engine that learns: Megatron-core, GRPO with PPO's clip and a token-level mean, AdamW with fp32 masters."""

    tp_size: int = Field(default=1, ge=1, le=1024, description="tensor-parallel ranks, one process each")
    learning_rate: float = Field(default=1e-5, ge=0, le=1, description="of AdamW; 0 changes nothing, for audits")
    warmup_updates: int = Field(default=0, ge=0, le=_COUNT, description="updates over which the rate rises from 0")
    decay_updates: int = Field(
        default=0, ge=0, le=_COUNT, description="updates over which it then falls to 0; 0: it stays"
    )
    weight_decay: float = Field(default=0.0, ge=0, le=100, description="of AdamW")
    betas: Annotated[tuple[Decay, Decay], BeforeValidator(_pair)] = Field(
        default=(0.9, 0.99), strict=False, description="of AdamW, each from 0 to below 1"
    )
    clip_low: float = Field(default=0.2, gt=0, lt=1, description="PPO: the ratio is clipped below at 1 - clip_low")
    clip_high: float = Field(default=0.2, gt=0, le=1000, description="PPO: the ratio is clipped above at 1 + clip_high")
    max_grad_norm: float = Field(default=1.0, gt=0, le=1e9, description="gradients are scaled down to this L2 norm")
    updates_per_step: int = Field(default=1, ge=1, le=1000, description="optimizer steps on each batch")
    micro_batch_tokens: int = Field(
        default=1024, ge=16, le=_COUNT, description="tokens in one forward and backward; changes no bit under fma32"
    )


class Weights(Section):
    """How new weights reach the rollout engine and the auditor."""

    directory: str = Field(
        default="", description="where versions are published, in a folder for each run; empty: in the run's own"
    )
    keep: int = Field(
        default=3, ge=2, le=_MANY, description="versions that stay on disk; of a run in which all matched, the last"
    )
    keep_waiting: int = Field(
        default=10, ge=2, le=_MANY, description="and at most so many while the auditor has work left on them"
    )


class Auditor(Section):
    """The referee. Without an address the job starts one of its own and stops it at the end."""

    grpc: str = Field(default="", description="address (host:port) of a running auditor; empty: start one")
    http: str = Field(default="", description="base URL of its API; needed with grpc")
    recompute_rate: float = Field(
        default=0.25, ge=0, le=1, description="share of samples that the own auditor recomputes"
    )
    grpc_port: int = Field(default=0, ge=0, le=65535, description="of the own auditor; 0: any free port")
    http_port: int = Field(default=0, ge=0, le=65535, description="of the own auditor; 0: any free port")
    queue_size: int = Field(
        default=4096, ge=1, le=_MANY, description="records that wait in memory before they go to the spool on disk"
    )
    settle_seconds: float = Field(
        default=120.0, ge=0, le=_SECONDS, description="at the end: how long to wait for verdicts"
    )
    layer_digests: bool = Field(
        default=False, description="the trainer reports digests of its layers, so that a verdict says where it left"
    )
    restart: bool = Field(default=True, description="start the own auditor again, on the same ledger, when it dies")
    token_file: str = Field(default="", description="file with the bearer token of a running auditor")
    tls_ca: str = Field(default="", description="PEM authority of a running auditor's certificate; empty: plain text")
    tls_certificate: str = Field(default="", description="PEM certificate of this job, where the auditor wants one")
    tls_key: str = Field(default="", description="PEM key of that certificate")


class Ray(Section):
    """The cluster that holds the actors."""

    address: str = Field(
        default="", description="of a running cluster; empty: start a local one (or join the job's own)"
    )
    wait_seconds: float = Field(
        default=120.0, ge=0, le=_SECONDS, description="how long to wait for free CPUs in a cluster that is busy"
    )
    object_store_mb: int = Field(default=100, ge=76, le=_MIB, description="of a local cluster, MiB")
    dashboard: bool = Field(default=False, description="of a local cluster")


class Config(Section):
    """The whole tree."""

    run: Run = Run()
    model: Model = Model()
    numerics: Strictness = Strictness()
    task: Task = Task()
    rollout: Rollout = Rollout()
    trainer: Trainer = Trainer()
    weights: Weights = Weights()
    auditor: Auditor = Auditor()
    ray: Ray = Ray()


def load_config(file: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read `file` (all defaults if None), apply overrides `a.b=value` (value in YAML), and check the result.

    Raises ConfigError with one line that names the key and what would be right.
    """
    tree: dict[str, Any] = {} if file is None else _read_yaml(file)
    for override in overrides:
        _set(tree, override)
    return build_config(tree, source=str(file or "the overrides"))


def build_config(tree: Mapping[str, Any], source: str = "the config") -> Config:
    """Check a nested mapping and freeze it; ConfigError as `load_config`."""
    _refuse_unknown(tree, Config, "", source)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{source}: {key} = {_shown(first['input'])}: {_lower(first['msg'])}") from None


def describe() -> str:
    """Every key with its default and meaning, as `--help` prints it."""
    lines = []
    for name, section in Config.model_fields.items():
        part = _section(section.annotation)
        lines.append(f"\n{name}: {(part.__doc__ or '').strip()}")
        for key, field in part.model_fields.items():
            lines.append(f"  {name}.{key} = {field.default!r}")
            lines.append(f"      {field.description}")
    return "\n".join(lines)


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"config file {file} does not exist; deploy/configs/ has some to start from") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"config file {str(file)!r} cannot be read: {error}") from None
    tree = read_yaml(text, f"config file {file}")
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"config file {file} holds a {type(tree).__name__}; it should hold sections with keys")
    return tree


def _set(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {_shown(override)} has no key or no value; write it like --set run.steps=10")
    *parents, last = key.strip().split(".")
    for parent in parents:
        inner = tree.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {_shown(override)}: {parent} is a value, not a section")
        tree = inner
    tree[last] = read_yaml(text, f"the value of --set {_shown(override)}")


def _refuse_unknown(tree: Mapping[str, Any], section: type[BaseModel], prefix: str, source: str) -> None:
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if key not in section.model_fields:
            known = list(_keys())
            near = difflib.get_close_matches(path, known, 1, 0.0) if prefix else _near_section(str(key))
            raise ConfigError(f"{source}: unknown key {_shown(path)}; the nearest known key is {near[0]!r}")
        annotation = section.model_fields[key].annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{source}: {path} = {_shown(value)} should be a section with keys")
            _refuse_unknown(value, annotation, f"{path}.", source)


def _near_section(key: str) -> list[str]:
    """A misspelt section, or a leaf that was written without its section."""
    leaves = {path.rpartition(".")[2]: path for path in _keys()}
    if key in leaves:
        return [leaves[key]]
    return difflib.get_close_matches(key, list(Config.model_fields), 1, 0.0)


def _keys() -> Iterator[str]:
    for name, section in Config.model_fields.items():
        for key in _section(section.annotation).model_fields:
            yield f"{name}.{key}"


def _section(annotation: Any) -> type[BaseModel]:
    assert isinstance(annotation, type)
    assert issubclass(annotation, BaseModel)
    return annotation


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120
_SHORT.maxlevel = 3


def _shown(value: object) -> str:
    """As Python writes it, cut short: what a person mistyped, or a megabyte that was meant for another key."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return "a number too long to show"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
