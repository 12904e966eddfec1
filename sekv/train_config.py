"""Options of a training run, validated before anything is loaded (`conf/train/*.yaml`, `conf/data/*.yaml`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sekv.documents import DataError, DocumentSource, LocalDocuments, MixedDocuments, TextDocuments
from sekv.hub_documents import HubDocuments


def _require(holds: bool, rule: str, received: object) -> None:
    if not holds:
        raise ValueError(f"{rule}; received {received!r}")


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Weights of the losses (published: distill 1, zoom 1, reconstruction 0.5, budget 0.1); 0 switches one off.

    Attributes:
        distill: KL(full ‖ SeKV) on next-token logits; the only loss that goes backward through the frozen backbone.
        distill_every: steps between two distillation losses; 1 is every step.
        listwise: KL of the teacher's attention mass over spans to the router's (not in the article).
        zoom: binary cross-entropy of the zoom probability against the teacher's coverage set.
        reconstruction: gated spectral error of keys and values; needs a form with rank gates.
        budget: expanded spans + `rank_weight` x retained rank; ramps over the first half of the run.
        rank_weight: beta.
        coverage: rho, share of the teacher's attention on spans that the zoom target covers.
        positive_weight: weight of spans to zoom into, in the zoom loss.
    """

    distill: float = 1.0
    distill_every: int = 1
    listwise: float = 0.0
    zoom: float = 1.0
    reconstruction: float = 0.5
    budget: float = 0.1
    rank_weight: float = 0.1
    coverage: float = 0.9
    positive_weight: float = 10.0

    def __post_init__(self) -> None:
        weights = {name: getattr(self, name) for name in ("distill", "listwise", "zoom", "reconstruction", "budget")}
        _require(min(weights.values()) >= 0, "train.losses: every weight must be >= 0", weights)
        _require(
            max(weights["distill"], weights["listwise"], weights["zoom"]) > 0,
            "train.losses: one of distill, listwise and zoom must be > 0, or the router learns nothing",
            weights,
        )
        _require(self.distill_every >= 1, "train.losses.distill_every must be >= 1 step", self.distill_every)
        _require(0 < self.coverage < 1, "train.losses.coverage must lie in (0, 1)", self.coverage)
        _require(self.positive_weight > 0, "train.losses.positive_weight must be > 0", self.positive_weight)


