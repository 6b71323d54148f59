"""latentmoe models: hybrid attention (KDA, gated MLA, gated DSA), latent experts, attention residuals, vision.

Start reading here. The text stack has no positional encoding: order comes from KDA's convolution and decay and from
causal masks. A layer does not add to one residual stream; it reads a learned mixture of what earlier blocks left
(`attn_residual.py`). Everything is single-device code that also works packed, padded and cached.

    LatentMoEDecoderLayer             mix -> attention -> mix -> feed-forward
    LatentMoEModel                    embeddings, layers, output mixture, norm
    LatentMoEForCausalLM              + language-model head (text only)
    LatentMoEForConditionalGeneration + vision tower and projector: what checkpoints hold

Legend: B batch, T tokens, S cached tokens, D model width, V vocabulary, E experts, I images, P media placeholders.
"""

import copy
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import GenerationMixin, LogitsProcessorList, PreTrainedModel, SuppressTokensLogitsProcessor
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from .attn_residual import ResidualNorm, ResidualProjection, mix
from .cache import CACHE_ARGUMENT, LatentMoECache, check_cache
from .configuration_latentmoe import INDEXED, LINEAR, LatentMoEConfig, LatentMoETextConfig
from .conversion import check_checkpoint, check_values, lazy_tensors, packed_converters, read_as_needed
from .documents import PADDING, Documents
from .indexer import LightningIndexer, mean_loss
from .kda import GatedHeadNorm, KimiDeltaAttention, ShortConvolution
from .layers import MLP, RMSNorm
from .mla import GatedLatentAttention
from .moe import Experts, LatentMoE, Router
from .mxfp4 import assert_packed
from .ops import linear_cross_entropy
from .recompute import recomputed
from .saving import staged
from .vision import PositionEmbedding, Projector, VisionTower

# Routing and key selection are decisions: a recomputed one could differ by a rounding and change the graph. That of a
# kernel is an operator of its own, in a library whose name changes with every build.
SAVED_DECISIONS = [torch.ops.aten.topk.default]
KERNEL_DECISION = "::index_topk"
# What transformers hands on: the function, and the keywords for it.
RECOMPUTE = partial(checkpoint)


@dataclass
class LatentMoEOutput(ModelOutput):
    """What `LatentMoEModel` returns.

    last_hidden_state [B, T, D]; cache; hidden_states: the running stream entering each layer and leaving the last
    norm, [B, T, D] each (on request); router_logits: fp32 [B * T, E] of each MoE layer, zero at padding (on
    request); expert_load: int64 [MoE layers, E] tokens routed to each expert, padding excluded; indexer_loss: what the
    indexers learn from (in training, with `config.indexer_loss`), summed over tokens, a mean over layers.
    """

    last_hidden_state: torch.Tensor | None = None
    cache: LatentMoECache | None = None
    if CACHE_ARGUMENT == "past_key_values":
        past_key_values: LatentMoECache | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None
    expert_load: torch.Tensor | None = None
    indexer_loss: torch.Tensor | None = None


