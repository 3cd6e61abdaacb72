"""Services that show a run's numbers; each is imported when it is used."""

from enum import StrEnum
from pathlib import Path
from typing import Protocol

from tcm.foundation.errors import TcmError
from tcm.foundation.extras import how_to_install


class TrackerName(StrEnum):
    """A service that shows metrics, besides metrics.jsonl."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"


class Tracker(Protocol):
    """A service that logs numbers."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log named numbers of a step."""
        ...

    def close(self) -> None:
        """Write what is pending."""
        ...


class TensorBoard:
    """Scalars for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard") from error
        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class HostedRun:
    """Scalars for Weights & Biases or trackio, which share an interface."""

    def __init__(self, service: TrackerName, project: str, name: str) -> None:
        try:
            if service is TrackerName.WANDB:
                import wandb as client
            else:
                import trackio as client
        except ImportError as error:
            raise _missing(service) from error
        self._run = client.init(project=project, name=name)

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


def open_tracker(name: TrackerName, folder: Path) -> Tracker:
    """The tracker of a stage's folder runs/NAME/STAGE."""
    if name is TrackerName.TENSORBOARD:
        return TensorBoard(folder)
    return HostedRun(name, project=folder.parent.name, name=folder.name)


def _missing(package: str) -> TcmError:
    return TcmError(f"track={package} needs the package {package}; {how_to_install('track')}")
