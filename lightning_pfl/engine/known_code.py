"""Code of users that computes from a step's inputs and from attributes by known functions alone.

Such a step gives the same for the same inputs as long as the attributes, the functions and the
global numbers that it reads stay the same, so that it may be recorded. Its instructions are read,
not run, whichever way they would go. An attribute's name is looked up on every layer of a user's,
as the object in front of it isn't known. What isn't understood counts as unknown.
"""

from __future__ import annotations

import builtins
import sys
from abc import ABCMeta
from functools import partial
from inspect import getattr_static
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType
from typing import Any, NoReturn

import lightning as L
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_pfl.engine.epoch import EPOCH
from lightning_pfl.engine.instructions import (
    ASKS,
    ATTRIBUTES,
    COMPUTING,
    GLOBALS,
    codes_in,
    instructions,
    may_write,
    names_alone,
    read_of_first,
)
from lightning_pfl.engine.known_values import HARMLESS, held_by, is_constant
from lightning_pfl.engine.operators import replaced_functions
from lightning_pfl.engine.safety.snapshot import BOOKS, hooks_of, is_plain

Read = dict[tuple[Any, str], Any]
"""By owner and name: the functions and the numbers that code reads outside of layers."""
OURS = ("torch", "torchmetrics", "math", "typing", "lightning_pfl")
"""Packages whose functions read their arguments alone, but for :data:`READING`."""
DEFAULT, AROUND = "default", "around"
"""How names begin in :data:`Read` of what a function has besides its code and global names."""
FUNCTIONAL = "torch.nn.functional"
FRAMEWORKS = ("torch", "lightning", "builtins", "abc", "typing")
"""Packages whose classes aren't read."""
READING = frozenset(
    {
        *("load", "save", "from_file", "hub", "utils", "_C", "backends", "distributed", "jit"),
        *("ops", "cuda", "multiprocessing", "serialization", "package", "random", "compile"),
        *("get_default_dtype", "get_default_device", "set_default_dtype", "set_default_device"),
        *("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "Generator"),
        *("seed", "initial_seed", "manual_seed", "get_rng_state", "set_rng_state", "Tag"),
        *("default_generator", "get_num_threads", "set_num_threads", "set_grad_enabled"),
    }
)
"""Names in torch that read or set files, settings and generators, and those of modules."""
OUTSIDE = frozenset(
    {
        *("item", "tolist", "numpy", "data_ptr", "storage", "untyped_storage", "is_set_to", "set_"),
        *("backward", "grad", "grad_fn", "register_hook", "retain_grad", "share_memory_"),
        *("register_post_accumulate_grad_hook", "is_shared", "is_pinned", "module_load"),
        *("storage_offset", "format", "format_map"),
    }
)
"""Attributes by which a tensor's numbers reach Python, and a text or autograd what they hold."""
PLACES = frozenset(
    {
        *("view", "view_as", "view_as_complex", "view_as_real", "as_strided", "as_strided_"),
        *("stride", "is_contiguous", "is_non_overlapping_and_dense", "dim_order"),
        *("as_strided_scatter", "resize", "resize_", "resize_as", "resize_as_"),
    }
)
"""Names of functions whose results depend on how a tensor lies in memory."""
BUILTINS = frozenset(
    {
        *("len", "range", "zip", "enumerate", "reversed", "sorted", "slice", "isinstance", "map"),
        *("int", "float", "bool", "str", "tuple", "list", "dict", "set", "frozenset", "filter"),
        *("min", "max", "sum", "abs", "all", "any", "round", "divmod", "pow", "iter", "next"),
        *("super", "ValueError", "TypeError", "RuntimeError", "IndexError", "KeyError"),
        *("AssertionError", "NotImplementedError"),
    }
)
"""Functions of Python that read their arguments alone, and errors."""
LAYERS = frozenset(
    {
        *("forward", "training_step", "training", "device", "dtype", "log", "log_dict", "hparams"),
        *("parameters", "named_parameters", "buffers", "named_buffers", "children", "modules"),
        *("named_children", "named_modules", "to", "type", "float", "double", "half", "bfloat16"),
        "cpu",
    }
)
"""Attributes of all layers and LightningModules that read what recordings know, or a tensor's."""
OF_TRAINER = frozenset({EPOCH, "max_epochs", "max_steps"})
"""Numbers of a Trainer that stay while clients train or are evaluated: they change between."""
MAKES_NUMBERS = frozenset({"int", "float", "str", "range", "round", "divmod"})
"""Functions of Python that read a number's value."""
WALKS = frozenset({"children", "named_children", "modules", "named_modules"})
"""Attributes by which code reaches layers without their names."""
METRICS = "torchmetrics.classification.", "torchmetrics.regression.", "torchmetrics.aggregation"
"""Where torchmetrics has objects that sum up or list what they are given."""
CALLS = frozenset({"_call_impl", "_wrapped_call_impl"})
"""Names of torch's in a layer's class by which a call means something else."""
KNOWN_ELSEWHERE = frozenset(
    name
    for kind in (Tensor, dict, list, tuple, set, str, int, float)
    for name in dir(kind)
    if not name.startswith("_")
)
"""Attributes of tensors and of Python's own objects."""


class UnknownCodeError(Exception):
    """Code that may read anything, with what it does that isn't known."""


def read_by_step(module: nn.Module, step: str = "training_step", metrics: bool = False) -> Read:
    """Return what the code of a step reads outside of the module's layers.

    Its code, and that of functions that it calls, is read. Global names must be functions and
    modules of torch and the like, functions of users that are known themselves, or numbers;
    attributes must be layers, tensors, numbers, or functions that are known.

    Args:
        module: The user's module.
        step: The function that is called.
        metrics: Whether it may call torchmetrics objects that are attributes of users' layers, and
            log them; whoever runs it makes these calls elsewhere.

    Returns:
        These functions and global names, which code may replace later.

    Raises:
        UnknownCodeError: If it may read anything else.
    """
    if hooks_of(module):
        raise UnknownCodeError("layers have hooks")
    reader = CodeReader(module, metrics)
    reader.step(step)
    return reader.read


def is_still(read: Read) -> bool:
    """Whether functions and global names are what code has read, so that it does the same."""
    return all(_now(owner, name) is value for (owner, name), value in read.items())


def _now(owner: Any, name: str) -> Any:
    """Return what an entry of :data:`Read` would be now."""
    if isinstance(owner, nn.Module) or owner in (Tensor, Metric, L.Trainer, L.LightningModule):
        return None
    if isinstance(owner, str):
        return getattr(sys.modules.get(owner), "__dict__", {}).get(name)
    if isinstance(owner, type):
        return vars(owner).get(name)
    if name == "__code__":
        return owner.__code__
    kind, _, of = name.partition(" ")
    if kind in (DEFAULT, AROUND):
        return (_defaults(owner) if kind == DEFAULT else _around(owner)).get(of)
    return owner.__globals__.get(name, vars(builtins).get(name))


def _defaults(function: FunctionType) -> dict[str, Any]:
    """Return a function's defaults, by number or name."""
    found = {str(at): value for at, value in enumerate(function.__defaults__ or ())}
    return found | (function.__kwdefaults__ or {})


def _around(function: FunctionType) -> dict[str, Any]:
    """Return the values of the variables around a function that have one."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if cell != CellType()}


def asks_for_places(read: Read) -> bool:
    """Whether code names a function whose result depends on how a tensor lies in memory."""
    return any(name in PLACES for _, name in read)


def calls_metrics(read: Read) -> bool:
    """Whether code names a torchmetrics object."""
    return any(owner is Metric for owner, _ in read)


def tensors_of(read: Read) -> list[tuple[str, Tensor]]:
    """Return the tensors that attributes of layers hold and code may write to, with their names."""
    held = [(name, vars(owner).get(name)) for owner, name in read if isinstance(owner, nn.Module)]
    return [(name, value) for name, value in held if isinstance(value, Tensor)]


def numbers_of_trainer(module: nn.Module, read: Read, any_epoch: bool) -> tuple[Any, ...]:
    """Return the numbers of the Trainer that code reads, as they are now.

    Args:
        module: The module.
        read: What its code reads.
        any_epoch: Whether to leave out that of the round, which recordings follow.
    """
    parts = [part for part in module.modules() if isinstance(part, L.LightningModule)]
    trainer, found = vars(module).get("_trainer"), list[Any]()
    for owner, name in read:
        if owner not in (L.LightningModule, L.Trainer):
            continue
        for part in parts:
            # A layer may have another Trainer, or none.
            known = any_epoch and name == EPOCH and part._trainer is trainer
            value = getattr(part._trainer, name, None), part._trainer is None
            found.append((name, known or value))
    return tuple(found)


def reads_epoch(read: Read) -> bool:
    """Whether code reads the number of the round."""
    return any((owner, EPOCH) in read for owner in (L.LightningModule, L.Trainer))


class CodeReader:
    """Reads the code that a step of a module may run.

    Args:
        module: The user's module.
        metrics: As of :func:`read_by_step`.

    Attributes:
        read: What it has found outside of layers.
    """

    def __init__(self, module: nn.Module, metrics: bool) -> None:
        self.module = module
        parts = dict(module.named_modules())
        # By all of their names.
        every = dict(module.named_modules(remove_duplicate=False))
        found = [n for n, part in every.items() if isinstance(part, (Metric, MetricCollection))]
        plain = [
            part
            for name, part in parts.items()
            if not any(f"{name}.".startswith(f"{metric}.") for metric in found)
        ]
        # Code that doesn't name a torchmetrics object doesn't reach it.
        called = {
            name
            for name in (found if metrics else ())
            if _is_callable(every[name], every[name.rpartition(".")[0]])
        }
        self._hidden = {part for name in found if name not in called for part in name.split(".")}
        self._metrics = {name.rpartition(".")[2] for name in called}
        self._hidden |= WALKS if found else set()
        # What is set on a tensor isn't compared, nor what torch's layers have that isn't public.
        for part in parts.values():
            for place in (part._parameters, part._buffers, vars(part)):
                for one in place.values():
                    if isinstance(one, Tensor):
                        self._hidden.update(vars(one))
        self._layers = [part for part in plain if is_torchs(part) and part is not module]
        self._own = [part for part in plain if part is module or not is_torchs(part)]
        kinds = dict.fromkeys(kind for part in self._own for kind in type(part).__mro__)
        self._kinds = [kind for kind in kinds if package_of(kind) not in FRAMEWORKS]
        self._begin()

    def _begin(self) -> None:
        """Begin with nothing read."""
        self.read: Read = {}
        self._seen: set[Any] = set()
        # Lists, dicts and objects that are read, and whether code may write to any.
        self._held: list[Any] = []
        self._writes = False
        # Attributes that no layer has, with the methods that read them of `self`, and functions
        # that are called with other first arguments.
        self._absent: list[tuple[FunctionType, str]] = []
        self._unbound: set[FunctionType] = set()

    def step(self, name: str) -> None:
        """Read a step."""
        for part in self._own:
            self._require_usual(part)
        for layer in self._layers:
            self._require_known_settings(layer)
        for replaced, function in replaced_functions().items():  # which layers of torch call, too
            self.read[FUNCTIONAL, replaced] = function
            self._require_known_function(replaced, function)
        self._attribute(name)
        # Called by the engines, and where a layer is called.
        for called in ("per_sample", "forward"):
            if any(called in vars(one) for one in (*self._kinds, *self._own)):
                self._attribute(called)
        if self._held:
            self._require_unwritten()
        self._require_layers_alone()
        self._require_arithmetic()

    def _require_layers_alone(self) -> None:
        """Require that what reads an attribute that no layer has is called with layers alone.

        Then it is an error where code comes to it, or what `getattr` has for this case.
        """
        named = any(isinstance(one, type) and one in self._kinds for one in self.read.values())
        for function, name in self._absent:
            if named or function in self._unbound:
                unknown(f"it reads an attribute {name!r}")

    def _require_arithmetic(self) -> None:
        """Require that code doesn't compute by Python's functions where it reads the round.

        A recording for each round would take more time than its steps.
        """
        for owner, name in self.read if reads_epoch(self.read) else ():
            if owner == "math" or (isinstance(owner, FunctionType) and name in MAKES_NUMBERS):
                unknown(f"it reads the epoch, and computes by {name!r}")

    def _require_unwritten(self) -> None:
        """Require that code doesn't write to what it reads, nor reads a default of its class."""
        if self._writes:
            kind = type(self._held[0]).__name__
            unknown(f"it reads a {kind}, and may write to it by `+=`, `[...] =` or a function")
        for record in filter(is_plain, self._held):
            classes = {name for kind in type(record).__mro__[:-1] for name in vars(kind)}
            if found := sorted((self._seen & classes) - vars(record).keys()):
                unknown(f"it reads {found[0]!r} of {type(record).__name__}")

    # --- layers ---

    def _require_usual(self, part: nn.Module) -> None:
        """Require that attributes, operators and calls of a layer mean what they always do."""
        kinds = [kind for kind in type(part).__mro__ if kind in self._kinds]
        special = {name for kind in kinds for name in vars(kind) if name.startswith("__")}
        special = special - HARMLESS | {
            name for kind in kinds for name in CALLS & vars(kind).keys()
        }
        if special or type(type(part)) not in (type, ABCMeta):
            unknown(f"{type(part).__name__} defines {', '.join(sorted(special)) or 'its class'}")

    def _require_known_settings(self, layer: nn.Module) -> None:
        """Require that a layer of torch has no object of a user's, such as an activation."""
        for name, value in vars(layer).items():
            users = hasattr(value, "__dict__") and package_of(type(value)) not in FRAMEWORKS
            if not name.startswith("_") and (users or isinstance(value, FunctionType)):
                self._value(name, value)

    def _require_known_function(self, name: str, function: Any) -> None:
        """Require what is in the place of one of torch's to be known, whatever it is named."""
        if isinstance(function, FunctionType):
            self._function(function)
        else:
            self._value(name, function)

    # --- attributes ---

    def _attribute(self, name: str) -> None:
        """Require an attribute to be what recordings know, whichever object it is of."""
        if name in self._seen:
            return
        self._seen.add(name)
        if name in PLACES:
            self.read[Tensor, name] = None
        if name in self._metrics:
            self.read[Metric, name] = None
        private = name.startswith("_") and any(name in vars(layer) for layer in self._layers)
        if private or name.startswith("__") or name in OUTSIDE or name in self._hidden:
            unknown(f"it reads an attribute {name!r}")
        for part in (*self._own, *self._layers):
            if isinstance(part, nn.Module) and type(vars(part).get(name)) is Tensor:
                self.read[part, name] = None
        for layer in self._layers:
            if name in vars(layer):  # which a user may have set
                self._value(name, vars(layer)[name])
        for kind in self._kinds:
            if name in vars(kind):
                self._of_class(kind, name)
        found = [self._is_attribute(part, name) for part in self._own]
        of_object = any(name in vars(one) for one in self._held if is_plain(one))
        if any(found) or of_object or name in KNOWN_ELSEWHERE:
            return
        if name.startswith("_") or not any(_has(layer, name) for layer in self._layers):
            unknown(f"it reads an attribute {name!r}")

    def _is_attribute(self, part: nn.Module, name: str) -> bool:
        """Whether a layer has an attribute, which then is required to be known."""
        held = vars(part)
        lightnings = isinstance(part, L.LightningModule)
        if name in held and not (lightnings and name == "log"):
            if lightnings and name in BOOKS and name != "training":
                unknown(f"it reads {name!r}")
            self._value(name, held[name])
            return True
        definer = next((kind for kind in type(part).__mro__ if name in vars(kind)), None)
        if definer is None:
            return _has(part, name)
        if definer is L.LightningModule and name in OF_TRAINER:
            self.read[definer, name] = None
            return True
        if definer not in self._kinds and not (name in LAYERS or _is_layer(definer)):
            unknown(f"it reads {name!r} of {definer.__name__}")
        function = vars(definer)[name]
        known = definer in self._kinds or package_of(function) in FRAMEWORKS
        if isinstance(function, FunctionType) and not known:
            unknown(f"{name!r} of {definer.__name__} is replaced")
        return True

    def _of_class(self, kind: type, name: str) -> None:
        """Require an attribute of a class to be a known function, or a number."""
        value, bound = vars(kind)[name], issubclass(kind, nn.Module)
        self.read[kind, name] = value
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
            bound = False
        elif isinstance(value, property):
            value = value.fget
        if isinstance(value, FunctionType):
            self._function(value, bound)
        elif not is_constant(value):
            unknown(f"{name!r} is a {type(value).__name__}")

    def _value(self, name: str, value: Any) -> None:
        """Require an attribute of an object to be a number, a tensor or a known function."""
        if is_constant(value) or type(value) in (Tensor, nn.Parameter):
            return
        if self._is_followed(name, value):
            return
        if not isinstance(value, (FunctionType, BuiltinFunctionType)):
            unknown(f"{name!r} is a {type(value).__name__}")
        self._known(name, value)

    def _is_followed(self, name: str, value: Any) -> bool:
        """Whether recordings depend on what an attribute holds, and not on which object it is."""
        if (held := held_by(value)) is not None:
            self._held += held
            return True
        if type(value) is partial and all(
            map(is_constant, (*value.args, *value.keywords.values()))
        ):
            self._known(name, value.func)
            return True
        return False

    def _hyperparameter(self, name: str, default: bool = False) -> None:
        """Require an entry of ``self.hparams`` to be a number.

        Args:
            name: Its name.
            default: Whether there may be none.
        """
        for part in self._own:
            if isinstance(part, L.LightningModule):
                held = dict(part.hparams)
                if not (is_constant(held[name]) if name in held else default):
                    unknown(f"it reads {name!r} of hparams")

    # --- functions ---

    def _function(self, function: FunctionType, bound: bool = False) -> None:
        """Require a function of a user's to read its arguments and known names alone.

        Args:
            function: The function.
            bound: Whether it is found as a method of layers, the first argument of which is one.
        """
        if not bound:
            self._unbound.add(function)
        if function in self._seen:
            return
        self._seen.add(function)
        defaults = _defaults(function)
        more = [name for name in vars(function) if not name.startswith("__")]
        if more or not all(map(is_constant, defaults.values())):
            unknown(f"{function.__qualname__} has attributes, or objects as defaults")
        # These can be replaced, too.
        self.read[function, "__code__"] = function.__code__
        self.read.update({(function, f"{DEFAULT} {at}"): value for at, value in defaults.items()})
        self._closure(function)
        of_first = read_of_first(function.__code__) if bound else frozenset[str]()
        absent = {name for name in of_first if not any(_has(part, name) for part in self._own)}
        for code in codes_in(function.__code__):
            outer = code is function.__code__
            self._code(function, instructions(code), absent if outer else set())

    def _closure(self, function: FunctionType) -> None:
        """Require the variables around a function to be numbers or known functions, which stay."""
        names, around = function.__code__.co_freevars, _around(function)
        for name in names:
            if name == "__class__":
                continue
            if name not in around:
                unknown(f"{name!r} around {function.__qualname__} has no value")
            value = self.read[function, f"{AROUND} {name}"] = around[name]
            if not is_constant(value):
                self._known(name, value)
        for code in codes_in(function.__code__):
            for kind, name in instructions(code):
                if kind in ("STORE_DEREF", "DELETE_DEREF") and name in names:
                    unknown(f"{function.__qualname__} changes {name!r} around it")

    def _code(self, function: FunctionType, code: list[tuple[str, Any]], absent: set[str]) -> None:
        # This package's own code has no lists, dicts and objects of a user's.
        at, ours = 0, package_of(function) == "lightning_pfl"
        while at < len(code):
            kind, name = code[at]
            at += 1
            self._writes |= not ours and may_write(kind, name)
            if kind in GLOBALS:
                at = self._name(function, name, code, at)
            elif kind == ASKS:
                self.read[function, name] = vars(builtins).get(name)
                if name in function.__globals__:
                    unknown(f"it calls {name!r}")
            elif kind in ATTRIBUTES and name == "hparams":
                at = self._hparams(code, at)
            elif kind in ATTRIBUTES and name == "trainer":
                at = self._trainer(code, at)
            elif kind in ATTRIBUTES and name in absent:
                self._absent.append((function, name))
            elif kind in ATTRIBUTES:
                self._attribute(name)
            elif kind == "LOAD_DEREF" and name == "__class__":
                if code[at + 1][0] != "LOAD_SUPER_ATTR":  # which is Python's for `super()`
                    unknown(f"{function.__qualname__} reads '__class__'")
            elif not kind.startswith(COMPUTING):
                unknown(f"{function.__qualname__} changes, imports or catches something ({kind})")

    def _name(self, function: FunctionType, name: str, code: list[tuple[str, Any]], at: int) -> int:
        """Require a global name to be known; return the position behind it and its attributes."""
        if name not in function.__globals__:
            self.read[function, name] = vars(builtins).get(name)
            if name not in BUILTINS:
                unknown(f"it calls {name!r}")
            if name == "super":  # which the module's `log`, replaced for a step, isn't found by
                follows = next((one for kind, one in code[at:] if kind in ATTRIBUTES), "")
                if follows in ("log", "log_dict", "hparams"):
                    unknown(f"it calls super().{follows}")
            return at
        value = self.read[function, name] = function.__globals__[name]
        while isinstance(value, ModuleType):
            kind, part = code[at] if at < len(code) else ("", "")
            known = kind in ATTRIBUTES and part in vars(value) and part not in READING
            if not known or value.__name__.partition(".")[0] not in OURS:
                unknown(f"it reads {part!r} of {value.__name__}")
            owner, value = value.__name__, vars(value)[part]
            self.read[owner, part] = value
            name, at = part, at + 1
        if not is_constant(value):
            self._known(name, value)
        return at

    def _known(self, name: str, value: Any) -> None:
        """Require a class or a function to be one of torch and the like, or to be known."""
        ours = package_of(value) in OURS
        if isinstance(value, FunctionType) and not ours:
            self._function(value)
            return
        if isinstance(value, type) and value in self._kinds:  # `Base.training_step(self, batch)`
            return
        parts = {getattr(value, "__name__", "")}
        if not isinstance(value, BuiltinFunctionType):  # most operators' module is torch._C
            parts.update(str(getattr(value, "__module__", "")).split("."))
        usual = isinstance(value, (type, FunctionType, BuiltinFunctionType))
        # Not a generator's or a list's, as `random.getrandbits` is and `[1].pop`.
        usual &= isinstance(getattr(value, "__self__", None), (type, ModuleType, type(None)))
        usual &= not (isinstance(value, type) and issubclass(value, (Metric, MetricCollection)))
        if not (usual and ours and READING.isdisjoint(parts)):
            unknown(f"it reads {name!r}")

    def _hparams(self, code: list[tuple[str, Any]], at: int) -> int:
        """Require what is done with ``hparams`` to be known; return the position behind it.

        That is ``hparams.name``, ``hparams["name"]``, ``hparams.get("name")`` and ``in hparams``.
        """
        self._attribute("hparams")  # which a layer may hold, too
        kind, name = code[at]
        if any("hparams" in vars(one) for one in self._kinds):
            unknown("it reads hparams")
        if kind == "CONTAINS_OP":
            return at
        if kind in ATTRIBUTES and name == "get" and names_alone(code, at + 1, 0):
            self._hyperparameter(code[at + 1][1], default=True)
            return at + 2
        stands = kind == "LOAD_CONST" and isinstance(name, str)
        if stands and code[at + 1][0] not in ("BINARY_SUBSCR", "BINARY_OP"):
            stands = False
        if not (stands or kind in ATTRIBUTES):
            unknown("it reads hparams")
        self._hyperparameter(name)
        return at + 1

    def _trainer(self, code: list[tuple[str, Any]], at: int) -> int:
        """Require ``trainer.name`` to be a number that is known; return the position behind it."""
        kind, name = code[at] if at < len(code) else ("", "")
        usual = all(_is_usual_trainer(part, name) for part in self._own)
        usual &= isinstance(self.module, L.LightningModule)
        if not (usual and kind in ATTRIBUTES and name in OF_TRAINER):
            unknown("it reads an attribute 'trainer'")
        self.read[L.Trainer, name] = None
        return at + 1


def unknown(why: str) -> NoReturn:
    """Refuse code that does something that isn't known."""
    raise UnknownCodeError(why)


def package_of(value: Any) -> str:
    """Return the package of a class or a function; that of operators has no name.

    A decorator may give a function another's module (``functools.wraps``): it is of no package.
    """
    package = str(getattr(value, "__module__", None) or "torch").partition(".")[0]
    if isinstance(value, FunctionType):
        where = str(value.__globals__.get("__name__")).partition(".")[0]
        return package if package == where else ""
    return package


def is_torchs(layer: nn.Module) -> bool:
    """Whether a layer, and what it computes, is torch's or this package's."""
    where = ("torch.nn.modules.", "lightning_pfl.models.")
    # Not called where it is a property, as of TorchScript's layers, which a class doesn't have.
    forward = getattr(getattr_static(type(layer), "forward"), "__module__", None) or ""
    known = type(layer).__module__.startswith(where) and forward.startswith(where)
    return known and "forward" not in vars(layer)


def _is_callable(metric: nn.Module, owner: nn.Module) -> bool:
    """Whether a torchmetrics object is an attribute, and has one result however it is called.

    Its state is the same after ``forward`` as after ``update``, as those of its kinds are sums and
    lists.
    """
    kind = type(metric)
    usual = issubclass(kind, Metric) and kind.forward is Metric.forward
    kept = not list(metric.children()) and "forward" not in vars(metric)
    return usual and kept and kind.__module__.startswith(METRICS) and not is_torchs(owner)


def _is_usual_trainer(part: nn.Module, name: str) -> bool:
    """Whether a layer's ``trainer`` is Lightning's, with Lightning's attribute of a name."""
    if not isinstance(part, L.LightningModule):
        return not _has(part, "trainer")
    kind = type(part._trainer)
    plain = part._trainer is None or getattr(kind, name, None) is getattr(L.Trainer, name, None)
    found = getattr(type(part), "trainer", None)
    return plain and part._fabric is None and found is L.LightningModule.trainer


def _has(part: nn.Module, name: str) -> bool:
    """Whether a layer has an attribute; no code of it runs."""
    held = vars(part)
    places = (held, held["_parameters"], held["_buffers"], held["_modules"])
    return any(name in place for place in (*places, *map(vars, type(part).__mro__)))


def _is_layer(kind: type) -> bool:
    return kind.__module__.startswith("torch.nn.modules.") and kind is not nn.Module
