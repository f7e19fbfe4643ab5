"""FirstP: the score of a doc is the score of its first window (Dai and Callan, 2019, arXiv:1905.09217)."""

from __future__ import annotations

from torch import Tensor, nn


class FirstP(nn.Module):
    r"""Score a doc by its first window: :math:`s(q, d) = s(q, w_1)`. Set `passages.most=1` to read no other window."""

    reads = "scores"

    def forward(self, scores: Tensor, mask: Tensor) -> Tensor:  # noqa: ARG002
        """Return the scores of docs [...].

        Args:
            scores: Scores of the docs' windows [..., windows].
            mask: True for windows, False for padding, bool, broadcast against `scores`.
        """
        return scores[..., 0]
