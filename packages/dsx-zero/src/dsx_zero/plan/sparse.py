"""Parameters with sparse row gradients: the weights of `nn.Embedding` and `nn.EmbeddingBag` with `sparse=True`.

A weight that another module uses too, such as a head that is tied to the embedding, has a dense gradient and is not
one of them.
"""

from __future__ import annotations

from torch import nn

__all__ = ["sparse_parameters"]


def sparse_parameters(model: nn.Module) -> frozenset[str]:
    """All names of the parameters whose gradients autograd gives as indices and values."""
    sparse: set[int] = set()
    others: set[int] = set()
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        is_sparse = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        for name, parameter in module.named_parameters(recurse=False):
            (sparse if is_sparse and name == "weight" else others).add(id(parameter))
            names.setdefault(id(parameter), []).append(f"{path}.{name}" if path else name)
    return frozenset(name for key in sparse - others for name in names[key])
