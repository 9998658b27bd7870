# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Keys or values of B * N rows of which a part is stored with fewer rows.

[`SegmentedStates`] takes the place of the tensor in a cache layer: `update`, `reorder_cache`, `crop` and the attention
modules go on as they are. It is a plain class with `__torch_function__`, not a subclass of `torch.Tensor`, since Dynamo
traces the one and skips the other.

    segments  (B, H, L, D)      states of the prompt, each row of which stands for N consecutive rows
              (B * N, H, S, D)  states of the rows themselves, the suffix: the only part that grows and is reordered

Any number of segments works, with any numbers of rows that divide that of the whole, oldest first. Attention and products
with the states read the segments where they lie (see `attention`). So does whatever treats each row and each token alike:
views, casts, linear maps. Any other operation gets the tensor of all rows, which then takes the place of the segments for
good. So the result is that of a tensor, whatever is done.

Shapes: R = B * N rows, H heads, L tokens of a segment, D head size.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .attention import StepMemo


class BeamMemo:
    """
    Whether rows stay with their item when they are reordered. All layers of a cache ask about the same indices, and the
    answer has to come from their device.
    """

    def __init__(self):
        self.entry: tuple[torch.Tensor, int | None, dict] | None = None

    def __reduce__(self):
        return BeamMemo, ()

    def stays_within_items(self, index: torch.LongTensor, repeats: int) -> bool:
        """
        Args:
            index (`torch.LongTensor` of shape `(R,)`): The row that each row goes on with.
            repeats (`int`): Number of rows per item.
        """
        # A tensor that was made in inference mode has no version: a change of it would go unnoticed, unless it is ours
        is_known = not index.is_inference() or getattr(index, "is_private", False)
        version = None if index.is_inference() else index._version
        if not is_known or self.entry is None or self.entry[0] is not index or self.entry[1] != version:
            self.entry = (index, version, {})
        answers = self.entry[2]
        if repeats not in answers:
            own = torch.arange(index.shape[0], device=index.device)
            answers[repeats] = torch.equal(index // repeats, own // repeats)
        return answers[repeats]


def private_index(index: torch.LongTensor) -> torch.LongTensor:
    """Returns indices that nobody else can change: a copy of those that were made in inference mode."""
    if index.is_inference() and not getattr(index, "is_private", False):
        index = index.clone()
        index.is_private = True
    return index


class Origin:
    """
    What the states of one cache layer have in common from step to step.

    Args:
        masks ([`StepMemo`]): What depends on the mask alone is computed once per step, for all layers of the cache.
        beams ([`BeamMemo`]): What depends on the beam indices alone likewise.

    Attributes:
        expanded_by (`str`, *optional*): The first operation that got the tensor of all rows.
    """

    def __init__(self, masks: StepMemo, beams: BeamMemo):
        self.masks, self.beams = masks, beams
        self.expanded_by: str | None = None


class SegmentedStates:
    """
    Stands for the tensor of all rows.

    Args:
        segments (`Sequence[torch.Tensor]`): Of the shape of the whole, but for their numbers of rows and of tokens.
        rows (`int`): Number R of rows of the whole.
        origin ([`Origin`]): The cache layer that they come from.
        row_dim (`int`, *optional*, defaults to 0): The dimension of rows.
        length_dim (`int`, *optional*, defaults to 2): The dimension of tokens.
        inner (`int`, *optional*, defaults to 1): Number of entries of `row_dim` per row: H where heads were merged with rows.
        groups (`int`, *optional*, defaults to 1): How often each head (dimension 1) is there, one after the other.
        source (`tuple`, *optional*): The states that these are a view of, and the function and arguments that made it.
        parents (`Sequence[SegmentedStates]`, *optional*): The states that these were computed from.

    Attributes:
        is_prompt (`bool`): Whether all segments belong to the prompt: when the rows are repeated, none of them is copied.
    """

    def __init__(
        self,
        segments: Sequence[torch.Tensor],
        rows: int,
        origin: Origin,
        row_dim: int = 0,
        length_dim: int = 2,
        inner: int = 1,
        groups: int = 1,
        source: tuple | None = None,
        parents: "Sequence[SegmentedStates]" = (),
    ):
        self.segments, self.rows, self.origin = tuple(segments), rows, origin
        self.row_dim, self.length_dim, self.inner, self.groups = row_dim, length_dim, inner, groups
        self.source, self.parents = source, tuple(parents)
        self.dense: torch.Tensor | None = None
        self._shape: torch.Size | None = None
        self.is_prompt = False

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return call(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        attribute = getattr(torch.Tensor, name)
        if callable(attribute):
            return lambda *args, **kwargs: call(attribute, (self, *args), kwargs)
        return getattr(self.example if name.startswith("is_") else self.expand_rows(name), name)

    def __repr__(self) -> str:
        shapes = "dense" if self.dense is not None else [tuple(segment.shape) for segment in self.segments]
        return f"{type(self).__name__}({tuple(self.shape)}, segments={shapes})"

    def __len__(self) -> int:
        return self.shape[0]

    def __bool__(self) -> bool:
        return bool(self.expand_rows("__bool__"))

    def __reversed__(self):
        return reversed(self.expand_rows("__reversed__"))

    @property
    def example(self) -> torch.Tensor:
        """A tensor of the same type on the same device."""
        return self.segments[-1] if self.dense is None else self.dense

    @property
    def lengths(self) -> list[int]:
        return [segment.shape[self.length_dim] for segment in self.segments]

    @property
    def repeats(self) -> list[int]:
        """For how many rows each row of a segment stands."""
        return [self.rows * self.inner // segment.shape[self.row_dim] for segment in self.segments]

    @property
    def shape(self) -> torch.Size:
        if self._shape is not None:
            return self._shape
        sizes = list(self.segments[0].shape)
        sizes[self.row_dim] = self.rows * self.inner
        sizes[self.length_dim] = sum(self.lengths)
        if self.groups > 1:
            sizes[1] *= self.groups
        shape = torch.Size(sizes)
        # Compiled code would be guarded by what the step before has kept
        if not torch.compiler.is_compiling():
            self._shape = shape
        return shape

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return math.prod(self.shape)

    nelement = numel

    @property
    def ndim(self) -> int:
        return self.example.ndim

    def dim(self) -> int:
        return self.example.ndim

    ndimension = dim

    @property
    def dtype(self) -> torch.dtype:
        return self.example.dtype

    @property
    def device(self) -> torch.device:
        return self.example.device

    @property
    def layout(self) -> torch.layout:
        return self.example.layout

    @property
    def requires_grad(self) -> bool:
        return (
            any(segment.requires_grad for segment in self.segments) if self.dense is None else self.dense.requires_grad
        )

    def get_device(self) -> int:
        return self.example.get_device()

    def is_floating_point(self) -> bool:
        return self.example.is_floating_point()

    def element_size(self) -> int:
        return self.example.element_size()

    def contiguous(self, **kwargs) -> "SegmentedStates":
        # What is written into a copy must not reach the states that a view is taken from
        return self if self.source is None else self.computed(self.segments)

    @property
    def held_bytes(self) -> int:
        """Bytes of the states that are held: R rows of the suffix alone."""
        return sum(segment.nbytes for segment in self.segments) if self.dense is None else self.dense.nbytes

    def settle(self) -> "SegmentedStates | torch.Tensor":
        """Returns the tensor where these states, or those that they are a view of, have become one."""
        if self.dense is None and self.source is not None:
            parent, function, args, kwargs = self.source
            settled = parent.settle()
            if settled is not parent:
                self._become(function(settled, *args, **kwargs))
        return self if self.dense is None else self.dense

    def expand_rows(self, operation: str) -> torch.Tensor:
        """
        Returns the tensor of all rows, which takes the place of the segments. What is written into it is written into the
        states: views become views of the tensor of their source.

        Args:
            operation (`str`): The name of what needs it.
        """
        if self.settle() is self:
            if self.source is not None:
                parent, function, args, kwargs = self.source
                self._become(function(parent.expand_rows(operation), *args, **kwargs))
            else:
                if not self.parents and self.origin.expanded_by is None:
                    self.origin.expanded_by = operation
                for parent in self.parents:
                    # What is small beside the states may be expanded in each step
                    if 8 * self.numel() >= parent.numel():
                        parent.expand_rows(operation)
                self._become(self.joined())
        return self.dense

    def _become(self, dense: torch.Tensor) -> None:
        self.dense, self._shape = dense, dense.shape
        self.segments, self.source, self.parents = (), None, ()

    def joined(self) -> torch.Tensor:
        """A tensor of all rows. The states stay as they are."""
        if self.dense is not None:
            return self.dense
        parts = []
        for segment, repeats in zip(self.segments, self.repeats, strict=True):
            if self.groups > 1:
                segment = segment.repeat_interleave(self.groups, dim=1)
            if repeats > 1:
                split = segment.unflatten(self.row_dim, (-1, self.inner)).repeat_interleave(repeats, dim=self.row_dim)
                segment = split.flatten(self.row_dim, self.row_dim + 1)
            parts.append(segment)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.length_dim)

    def written_to(self, states: "SegmentedStates") -> "SegmentedStates":
        """Returns these states with the suffix written to the buffer of that of `states`, if both have as many rows."""
        buffer, suffix = states.segments[-1], self.segments[-1]
        if buffer is suffix or buffer.shape != suffix.shape:
            return self
        return self.make([*self.segments[:-1], buffer.copy_(suffix)])

    def make(self, segments: Sequence[torch.Tensor], **changes) -> "SegmentedStates":
        """States of other segments, as these in everything that `changes` don't name."""
        layout = {name: getattr(self, name) for name in ("rows", "origin", "row_dim", "length_dim", "inner", "groups")}
        return SegmentedStates(segments, **{**layout, **changes})

    def computed(self, segments: Sequence[torch.Tensor], *others: "SegmentedStates") -> "SegmentedStates":
        """States that were computed from these, and from `others`."""
        return self.make(segments, parents=(self, *others))

    def has_layout_of(self, other: "SegmentedStates") -> bool:
        """Whether rows, tokens and heads are in the same dimensions as in the other states."""
        return (self.rows, self.row_dim, self.length_dim, self.inner, self.groups) == (
            *(other.rows, other.row_dim, other.length_dim, other.inner, other.groups),
        )

    def is_like(self, other: "SegmentedStates") -> bool:
        """Whether the segments of the two belong to the same rows and tokens."""
        return self.has_layout_of(other) and (self.lengths, self.repeats) == (other.lengths, other.repeats)


# The handlers of `operations`, by the name of an operation, which is the same for `torch.matmul` and `torch.Tensor.matmul`
HANDLERS: dict[str, "Handler"] = {}


class Handler(NamedTuple):
    """
    Args:
        function (`Callable`): Gets the operation and its arguments. Returns `NotImplemented` where it has to be given tensors.
        keywords (`frozenset[str]`, *optional*): The keyword arguments that it takes, `None` for any.
        is_of_first (`bool`): Whether it needs segmented states as the first argument.
    """

    function: Callable[..., Any]
    keywords: frozenset[str] | None
    is_of_first: bool


NO_HANDLER = Handler(lambda *args, **kwargs: NotImplemented, None, False)


def map_states(function: Callable, value: Any) -> Any:
    """Replaces the segmented states in `value`, an argument of an operation: those in lists, too."""
    if isinstance(value, SegmentedStates):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)([map_states(function, item) for item in value])
    return value


def call(func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Calls an operation of torch with arguments among which there are segmented states, also in lists."""
    found = []

    def settle(states):
        settled = states.settle()
        if settled is states:
            found.append(states)
        return settled

    args = [map_states(settle, arg) for arg in args]
    kwargs = {name: map_states(settle, arg) for name, arg in kwargs.items()}
    if not found:
        return func(*args, **kwargs)
    name = func.__name__
    function, keywords, is_of_first = HANDLERS.get(name, NO_HANDLER)
    if (keywords is None or keywords >= kwargs.keys()) and (not is_of_first or isinstance(args[0], SegmentedStates)):
        result = function(func, *args, **kwargs)
        if result is not NotImplemented:
            return result

    def expand(states):
        return states.expand_rows(name)

    return func(*map_states(expand, args), **{name: map_states(expand, arg) for name, arg in kwargs.items()})


# ------------------------------------------------------------------------------------------------------------ operators
def _define_operator(name: str) -> None:
    def operator(self, *args):
        return call(getattr(torch.Tensor, name), (self, *args), {})

    operator.__name__ = name
    setattr(SegmentedStates, name, operator)


# Python looks them up on the class alone. What writes into the states has no handler, and gets a tensor of all rows
OPERATORS = """
    getitem setitem add radd sub rsub mul rmul truediv rtruediv floordiv mod pow rpow matmul rmatmul iadd isub imul itruediv
    neg abs eq ne lt le gt ge and or invert float int index iter contains array
"""
for _name in OPERATORS.split():
    if hasattr(torch.Tensor, f"__{_name}__"):
        _define_operator(f"__{_name}__")
# Tensors compare element by element, and are hashed by identity
SegmentedStates.__hash__ = object.__hash__
