"""Clients that are spread over processes: every rank holds some of them whole.

What must travel: the inner product of two clients needs both, so every number of every client
leaves its rank at most once, for the rank that works on its part of the model. With m clients of d
numbers on W ranks, each rank sends and receives about ``m d (W - 1) / W^2`` numbers, and then
``d (W - 1) / W`` of the new model. Ranks that hold *parts of the model* of all clients instead
(``process_group=`` of a rule) send nothing of that: only the Gram matrices, ``groups (m + 1)^2``
float64 numbers, are added up in both cases.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._contract import AggregationResult, ClientUpdate
from .errors import IncompatibleUpdate

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .aggregators import GramRule

__all__ = ["aggregate_by_clients"]


def aggregate_by_clients(
    rule: GramRule,
    global_state: Mapping[str, Any],
    updates: Iterable[ClientUpdate],
    group: ProcessGroup,
    *,
    round: int | None = None,
) -> AggregationResult:
    """One step of a rule whose clients are spread over the ranks of a process group.

    All ranks call it together. Each works on its rows (of the first dimension) of every entry, so
    the rule's own state is this rank's part: save and load it per rank.

    Args:
        rule: Made with ``process_group=group``, with the same options on every rank.
        global_state: The whole model, the same on every rank.
        updates: This rank's clients, whole; none is fine. Ids are unique over all ranks.
        group: The ranks.
        round: See :meth:`craft_adapters.Aggregator.aggregate`.

    Returns:
        The whole new model, the same on every rank, and the report on all clients.

    Raises:
        IncompatibleUpdate: an entry is missing or of another shape or type than the global one, by
            client and entry. Other ranks then wait for the group's timeout.
    """
    from torch import distributed

    ranks, rank = distributed.get_world_size(group), distributed.get_rank(group)
    wire = _Wire(group, ranks)
    own = list(updates)
    names = [name for name, value in global_state.items() if isinstance(value, Tensor)]
    pieces = [[_piece(global_state[name], r, ranks) for name in names] for r in range(ranks)]
    sent = [
        [
            _piece(_value(update, name, global_state[name]), r, ranks)
            for update in own
            for name in names
        ]
        for r in range(ranks)
    ]
    everyone = wire.gather([_describe(update) for update in own])
    received = wire.exchange(sent, [[pieces[rank]] * len(theirs) for theirs in everyone])
    clients = [
        ClientUpdate(values=dict(zip(names, values, strict=True)), **about)
        for theirs, blocks in zip(everyone, received, strict=True)
        for about, values in zip(theirs, blocks, strict=True)
    ]
    local = {**global_state, **dict(zip(names, pieces[rank], strict=True))}
    result = rule.aggregate(local, clients, round=round)
    parts = wire.exchange(
        [[result.state[name] for name in names]] * ranks, [[pieces[r]] for r in range(ranks)]
    )
    state = dict(result.state)
    for position, name in enumerate(names):
        like: Tensor = global_state[name]
        rows = [part[position].reshape(-1, *like.shape[1:]) for (part,) in parts]
        state[name] = torch.cat(rows).reshape(like.shape).to(like.device)
    return AggregationResult(state, result.report)


class _Wire:
    """Tensors of known shapes as bytes, between all ranks."""

    def __init__(self, group: ProcessGroup, ranks: int) -> None:
        from torch import distributed

        self._group = group
        self._ranks = ranks
        nccl = "nccl" in distributed.get_backend(group)
        self._device = torch.device("cuda" if nccl else "cpu")

    def gather(self, ours: object) -> list[Any]:
        """What every rank gave, by rank, as JSON."""
        from torch import distributed

        text = torch.tensor(list(json.dumps(ours).encode()), dtype=torch.uint8, device="cpu")
        lengths = [
            torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self._ranks)
        ]
        length = torch.tensor([len(text)], device=self._device)
        distributed.all_gather(lengths, length, group=self._group)
        longest = max(int(each) for each in lengths)
        padded = torch.nn.functional.pad(text, (0, longest - len(text))).to(self._device)
        texts = [torch.empty_like(padded) for _ in range(self._ranks)]
        distributed.all_gather(texts, padded, group=self._group)
        return [
            json.loads(bytes(text[: int(length)].tolist()))
            for text, length in zip(texts, lengths, strict=True)
        ]

    def exchange(
        self, sent: Sequence[Sequence[Tensor]], like: Sequence[Sequence[Sequence[Tensor]]]
    ) -> list[list[list[Tensor]]]:
        """Send each rank a list of tensors; receive from each, per client, tensors like those."""
        from torch import distributed

        out = [_bytes(tensors, self._device) for tensors in sent]
        sizes = [sum(t.nbytes for tensors in blocks for t in tensors) for blocks in like]
        came = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        distributed.all_to_all_single(
            came, torch.cat(out), sizes, [len(part) for part in out], group=self._group
        )
        answer, start = [], 0
        for blocks in like:
            tensors = []
            for block in blocks:
                row = []
                for tensor in block:
                    stop = start + tensor.nbytes
                    # A copy, so that it starts where its type can.
                    row.append(came[start:stop].clone().view(tensor.dtype).view(tensor.shape))
                    start = stop
                tensors.append(row)
            answer.append(tensors)
        return answer


def _bytes(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    flat = [t.to(device).contiguous().reshape(-1).view(torch.uint8) for t in tensors if t.numel()]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=device)


def _piece(value: Tensor, rank: int, ranks: int) -> Tensor:
    """A rank's rows of an entry; a single number is the first rank's."""
    rows = value.detach().reshape(1) if value.ndim == 0 else value.detach()
    return torch.tensor_split(rows, ranks)[rank]


def _value(update: ClientUpdate, name: str, like: Tensor) -> Tensor:
    value = update.values.get(name)
    if not isinstance(value, Tensor) or value.shape != like.shape or value.dtype != like.dtype:
        got = "nothing"
        if isinstance(value, Tensor):
            got = f"{tuple(value.shape)} {value.dtype}"
        raise IncompatibleUpdate(
            f"client {update.client_id!r}, entry {name!r}: clients that are sent between processes "
            f"must hold every entry as the global model does, {tuple(like.shape)} {like.dtype}; "
            f"got {got}"
        )
    return value


def _describe(update: ClientUpdate) -> dict[str, Any]:
    return {
        "client_id": update.client_id,
        "num_examples": update.num_examples,
        "kind": update.kind,
        "loss": update.loss,
        "local_steps": update.local_steps,
    }