@dataclass
class LatentMoECausalLMOutput(ModelOutput):
    """loss (scalar, with labels), logits [B, T, V] (or the `logits_to_keep` last), the rest as `LatentMoEOutput`."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    cache: LatentMoECache | None = None
    if CACHE_ARGUMENT == "past_key_values":
        past_key_values: LatentMoECache | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None
    expert_load: torch.Tensor | None = None
    indexer_loss: torch.Tensor | None = None


class LatentMoEDecoderLayer(GradientCheckpointingLayer):
    """One layer: a mixer (KDA, MLA or DSA) and a feed-forward (dense or latent MoE), each reading its own mixture."""

    def __init__(self, config: LatentMoETextConfig, layer: int):
        super().__init__()
        self.config = config
        D, eps = config.hidden_size, config.rms_norm_eps
        self.is_linear = config.layer_types[layer] == LINEAR
        self.starts_block = layer % config.attn_res_block_size == 0
        self.is_moe = config.is_moe_layer(layer)
        if self.is_linear:
            self.self_attn = KimiDeltaAttention(config)
        else:
            indexed = config.layer_types[layer] == INDEXED
            self.self_attn = GatedLatentAttention(config, config.indexer_types[layer] if indexed else "none")
        if self.is_moe:
            self.block_sparse_moe = LatentMoE(config)
        else:
            self.mlp = MLP(D, config.intermediate_size, config)
        self.input_layernorm = RMSNorm(D, eps)
        self.post_attention_layernorm = RMSNorm(D, eps)
        self.self_attention_res_norm = ResidualNorm(D, eps)
        self.self_attention_res_proj = ResidualProjection(D)
        self.mlp_res_norm = ResidualNorm(D, eps)
        self.mlp_res_proj = ResidualProjection(D)

    def forward(self, stream_BTD, snapshots, choice, documents: Documents, cache=None):
        """stream: [B, T, D]; snapshots: tuple of [B, T, D]; choice: of the last full indexer (indexer.py), or None.

        Returns the new stream, snapshots and choice, then router logits [B * T, E] and expert load [E] (None if dense).
        """
        sources = *snapshots, stream_BTD
        if self.starts_block:
            snapshots, stream_BTD = sources, None
        residual = self.self_attention_res_proj, self.self_attention_res_norm, self.input_layernorm
        if self.is_linear:
            attended = self._read(sources, *residual, lambda x: self.self_attn(x, documents, cache))
        else:
            attended, chosen = self._read(sources, *residual, lambda x: self.self_attn(x, documents, cache, choice))
            choice = choice if chosen is None else chosen
        stream_BTD = attended if stream_BTD is None else stream_BTD + attended
        # The feed-forward needs the most memory.
        del attended

        sources = *snapshots, stream_BTD
        residual = self.mlp_res_proj, self.mlp_res_norm, self.post_attention_layernorm
        if self.is_moe:
            feed = partial(self.block_sparse_moe, valid_BT=documents.valid_BT)
            fed, router_logits, load = self._read(sources, *residual, feed)
        else:
            fed, router_logits, load = self._read(sources, *residual, self.mlp), None, None
        return stream_BTD + fed, snapshots, choice, router_logits, load

    def _read(
        self,
        sources: tuple[torch.Tensor, ...],
        proj: ResidualProjection,
        residual_norm: ResidualNorm,
        norm: RMSNorm,
        sublayer: Callable[[torch.Tensor], Any],
    ) -> Any:
        """sublayer(norm(mixture of the sources)); for backward only the sources are kept."""

        def mixture(*sources: torch.Tensor) -> torch.Tensor:
            return mix(sources, proj, residual_norm, self.config.kernels)

        mixed = mixture(*sources)
        with recomputed(mixed, mixture, *sources):
            normed = norm(mixed)
            with recomputed(normed, norm, mixed):
                del mixed
                return sublayer(normed)


class LatentMoEPreTrainedModel(PreTrainedModel):
    """Initialisation, strict loading and checkpointing rules that every latentmoe model shares."""

    config_class = LatentMoEConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LatentMoEDecoderLayer", "LatentMoEVisionBlock"]  # noqa: RUF012
    _supports_sdpa = True
    _is_stateful = True
    _keep_in_fp32_modules_strict = [  # noqa: RUF012
        "A_log",
        "dt_bias",
        "q_conv1d",
        "k_conv1d",
        "v_conv1d",
        "o_norm",
        "e_score_correction_bias",
        "learnable_sink_param",
    ]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.get_text_config().initializer_range
        if isinstance(module, RMSNorm | GatedHeadNorm | nn.RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, nn.Linear | nn.Embedding | nn.Conv2d | ShortConvolution):
            init.normal_(module.weight, std=0.5 if isinstance(module, ShortConvolution) else std)
        elif isinstance(module, KimiDeltaAttention):
            rates = torch.zeros_like(module.A_log)
            rates[: module.num_heads] = torch.empty_like(rates[: module.num_heads]).uniform_(1, 16).log()
            init.copy_(module.A_log, rates)
            init.zeros_(module.dt_bias)
        elif isinstance(module, GatedLatentAttention) and module.learnable_sink_param is not None:
            init.zeros_(module.learnable_sink_param)
        elif isinstance(module, LightningIndexer) and module.pool > 1:
            init.zeros_(module.index_kpool_compress_gate)
            init.zeros_(module.index_kpool_compress_ape)
        elif isinstance(module, Router):
            init.normal_(module.weight, std=std)
            init.zeros_(module.e_score_correction_bias)
        elif isinstance(module, Experts):
            # A stack that is offloaded to disk is on the meta device here.
            if not (module.down_proj.is_meta or getattr(module.down_proj, "_is_hf_initialized", False)):
                module.reset_parameters(std)
        elif isinstance(module, PositionEmbedding):
            init.normal_(module.weight, std=std)

    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs):
        # transformers only warns about missing tensors and fills them with random numbers; here they are errors.
        if state_dict is not None:
            raise ValueError("state_dict: not supported, save it as a checkpoint folder and load that")
        quantized = load_config.hf_quantizer is not None
        shards = {}
        # The same method loads adapters, which are a few tensors of their own.
        if checkpoint_files and not model._hf_peft_config_loaded:
            shards = check_checkpoint(model, checkpoint_files, packed=quantized)
            # Memory-mapped files, as transformers opens them, all stay in memory until the last one is read.
            state_dict = lazy_tensors(checkpoint_files)
        with read_as_needed():
            info = PreTrainedModel._load_pretrained_model(
                model, state_dict, checkpoint_files, load_config, *args, **kwargs
            )
        if shards:
            check_values(model, shards)
        for module in model.modules():
            # transformers makes every float parameter that it loads trainable.
            if isinstance(module, Router):
                module.e_score_correction_bias.requires_grad_(False)
        if quantized and model.config.get_text_config().packed_experts:
            assert_packed(model)
        return info

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        push_to_hub: bool = False,
        variant: str | None = None,
        distributed_checkpoint: bool = False,
        **kwargs,
    ) -> None:
        """`PreTrainedModel.save_pretrained` in one step: a kill or a full disk leaves the old checkpoint (saving.py).

        Only `distributed_checkpoint`, into which every process writes its part, goes straight to the folder.
        """
        if any(isinstance(m, Experts) and len(m.owned) < m.config.num_experts for m in self.modules()):
            raise ValueError("this model holds a share of its experts (expert parallelism): it cannot be saved alone")
        kwargs |= {"is_main_process": is_main_process, "variant": variant}
        if distributed_checkpoint or not self.should_save_on_this_rank(is_main_process):
            options = {"push_to_hub": push_to_hub, "distributed_checkpoint": distributed_checkpoint}
            super().save_pretrained(save_directory, **options, **kwargs)
            return
        folder = Path(save_directory)
        if push_to_hub:
            kwargs = {"push_to_hub": True, "repo_id": folder.name} | kwargs
        stem = "adapter_model" if self._hf_peft_config_loaded else "model"
        with staged(folder, stem, variant) as stage:
            super().save_pretrained(stage, **kwargs)

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: partial = RECOMPUTE, **kwargs
    ) -> None:
        # Layers are recomputed in backward, but never their decisions: the top-k of routers and indexers is saved, and
        # so are the results of the caller's `saved_ops`. Every public switch of transformers and PEFT ends here.
        options = dict(gradient_checkpointing_func.keywords)
        if options.pop("use_reentrant", False):
            raise ValueError("use_reentrant: must be False (reentrant checkpointing cannot save routing decisions)")
        if "context_fn" in options:
            raise ValueError("context_fn: not supported, pass what to keep as a list of operators, saved_ops=[...]")
        saved = {*SAVED_DECISIONS, *options.pop("saved_ops", ())}

        def policy(ctx, operator, *args, **kwargs) -> CheckpointPolicy:
            keeps = operator in saved or operator.name().endswith(KERNEL_DECISION)
            return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

        function = partial(
            gradient_checkpointing_func.func,
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, policy),
            **options,
        )
        super()._set_gradient_checkpointing(enable=enable, gradient_checkpointing_func=function, **kwargs)

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs) -> None:
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation: {generation_config.cache_implementation!r} is not supported, leave it unset "
                f"(latentmoe models bring their own cache)"
            )
        if generation_config.use_cache is not False and model_kwargs.get(CACHE_ARGUMENT) is None:
            model_kwargs[CACHE_ARGUMENT] = LatentMoECache(self.config.get_text_config().num_hidden_layers)


class LatentMoEModel(LatentMoEPreTrainedModel):
    """Text decoder without head. See `LatentMoEOutput` for what it returns."""

    config_class = LatentMoETextConfig

    def __init__(self, config: LatentMoETextConfig):
        super().__init__(config)
        D = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, D, config.pad_token_id)
        self.layers = nn.ModuleList(LatentMoEDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.output_attn_res_norm = ResidualNorm(D, config.rms_norm_eps)
        self.output_attn_res_proj = ResidualProjection(D)
        self.norm = RMSNorm(D, config.rms_norm_eps)
        self.gradient_checkpointing = False
        if config.packed_experts:
            self._weight_conversions = packed_converters()
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        cache: LatentMoECache | None = None,
        past_key_values: LatentMoECache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_router_logits: bool | None = None,
        **kwargs,
    ) -> LatentMoEOutput:
        """input_ids int64 [B, T] or inputs_embeds [B, T, D]; attention_mask [B, T] or [B, cached + T], 0 = padding.

        Packed rows: cu_seqlens int [documents + 1] (one row), or position_ids that restart at each document; every
        document is computed as if it were alone. Raises ValueError for inputs that contradict each other.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids / inputs_embeds: pass exactly one of them")
        check_keywords(kwargs)
        stream = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = check_cache(cache if cache is not None else past_key_values)
        documents = Documents.of_batch(
            stream.shape[:2],
            stream.device,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cu_seqlens=_boundaries(cu_seqlens, position_ids, kwargs),
            past_ids=None if cache is None else cache.ids_BS,
        )
        cache = self._cache_for(documents, cache, use_cache)
        want_hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        want_logits = self.config.output_router_logits if output_router_logits is None else output_router_logits
        snapshots, choice = (), None
        streams, all_router_logits, loads = [], [], []
        for i, layer in enumerate(self.layers):
            if want_hidden:
                streams.append(stream)
            layer_cache = None if cache is None else cache.layers[i]
            stream, snapshots, choice, router_logits, load = layer(
                stream, snapshots, choice, documents, cache=layer_cache
            )
            if load is not None:
                loads.append(load)
                # Of all experts in fp32: those of all layers would need more memory than any layer.
                if want_logits:
                    all_router_logits.append(router_logits)
        if cache is not None:
            cache.remember(documents.ids_BT)
        mixed = mix((*snapshots, stream), self.output_attn_res_proj, self.output_attn_res_norm, self.config.kernels)
        h = self.norm(mixed)
        return LatentMoEOutput(
            last_hidden_state=h,
            hidden_states=(*streams, h) if want_hidden else None,
            router_logits=tuple(all_router_logits) if want_logits else None,
            expert_load=torch.stack(loads) if loads else None,
            indexer_loss=mean_loss(choice.losses, self.config.indexer_types) if choice and choice.losses else None,
            **_cache_fields(cache),
        )

    @property
    def _recomputes(self) -> bool:
        """Whether backward will run layers again, which would write to a cache a second time."""
        return self.gradient_checkpointing and self.training and torch.is_grad_enabled()

    def _cache_for(self, documents: Documents, cache, use_cache: bool | None) -> LatentMoECache | None:
        """The given cache, or a new one where the caller (or for None the config, in evaluation) wants one."""
        if self._recomputes:
            if cache is not None or use_cache:
                raise ValueError("cache / use_cache: gradient checkpointing cannot fill a cache while training")
            return None
        if documents.packed:
            if cache is not None or use_cache:
                raise ValueError("packed rows cannot be cached: pass one document per row, or use_cache=False")
            return None
        wanted = self.config.use_cache and not self.training if use_cache is None else use_cache
        return LatentMoECache(len(self.layers)) if cache is None and wanted else cache


