"""Configuration of latentmoe models: text decoder, vision tower, and the two composed.

Field names, nesting and defaults are those of the released Kimi-K3 `config.json`, which is read unchanged
(`model_type: kimi_k3`); what is written back has `model_type: latentmoe`.

    LatentMoEConfig              root: text_config + vision_config (None = text only) + special token ids
    LatentMoETextConfig          decoder: KDA / gated MLA / gated DSA layers, latent MoE, attention residuals
    LatentMoEVisionConfig        MoonViT tower and projector
"""

import copy
from dataclasses import field
from typing import Any

import transformers
from transformers import PreTrainedConfig

SUPPORTED_TRANSFORMERS = ("5.22", "5.23", "5.24")
if ".".join(transformers.__version__.split(".")[:2]) not in SUPPORTED_TRANSFORMERS:
    raise ImportError(
        f"latentmoe supports transformers {', '.join(SUPPORTED_TRANSFORMERS)} but {transformers.__version__} is "
        f'installed: run `pip install "transformers>=5.22,<5.25"`'
    )

# Our own name: "compressed-tensors" belongs to the in-tree quantizer, which needs a package and has no packed experts.
QUANT_METHOD = "latentmoe_mxfp4"
RELEASED_MODEL_TYPE = "kimi_k3"
PACKED_FORMAT = "mxfp4-pack-quantized"
MXFP4_GROUP = 32

# Where fused operations come from, see kernel_loading.py.
KERNELS = ("auto", "torch", "hub")

LINEAR, FULL, INDEXED = "linear_attention", "full_attention", "indexed_attention"

AUTO_MAP = {
    "AutoConfig": "configuration_latentmoe.LatentMoEConfig",
    "AutoModel": "modeling_latentmoe.LatentMoEForConditionalGeneration",
    "AutoModelForCausalLM": "modeling_latentmoe.LatentMoEForConditionalGeneration",
    "AutoModelForImageTextToText": "modeling_latentmoe.LatentMoEForConditionalGeneration",
}
TEXT_AUTO_MAP = {
    "AutoConfig": "configuration_latentmoe.LatentMoETextConfig",
    "AutoModel": "modeling_latentmoe.LatentMoEModel",
    "AutoModelForCausalLM": "modeling_latentmoe.LatentMoEForCausalLM",
}

# What a text_config read from a file means by leaving a field out: as in the released classes, the part is absent.
_ABSENT_FROM_FILE = {
    "num_experts": None,
    "routed_expert_hidden_size": None,
    "latent_moe_use_norm": False,
    "mla_use_output_gate": False,
    "linear_attn_config": None,
}
# Stands for a vision_config that was not given, which differs from null.
_NOT_GIVEN: dict[str, Any] = {}

_K3_FULL_ATTENTION = [*range(4, 93, 4), 93]


def _k3_linear_attn_config() -> dict[str, Any]:
    return {
        "full_attn_layers": list(_K3_FULL_ATTENTION),
        "kda_layers": [i for i in range(1, 94) if i not in _K3_FULL_ATTENTION],
        "num_heads": 96,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
    }


def _released_quantization() -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": MXFP4_GROUP,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": PACKED_FORMAT,
        "config_groups": {"group_0": {"weights": weights}},
    }


def own_quantization(quantization: dict[str, Any] | Any | None) -> dict[str, Any] | Any | None:
    """Released (`compressed-tensors`, mxfp4-pack-quantized) or own quantization dict -> own dict.

    Raises ValueError for any other format or group size: their bytes would decode to wrong weights in silence.
    Objects (a quantization config set by transformers while loading) pass through.
    """
    if not isinstance(quantization, dict):
        return quantization
    method, layout = quantization.get("quant_method"), quantization.get("format", PACKED_FORMAT)
    if method not in ("compressed-tensors", QUANT_METHOD):
        raise ValueError(f"quantization_config.quant_method: {method!r} is not supported, expected {QUANT_METHOD!r}")
    if layout != PACKED_FORMAT:
        raise ValueError(f"quantization_config.format: {layout!r} is not supported, expected {PACKED_FORMAT!r}")
    for name, group in quantization.get("config_groups", {}).items():
        size = group.get("weights", {}).get("group_size", MXFP4_GROUP)
        if size != MXFP4_GROUP:
            raise ValueError(
                f"quantization_config.config_groups.{name}.weights.group_size: {size}, must be {MXFP4_GROUP}"
            )
    own = {"quant_method": QUANT_METHOD, "format": PACKED_FORMAT}
    if quantization.get("dequantize"):
        own["dequantize"] = True
    return own


