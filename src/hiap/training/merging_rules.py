"""What a run that merges tokens asks of its model, its cost and its target."""

from __future__ import annotations

from torch import nn

from hiap.budget.cost import Cost, MacCost
from hiap.budget.latency import LatencyCost
from hiap.budget.target import Target
from hiap.errors import BudgetError
from hiap.pruning.merging import Merged, check_merged
from hiap.training.config import Config, ConfigError

__all__ = ["cost_without_merging", "plain_model"]


def plain_model(model: nn.Module, config: Config) -> nn.Module:
    """The model that is pruned: without merging, which begins after the search.

    Raises:
        ConfigError: it merges tokens, and the configuration does not.
        InputError, UnsupportedModelError: it cannot merge as many tokens as the configuration says.
    """
    if isinstance(model, Merged):
        if not config.merge_tokens:
            raise ConfigError(
                f"the model merges {model.most} tokens in each block: pass --merge-tokens {model.most} to go on so"
            )
        model = model.model
    if config.merge_tokens:
        check_merged(model, config.merge_tokens)
    return model


def cost_without_merging(cost: Cost, config: Config, merged: float, dense_macs: int) -> float:
    """The cost of the dense model, which merges no tokens: what a target in percent is a share of.

    Args:
        merged: its cost with merging.

    Raises:
        ConfigError: the cost is in time, and its table knows nothing of merging.
        BudgetError: merging alone meets the target.
    """
    if isinstance(cost, LatencyCost):
        raise ConfigError("merge_tokens does not go with a cost in time: its table was measured without merging")
    if not isinstance(cost, MacCost):
        return merged
    target, most = config.targets[0], config.merge_tokens
    goal = Target.parse(target).absolute(dense_macs)
    if goal >= merged:
        raise BudgetError(
            f"a target of {target} ({cost.say(goal)}) leaves nothing to prune: merging {most} tokens in each block "
            f"gives {cost.say(merged)}, {merged / dense_macs:.1%} of the dense model; choose a smaller target or fewer "
            "tokens"
        )
    return float(dense_macs)
