"""Spherical k-means over the keys of several heads at once, deterministic.

Legend: Hkv KV heads, m tokens, C clusters, d head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch itself uses
from torch import Tensor


def spherical_kmeans(keys: Tensor, num_clusters: int, iterations: int) -> Tensor:
    """Cluster number [Hkv, m] of every key: the centroid direction with the largest inner product.

    Keys are centred on their mean first, so that directions differ; centroids start at evenly spaced tokens and move
    to the normalised mean of their keys. A cluster that loses all its keys keeps its direction.

    Args:
        keys: [Hkv, m, d], m >= num_clusters.
        num_clusters: C.
        iterations: rounds of assignment and update.
    """
    points = keys.float()
    points = points - points.mean(1, keepdim=True)
    first = torch.arange(num_clusters, device=keys.device) * keys.shape[1] // num_clusters
    directions = F.normalize(points[:, first], dim=-1)
    label = (points @ directions.transpose(-1, -2)).argmax(-1)
    for _ in range(iterations - 1):
        sums = torch.zeros_like(directions).scatter_add_(1, label.unsqueeze(-1).expand_as(points), points)
        empty = torch.zeros_like(sums[..., 0]).scatter_add_(1, label, torch.ones_like(points[..., 0])) == 0
        directions = torch.where(empty.unsqueeze(-1), directions, F.normalize(sums, dim=-1))
        label = (points @ directions.transpose(-1, -2)).argmax(-1)
    return label