PRECISIONS = ("no", "bf16")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run.

    Attributes:
        steps: optimizer steps.
        sequence: tokens per sample (context + queries), one entry per phase of the curriculum.
        query_tokens: Q, tokens after the context that serve as queries.
        mined_share: share of the query tokens, those with the most attention beyond the window, that the losses use.
        effective_batch: samples per optimizer step, over all processes; the rest is gradient accumulation.
        learning_rate, weight_decay, warmup, max_grad_norm: AdamW; warm-up as a share of the steps, then a cosine.
        threshold_learning_rate: of the thresholds tau; null is `learning_rate`. Thresholds are never decayed.
        losses: weights of the losses.
        calibration_samples: samples on which the thresholds are set before the first step, so that one more zoomed
            token matters equally little in every head (see `sekv.calibration`); 0 starts from `method.sekv.tau`.
        mixed_precision: `no`, or `bf16`: the frozen backbone computes in bf16 by autocast, whatever its weights are
            stored in; memory and losses keep the backbone's own dtype.
        gradient_checkpointing: recompute attention logits in the backward pass instead of keeping them.
        windows_per_document: most samples taken from one document in an epoch.
        workers: data loader processes that tokenise ahead; 0 tokenises in the training process.
        eval_every, eval_samples: steps between evaluations on held-out documents, and their number of samples.
        zoom_share: share of the tokens at which the evaluation compares routers.
        save_every, keep: steps between checkpoints, and how many to keep beside the best.
        log_every: steps between log records.
    """

    steps: int
    sequence: tuple[int, ...]
    query_tokens: int
    mined_share: float = 1.0
    effective_batch: int = 8
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    warmup: float = 0.1
    max_grad_norm: float = 1.0
    threshold_learning_rate: float | None = None
    losses: LossConfig = field(default_factory=LossConfig)
    calibration_samples: int = 0
    mixed_precision: str = "no"
    gradient_checkpointing: bool = True
    windows_per_document: int = 4
    workers: int = 0
    eval_every: int = 100
    eval_samples: int = 4
    zoom_share: float = 0.1
    save_every: int = 100
    keep: int = 2
    log_every: int = 1

    def __post_init__(self) -> None:
        at_least_one = ("steps", "query_tokens", "effective_batch", "windows_per_document", "save_every", "keep")
        for name in (*at_least_one, "log_every"):
            _require(getattr(self, name) >= 1, f"train.{name} must be >= 1", getattr(self, name))
        for name in ("workers", "calibration_samples", "eval_every", "eval_samples", "weight_decay"):
            _require(getattr(self, name) >= 0, f"train.{name} must be >= 0", getattr(self, name))
        _require(
            bool(self.sequence) and min(self.sequence) > self.query_tokens,
            "train.sequence: every length must exceed train.query_tokens, which are its last tokens",
            (list(self.sequence), self.query_tokens),
        )
        _require(self.mixed_precision in PRECISIONS, "train.mixed_precision must be no or bf16", self.mixed_precision)
        _require(0 < self.mined_share <= 1, "train.mined_share must lie in (0, 1]", self.mined_share)
        _require(0 <= self.warmup < 1, "train.warmup is a share of the steps in [0, 1)", self.warmup)
        _require(self.learning_rate > 0, "train.learning_rate must be > 0", self.learning_rate)
        rate = self.threshold_learning_rate
        _require(rate is None or rate > 0, "train.threshold_learning_rate must be > 0 or null", rate)
        _require(self.max_grad_norm > 0, "train.max_grad_norm must be > 0", self.max_grad_norm)
        _require(0 < self.zoom_share < 1, "train.zoom_share must lie in (0, 1)", self.zoom_share)


KINDS = ("embedded", "local", "hub")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where training documents come from.

    Attributes:
        kind: `embedded` (texts that any machine has after installation), `local` (files) or `hub` (streaming).
        path: for `local`: a jsonl, parquet or txt file, a folder, or a glob.
        heldout_path: for `local`: files of the evaluation; null holds out every `heldout_every`-th document.
        heldout_every: one in so many documents is held out of training (`embedded`, and `local` without
            `heldout_path`).
        heldout_documents: for `hub`: that many documents at the head of each subset are held out.
        text_field: name of the text column of `local` files.
        subsets: for `hub`: name -> options of `HubDocuments`, and `weight`.
        revision: for `hub`: revision of every subset that does not pin its own.
    """

    kind: str
    path: str | None = None
    heldout_path: str | None = None
    heldout_every: int = 16
    heldout_documents: int = 64
    text_field: str = "text"
    subsets: dict[str, dict[str, Any]] = field(default_factory=dict)
    revision: str | None = None

    def __post_init__(self) -> None:
        _require(self.kind in KINDS, f"data.kind must be one of {', '.join(KINDS)}", self.kind)
        _require(self.heldout_every >= 2, "data.heldout_every must be >= 2", self.heldout_every)
        if self.kind == "local" and not self.path:
            raise DataError("data=local needs data.path=<file, folder or glob>")
        if self.kind == "hub" and not self.subsets:
            raise DataError("data.kind=hub needs data.subsets (see conf/data/redpajama_v1.yaml)")

    def source(self, seed: int, heldout: bool) -> DocumentSource:
        """The documents of the training or of the evaluation; never the same ones.

        Args:
            seed: orders the documents.
            heldout: whether the documents are for the evaluation.
        """
        part = "heldout" if heldout else "train"
        if self.kind == "embedded":
            return TextDocuments(_embedded, seed, part, self.heldout_every)
        if self.kind == "local":
            assert self.path is not None
            if self.heldout_path is not None:
                return LocalDocuments(self.heldout_path if heldout else self.path, seed, self.text_field)
            return LocalDocuments(self.path, seed, self.text_field, part, self.heldout_every)
        sources: list[DocumentSource] = []
        weights = []
        for name, options in self.subsets.items():
            chosen = {"revision": self.revision, **options}
            weights.append(float(chosen.pop("weight", 1.0)))
            sources.append(
                HubDocuments(name=name, seed=seed, part=part, heldout_documents=self.heldout_documents, **chosen)
            )
        return sources[0] if len(sources) == 1 else MixedDocuments(sources, weights, seed)


def _embedded() -> list[tuple[str, str]]:
    from kvcore.text import embedded_documents

    return [(document.id, document.text) for document in embedded_documents()]
