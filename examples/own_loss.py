"""A custom loss: (scores, labels, doc_mask) -> mean over groups.

docs/add_a_loss.md shows how `train.py loss=NAME` can select it.
"""

import torch
from torch import Tensor, nn


class TopOne(nn.Module):
    """Squared distance between the softmax of the scores and the softmax of the labels.

    All groups have equal weight. Padded docs have no effect.
    """

    def forward(self, scores: Tensor, labels: Tensor, doc_mask: Tensor) -> Tensor:
        """Return the mean over groups of the summed squared differences; all inputs are [batch, docs]."""
        predicted, target = (torch.softmax(part.masked_fill(~doc_mask, -torch.inf), dim=1) for part in (scores, labels))
        return (predicted - target).square().sum(1).mean()


def main() -> tuple[float, float]:
    """Show why training is the same on any hardware: a batch's loss is the weighted mean of the losses of its parts."""
    torch.manual_seed(0)
    scores, labels, mask = torch.randn(5, 4), torch.randint(0, 3, (5, 4)).float(), torch.ones(5, 4, dtype=torch.bool)
    mask[3, 2:] = False
    loss = TopOne()
    whole = float(loss(scores, labels, mask))
    parts = float((2 * loss(scores[:2], labels[:2], mask[:2]) + 3 * loss(scores[2:], labels[2:], mask[2:])) / 5)
    print(f"whole {whole:.6f}, from its parts {parts:.6f}")
    return whole, parts


if __name__ == "__main__":
    main()
