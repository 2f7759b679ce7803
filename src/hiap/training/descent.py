"""What a run is given that makes one of several sizes: the network it begins with, and the dense model that teaches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from hiap.budget.latency import LatencyTable
from hiap.data.sources import Data
from hiap.errors import RunError
from hiap.pruning.digest import digest_tensors

__all__ = ["Descent"]


@dataclass(frozen=True)
class Descent:
    """The place of a run among those of several targets.

    Attributes:
        home: the folder of all of them, which is where they are resumed.
        later: targets that follow; they must be in reach too.
        network: the compact network that the search begins with, instead of the dense model.
        above: the folder it comes from.
        dense: weights of the dense model, if the first run has fine-tuned it.
        digest: of the weights of the dense model, if it has not.
        dense_top1: what the first run has measured.
        data: what an earlier run has read.
        table: what the first run has measured.
        table_error: how many times the cost by the table the network takes, as far as that is known.
        epochs: of data that the runs before have seen.
        total: epochs of all sizes together.
    """

    home: Path
    later: tuple[str, ...] = ()
    network: nn.Module | None = None
    above: Path | None = None
    dense: dict[str, Tensor] | None = None
    digest: str | None = None
    dense_top1: float | None = None
    data: Data | None = None
    table: LatencyTable | None = None
    table_error: float = 1.0
    epochs: int = 0
    total: int = 0

    def check_dense(self, model: nn.Module) -> None:
        """Give the dense model the weights that the first run has trained, or see that it is the same.

        Raises:
            RunError: it is another one.
        """
        other = f"the dense model is not the one that {self.home} began with; name the same --model and --weights"
        if self.dense is not None:
            try:
                model.load_state_dict(self.dense)
            except RuntimeError as error:
                raise RunError(f"{other} ({str(error).splitlines()[0]})") from error
        elif self.digest is not None and self.digest != digest_tensors(model.state_dict()):
            raise RunError(other)
