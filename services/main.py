"""The command line: reads the config and checks it; `services.job` wires the parts and runs them.

    python -m services.main --config deploy/configs/demo.yaml
    python -m services.main --config deploy/configs/demo.yaml --numerics native
    python -m services.main --resume latest --set run.steps=10
    ray job submit --address URL -- python -m services.main --config FILE

Exit code 0: done, and in a strict run every sample was compared without one differing bit. 1: a strict run that cannot
say so. 2: something asked for cannot be right, or cannot be had. 130: interrupted.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while the rest is imported: there is nothing to unwind yet

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from rl_kernel.errors import RlKernelError
from services.config import Config, describe, load_config
from services.errors import ConfigError, ServicesError
from services.models import ensure_model
from services.preflight import check, check_resumed
from services.run_folder import RunFolder, with_absolute_paths


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job that the command line describes; return the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s", stream=sys.stderr)
    try:
        return _run(_parse(arguments))
    except (ServicesError, RlKernelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 2)
    except OSError as error:
        # A disk that is full or a folder that may not be written; the message has the file where there is one.
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; everything that was started has been stopped", file=sys.stderr)
        return 130


def _run(asked: argparse.Namespace) -> int:
    config, folder = _config(asked)
    model = ensure_model(config.model.path, Path(config.model.cache))
    check(config, model)
    if not (config.ray.address or os.environ.get("RAY_ADDRESS")):
        # A cluster of our own stays on the loopback interface. Ray reads this when it is imported.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    from services.job import run_job  # noqa: PLC0415  after the variable above

    return run_job(config, model.resolve(), folder)


def _config(asked: argparse.Namespace) -> tuple[Config, RunFolder | None]:
    """The config, and the run to go on with (None: a new one)."""
    overrides = list(asked.set)
    if asked.numerics:
        overrides.append(f"numerics.mode={asked.numerics}")
    if asked.resume is None:
        return load_config(asked.config, overrides), None
    if asked.config or asked.numerics:
        raise ConfigError("--resume goes on with the run's own config; leave out --config and --numerics")
    root = Path(load_config(None, overrides).run.directory)
    folder = RunFolder.open(asked.resume, root)
    # It may have been moved since it was started.
    overrides.append(f"run.directory={json.dumps(str(folder.path.parent))}")
    config = with_absolute_paths(load_config(folder.config_file, overrides))
    check_resumed(with_absolute_paths(load_config(folder.config_file)), config)
    return config, folder


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m services.main",
        description="Train a model with GRPO: vLLM samples, Megatron-core learns, an auditor compares them bit by bit.",
        epilog="keys of the config file and of --set, with their defaults:\n" + describe(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML 1.2; deploy/configs/ has some to start from")
    parser.add_argument("--numerics", choices=("strict", "native"), help="short for --set numerics.mode=…")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="e.g. --set run.steps=10")
    parser.add_argument("--resume", metavar="RUN", help="go on with a run (its folder, its id, or `latest`)")
    return parser.parse_args(arguments)


def _interrupt(number: int, frame: FrameType | None) -> None:
    # SIGTERM unwinds like Ctrl-C, so that both leave nothing behind. A second one must not cut short what that takes.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
