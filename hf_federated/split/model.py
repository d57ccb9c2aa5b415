"""`SplitModel`: a decoder model that is split between a client (first and last blocks) and a server (other blocks).

The method is FL-GLM (Zheng et al. 2024), section 3.1. The client computes and sends `h_0 = Block_0(Embedding(x))`, the
server computes and returns `h_{N-2} = Block_{1..N-2}(h_0)`, and the client computes `Linear(Block_{N-1}(h_{N-2}))` and
the loss. The number of blocks on each side can be chosen.

Raw text and labels stay with the client. However, hidden states can reveal text and gradients can reveal labels to a
server that knows the pretrained weights. Measure how much they reveal with `hf_federated.audits`.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .._compat import (
    CACHE_NAME,
    ActivationCheckpointing,
    disable_activation_checkpointing,
    register_load_state_dict_pre_hook,
)
from .adapters import add_adapter, copy_adapter, save_adapter
from .body import BodyServer
from .boundary import Boundary, LocalLink
from .cache import SplitCache
from .creation import base_model, create_parts
from .cut import Cut
from .forward_arguments import count_targets, loss_arguments, prepare_inputs
from .generation import SplitGenerationMixin
from .layouts import Layout
from .parts import Part
from .per_token import PerTokenOutput, score_targets
from .saving import rename_to_part_names, save_full_model
from .verification import verify_parts
from .wire import Wire


class SplitModel(ActivationCheckpointing, PreTrainedModel, SplitGenerationMixin):
    """
    A causal language model in three parts. Client and server exchange only messages.

    Calls, training and generation work as with the original model, and logits and gradients are the same as with
    `use_cache=False`. Outside of `generate`, a split model creates a cache only if `use_cache=True` is passed.

    Args:
        config (`PretrainedConfig`): The config of the full model.
        client_head ([`Part`]): The client's embedding and first blocks.
        client_tail ([`Part`]): The client's last blocks, final norm and output layer.
        boundary ([`Boundary`]): The client's side of the cut layer, with the link to the server.
        server_body ([`Part`], *optional*): The server's blocks, if the server is in this process.

    Example:

    ```python
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from hf_federated import SplitModel

    >>> config = LlamaConfig(
    ...     vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2
    ... )
    >>> model = LlamaForCausalLM(config)
    >>> split = SplitModel.from_model(model, head_blocks=1, tail_blocks=1)
    >>> tokens = torch.tensor([[1, 2, 3]])
    >>> bool((split(tokens).logits == model(tokens).logits).all())
    True
    >>> split.part_bytes()
    {'head': 11392, 'body': 17664, 'tail': 11456}
    ```
    """

    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(
        self,
        config: PretrainedConfig,
        client_head: Part,
        client_tail: Part,
        boundary: Boundary,
        server_body: Part | None = None,
    ) -> None:
        super().__init__(config)
        self.client_head = client_head
        self.server_body = server_body
        self.client_tail = client_tail
        self.boundary = boundary
        # `Trainer` counts target tokens by the loss type. GPT-2 has no loss type, so `Trainer` counts all labels.
        self.loss_type = client_tail.model.loss_type
        self.adapter_config: PeftConfig | None = None
        # Checkpoints of a `Trainer` contain the weights with the names of the full model.
        register_load_state_dict_pre_hook(self, self._rename_to_part_names)

    @classmethod
    def from_model(
        cls,
        model_or_name: PreTrainedModel | PeftModel | str,
        head_blocks: int = 1,
        tail_blocks: int = 1,
        *,
        layout: Layout | None = None,
        model_class: type[PreTrainedModel] | None = None,
        wire_dtype: str = "auto",
        client_id: str = "client",
        **kwargs: Any,
    ) -> SplitModel:
        """
        Split a model.

        The first time that a process splits a model of a class, config and layout, the method compares the parts with
        the whole model. See `verification.py`.

        Args:
            model_or_name (`PreTrainedModel`, `PeftModel` or `str`):
                A model or a checkpoint (a directory or a Hub id). The parts share the parameters of a model. The parts
                of a PEFT model share the parameters of the base model and copy the adapters.
            head_blocks (`int`, *optional*, defaults to `1`): Number of first blocks, which the client keeps.
            tail_blocks (`int`, *optional*, defaults to `1`): Number of last blocks, which the client keeps.
            layout ([`Layout`], *optional*): The layout of the model. Defaults to the layout of its model type.
            model_class (`type[PreTrainedModel]`, *optional*):
                The model class of a checkpoint, if `AutoModelForCausalLM` has no class for it.
            wire_dtype (`str`, *optional*, defaults to `"auto"`):
                The dtype in which hidden states and gradients are sent: `"float32"`, `"bfloat16"`, `"float16"`,
                `"int8"`, `"int4"` or `"topk"`, as in [`~split.Wire`].
                `"auto"` selects the dtype of the model at the time of the split, or `"float32"` for a wider dtype. A
                later `.to(dtype)` does not change the wire dtype.
            client_id (`str`, *optional*, defaults to `"client"`): Id of the client that owns head and tail.
            kwargs:
                For a checkpoint: `dtype`, and the arguments of `AutoConfig.from_pretrained` (`revision`, `token`, …).

        Raises:
            ValueError: If the model has no layout, the cut does not fit the model, weights are missing or quantized, a
                module of the model was replaced by a module of another class, or the parts do not compute what the
                whole model computes.
            TypeError: If arguments for a checkpoint are passed together with a model.
        """
        config, parts = create_parts(model_or_name, head_blocks, tail_blocks, layout, model_class, **kwargs)
        wire = Wire.for_weights(parts["head"].dtype, wire_dtype)
        server = BodyServer(parts["body"], wire, trusts_clients=True)
        boundary = Boundary(LocalLink(server), wire, client_id, trusts_server=True)
        split = cls(config, parts["head"], parts["tail"], boundary, parts["body"])
        if isinstance(model_or_name, str):
            split.eval()
            arguments = {name: value for name, value in kwargs.items() if name != "dtype"}
            with contextlib.suppress(OSError):
                split.generation_config = GenerationConfig.from_pretrained(model_or_name, **arguments)
            verify_parts(parts, config)
            return split
        if isinstance(model_or_name, PeftModel):
            copy_adapter(split.parts, model_or_name)
            split.adapter_config = model_or_name.active_peft_config
        split.train(model_or_name.training)
        model = base_model(model_or_name)
        if model.can_generate():
            split.generation_config = model.generation_config
        verify_parts(parts, config, model)
        return split

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """
        Raise an error that refers to `from_model`.

        Raises:
            TypeError: Always. Use `from_model` to split a checkpoint.
        """
        raise TypeError(
            "SplitModel.from_pretrained() is not supported. Split a checkpoint with SplitModel.from_model(name, "
            "head_blocks, tail_blocks)."
        )

    def get_correct_attn_implementation(
        self, requested_attention: str | None, is_init_check: bool = False
    ) -> str | None:
        """
        Return the attention implementation of the config. The class of the parts chooses and checks theirs.

        Args:
            requested_attention (`str`, *optional*): The attention implementation of the config.
            is_init_check (`bool`, *optional*, defaults to `False`): Whether the model is being created.
        """
        return requested_attention

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """
        Return the experts implementation of the config, which the class of the parts has checked.

        Args:
            requested_experts (`str`, *optional*): The experts implementation of the config.
        """
        return super().get_correct_experts_implementation(None) if requested_experts is None else requested_experts

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """
        Raise an error, because the embeddings of a split model cannot be resized.

        Raises:
            ValueError: Always. Resize the embeddings of the full model before splitting it.
        """
        raise ValueError(
            "The embeddings of a SplitModel cannot be resized. Resize the embeddings of the full model, save it, and "
            "split the saved model."
        )

    def activation_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """
        Enable activation checkpointing in every part that is in this process.

        The arguments are the arguments of `PreTrainedModel.activation_checkpointing_enable`.

        Raises:
            ValueError: If the parts have prefixes, which are in a cache, or reentrant checkpointing is requested.
        """
        for part in self.parts:
            part.enable_checkpointing(*args, **kwargs)

    def activation_checkpointing_disable(self) -> None:
        """Disable activation checkpointing in every part that is in this process."""
        for part in self.parts:
            disable_activation_checkpointing(part.model)

    def _rename_to_part_names(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        """Rename weights of the full model to the names of the parts."""
        rename_to_part_names(self.parts, state)

    def add_adapter(self, adapter_config: PeftConfig, adapter_name: str | None = None) -> None:
        """
        Add an adapter to the blocks of every part, and freeze all other parameters.

        Args:
            adapter_config (`PeftConfig`):
                The adapter config for the full model: a `LoraConfig` or a `PrefixTuningConfig`.
            adapter_name (`str`, *optional*): Must be `None`. A split model has one adapter without a name.

        Raises:
            ValueError: If the model already has an adapter, a name is passed, or the method is neither LoRA nor prefix
                tuning.
        """
        if self.adapter_config is not None or adapter_name is not None:
            raise ValueError(
                "A split model has at most one adapter, without a name, but this model already has an adapter or "
                f"adapter_name={adapter_name!r} was passed. Add one adapter, without a name."
            )
        add_adapter(self.parts, self.config, adapter_config)
        self.adapter_config = adapter_config

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """
        Save the full model in the standard format, or only its PEFT adapter if the model has an adapter.

        Args:
            save_directory (`str` or `os.PathLike`): The output directory. It is created if it does not exist.
            kwargs: Only `max_shard_size` has an effect.

        Raises:
            ValueError: If the server's blocks are not in this process. Use `save_parts` to save the client's parts.
        """
        self.require_server_body()
        if self.adapter_config is not None:
            save_adapter(self.parts, self.config, self.adapter_config, save_directory)
            return
        shards = {name: value for name, value in kwargs.items() if name == "max_shard_size"}
        save_full_model(self.parts, self.config, self.generation_config, save_directory, **shards)

    def require_server_body(self) -> Part:
        """
        Return the server's blocks.

        Raises:
            ValueError: If the server's blocks are not in this process.
        """
        if self.server_body is None:
            raise ValueError(
                "The server's blocks are not in this process, so the full model cannot be trained or saved here. Save "
                "the client's parts with save_parts, and merge them with the server's part with `hf-federated "
                "split-merge`."
            )
        return self.server_body

    def _get_name(self) -> str:
        # With label smoothing, `Trainer` decides by the class name whether to shift the labels.
        return type(self.client_tail.model).__name__

    @property
    def parts(self) -> list[Part]:
        """The parts that are in this process, in the order of their blocks."""
        parts = (self.client_head, self.server_body, self.client_tail)
        return [part for part in parts if part is not None]

    @property
    def cut(self) -> Cut:
        """The cuts of the model."""
        return self.client_head.cut

    def part_bytes(self) -> dict[str, int]:
        """Return the size of each part's parameters in bytes. Tied embeddings count for the head."""
        # The first part that has a parameter owns it.
        owners = {parameter: part.role for part in reversed(self.parts) for parameter in part.parameters()}
        sizes: dict[str, int] = {part.role: 0 for part in self.parts}
        for parameter, role in owners.items():
            sizes[role] += parameter.nbytes
        return sizes

    def get_input_embeddings(self) -> torch.nn.Module:
        """Return the client's word embeddings."""
        return self.client_head.model.get_submodule(self.client_head.layout.embedding)

    def get_output_embeddings(self) -> torch.nn.Module:
        """Return the client's output layer."""
        return self.client_tail.model.get_submodule(self.client_tail.layout.output)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: SplitCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        cache: SplitCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | PerTokenOutput:
        """
        Run the full model: the head on the client, the body on the server, and the tail on the client.

        Args:
            input_ids (`torch.Tensor`, *optional*): Shape `(batch, sequence)`. Token ids stay with the client.
            attention_mask (`torch.Tensor`, *optional*):
                Shape `(batch, past + sequence)`. A mask with zeros is sent as bits.
            position_ids (`torch.Tensor`, *optional*):
                Shape `(batch or 1, sequence)`. Positions are sent if they differ from the model's default positions.
                ChatGLM-6B ignores this argument and computes positions from the tokens.
            past_key_values ([`SplitCache`], *optional*): The cache of the previous tokens.
            inputs_embeds (`torch.Tensor`, *optional*): Shape `(batch, sequence, hidden)`, in place of `input_ids`.
            labels (`torch.Tensor`, *optional*): Shape `(batch, sequence)`. Labels stay with the client.
            use_cache (`bool`, *optional*):
                Whether to create a cache if no cache is passed. By default no cache is created, even if the config
                enables caches, because the server would have to keep the cache.
            logits_to_keep (`int` or `torch.Tensor`, *optional*, defaults to `0`):
                Number or indices of the positions for which to compute logits, as in the full model.
            cache ([`SplitCache`], *optional*): The name of `past_key_values` in `transformers` 5.24 and later.
            kwargs:
                `num_items_in_batch` and `shift_labels`, which are arguments of the loss, and `fused_lm_head`, with
                which TRL's `SFTTrainer` requests [`~split.per_token.PerTokenOutput`] in place of logits.

        Returns:
            `CausalLMOutputWithPast` or [`~split.per_token.PerTokenOutput`]: The output of the model.

        Raises:
            ValueError: If a sequence has more tokens than the model has positions, or the value of an argument is not
                supported.
            TypeError: If a split model does not support an argument.
        """
        past_key_values = past_key_values if cache is None else cache
        returns_target_scores = kwargs.pop("fused_lm_head", False)
        arguments = loss_arguments(kwargs, self.client_tail, packed=position_ids is not None)
        cache = self.new_cache() if use_cache and past_key_values is None else past_key_values
        inputs = prepare_inputs(
            self.client_head, self.config, input_ids, inputs_embeds, attention_mask, position_ids, cache
        )
        attention, contexts = (inputs.attention_mask, inputs.position_ids), inputs.context_lengths
        caches = (None, None) if cache is None else (cache.head, cache.tail)
        if cache is not None:
            cache.begin_call(inputs.num_sequences)
        num_targets = None
        if self.boundary.total_targets is not None and torch.is_grad_enabled():
            num_targets = count_targets(self.loss_type, labels, arguments.get("shift_labels"))
        hidden = self.client_head(inputs.states, *attention, caches[0], contexts, use_cache=cache is not None).logits
        hidden = self.boundary.run_body(
            hidden,
            *attention,
            training=self.training,
            cache_id=None if cache is None else cache.cache_id,
            seen=inputs.seen,
            reorder=None if cache is None else cache.take_reorder(),
            context_lengths=contexts,
            num_targets=num_targets,
        )
        output = self.client_tail(
            hidden,
            *attention,
            caches[1],
            contexts,
            use_cache=cache is not None,
            labels=None if returns_target_scores else labels,
            logits_to_keep=logits_to_keep,
            **({} if returns_target_scores else arguments),
        )
        if returns_target_scores:
            return score_targets(output.logits, labels, **arguments)
        if cache is not None:
            cache.end_call(inputs.num_sequences, inputs.num_positions, inputs.tokens)
        return CausalLMOutputWithPast(loss=output.loss, logits=output.logits, **{CACHE_NAME: cache})
