"""NeMo RL's own policy loss in the check of the packing."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from polar_gym.training.batch import Weighting
from polar_gym.training.conformance import check, holds
from tests.support.nemo_rl_loss import LOSSES_OF_SESSIONS, nemo_rl
from tests.support.tiny_model import tiny_gpt2


@pytest.mark.parametrize("weighting", get_args(Weighting))
@pytest.mark.parametrize("loss", LOSSES_OF_SESSIONS)
def test_the_gradient_of_nemo_rls_loss(trainer: Any, loss: str, weighting: Weighting) -> None:
    """NeMo RL's sequence-level ratio is that of a row, and its KL penalty has no weights."""
    losses = {loss: LOSSES_OF_SESSIONS[loss]}
    findings = check(nemo_rl, tiny_gpt2(), vocabulary=32, losses=losses, weightings=[weighting])
    assert holds(findings) == (loss != "gspo" and (loss, weighting) != ("kl", "session")), findings