class LanguageModelHead(nn.Linear):
    """Logits [..., V] of hidden states, or with targets [N] of hidden states [N, D] their losses, in fp32.

    Both are one module's forward because only there FSDP has its weight at hand.
    """

    def forward(self, hidden: torch.Tensor, target: torch.Tensor | None = None, kernels: str = "torch") -> torch.Tensor:
        if target is None:
            return super().forward(hidden)
        return linear_cross_entropy(hidden, self.weight, target, kernels=kernels)


class LatentMoEForCausalLM(LatentMoEPreTrainedModel, GenerationMixin):
    """Text decoder with its language-model head: a model of its own, and `language_model` of the composite."""

    config_class = LatentMoETextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: LatentMoETextConfig):
        super().__init__(config)
        self.model = LatentMoEModel(config)
        self.lm_head = LanguageModelHead(config.hidden_size, config.vocab_size, bias=False)
        if config.packed_experts:
            self._weight_conversions = packed_converters()
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        cache: LatentMoECache | None = None,
        past_key_values: LatentMoECache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_logits: bool = True,
        output_hidden_states: bool | None = None,
        output_router_logits: bool | None = None,
        **kwargs,
    ) -> LatentMoECausalLMOutput:
        """Arguments of `LatentMoEModel.forward`, and labels int64 [B, T] (-100 = no loss; shifted here, never across
        documents); logits_to_keep: only the last so many positions, or these positions; return_logits False: only
        the loss, for which the logits of all positions are never held together. The loss is a mean over the labelled
        tokens, or their sum / num_items_in_batch when a trainer gives the global count."""
        if labels is None and not return_logits:
            raise ValueError("return_logits: False leaves nothing to return without labels")
        ignore_index = kwargs.pop("ignore_index", -100)
        borders = {"attention_mask": attention_mask, "position_ids": position_ids, "cu_seqlens": cu_seqlens}
        out = self.model(
            input_ids,
            **borders,
            inputs_embeds=inputs_embeds,
            cache=cache,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_router_logits=output_router_logits,
            **kwargs,
        )
        hidden = out.last_hidden_state
        # Another head, such as one that PEFT wraps to train an adapter on it, gives nothing but logits.
        fused = not return_logits and isinstance(self.lm_head, LanguageModelHead)
        loss = logits = None
        if not fused:
            keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden[:, keep])
        if labels is not None:
            # Listed positions may be in any order, also where they are all.
            listed = isinstance(logits_to_keep, torch.Tensor)
            if logits is not None and (listed or logits.shape[1] != labels.shape[1]):
                raise ValueError("logits_to_keep: cannot be combined with labels")
            target = next_tokens(labels.to(hidden.device), ignore_index, **borders, **kwargs)
            predicted = target != ignore_index
            if fused:
                losses = self.lm_head(hidden[:, :-1][predicted], target[predicted], self.config.kernels)
                total = losses.sum()
            else:
                total = cross_entropy_sum(logits, target, ignore_index)
            count = kwargs.get("num_items_in_batch")
            loss = total / (predicted.sum().clamp(min=1) if count is None else count)
        return LatentMoECausalLMOutput(
            loss=loss,
            logits=logits if return_logits else None,
            hidden_states=out.hidden_states,
            router_logits=out.router_logits,
            expert_load=out.expert_load,
            indexer_loss=out.indexer_loss,
            **_cache_fields(out.cache),
        )


