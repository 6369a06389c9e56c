"""The operator: Gram pass, m x m solve, apply pass. Tensors in, tensors out.

A group of m clients and d coordinates is a matrix of :class:`Rows`, never held whole. Everything
that has to be known about it is its Gram matrix, a sum over column blocks, so it may be added up
over devices and processes; every step is a combination of its rows. Nothing here knows a client,
a name, a configuration or a file.

What is computed in what: see :func:`gram` and :func:`combine`. The m x m part is float64 on the
CPU.
"""

from ._passes import Correction, Turn, combine, gram
from ._plan import Piece
from ._rows import Rows, Workspace
from ._solve import Cosines, Solution, solve, sound

__all__ = [
    "Correction",
    "Cosines",
    "Piece",
    "Rows",
    "Solution",
    "Turn",
    "Workspace",
    "combine",
    "gram",
    "solve",
    "sound",
]
