"""What somebody adds to a network from outside: hooks of layers and of parameters, a `forward` set on an object."""

import copy
from typing import Any, TypeVar

from torch import Tensor, nn

from fedskew.errors import ArgumentError
from fedskew.models._dropout import Draws, count_anew

_KINDS = ("forward", "forward_pre", "backward", "backward_pre")
_Module = TypeVar("_Module", bound=nn.Module)


def is_plain(layer: nn.Module) -> bool:
    """Return whether a layer is what its class says, with no hook but that of dropout, and no `forward` of its own."""
    own = any(parameter_hooks(parameter) for parameter in layer.parameters(recurse=False))
    return not own and layer_hooks(layer) in ([], [count_anew]) and "forward" not in vars(layer)


def layer_hooks(layer: nn.Module) -> list[Any]:
    """Return the hooks that see a layer's passes."""
    return [hook for kind in _KINDS for hook in vars(layer)[f"_{kind}_hooks"].values()]


def parameter_hooks(parameter: Tensor) -> list[Any]:
    """Return the hooks that see a parameter's gradient (`register_hook`)."""
    return list((parameter._backward_hooks or {}).values())


def has_global_hooks() -> bool:
    """Return whether PyTorch has hooks of all modules."""
    return any(vars(nn.modules.module)[f"_global_{kind}_hooks"] for kind in _KINDS)


def hooks_of(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the hooks of a network, but the one that counts the uses of dropout layers, and what each belongs to."""
    layers = [(f"layer {name!r}" if name else "the network", layer) for name, layer in module.named_modules()]
    of_layers = [(what, hook) for what, layer in layers for hook in layer_hooks(layer) if hook is not count_anew]
    named = module.named_parameters()
    return of_layers + [(f"parameter {name!r}", hook) for name, one in named for hook in parameter_hooks(one)]


def added_to(module: nn.Module) -> str | None:
    """Say in words what a network has beside its classes' own code, the first such thing; None: nothing."""
    if has_global_hooks():
        return "PyTorch has a hook of all modules"
    if any(isinstance(layer, Draws) for layer in module.modules()):
        return "the network draws by calls such as functional.dropout"
    own = (f"layer {name!r} has a forward of its own" for name, one in module.named_modules() if "forward" in vars(one))
    return next((f"{what} has a hook" for what, _ in hooks_of(module)), next(own, None))


def check_added(module: nn.Module) -> None:
    """Raise ArgumentError where a parameter has a hook that training would never call."""
    for name, parameter in module.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            raise ArgumentError(
                f"module: {name!r} has a hook for accumulated gradients, and none are accumulated here; take "
                "register_hook in place of register_post_accumulate_grad_hook"
            )


def copied(module: _Module) -> _Module:
    """Copy a network with the hooks of its parameters, which `copy.deepcopy` leaves out.

    Raises:
        ArgumentError: A hook, or a `forward` of an object, has closed over a part of the network, and would go on to
            use that in place of the copy's; or a parameter has a hook that training would never call.
    """
    check_added(module)
    parts = {id(part) for part in (*module.modules(), *module.parameters(), *module.buffers())}
    forwards = [(name, vars(layer)["forward"]) for name, layer in module.named_modules() if "forward" in vars(layer)]
    for what, function in [*hooks_of(module), *((f"the forward of layer {name!r}", one) for name, one in forwards)]:
        if any(id(cell.cell_contents) in parts for cell in getattr(function, "__closure__", None) or ()):
            raise ArgumentError(
                f"{what} has a function that uses the network itself, and a copy's would use the original"
            )
    memo: dict[int, Any] = {}
    made = copy.deepcopy(module, memo)
    for parameter, own in zip(module.parameters(), made.parameters(), strict=True):
        for hook in parameter_hooks(parameter):
            own.register_hook(copy.deepcopy(hook, memo))
    return made