class NoPlaceholders(SuppressTokensLogitsProcessor):
    """A class of its own: `generate` drops its processor of a class that the caller brings, the one that the argument
    `suppress_tokens` asks for."""


class LatentMoEForConditionalGeneration(LatentMoEPreTrainedModel, GenerationMixin):
    """Image-text-to-text model in the layout of released checkpoints; text-only when `vision_config` is None."""

    config_class = LatentMoEConfig
    base_model_prefix = "language_model"
    _tied_weights_keys = {"language_model.lm_head.weight": "language_model.model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: LatentMoEConfig):
        # The text part is told below whether its experts are packed: a caller's config must not change with it.
        config = copy.deepcopy(config)
        super().__init__(config)
        config.text_config.decided_by_root(config.packed_experts)
        self.language_model = LatentMoEForCausalLM(config.text_config)
        if config.vision_config is not None:
            self.vision_tower = VisionTower(config.vision_config)
            self.mm_projector = Projector(config.vision_config)
        if config.packed_experts:
            self._weight_conversions = packed_converters()
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.model.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.language_model.model.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module:
        return self.language_model.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.language_model.lm_head = value

    def encode_images(self, pixel_values: torch.Tensor, grid_thws: torch.Tensor) -> torch.Tensor:
        """pixel_values [patches, 3, P, P], grid_thws int64 [I, 3] -> features [image tokens, D] in prompt order."""
        if self.config.vision_config is None:
            raise ValueError("pixel_values: this model has no vision tower (vision_config is null)")
        if pixel_values is None or grid_thws is None:
            raise ValueError("pixel_values and grid_thws belong together: pass both (the processor returns them)")
        return self.mm_projector(self.vision_tower(pixel_values, grid_thws))

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        grid_thws: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        cache: LatentMoECache | None = None,
        past_key_values: LatentMoECache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_logits: bool = True,
        output_hidden_states: bool | None = None,
        output_router_logits: bool | None = None,
        **kwargs,
    ) -> LatentMoECausalLMOutput:
        """Arguments of `LatentMoEForCausalLM.forward`, and images: pixel_values fp [patches, 3, P, P], grid_thws int64
        [I, 3]. input_ids hold one media placeholder per image token, an image's without a gap; anything else is a
        ValueError. With a cache a single row may bring its images first and read their placeholders over several calls.
        """
        cache = check_cache(cache if cache is not None else past_key_values)
        if inputs_embeds is None and input_ids is not None:
            inputs_embeds = self._embed(input_ids, pixel_values, grid_thws, cache)
        elif pixel_values is not None:
            raise ValueError("pixel_values: placeholders are found in input_ids, which inputs_embeds replaces")
        return self.language_model(
            attention_mask=attention_mask,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            inputs_embeds=inputs_embeds,
            labels=labels,
            cache=cache,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            return_logits=return_logits,
            output_hidden_states=output_hidden_states,
            output_router_logits=output_router_logits,
            ignore_index=self.config.ignore_index,
            **kwargs,
        )

    def _embed(self, input_ids, pixel_values, grid_thws, cache) -> torch.Tensor:
        """Token embeddings with image features written over their placeholders."""
        embeds_BTD = self.get_input_embeddings()(input_ids)
        media_BT = input_ids == self.config.media_placeholder_token_id
        counts = media_BT.sum(1).tolist()
        waiting = cache.images if cache is not None else None
        if pixel_values is not None or grid_thws is not None:
            features = self.encode_images(pixel_values, grid_thws)
            if cache is not None and len(input_ids) == 1:
                waiting = [features if waiting is None else torch.cat([waiting[0], features])]
            else:
                self._images_by_row(input_ids, grid_thws)
                waiting = list(features.split(counts))
        if waiting is None:
            _check_placeholders(sum(counts), 0)
            return embeds_BTD
        for count, features in zip(counts, waiting, strict=True):
            if count > len(features):
                _check_placeholders(count, len(features))
        rows = torch.cat([features[:count] for count, features in zip(counts, waiting, strict=True)])
        if cache is not None:
            rest = [features[count:] for count, features in zip(counts, waiting, strict=True)]
            cache.images = rest if any(len(features) for features in rest) else None
        return embeds_BTD.masked_scatter(media_BT.unsqueeze(-1), rows.to(embeds_BTD.dtype))

    def generate(self, *args, logits_processor=None, **kwargs):
        """`GenerationMixin.generate`, which never writes a media placeholder: text cannot bring its image along."""
        never = NoPlaceholders([self.config.media_placeholder_token_id], device=self.device)
        processors = LogitsProcessorList([*(logits_processor or []), never])
        return super().generate(*args, logits_processor=processors, **kwargs)

    def _images_by_row(self, input_ids, grid_thws) -> list[int]:
        """Number of images of each row, from its placeholders; ValueError when they do not fit the images."""
        area = math.prod(self.config.vision_config.merge_kernel_size)
        tokens = (grid_thws[:, 1:].prod(1) // area).tolist()
        row_P, column_P = (input_ids == self.config.media_placeholder_token_id).nonzero(as_tuple=True)
        _check_placeholders(len(row_P), sum(tokens))
        rows = []
        for image, (row, column) in enumerate(zip(row_P.split(tokens), column_P.split(tokens), strict=True)):
            if len(row) and (row[0] != row[-1] or column[-1] - column[0] >= len(column)):
                raise ValueError(
                    f"images do not match the prompt: image {image} has {len(row)} tokens, but its placeholders in "
                    f"input_ids are not one run of that length"
                )
            rows += row[:1].tolist()
        return [rows.count(row) for row in range(len(input_ids))]

    def _prefill(self, input_ids, generation_config, model_kwargs, *args, **kwargs):
        # Images are encoded once, before the prompt is cut into chunks, and wait in the cache for their placeholders.
        cache, grid_thws = model_kwargs.get(CACHE_ARGUMENT), model_kwargs.get("grid_thws")
        if cache is None or grid_thws is None:
            return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)
        # A prompt that repeats what the cache holds may bring the images of that part again, or only the new ones.
        mask = model_kwargs.get("attention_mask")
        repeated = cache.get_seq_length() if mask is None or mask.shape[1] == input_ids.shape[1] else 0
        new_ids = input_ids[:, repeated:]
        features = self.encode_images(model_kwargs.pop("pixel_values", None), model_kwargs.pop("grid_thws"))
        media_BT = input_ids == self.config.media_placeholder_token_id
        if len(features) == int(media_BT.sum()):
            self._images_by_row(input_ids, grid_thws)
            old = media_BT[:, :repeated].sum(1).tolist()
            rows = features.split(media_BT.sum(1).tolist())
            cache.images = [row[n:] for row, n in zip(rows, old, strict=True)]
        else:
            self._images_by_row(new_ids, grid_thws)
            cache.images = list(features.split(media_BT[:, repeated:].sum(1).tolist()))
        return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)

    def _expand_inputs_for_generation(self, expand_size=1, is_encoder_decoder=False, input_ids=None, **model_kwargs):
        # Rows of pixel_values are patches, not batch rows: all images of a row are repeated together.
        pixel_values, grid_thws = model_kwargs.pop("pixel_values", None), model_kwargs.pop("grid_thws", None)
        if expand_size > 1 and grid_thws is not None:
            images = self._images_by_row(input_ids, grid_thws)
            patches = pixel_values.split(grid_thws.prod(1).tolist())
            order = [i for row in torch.arange(len(grid_thws)).split(images) for i in row.tolist() * expand_size]
            pixel_values, grid_thws = torch.cat([patches[i] for i in order]), grid_thws[order]
        input_ids, model_kwargs = super()._expand_inputs_for_generation(
            expand_size=expand_size,
            is_encoder_decoder=is_encoder_decoder,
            input_ids=input_ids,
            **model_kwargs,
        )
        if pixel_values is not None:
            model_kwargs["pixel_values"] = pixel_values
        if grid_thws is not None:
            model_kwargs["grid_thws"] = grid_thws
        return input_ids, model_kwargs


