"""The array type of the signatures, and the base class of records of arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import numpy as np
from flax import struct

if TYPE_CHECKING:
    Array = jax.Array
else:
    Array = jax.Array | np.ndarray  # functions of JAX arrays also take numpy arrays


class Record(struct.PyTreeNode):
    """A frozen dataclass that is a JAX pytree.

    Unlike a NamedTuple, it may have fields called `index` and `count`. JAX also builds records of shapes or shardings,
    so the tests do not check the types of the fields.
    """

    __no_type_check__ = True
