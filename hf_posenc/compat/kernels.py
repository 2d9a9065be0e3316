"""torch: a context that intercepts every kernel that runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class KernelMode(TorchDispatchMode):
    """A context in which every kernel below autograd is run through `kernel`. Subclasses override that."""

    def kernel(self, name: str, args: Any, run: Callable[[], Any]) -> Any:
        """The result of the kernel of that name; `run()` computes it."""
        return run()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.kernel(str(func), args, partial(func, *args, **(kwargs or {})))


def detach_all(values: Any) -> Any:
    """Detach every tensor in a nested structure."""
    return tree_map_only(Tensor, Tensor.detach, values)