def next_tokens(
    labels: torch.Tensor,
    ignore_index: int,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor:
    """The label of the token after each, [B, T - 1]: the first of a document is not predicted from another one.

    attention_mask: [B, T], or [B, cached + T] as with a cache.
    """
    if attention_mask is not None:
        attention_mask = attention_mask[:, -labels.shape[1] :]
    documents = Documents.of_batch(
        labels.shape,
        labels.device,
        attention_mask=attention_mask,
        position_ids=position_ids,
        cu_seqlens=_boundaries(cu_seqlens, position_ids, kwargs),
    )
    ids_BT = documents.ids_BT
    continues = (ids_BT[:, 1:] == ids_BT[:, :-1]) & (ids_BT[:, 1:] != PADDING)
    return labels[:, 1:].masked_fill(~continues, ignore_index)


def cross_entropy_sum(logits: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Sum over the targets [B, T - 1] of the cross-entropy with the logits [B, T, V] before them, in fp32."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    predicted = logits[:, :-1].flatten(0, 1).to(wide)
    return F.cross_entropy(predicted, target.flatten(), ignore_index=ignore_index, reduction="sum")


# What trainers, collators and `generate` pass to any model, and what has no meaning or no effect here.
KNOWN_KEYWORDS = frozenset(
    {"num_items_in_batch", "return_dict", "output_attentions", "seq_idx", "cache_position", "mm_token_type_ids"}
    | {f"{name}_{side}" for name in ("cu_seq_lens", "max_length") for side in "qk"}
)


def check_keywords(kwargs: dict) -> None:
    """TypeError for an argument that no one knows: a misspelt `attention_mask` must not mean "no padding"."""
    unknown = sorted(kwargs.keys() - KNOWN_KEYWORDS)
    if unknown:
        raise TypeError(f"forward got unknown arguments: {', '.join(unknown)}")
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions: attention weights are not available")


def _boundaries(cu_seqlens, position_ids, kwargs: dict) -> torch.Tensor | None:
    """Document borders under our name or that of transformers' flattening collators."""
    flattened = kwargs.get("cu_seq_lens_q")
    if cu_seqlens is not None or flattened is not None:
        return cu_seqlens if cu_seqlens is not None else flattened
    if kwargs.get("seq_idx") is not None and position_ids is None:
        raise ValueError("seq_idx: pass the document borders as cu_seqlens, or position_ids that restart")
    return None


def _cache_fields(cache: LatentMoECache | None) -> dict[str, LatentMoECache | None]:
    """Output fields of the cache: `cache`, and the name that this transformers' `generate` reads."""
    return {"cache": cache, CACHE_ARGUMENT: cache}


def _check_placeholders(placeholders: int, features: int) -> None:
    if placeholders != features:
        raise ValueError(
            f"images do not match the prompt: {placeholders} media placeholders in input_ids, {features} image tokens "
            f"in pixel_values (build both with the processor, and do not truncate through an image)"
        )


LatentMoEModel.register_for_auto_class("AutoModel")
LatentMoEForCausalLM.register_for_auto_class("AutoModelForCausalLM")
LatentMoEForConditionalGeneration.register_for_auto_class("AutoModelForImageTextToText")
