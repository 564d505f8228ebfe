"""nanocem/loss.py: measured losses."""
import math

import pytest
import torch
import torch.nn.functional as F

from nanocem import loss as loss_fn


def test_measured_losses_are_sums_over_targets_that_count() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 7, 5).double(), torch.randint(5, (3, 7))
    counts = torch.rand(3, 7) < 0.6
    is_text = (torch.rand(3, 7) < 0.5) & counts
    expected = F.cross_entropy(logits.mT, targets, reduction='none').where(counts, 0)
    targets = targets.where(counts, loss_fn.NO_TARGET)
    torch.testing.assert_close(loss_fn.token_losses(logits, targets), expected, rtol=1e-6, atol=0)
    sums = loss_fn.sum_losses(logits, targets, is_text).tolist()
    right = [int(counts.sum()), float(expected.sum()), float(expected[is_text].sum())]
    assert sums == pytest.approx(right, rel=1e-6)
    assert loss_fn.perplexity(math.log(7)) == pytest.approx(7)
    assert loss_fn.perplexity(50) == math.inf and math.isnan(loss_fn.perplexity(math.nan))