def is_packed(quantization: dict[str, Any] | Any | None) -> bool:
    """True when experts stay MXFP4 in memory: a quantization config that does not ask for `dequantize`."""
    if quantization is None:
        return False
    values = quantization if isinstance(quantization, dict) else vars(quantization)
    return not values.get("dequantize", False)


def _from_file(text: dict[str, Any]) -> dict[str, Any]:
    """text_config of a file, with the parts that it does not name switched off."""
    if "hidden_size" not in text:
        return text
    text = {LatentMoETextConfig.attribute_map.get(name, name): value for name, value in text.items()}
    return _ABSENT_FROM_FILE | text


def _is_count(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


class LatentMoETextConfig(PreTrainedConfig):
    """Text decoder. Defaults are the released Kimi-K3.

    `linear_attn_config.kda_layers` / `full_attn_layers` are 1-based as released; `layer_types` is the 0-based list
    derived from them: "linear_attention" (KDA), "full_attention" (gated MLA), "indexed_attention" (gated DSA: an MLA
    layer whose `indexer_types` entry is "full" or "shared"). `linear_attn_config=None` means that every layer is MLA.
    `linear_attn_config.gate_lower_bound` absent or null selects the softplus decay gate; it is never assumed.
    `index_kpool` above 1 lets the indexer choose pools of so many keys, of which index_topk must be a multiple, and
    `learnable_sink` gives every head of attention layers a sink; indexers and attention have no rotary embedding.
    `num_experts` None or 0 gives a dense model; `routed_expert_hidden_size` None gives experts at model width.

    Fields that are not passed to the constructor are the released ones. A file (`from_pretrained`, `from_dict`) that
    names `hidden_size` describes its own model instead, and a part that it does not name is absent, as in the released
    classes: no `num_experts` is dense, no `routed_expert_hidden_size` is experts at model width, no
    `latent_moe_use_norm` or `mla_use_output_gate` is false, no `linear_attn_config` is MLA in every layer.
    Files that this class writes name every field.
    """

    model_type = "latentmoe_text"
    base_config_key = "text_config"
    attribute_map = {"num_experts_per_tok": "num_experts_per_token", "num_local_experts": "num_experts"}  # noqa: RUF012

    vocab_size: int = 163840
    hidden_size: int = 7168
    num_hidden_layers: int = 93
    num_attention_heads: int = 96
    num_key_value_heads: int | None = 96
    intermediate_size: int = 33792
    hidden_act: str = "situ"
    activation_situ_beta: float | None = 4.0
    activation_situ_linear_beta: float | None = 25.0
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    max_position_embeddings: int = 1048576
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    mla_use_nope: bool = True
    mla_use_output_gate: bool = True
    num_experts: int | None = 896
    num_experts_per_token: int | None = 16
    num_shared_experts: int | None = 2
    moe_intermediate_size: int | None = 3072
    routed_expert_hidden_size: int | None = 3584
    latent_moe_use_norm: bool = True
    moe_layer_freq: int = 1
    first_k_dense_replace: int = 1
    moe_router_activation_func: str = "sigmoid"
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    use_grouped_topk: bool = True
    num_expert_group: int = 1
    topk_group: int = 1
    topk_method: str = "noaux_tc"
    attn_res_block_size: int = 12
    num_nextn_predict_layers: int = 0
    tie_word_embeddings: bool = False
    use_cache: bool = True
    output_router_logits: bool = False
    bos_token_id: int | None = 163584
    eos_token_id: int | list[int] | None = 163586
    pad_token_id: int | None = 163839
    linear_attn_config: dict | None = field(default_factory=_k3_linear_attn_config)
    layer_types: list[str] | None = None
    index_topk: int | None = None
    index_n_heads: int = 64
    index_head_dim: int = 128
    indexer_types: list[str] | None = None
    index_relu: bool = True
    index_kpool: int = 1
    index_kpool_always_select_tail: bool = True
    learnable_sink: bool = False

    def __post_init__(self, **kwargs):
        # The released nested auto_map / architectures name classes of another repository.
        if not all("latentmoe" in target for target in kwargs.get("auto_map", TEXT_AUTO_MAP).values()):
            kwargs.pop("auto_map")
        kwargs.setdefault("auto_map", dict(TEXT_AUTO_MAP))
        quantization = own_quantization(kwargs.pop("quantization_config", None))
        if quantization is not None:
            kwargs["quantization_config"] = quantization
        super().__post_init__(**kwargs)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        derived = self._derive_layer_types()
        if self.layer_types is not None and list(self.layer_types) != derived:
            raise ValueError(
                "text_config.layer_types contradicts linear_attn_config / indexer_types: remove it or make them agree"
            )
        self.layer_types = derived
        self._validate()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "LatentMoETextConfig":
        return super().from_dict(_from_file(config_dict), **kwargs)

    def _derive_layer_types(self) -> list[str]:
        n, linear = self.num_hidden_layers, self.linear_attn_config
        if not _is_count(n):
            raise ValueError(f"num_hidden_layers: {n!r}, must be a positive integer")
        kinds = [FULL] * n
        if linear is not None:
            if not isinstance(linear, dict):
                raise ValueError(f"linear_attn_config: {linear!r}, must be an object or null")
            kda, full = linear.get("kda_layers"), linear.get("full_attn_layers")
            if kda is None or full is None:
                raise ValueError("linear_attn_config: kda_layers and full_attn_layers (1-based) are both required")
            if not isinstance(kda, list | tuple) or not isinstance(full, list | tuple):
                raise ValueError(f"linear_attn_config: kda_layers {kda!r} and full_attn_layers {full!r} must be lists")
            if sorted([*kda, *full]) != list(range(1, n + 1)):
                raise ValueError(
                    f"linear_attn_config: kda_layers and full_attn_layers must partition the layers 1..{n} "
                    f"(num_hidden_layers), each exactly once"
                )
            for layer in kda:
                kinds[layer - 1] = LINEAR
        if self.index_topk is None:
            if self.indexer_types and set(self.indexer_types) != {"none"}:
                raise ValueError("indexer_types is set but index_topk is null: set index_topk, or remove indexer_types")
            return kinds
        if self.indexer_types is None:
            self.indexer_types = ["none" if kind == LINEAR else "full" for kind in kinds]
        if len(self.indexer_types) != n:
            raise ValueError(f"indexer_types: {len(self.indexer_types)} entries for num_hidden_layers={n}")
        indexed_before = False
        for i, (kind, indexer) in enumerate(zip(kinds, self.indexer_types, strict=True)):
            if indexer not in ("none", "full", "shared"):
                raise ValueError(f"indexer_types[{i}]: {indexer!r}, expected 'none', 'full' or 'shared'")
            if indexer != "none" and kind == LINEAR:
                raise ValueError(f"indexer_types[{i}]: {indexer!r} on a KDA layer, expected 'none'")
            if indexer == "shared" and not indexed_before:
                raise ValueError(f"indexer_types[{i}]: 'shared' but no earlier layer is 'full'")
            indexed_before |= indexer == "full"
            if indexer != "none":
                kinds[i] = INDEXED
        return kinds

    def _validate(self) -> None:
        positive = [
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
        ]
        positive += ["q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "attn_res_block_size"]
        for name in positive:
            if not _is_count(getattr(self, name)):
                raise ValueError(f"{name}: {getattr(self, name)!r}, must be a positive integer")
        if not _is_count(self.qk_rope_head_dim, least=0):
            raise ValueError(f"qk_rope_head_dim: {self.qk_rope_head_dim!r}, must be an integer from 0 on")
        if not _is_positive(self.rms_norm_eps):
            raise ValueError(f"rms_norm_eps: {self.rms_norm_eps!r}, must be a positive number")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(
                f"pad_token_id: {self.pad_token_id}, must lie in 0..vocab_size-1={self.vocab_size - 1} or be null"
            )
        if self.hidden_act not in ("situ", "silu"):
            raise ValueError(f"hidden_act: unknown activation {self.hidden_act!r}, expected 'situ' or 'silu'")
        if self.hidden_act == "situ":
            self._validate_situ()
        if not self.mla_use_nope:
            raise ValueError("mla_use_nope: false is not supported (attention layers carry no rotary embedding)")
        if self.num_key_value_heads != self.num_attention_heads:
            raise ValueError("num_key_value_heads: MLA needs it equal to num_attention_heads")
        if self.num_nextn_predict_layers:
            raise ValueError("num_nextn_predict_layers: multi-token prediction layers are not supported, set it to 0")
        if self.index_topk is not None:
            self._validate_indexer()
        if LINEAR in self.layer_types:
            self._validate_kda()
        if self.num_experts:
            self._validate_moe()

    def _validate_situ(self) -> None:
        # Null is 1 for the first, as in the released classes, and leaves out the second.
        for name in ("activation_situ_beta", "activation_situ_linear_beta"):
            value = getattr(self, name)
            if value is not None and not _is_positive(value):
                raise ValueError(f"{name}: {value!r}, must be positive or null")

    def _validate_indexer(self) -> None:
        for name in ("index_topk", "index_n_heads", "index_head_dim"):
            if not _is_count(getattr(self, name)):
                raise ValueError(f"{name}: {getattr(self, name)!r}, must be a positive integer")
        if not _is_count(self.index_kpool) or self.index_topk % self.index_kpool:
            raise ValueError(f"index_kpool: {self.index_kpool!r}, must divide index_topk={self.index_topk}")
        if not self.index_kpool_always_select_tail:
            raise ValueError("index_kpool_always_select_tail: false is not supported (the last keys are always seen)")
        if hasattr(self, "indexer_rope_interleave"):
            raise ValueError("indexer_rope_interleave: indexers with a rotary embedding are not supported")

    def _validate_kda(self) -> None:
        linear = self.linear_attn_config
        for name in ("num_heads", "head_dim", "short_conv_kernel_size"):
            if not _is_count(linear.get(name)):
                raise ValueError(f"linear_attn_config.{name}: {linear.get(name)!r}, must be a positive integer")
        if not linear.get("use_full_rank_gate", False):
            raise ValueError("linear_attn_config.use_full_rank_gate: only true is supported (one full-rank g_proj)")
        bound = linear.get("gate_lower_bound")
        if bound is not None and bound >= 0:
            raise ValueError(f"linear_attn_config.gate_lower_bound: {bound}, must be negative or null")

    def _validate_moe(self) -> None:
        if not _is_count(self.num_experts_per_token) or self.num_experts_per_token > self.num_experts:
            raise ValueError(
                f"num_experts_per_token: {self.num_experts_per_token}, must lie in 1..num_experts={self.num_experts}"
            )
        for name in ("num_experts", "moe_intermediate_size", "moe_layer_freq", "num_expert_group", "topk_group"):
            if not _is_count(getattr(self, name)):
                raise ValueError(f"{name}: {getattr(self, name)!r}, must be a positive integer")
        if not _is_count(self.first_k_dense_replace, least=0):
            raise ValueError(f"first_k_dense_replace: {self.first_k_dense_replace!r}, must be an integer from 0 on")
        if self.num_shared_experts is not None and not _is_count(self.num_shared_experts, least=0):
            raise ValueError(f"num_shared_experts: {self.num_shared_experts!r}, must be null or an integer from 0 on")
        if not _is_positive(self.routed_scaling_factor):
            raise ValueError(f"routed_scaling_factor: {self.routed_scaling_factor!r}, must be a positive number")
        if self.moe_router_activation_func not in ("sigmoid", "softmax"):
            raise ValueError(
                f"moe_router_activation_func: unknown {self.moe_router_activation_func!r}, expected 'sigmoid' or "
                f"'softmax'"
            )
        if self.topk_method != "noaux_tc":
            raise ValueError(f"topk_method: {self.topk_method!r} is not supported, expected 'noaux_tc'")
        if not self.use_grouped_topk and self.num_expert_group > 1:
            raise ValueError(
                f"use_grouped_topk: false contradicts num_expert_group={self.num_expert_group}, set it to 1"
            )
        if self.num_experts % self.num_expert_group or self.topk_group > self.num_expert_group:
            raise ValueError("num_expert_group must divide num_experts and topk_group must lie in 1..num_expert_group")
        reachable = self.num_experts // self.num_expert_group * self.topk_group
        if self.num_experts_per_token > reachable:
            raise ValueError(
                f"num_experts_per_token: {self.num_experts_per_token} > {reachable} experts in topk_group groups"
            )
        if is_packed(getattr(self, "quantization_config", None)):
            self.validate_packable()

    def validate_packable(self) -> None:
        """Raise ValueError when expert sizes do not divide into MXFP4 groups of 32."""
        for name in (
            "moe_intermediate_size",
            "routed_expert_hidden_size" if self.routed_expert_hidden_size else "hidden_size",
        ):
            if getattr(self, name) % MXFP4_GROUP:
                raise ValueError(
                    f"{name}: {getattr(self, name)} is not a multiple of {MXFP4_GROUP}, as MXFP4 experts need"
                )

    @property
    def gate_lower_bound(self) -> float | None:
        return self.linear_attn_config.get("gate_lower_bound")

    @property
    def expert_hidden_size(self) -> int:
        """Width of the rows that routed experts see."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def packed_experts(self) -> bool:
        """Whether expert weights stay MXFP4 in memory (of a text-only root; a composite root decides for its part)."""
        part_of_root = self.__dict__.get("_packed_by_root")
        return is_packed(getattr(self, "quantization_config", None)) if part_of_root is None else part_of_root

    def decided_by_root(self, packed: bool) -> None:
        """Let a composite model, whose config carries the quantization, decide `packed_experts` for its text part."""
        self._packed_by_root = packed

    @property
    def kernels(self) -> str:
        """Where fused operations come from: "auto" (a kernel that is at hand, on CUDA devices; on Ascend, operators of
        torch-npu and kernels that Triton-Ascend compiles), "torch" or "hub".

        A choice of the process, like the attention implementation: it is read at every call and never saved.
        """
        return self.__dict__.get("_kernels", "auto")

    @kernels.setter
    def kernels(self, choice: str) -> None:
        if choice not in KERNELS:
            raise ValueError(f"kernels: {choice!r}, expected one of {', '.join(map(repr, KERNELS))}")
        self._kernels = choice

    @property
    def dense_attention(self) -> bool:
        """Whether layers with an indexer attend to all keys, whatever it would choose. A choice of the process, never
        saved, and so is `indexer_loss`."""
        return self.__dict__.get("_dense_attention", False)

    @dense_attention.setter
    def dense_attention(self, choice: bool) -> None:
        self._dense_attention = choice

    @property
    def indexer_loss(self) -> bool:
        """Whether a model in training computes what its indexers learn from, `output.indexer_loss`."""
        return self.__dict__.get("_indexer_loss", False)

    @indexer_loss.setter
    def indexer_loss(self, choice: bool) -> None:
        self._indexer_loss = choice

    def is_moe_layer(self, layer: int) -> bool:
        return bool(self.num_experts) and layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    def _without_private(self, out: dict[str, Any]) -> dict[str, Any]:
        for name in ("_packed_by_root", "_kernels", "_dense_attention", "_indexer_loss"):
            out.pop(name, None)
        return out

    def to_dict(self) -> dict[str, Any]:
        return self._without_private(super().to_dict())

    def to_diff_dict(self) -> dict[str, Any]:
        return self._without_private(super().to_diff_dict())


class LatentMoEVisionConfig(PreTrainedConfig):
    """MoonViT tower and patch-merger projector. Defaults are the released Kimi-K3."""

    model_type = "latentmoe_vision"
    base_config_key = "vision_config"

    patch_size: int = 14
    vt_hidden_size: int = 1024
    vt_intermediate_size: int = 4096
    vt_num_hidden_layers: int = 27
    vt_num_attention_heads: int = 12
    qkv_hidden_size: int | None = 1536
    norm_type: str = "rmsnorm"
    attn_bias: bool = False
    linear_bias: bool = False
    patch_embed_proj_bias: bool = False
    mlp_type: str = "mlp2"
    activation_func: str = "gelu_pytorch_tanh"
    pos_emb_type: str = "divided_fixed"
    init_pos_emb_height: int = 64
    init_pos_emb_width: int = 64
    init_pos_emb_time: int = 4
    pos_emb_interpolation_mode: str = "bilinear"
    merge_kernel_size: list[int] = field(default_factory=lambda: [2, 2])
    merge_type: str = "sd2_tpool"
    mm_projector_type: str = "patchmergerv2"
    mm_hidden_size: int = 1024
    projector_hidden_act: str = "gelu"
    projector_ln_eps: float = 1e-5
    text_hidden_size: int = 7168

    def __post_init__(self, **kwargs):
        kwargs.pop("_attn_implementation", None)  # released: flash_attention_2; the tower has its own attention
        super().__post_init__(**kwargs)
        if self.qkv_hidden_size is None:
            self.qkv_hidden_size = self.vt_hidden_size
        fixed = {
            "norm_type": "rmsnorm",
            "attn_bias": False,
            "linear_bias": False,
            "patch_embed_proj_bias": False,
            "mlp_type": "mlp2",
            "activation_func": "gelu_pytorch_tanh",
            "pos_emb_type": "divided_fixed",
            "pos_emb_interpolation_mode": "bilinear",
            "merge_type": "sd2_tpool",
            "mm_projector_type": "patchmergerv2",
            "projector_hidden_act": "gelu",
        }
        for name, value in fixed.items():
            if getattr(self, name) != value:
                raise ValueError(f"vision_config.{name}: {getattr(self, name)!r} is not supported, expected {value!r}")
        counts = ["patch_size", "vt_hidden_size", "vt_intermediate_size", "vt_num_hidden_layers"]
        counts += ["vt_num_attention_heads", "qkv_hidden_size", "text_hidden_size"]
        counts += ["init_pos_emb_height", "init_pos_emb_width", "init_pos_emb_time"]
        for name in counts:
            if not _is_count(getattr(self, name)):
                raise ValueError(f"vision_config.{name}: {getattr(self, name)!r}, must be a positive integer")
        if not _is_positive(self.projector_ln_eps):
            # torch would take an eps of its own for null
            raise ValueError(f"vision_config.projector_ln_eps: {self.projector_ln_eps!r}, must be a positive number")
        merge = self.merge_kernel_size
        if not isinstance(merge, list | tuple) or len(merge) != 2 or not all(map(_is_count, merge)):
            raise ValueError(f"vision_config.merge_kernel_size: {merge!r}, must be two positive integers")
        if (
            self.qkv_hidden_size % self.vt_num_attention_heads
            or (self.qkv_hidden_size // self.vt_num_attention_heads) % 4
        ):
            raise ValueError(
                "vision_config.qkv_hidden_size: must divide into vt_num_attention_heads heads of 4k channels"
            )
        if self.mm_hidden_size != self.vt_hidden_size:
            raise ValueError("vision_config.mm_hidden_size: must equal vt_hidden_size")


class LatentMoEConfig(PreTrainedConfig):
    """Root configuration: reads the released Kimi-K3 `config.json` unchanged; `LatentMoEConfig()` equals it.

    `vision_config` None gives a text-only model, and so does leaving it out beside a `text_config`; only without a
    `text_config` it is the released tower. A text_config that is read from a file (`from_pretrained`, `from_dict`)
    has no part that it does not name, see `LatentMoETextConfig`. A released `text_config.quantization_config` is
    moved to the root under our own quantization method, where transformers looks for it. Contradictory fields raise
    ValueError.
    """

    model_type = "latentmoe"
    sub_configs = {"text_config": LatentMoETextConfig, "vision_config": LatentMoEVisionConfig}  # noqa: RUF012

    text_config: LatentMoETextConfig | dict | None = None
    vision_config: LatentMoEVisionConfig | dict | None = field(default_factory=lambda: _NOT_GIVEN)
    bos_token_id: int | None = 163584
    eos_token_id: int | list[int] | None = 163586
    pad_token_id: int | None = 163839
    ignore_index: int = -100
    image_placeholder: str = "<|kimi_image_placeholder|>"
    media_placeholder_token_id: int = 163605
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs):
        quantization = kwargs.pop("quantization_config", None)
        if self.vision_config is _NOT_GIVEN and self.text_config is not None:
            self.vision_config = None
        for name in ("text_config", "vision_config"):
            if not isinstance(value := getattr(self, name), dict | self.sub_configs[name] | None):
                raise ValueError(f"{name}: {value!r}, must be an object or null")
        if not isinstance(self.text_config, LatentMoETextConfig):
            text = copy.deepcopy(self.text_config or {})
            text.pop("model_type", None)
            nested = text.pop("quantization_config", None)
            quantization = nested if quantization is None else quantization
            self.text_config = LatentMoETextConfig(**text)
        if isinstance(self.vision_config, dict):
            vision = {key: value for key, value in self.vision_config.items() if key != "model_type"}
            self.vision_config = LatentMoEVisionConfig(**vision)
        if not all("latentmoe" in target for target in kwargs.get("auto_map", AUTO_MAP).values()):
            kwargs.pop("auto_map")
        kwargs.setdefault("auto_map", dict(AUTO_MAP))
        quantization = own_quantization(quantization)
        if quantization is not None:
            kwargs["quantization_config"] = quantization
            if is_packed(quantization) and self.text_config.num_experts:
                self.text_config.validate_packable()
        super().__post_init__(**kwargs)
        if self.vision_config is not None and self.vision_config.text_hidden_size != self.text_config.hidden_size:
            raise ValueError(
                f"vision_config.text_hidden_size: {self.vision_config.text_hidden_size} differs from "
                f"text_config.hidden_size={self.text_config.hidden_size}"
            )
        media = self.media_placeholder_token_id
        # Without images it is looked for too, and need not be a token.
        if not _is_count(media, least=0) or (self.vision_config is not None and media >= self.text_config.vocab_size):
            raise ValueError(
                f"media_placeholder_token_id: {media!r}, must lie in 0..vocab_size-1={self.text_config.vocab_size - 1}"
            )
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.text_config.vocab_size:
            raise ValueError(
                f"pad_token_id: {self.pad_token_id} is not null or below vocab_size={self.text_config.vocab_size}"
            )
        if self.tie_word_embeddings != self.text_config.tie_word_embeddings:
            raise ValueError("tie_word_embeddings: root and text_config disagree")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "LatentMoEConfig":
        if isinstance(config_dict.get("text_config"), dict):
            config_dict = {**config_dict, "text_config": _from_file(config_dict["text_config"])}
        return super().from_dict(config_dict, **kwargs)

    @classmethod
    def get_config_dict(cls, *args, **kwargs) -> tuple[dict[str, Any], dict[str, Any]]:
        config, unused = super().get_config_dict(*args, **kwargs)
        if config.get("model_type") == RELEASED_MODEL_TYPE:
            config["model_type"] = cls.model_type
        return config, unused

    @property
    def packed_experts(self) -> bool:
        """Whether expert weights stay MXFP4 in memory (a quantization config that does not ask for `dequantize`)."""
        return is_packed(getattr(self, "quantization_config", None))

    @property
    def kernels(self) -> str:
        """Where fused operations come from, see `LatentMoETextConfig.kernels`."""
        return self.text_config.kernels

    @kernels.setter
    def kernels(self, choice: str) -> None:
        self.text_config.kernels = choice

    @classmethod
    def kimi_k3(cls) -> "LatentMoEConfig":
        """The released Kimi-K3: 93 layers, 896 experts of which 16 are active, MXFP4 experts, 1M context."""
        return cls(quantization_config=_released_quantization(), dtype="bfloat16")

    @classmethod
    def kda_dsa(cls) -> "LatentMoEConfig":
        """KDA + gated DSA Top-2048 3:1: Kimi-K3 whose attention layers carry a lightning indexer.

        Every second indexed layer, and the last one beside its neighbour, reuses the indices of the one before it.
        """
        indexers = ["none"] * 93
        for n, layer in enumerate(layer - 1 for layer in _K3_FULL_ATTENTION):
            indexers[layer] = "full" if n % 2 == 0 else "shared"
        text = {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128, "indexer_types": indexers}
        return cls(text_config=text, vision_config={}, quantization_config=_released_quantization(), dtype="bfloat16")

    @classmethod
    def tiny(cls, vision: bool = True, experts: int = 16, packed: bool = True) -> "LatentMoEConfig":
        """A model for tests and laptops with every kind of layer: KDA, MLA, DSA with own and shared indices.

        vision: with a two-block tower. experts: 0 gives a dense model. packed: MXFP4 experts.
        """
        linear = {
            "kda_layers": [1, 2, 4, 5, 7],
            "full_attn_layers": [3, 6, 8],
            "num_heads": 4,
            "head_dim": 16,
        }
        linear |= {"short_conv_kernel_size": 4, "use_full_rank_gate": True, "gate_lower_bound": -5.0}
        text = {
            "vocab_size": 512,
            "hidden_size": 64,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 128,
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "num_experts": experts,
            "num_experts_per_token": 4,
            "moe_intermediate_size": 32,
            "routed_expert_hidden_size": 32,
            "attn_res_block_size": 3,
            "linear_attn_config": linear,
            "index_topk": 16,
            "index_n_heads": 4,
            "index_head_dim": 16,
            "indexer_types": ["none", "none", "none", "none", "none", "full", "none", "shared"],
            "bos_token_id": 256,
            "eos_token_id": 258,
            "pad_token_id": 267,
        }
        tower = {
            "vt_hidden_size": 32,
            "vt_intermediate_size": 64,
            "vt_num_hidden_layers": 2,
            "vt_num_attention_heads": 2,
            "qkv_hidden_size": 48,
            "init_pos_emb_height": 8,
            "init_pos_emb_width": 8,
            "mm_hidden_size": 32,
            "text_hidden_size": 64,
        }
        quantization = {"quantization_config": _released_quantization()} if packed and experts else {}
        return cls(
            text_config=text,
            vision_config=tower if vision else None,
            bos_token_id=256,
            eos_token_id=258,
            pad_token_id=267,
            media_placeholder_token_id=265,
            **quantization,
        )


LatentMoEConfig.register_for_auto_class()
