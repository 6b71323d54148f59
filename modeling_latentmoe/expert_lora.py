"""The only file that knows how PEFT attaches adapters to stacked expert parameters.

`LoraConfig(target_parameters=["experts.gate_up_proj", "experts.down_proj"])` nests one `ParamWrapper` per
parameter around the experts module. A wrapper's own forward adds B A to the whole stack of weights; here its
factors are read instead, so that no tensor of the size of the weights is made, and packed weights need not be
decoded for it. Creation, names, saving and loading stay PEFT's. Written against peft 0.21.
"""

import torch
from torch import Tensor, nn

from .ops import LowRank


class LogicalShapes:
    """Mixin of a module whose packed parameters stand for larger float ones.

    `logical_shapes` maps a stem ("gate_up") to the float shape of its "{stem}_proj" parameter. PEFT sizes the
    factors of a parameter by its `ds_shape` attribute, if present, instead of `shape`. The attribute is set
    again wherever torch or transformers exchange the parameter object.
    """

    logical_shapes: dict[str, torch.Size]

    def _tag(self) -> None:
        for stem, shape in self.__dict__.get("logical_shapes", {}).items():
            param = self._parameters.get(f"{stem}_proj")
            if param is not None and not param.is_floating_point():
                param.ds_shape = shape

    # Also reached by setattr, with which `from_pretrained` fills in loaded parameters.
    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._tag()

    # to(), to_empty()
    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        self._tag()
        return self

    # copy.deepcopy, pickle
    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._tag()


def unwrap_experts(
    module: nn.Module, experts_type: type[nn.Module]
) -> tuple[nn.Module, dict[str, tuple[LowRank, ...]]]:
    """The experts module inside PEFT's wrappers, and its active adapters by stem ("gate_up", "down").

    Disabled, inactive and merged adapters are left out. TypeError for any other wrapper (another tuner, DoRA,
    modules_to_save); ValueError for factors that do not fit the logical shapes and for mixed-batch adapters,
    whose hooks on the wrapper would not run.
    """
    adapters: dict[str, list[LowRank]] = {}
    wrappers = []
    while not isinstance(module, experts_type):
        if type(module).__name__ != "ParamWrapper":
            raise TypeError(
                f"{type(module).__name__} around routed experts is not supported: adapt them with "
                f'LoraConfig(target_parameters=["experts.gate_up_proj", "experts.down_proj"])'
            )
        if module._forward_pre_hooks:
            raise ValueError("routed experts do not support one adapter per row of a batch (adapter_names)")
        wrappers.append(module)
        module = module.base_layer
    for wrapper in wrappers:
        if wrapper.disable_adapters:
            # As its own forward would: switching off merged adapters takes them out of the weights.
            if wrapper.merged:
                wrapper.unmerge()
            continue
        if wrapper.merged:
            continue
        stem = wrapper.parameter_name.removesuffix("_proj")
        for name in wrapper.active_adapters:
            if name in wrapper.lora_A:
                factors = _factors(
                    wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, module.logical_shapes[stem]
                )
                adapters.setdefault(stem, []).append(LowRank(*factors, wrapper.scaling[name]))
    return module, {stem: tuple(factors) for stem, factors in adapters.items()}


def _factors(a: Tensor, b: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """PEFT's two matrices -> (A [E, r, in], B [E, out, r]): rows of A expert by expert."""
    experts, rows, columns = shape
    if a.shape[1] != columns or b.shape[0] != rows or a.shape[0] % experts or a.shape[0] != b.shape[1]:
        raise ValueError(
            f"LoRA factors {list(a.shape)} and {list(b.shape)} do not fit expert weights {list(shape)}: "
            f"packed experts need peft >= 0.21"
        )
    return a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 0, 1)
