"""A model that is split in memory, as the engine splits one while it reads it."""

import torch
from transformers import PreTrainedModel

from loradock.engine.models.sharding import Sharding
from loradock.engine.parallel import ParallelGroup


def shard_model(
    model: PreTrainedModel, group: ParallelGroup, device: torch.device, by_expert: bool = False
) -> None:
    """Replace `model`, which is whole on the host, in place by this rank's part on `device`.

    With `by_expert` a rank keeps some experts whole, else some columns of each. Collective. Raises
    `ModelRefused` as `Sharding` does.
    """
    sharding = Sharding(model, group, by_expert)
    sharding.apply()
    sharding.check(device)
