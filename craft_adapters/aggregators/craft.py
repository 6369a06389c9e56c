"""CRAFT: conflict-resolved aggregation (Wang, Liu, Thuerey 2026, arXiv 2605.21317)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from .._contract import ClientUpdate, State
from .._layout import Granularity
from ..errors import OptionError
from ..plugins import hookimpl
from ..projection import Cosines, Solution, solve
from ._common import EPS64, NOISE, Common, cutoff, shows_common_options
from ._entries import cloned, read_count, read_entries, read_numbers, read_round
from ._gram_rule import GramRule
from ._grams import Combination, Grams

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["AgreementWarning", "Craft"]

Reference = Literal["previous", "zero", "ema"]
Targets = Literal["examples", "uniform", "sqrt"] | Callable[[Sequence[ClientUpdate]], Any]
Scale = Literal["unit", "client_norm", "mean", "steady"]

# A remembered direction shorter than this is no direction: steps have about unit length.
_NO_REFERENCE = 1e-12
# "steady": the step length follows the clients' by a tenth a round, and grows by 2 % at most.
_FOLLOW, _GROW = 0.1, 1.02
# The clients agree far more than the targets let the step follow: one direction could have this
# many times the cosine with all of them that it could have if they had nothing in common ...
_AGREEMENT = 2.0
# ... in groups that hold more than half of the coordinates, for this many rounds in a row.
_AGREEMENT_ROUNDS = 3


class AgreementWarning(UserWarning):
    """The published targets hold the step back: the clients agree far more than they allow."""


@shows_common_options
class Craft(GramRule):
    """The step closest to the previous one that has the wanted inner product with every client.

    Per layer group, with unit updates u_i as the rows of U and the reference r (the previous step,
    normalised; zero in the first round):

        g = argmin |g - r|  subject to  U g = rho,    that is    g = r + U^+ (rho - U r)
        theta <- theta - server_lr g

    rho_i is the client's data share among the group's active clients, so every client's inner
    product is positive, as long as the clients' updates are independent. Where they are not
    (more clients than coordinates, duplicates), g is the least-squares solution, alignment is not
    guaranteed, and the report lists who conflicts.

    Args:
        server_lr: Length of the server's step, > 0. With ``scale="unit"`` the usual start is 0.1;
            1.0, which the paper's CIFAR-100 demonstration uses, is too long in other federations.
            The other scales follow the clients' own step lengths and want 1.0. None takes 0.1
            or 1.0, by the scale.
        norm_threshold: A client whose update of a group is shorter is inactive there.
        reference: ``"previous"`` (the paper), ``"zero"`` (none; with uniform targets the direction
            is ConFIG's), ``"ema"``: r = a / |a|, with a <- beta a + (1 - beta) g / |g| after each
            round and a = 0 before the first. Directions are averaged, not steps, so that a long
            step does not outweigh the others; r has length 1 as ``"previous"`` has.
        beta: Weight of the past in ``reference="ema"``, 0 <= beta < 1.
        targets: rho: ``"examples"`` (the paper), ``"uniform"``, ``"sqrt"`` (of the number of
            examples), or a function from the list of ClientUpdate to as many positive numbers (by
            their losses, say); renormalised over the active clients.
        client_length: None: targets are rho (the paper). A number L: they are rho times the
            factor that gives the clients' own part U^+ rho the length L against the reference's 1.
            All inner products stay positive, and |g| <= sqrt(1 + L^2) however nearly parallel the
            clients are. 1 is balanced, and right where clients agree.
        scale: ``"unit"``: the model moves by server_lr g (the paper). ``"client_norm"``: by
            server_lr times sum_i rho_i |g_i| along g. ``"mean"``: by server_lr times the length
            of sum_i rho_i g_i. ``"steady"``: by server_lr times a length that follows the median
            of the clients' norms slowly.
        granularity: As for the other options, see :class:`GramRule`.
        **common: ``layout``, ``on_nonfinite``, ...: see :class:`GramRule`.

    Raises:
        OptionError: an option has a value that it does not take.

    Differences from the published code: buffers are averaged, never projected; one active client
    is treated by the same formula; the pseudo-inverse's cut-off does not grow with the width.

    Example:
        >>> from craft_adapters import ClientUpdate
        >>> theta = {"w": torch.zeros(3)}
        >>> clients = ClientUpdate.join(  # theta - client: (3, 4, 0) and (1, 0, 0)
        ...     [{"w": torch.tensor([-3.0, -4.0, 0.0])}, {"w": torch.tensor([-1.0, 0.0, 0.0])}],
        ...     [5, 5],
        ... )
        >>> result = Craft(server_lr=1.0).aggregate(theta, clients)
        >>> result.state["w"]
        tensor([-0.5000, -0.2500,  0.0000])
        >>> result.report.conflicts_after
        0
    """

    name = "craft"
    separable = True

    def __init__(
        self,
        *,
        server_lr: float | None = None,
        norm_threshold: float = 1e-6,
        reference: Reference = "previous",
        beta: float = 0.9,
        targets: Targets = "examples",
        client_length: float | None = None,
        scale: Scale = "unit",
        granularity: Granularity = "layer",
        **common: Unpack[Common],
    ) -> None:
        super().__init__(granularity=granularity, **common)
        if server_lr is None:
            server_lr = 0.1 if scale == "unit" else 1.0
        _require(0 < server_lr < math.inf, "server_lr", server_lr, "a number > 0")
        _require(0 <= norm_threshold < math.inf, "norm_threshold", norm_threshold, "a number >= 0")
        _require(reference in get_args(Reference), "reference", reference, str(get_args(Reference)))
        _require(0 <= beta < 1, "beta", beta, "a number in [0, 1)")
        names = ("examples", "uniform", "sqrt")
        _require(
            callable(targets) or targets in names, "targets", targets, f"{names} or a function"
        )
        _require(scale in get_args(Scale), "scale", scale, str(get_args(Scale)))
        _require(
            client_length is None or 0 < client_length < math.inf,
            "client_length",
            client_length,
            "None or a number > 0",
        )
        self.server_lr = server_lr
        self.norm_threshold = norm_threshold
        self.reference = reference
        self.beta = beta
        self.targets = targets
        self.client_length = client_length
        self.scale = scale
        if callable(targets):  # a user's function is called once a round
            self.separable = False
        self._reference: dict[str, Tensor] = {}
        self._lengths: dict[str, float] = {}
        self._agreeing = 0

    def memory(self) -> Mapping[str, Tensor]:
        """The previous step (or the average of past directions) per entry, not normalised."""
        return self._reference

    def combine(self, grams: Grams) -> Combination:
        """Solve for the steps of all the groups at hand at once."""
        norms = grams.norms
        active = (norms > 0) & (norms >= self.norm_threshold)
        count = active.sum(-1)
        inverse = torch.where(active, 1.0 / norms, 0.0)
        has_reference = grams.memory_norms > _NO_REFERENCE
        reference = torch.where(has_reference, 1.0 / grams.memory_norms, 0.0)

        before = grams.memory_products * inverse * reference.unsqueeze(-1)  # U r
        shares = self._shares(grams, active)
        solution = solve(
            Cosines(grams.products, inverse),
            torch.stack([shares, before, active.to(torch.float64)], dim=-1),
            rtol=cutoff(grams),
        )
        toward_targets, toward_reference, toward_all = solution.x.unbind(-1)
        # |U^+ rho|^2, and the largest cosine that one direction has with all: 1/|U^+ 1|.
        length2 = (shares * toward_targets).sum(-1)
        consensus = (active * toward_all).sum(-1).rsqrt()
        rounding = NOISE * torch.maximum(grams.rounding, count * EPS64)
        factor = torch.ones_like(length2)
        if self.client_length is not None:
            cancels = length2.sqrt() <= rounding * shares.square().sum(-1).sqrt()
            factor = torch.where(cancels, 0.0, self.client_length * length2.rsqrt())
        targets = factor.unsqueeze(-1) * shares
        coefficients = factor.unsqueeze(-1) * toward_targets - toward_reference

        idle = count == 0  # the paper's rule: this group is averaged
        nan = torch.full_like(length2, torch.nan)
        return Combination(
            weights=torch.where(idle.unsqueeze(-1), grams.shares, coefficients * inverse),
            memory_weights=torch.where(idle, 0.0, reference),
            active=active,
            lengths=torch.where(idle, nan, self._step_lengths(grams, active, shares, nan)),
            rates=torch.where(idle, 1.0, self.server_lr),
            noise=torch.where(
                idle, 0.0, rounding * (has_reference + targets.square().sum(-1).sqrt())
            ),
            targets=targets,
            solution=solution,
            # Dependent rows may have no direction with the same cosine to all.
            consensus=torch.where(solution.rank < count.clamp(min=1), torch.nan, consensus),
            notes=_notes(solution, count),
        )

    def commit(self, grams: Grams, combination: Combination, steps: Mapping[str, Tensor]) -> None:
        """Remember the steps as the next round's reference, and the step lengths."""
        # Before anything is changed: where warnings are errors, the round has not happened.
        agreeing = self._watch_agreement(grams, combination)
        if self.reference != "zero":
            kept = {n: v for n, v in self._reference.items() if n not in grams.buffers}
            for group, some in zip(grams.groups, combination.active.any(-1).tolist(), strict=True):
                kept.update(self._next_reference(group.entries, some, steps))
            self._reference = kept
        if self.scale == "steady":
            lengths = (combination.lengths / self.server_lr).tolist()
            names = (group.name for group in grams.groups)
            new = {n: length for n, length in zip(names, lengths, strict=True) if length == length}
            self._lengths = {**self._lengths, **new}
        self._agreeing = agreeing

    def state_dict(self) -> State:
        """Round counter, reference per entry, step length per group."""
        return {
            "round": self._round,
            "reference": cloned(self._reference),
            "lengths": dict(self._lengths),
            "agreeing": self._agreeing,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`craft_adapters.Aggregator.load_state_dict`.

        ``reference`` alone is enough: an entry -> tensor mapping of the previous step.
        """
        number = read_round(self.name, state, {"round", "reference", "lengths", "agreeing"})
        agreeing = read_count(self.name, state, "agreeing")
        lengths = read_numbers(self.name, state, "lengths")
        self._reference = read_entries(
            self.name, state, "reference", self._reference, device=self.device
        )
        self._round, self._agreeing, self._lengths = number, agreeing, lengths

    def _shares(self, grams: Grams, active: Tensor) -> Tensor:
        """Rho (q, m): one number per client, renormalised over each group's active clients."""
        if self.targets == "examples":
            raw = grams.shares
        elif self.targets == "sqrt":
            raw = grams.shares.sqrt()
        elif self.targets == "uniform":
            raw = torch.ones_like(grams.shares)
        else:
            raw = torch.as_tensor(
                self.targets(list(grams.clients)), dtype=torch.float64, device="cpu"
            )
            if raw.shape != grams.shares.shape or not bool((raw.isfinite() & (raw > 0)).all()):
                raise OptionError(
                    f"targets: the function must give {len(grams.clients)} positive finite "
                    f"numbers, one a client, got {raw.tolist()}"
                )
        shares = active * raw
        return shares / shares.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)

    def _step_lengths(self, grams: Grams, active: Tensor, shares: Tensor, nan: Tensor) -> Tensor:
        """How far the model moves along g, or NaN for server_lr times g as it is."""
        if self.scale == "unit":
            return nan
        if self.scale == "client_norm":
            return self.server_lr * (shares * grams.norms).sum(-1)
        if self.scale == "mean":
            squares = torch.einsum("qi,qij,qj->q", shares, grams.products, shares)
            return self.server_lr * squares.clamp(min=0.0).sqrt()
        median = grams.norms.where(active, torch.nan).nanmedian(-1).values
        last = torch.tensor(
            [self._lengths.get(group.name, torch.nan) for group in grams.groups],
            dtype=torch.float64,
        )
        followed = torch.minimum((1 - _FOLLOW) * last + _FOLLOW * median, _GROW * last)
        # A group that stood still has no length to grow from: it starts afresh.
        return self.server_lr * torch.where(last > 0, followed, median)

    def _next_reference(
        self, entries: Sequence[str], active: bool, steps: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """What a group remembers: nothing after a round without active clients."""
        new = {e: steps[e] if active else torch.zeros_like(steps[e]) for e in entries}
        if self.reference == "previous":
            return new
        squares = torch.stack([step.square().sum(dtype=torch.float64) for step in new.values()])
        norm = self.over_ranks(squares.sum().cpu()).sqrt().to(squares.device)
        return {
            entry: self.beta * self._reference.get(entry, torch.zeros_like(step)).to(step)
            + (1 - self.beta) * torch.where(norm > 0, step / norm, 0.0)
            for entry, step in new.items()
        }

    def _watch_agreement(self, grams: Grams, combination: Combination) -> int:
        """Warn once where the published targets are known to stall (the reference drowns them)."""
        if (
            self.client_length is not None
            or self.reference == "zero"
            or combination.consensus is None
            or self._agreeing >= _AGREEMENT_ROUNDS
        ):
            return self._agreeing
        # Unrelated clients give 1/sqrt(m).
        excess = combination.consensus * combination.active.sum(-1).sqrt()
        agreeing = float(grams.widths[excess > _AGREEMENT].sum()) > 0.5 * float(grams.widths.sum())
        rounds = self._agreeing + 1 if agreeing else 0
        if rounds == _AGREEMENT_ROUNDS:
            warnings.warn(
                "CRAFT: for several rounds the clients agree far more than their targets (mean "
                f"{1 / len(grams.clients):.3g}) let the step follow, so the previous step "
                "outweighs them and training may stall. Use the rule 'craft_balanced', or set "
                "client_length=1 and targets='sqrt'",
                AgreementWarning,
                stacklevel=5,
            )
        return rounds


def _notes(solution: Solution, count: Tensor) -> dict[int, str]:
    notes = {}
    for q, (rank, clients) in enumerate(zip(solution.rank.tolist(), count.tolist(), strict=True)):
        if clients == 0:
            notes[q] = "no active client: plain weighted average"
        elif rank < clients:
            notes[q] = f"{clients} clients span {rank} directions: alignment is not guaranteed"
    return notes


def _require(holds: bool, option: str, value: object, allowed: str) -> None:
    if not holds:
        raise OptionError(f"{option} must be {allowed}, got {value!r}")


@hookimpl
def craft_register_aggregators(register: Callable[[str, object], None]) -> None:
    """Offer the rule under its name."""
    register(Craft.name, Craft)
