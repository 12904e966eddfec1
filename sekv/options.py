"""The options of SeKV: every choice of the article, and every choice that measured better, is one switch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvcore.budget import ModelSpec
from sekv.routing import Decision, MapKind, RouterConfig, SummaryKind
from sekv.rows import ROW_BITS
from sekv.segmentation import Segmentation, SegmentOptions
from sekv.sketch import SKETCH_BITS

LARGEST_RANK = 4096
LARGEST_REACH = 64


@dataclass(frozen=True, kw_only=True)
class SeKVOptions:
    """SeKV (arXiv 2606.31145). Lengths in tokens.

    Attributes:
        segmentation: `budget`, `paper` or `fixed` (see `SegmentOptions`, as for the next seven).
        alpha, min_span, max_span, span_tokens, anchor_share, anchors, num_sinks: how a row is cut.
        weighted_summary: weigh means by surprisal (published) instead of evenly.
        summary: `sketch` (token-level zoom), `second_order` or `mean` (span-level zoom).
        maps: `none`, `tied` (published) or `untied` routing maps.
        decision: `mass` or `probability` (published).
        map_rank: rank of the maps.
        directions: second-order directions per span.
        tau: threshold of an untrained router: multiples of the uniform share (`mass`) or a probability.
        global_threshold: one threshold for all layers and heads.
        sketch_dims: most coordinates per key (at most the head dimension; fewer where the budget is small).
        sketch_fine_dims, sketch_bits: so many of as many, the leading ones, have so many bits; the others have 2.
        outlier_share: tokens per KV head, as a share, that stay on the device because the sketch shows them worst.
        query_aware: choose the sketch's directions by the logits they explain rather than by the keys' variance.
        neighbours: tokens on either side that decoding with a sketch zooms into beside one far above the threshold.
        window: newest tokens kept exactly. window_block: tokens that leave it at a time.
        max_zoom: most tokens fetched per layer and KV head in one step, as a share of the tokens.
        row_bits: 8 or 0 (the model's dtype): storage of host rows and of fetched rows on the device.
        max_rank: rank of the spans' factors; 0 keeps raw rows. gates: whether the rank gate prunes components.
        coarse: whether what is not zoomed into keeps a coarse entry.
        mass_weighted: coarse entries carry their expected mass instead of n · exp(q·k̄).
        factor_cache: keep fetched rows on the device while the budget allows.
        warm_queries: newest prompt queries whose attention fills the factor cache at first.
        offload: rows live in host memory. pin: with a GPU they travel through pinned memory, beside the computation.
        checkpoint: `auto` (the shipped router of this backbone and form, if any), `none` (untrained), or a file.
    """

    segmentation: Segmentation = "budget"
    alpha: float = 1.0
    min_span: int = 16
    max_span: int = 128
    span_tokens: int = 64
    anchor_share: float = 0.002
    anchors: bool = True
    num_sinks: int = 4
    weighted_summary: bool = False
    summary: SummaryKind = "sketch"
    maps: MapKind = "untied"
    decision: Decision = "mass"
    map_rank: int = 8
    directions: int = 1
    tau: float = 1.0
    global_threshold: bool = False
    sketch_dims: int = 48
    sketch_fine_dims: int = 16
    sketch_bits: int = 4
    outlier_share: float = 0.01
    query_aware: bool = True
    neighbours: int = 2
    window: int = 32
    window_block: int = 16
    max_zoom: float = 0.25
    row_bits: int = 8
    max_rank: int = 0
    gates: bool = False
    coarse: bool = True
    mass_weighted: bool = True
    factor_cache: bool = True
    warm_queries: int = 32
    offload: bool = True
    pin: bool = True
    checkpoint: str = "auto"

    def __post_init__(self) -> None:
        self.segment_options()
        RouterConfig(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1, **self.router_form())
        rules = (
            (self.sketch_bits in SKETCH_BITS, "sketch_bits", f"one of {SKETCH_BITS}"),
            (self.sketch_dims > 0 and self.sketch_dims % 2 == 0, "sketch_dims", "a positive even number"),
            (self.sketch_fine_dims >= 0 and self.sketch_fine_dims % 2 == 0, "sketch_fine_dims", "an even number >= 0"),
            (self.row_bits in ROW_BITS, "row_bits", f"one of {ROW_BITS}"),
            (0 <= self.neighbours <= LARGEST_REACH, "neighbours", f"in 0..{LARGEST_REACH}"),
            (self.window >= 1, "window", ">= 1"),
            (self.window_block >= 1, "window_block", ">= 1"),
            (0.0 <= self.max_zoom <= 1.0, "max_zoom", "in [0, 1]"),
            (0.0 <= self.outlier_share <= 1.0, "outlier_share", "in [0, 1]"),
            (self.max_rank >= 0, "max_rank", ">= 0"),
            (0 <= self.map_rank <= LARGEST_RANK, "map_rank", f"in 0..{LARGEST_RANK}"),
            (self.directions >= 1, "directions", ">= 1"),
            (self.warm_queries >= 1, "warm_queries", ">= 1"),
        )
        for holds, name, rule in rules:
            if not holds:
                raise ValueError(f"sekv.{name} must be {rule}; received {getattr(self, name)!r}")
        if self.gates and self.max_rank == 0:
            raise ValueError("sekv.gates=true needs factors to prune: set max_rank (published: 32)")
        if self.max_rank and self.row_bits:
            raise ValueError(
                f"sekv.max_rank={self.max_rank} factors exact rows: set row_bits=0 (received {self.row_bits})"
            )
        if self.summary == "sketch" and (self.decision != "mass" or self.maps == "tied"):
            raise ValueError(
                "sekv.summary=sketch estimates attention mass: it needs decision=mass and maps=none or untied; "
                f"received decision={self.decision}, maps={self.maps}"
            )

    def segment_options(self) -> SegmentOptions:
        """The part that cuts rows."""
        return SegmentOptions(
            mode=self.segmentation,
            alpha=self.alpha,
            min_span=self.min_span,
            max_span=self.max_span,
            span_tokens=self.span_tokens,
            anchor_share=self.anchor_share,
            anchors=self.anchors,
            num_sinks=self.num_sinks,
        )

    @property
    def needs_surprisal(self) -> bool:
        """Whether the surprisal of the prompt is used at all."""
        return self.segmentation != "fixed" or self.weighted_summary

    def router_form(self) -> dict[str, Any]:
        """The form of the router, without the backbone's shape."""
        return {
            "maps": self.maps,
            "summary": self.summary,
            "decision": self.decision,
            "map_rank": self.map_rank,
            "directions": self.directions,
            "global_threshold": self.global_threshold,
            "initial_tau": self.tau,
            "temperature": 0.1 if self.decision == "probability" else 1.0,
            "max_rank": self.max_rank or 32,
            "gates": self.gates,
        }

    def coarse_dtype(self, spec: ModelSpec) -> torch.dtype:
        """Storage of coarse entries: 16 bits at most."""
        return torch.bfloat16 if spec.dtype == torch.float32 else spec.dtype
