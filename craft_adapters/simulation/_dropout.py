"""Dropout whose masks come from outside, so that they do not depend on how clients are trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Masks", "hold_dropout"]


class _HeldDropout(nn.Module):
    """Multiplies by a mask that somebody else has put there."""

    mask: Tensor

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.register_buffer("mask", torch.empty(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask if self.training and self.p > 0 else x


class Masks:
    """The dropout masks of a model whose ``nn.Dropout`` layers are held.

    Args:
        shapes: Layer name -> sizes of one example where it passes the layer.
        rates: Layer name -> its p.
        device: Where the masks are drawn.
        dtype: Of the masks.
    """

    def __init__(
        self,
        shapes: dict[str, tuple[int, ...]],
        rates: dict[str, float],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.shapes, self.rates, self.device, self.dtype = shapes, rates, device, dtype

    def __bool__(self) -> bool:
        return bool(self.shapes)

    def generator(self, seed: int) -> torch.Generator:
        """One training's stream of masks."""
        return torch.Generator(self.device).manual_seed(seed)

    def draw(self, size: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Masks for a batch, by the name of the buffer they belong in."""
        return {f"{name}.mask": self._draw(name, size, generator) for name in self.shapes}

    def _draw(self, name: str, size: int, generator: torch.Generator) -> Tensor:
        p = self.rates[name]
        shape = (size, *self.shapes[name])
        kept = torch.rand(shape, generator=generator, device=self.device) >= p
        return kept.to(self.dtype) / (1 - p) if p < 1 else torch.zeros_like(kept, dtype=self.dtype)


def hold_dropout(model: nn.Module, example: Tensor) -> Masks:
    """Replace, in place, the model's ``nn.Dropout`` layers; other random layers stay.

    Args:
        model: The model; its state dict keeps its entries.
        example: A batch, to see the sizes at each layer. The model is not trained by it.
    """
    found = {name: m for name, m in model.named_modules() if type(m) is nn.Dropout and m.p > 0}
    shapes: dict[str, tuple[int, ...]] = {}
    handles = []
    for name, layer in found.items():

        def see(layer: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
            shapes[name] = tuple(args[0].shape[1:])

        handles.append(layer.register_forward_pre_hook(see))
    if found:
        mode = model.training
        with torch.no_grad():
            model.eval()(example)
        model.train(mode)
    for handle in handles:
        handle.remove()
    rates = {name: found[name].p for name in shapes}
    for name, p in rates.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, _HeldDropout(p))
    return Masks(shapes, rates, example.device, example.dtype)
