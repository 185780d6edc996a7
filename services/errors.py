"""Every error that the job raises on purpose.

    ServicesError
    ├── ConfigError          a key or a value of the config tree that cannot be right
    ├── ModelUnavailable     a model that is neither in the cache nor to be had
    ├── PublishError         weights that could not be written, or that an engine did not confirm
    ├── CheckpointError      a run that cannot be resumed
    ├── TrainingError        a batch or numbers that cannot be trained on
    └── AuditorError         an auditor that does not start or does not answer

The message is one line that names the thing and says what would be right. `exit_code` is what the process ends with.
"""

__all__ = [
    "AuditorError",
    "CheckpointError",
    "ConfigError",
    "ModelUnavailable",
    "PublishError",
    "ServicesError",
    "TrainingError",
]


class ServicesError(Exception):
    """Base of the tree; catch this to catch any of them."""

    exit_code = 2


class ConfigError(ServicesError, ValueError):
    """A key or a value of the config tree that cannot be right."""


class ModelUnavailable(ServicesError, LookupError):
    """A model that is neither in the cache nor to be had."""


class PublishError(ServicesError, RuntimeError):
    """Weights that could not be written, or that an engine did not confirm."""


class CheckpointError(ServicesError, ValueError):
    """A run that cannot be resumed."""


class TrainingError(ServicesError, ArithmeticError):
    """A batch or numbers that cannot be trained on, such as a logprob that is not finite."""


class AuditorError(ServicesError, RuntimeError):
    """An auditor that does not start or does not answer."""
