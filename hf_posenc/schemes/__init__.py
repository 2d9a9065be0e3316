"""All schemes, one file each. A new file in this folder is registered, exported, tested and listed automatically."""

from importlib import import_module
from pkgutil import iter_modules

# Listed for type checkers and editors only: the loop at the end imports files that are not listed here as well.
from .alibi import Alibi
from .axial_rope import AxialRope
from .base import SCHEMES, Scheme, register_scheme, scheme_from
from .clip import Clip
from .dca import Dca
from .deberta import Deberta
from .dynamic_ntk import DynamicNtk
from .fire import Fire
from .forgetting import Cable, Fox
from .fourier import Fourier
from .kerple import Kerple
from .learned import Learned
from .linear import Linear
from .llama3 import Llama3
from .longrope import LongRope
from .none import NoPositions
from .ntk import Ntk
from .proportional import Proportional
from .rerope import Rerope
from .rope import Rope
from .sandwich import Sandwich
from .self_extend import SelfExtend
from .shaw import Shaw
from .sinusoidal import Sinusoidal
from .streaming import LmInfinite, Streaming
from .string import String
from .t5 import T5
from .transformer_xl import TransformerXL
from .window import Sparse, Window
from .yarn import Yarn

__all__ = [
    "SCHEMES",
    "T5",
    "Alibi",
    "AxialRope",
    "Cable",
    "Clip",
    "Dca",
    "Deberta",
    "DynamicNtk",
    "Fire",
    "Fourier",
    "Fox",
    "Kerple",
    "Learned",
    "Linear",
    "Llama3",
    "LmInfinite",
    "LongRope",
    "NoPositions",
    "Ntk",
    "Proportional",
    "Rerope",
    "Rope",
    "Sandwich",
    "Scheme",
    "SelfExtend",
    "Shaw",
    "Sinusoidal",
    "Sparse",
    "Streaming",
    "String",
    "TransformerXL",
    "Window",
    "Yarn",
    "register_scheme",
    "scheme_from",
]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
for _class in SCHEMES.registered().values():
    if _class.__name__ not in __all__:
        globals()[_class.__name__] = _class
        __all__.append(_class.__name__)
