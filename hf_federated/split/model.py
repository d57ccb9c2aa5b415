"""`SplitModel`: a decoder model whose first and last blocks are a client's and whose others are a server's.

FL-GLM (Zheng et al. 2024), section 3.1: `h_0 = Block_0(Embedding(x))` leaves the client, the server answers with
`h_{N-2} = Block_{1..N-2}(h_0)`, and `Linear(Block_{N-1}(h_{N-2}))` and the loss are the client's again. Any cut may be
chosen.

Raw text and labels stay with the client. Against a server that knows the pretrained weights, hidden states can still
reveal text, and gradients labels: how much is a thing to measure (`hf_federated.audits`), not to claim.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from peft import PeftConfig, PeftModel
from transformers import AutoConfig, GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.generation import GenerationMode
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..messages.quantization import TRAVEL_DTYPES
from .adapters import add_adapter, check_peft_model, save_adapter, take_adapter
from .body import BodyServer
from .boundary import Boundary, LocalLink
from .cache import SplitCache
from .cut import ROLES, Cut
from .families import layout_of
from .layouts import Layout, Places
from .loading import load_parts
from .parts import Part
from .per_token import PerTokenOutput, score_targets
from .saving import rename_whole, whole_weights
from .whole import base_weights, check_modules, check_not_quantized
from .wire import Wire


# What a caller may pass that changes nothing here.
_WITHOUT_EFFECT = ("return_dict", "cache_position")
# What tells attention kernels where packed sequences begin; positions tell every part.
_OF_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
# What goes to the tail with the labels.
_FOR_THE_LOSS = ("num_items_in_batch", "shift_labels")


class SplitModel(PreTrainedModel, GenerationMixin):
    """
    A causal language model in three parts, which talk through a boundary that only bytes cross.

    It is called, trained and generates as the model that it was made from, with the same logits and gradients: those
    of `use_cache=False`, for no cache is made unless it is asked for.

    Args:
        config (`PretrainedConfig`): The whole model's.
        client_head ([`Part`]): The client's embedding and first blocks.
        client_tail ([`Part`]): The client's last blocks, final norm and output layer.
        boundary ([`Boundary`]): To the server.
        server_body ([`Part`], *optional*): The server's blocks, where they are in this process.

    Example:

    ```python
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from hf_federated import SplitModel

    >>> config = LlamaConfig(
    ...     vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2
    ... )
    >>> whole = LlamaForCausalLM(config)
    >>> split = SplitModel.from_model(whole, head_blocks=1, tail_blocks=1)
    >>> tokens = torch.tensor([[1, 2, 3]])
    >>> bool((split(tokens).logits == whole(tokens).logits).all())
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
        # What Trainer counts target tokens by; GPT-2 has none, and is counted otherwise.
        self.loss_type = client_tail.model.loss_type
        self.adapter_config: PeftConfig | None = None
        # A Trainer's checkpoint has the whole model's names.
        self._register_load_state_dict_pre_hook(self._rename_whole)

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
        Cut a model.

        Args:
            model_or_name (`PreTrainedModel`, `PeftModel` or `str`):
                A model, whose parameters the parts then share, or a checkpoint: a directory or a Hub id. Of a PEFT
                model they share the base, and have copies of its adapters.
            head_blocks (`int`, *optional*, defaults to `1`): First blocks, which the client keeps.
            tail_blocks (`int`, *optional*, defaults to `1`): Last blocks, which the client keeps.
            layout ([`Layout`], *optional*): Where the parts of the model are; by default that of its type.
            model_class (`type[PreTrainedModel]`, *optional*): Of a checkpoint, where `AutoModelForCausalLM` has none.
            wire_dtype (`str`, *optional*, defaults to `"auto"`):
                The dtype in which hidden states travel: `"float32"`, `"bfloat16"`, `"float16"` or `"int8"`. By default
                the model's when it is split (of a wider one `"float32"`); `.to(dtype)` later does not change it.
            client_id (`str`, *optional*, defaults to `"client"`): Whose head and tail they are.
            kwargs: For a checkpoint: `dtype`, and what `AutoConfig.from_pretrained` takes (`revision`, `token`, …).

        Raises:
            ValueError: If there is no layout for the model, the cut does not fit it, weights are missing or quantized,
                or a module of the model is not the one that its class makes.
        """
        if isinstance(model_or_name, str):
            dtype = kwargs.pop("dtype", None)
            config = AutoConfig.from_pretrained(model_or_name, **kwargs)
            cut = Cut(_num_blocks(config, layout), head_blocks, tail_blocks)
            parts = load_parts(
                model_or_name, config, cut, ROLES, layout=layout, model_class=model_class, dtype=dtype, **kwargs
            )
        else:
            if kwargs:
                raise TypeError(f"{sorted(kwargs)} are for a checkpoint, and a model was given.")
            whole = model_or_name
            if isinstance(model_or_name, PeftModel):
                check_peft_model(model_or_name)
                whole = model_or_name.get_base_model()
            config = whole.config
            check_not_quantized(config)
            cut = Cut(_num_blocks(config, layout), head_blocks, tail_blocks)
            parts = {role: Part(config, cut, role, layout, type(whole)) for role in ROLES}
            weights = base_weights(whole)
            for part in parts.values():
                part.take(weights)
            check_modules(whole, parts.values())
            # What was set on the model itself is no module's.
            parts["tail"].model.loss_type = whole.loss_type
            if hasattr(whole, "_loss_function"):
                parts["tail"].model.loss_function = whole.loss_function
        wire = Wire(_wire_dtype(parts["head"].dtype) if wire_dtype == "auto" else wire_dtype)
        boundary = Boundary(LocalLink(BodyServer(parts["body"], wire)), wire, client_id)
        split = cls(config, parts["head"], parts["tail"], boundary, parts["body"])
        if isinstance(model_or_name, str):
            split.eval()
            with contextlib.suppress(OSError):
                split.generation_config = GenerationConfig.from_pretrained(model_or_name, **kwargs)
        else:
            if isinstance(model_or_name, PeftModel):
                take_adapter(split.parts, model_or_name)
                split.adapter_config = model_or_name.active_peft_config
            split.train(model_or_name.training)
            if whole.can_generate():
                split.generation_config = whole.generation_config
        return split

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """
        Raises:
            TypeError: Always: `from_model` cuts a checkpoint.
        """
        raise TypeError("SplitModel.from_model(name, head_blocks, tail_blocks) cuts a checkpoint.")

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """
        Raises:
            ValueError: Always: resize the whole model and split it then.
        """
        raise ValueError("Resize the embeddings of the whole model, save it, and split it then.")

    def activation_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """
        As of the whole model, in every part that is here.

        Raises:
            ValueError: If there are prefixes, which go into a cache.
        """
        for part in self.parts:
            part.enable_checkpointing(*args, **kwargs)

    def activation_checkpointing_disable(self) -> None:
        """As of the whole model, in every part that is here."""
        for part in self.parts:
            part.model.activation_checkpointing_disable()

    def _rename_whole(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        """Give weights under the whole model's names those of the parts."""
        rename_whole(self.parts, state)

    def add_adapter(self, adapter_config: PeftConfig, adapter_name: str | None = None) -> None:
        """
        Give every part the adapters of its blocks, and freeze everything else.

        Args:
            adapter_config (`PeftConfig`): For the whole model: a `LoraConfig` or a `PrefixTuningConfig`.
            adapter_name (`str`, *optional*): There is one adapter, and it has no name.

        Raises:
            ValueError: If there is an adapter already, or the method is another one.
        """
        if self.adapter_config is not None or adapter_name is not None:
            raise ValueError("A split model has one adapter without a name: this one has it already, or a name came.")
        add_adapter(self.parts, self.config, adapter_config)
        self.adapter_config = adapter_config

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """
        Write the ordinary whole model, or where there is an adapter its ordinary PEFT adapter.

        Args:
            save_directory (`str` or `os.PathLike`): Where to. It is created.
            kwargs: Nothing of what others take has an effect but `max_shard_size`.

        Raises:
            ValueError: If the server's blocks are not in this process: `save_parts` writes those that are.
        """
        if self.server_body is None:
            raise ValueError(
                "The server's blocks are elsewhere: save_parts writes the client's, split-merge joins them."
            )
        if self.adapter_config is not None:
            save_adapter(self.parts, self.config, self.adapter_config, save_directory)
            return
        self.config.save_pretrained(save_directory)
        if self.generation_config is not None:
            self.generation_config.save_pretrained(save_directory)
        shards = {name: value for name, value in kwargs.items() if name == "max_shard_size"}
        save_torch_state_dict(whole_weights(self.parts, self.config), Path(save_directory), **shards)

    def _get_name(self) -> str:
        # `Trainer` asks a model's name whether a smoothed loss is of the next token.
        return type(self.client_tail.model).__name__

    @property
    def parts(self) -> list[Part]:
        """The parts that are in this process, from the first block to the last."""
        parts = (self.client_head, self.server_body, self.client_tail)
        return [part for part in parts if part is not None]

    @property
    def cut(self) -> Cut:
        """Where the model is cut."""
        return self.client_head.cut

    def part_bytes(self) -> dict[str, int]:
        """Bytes of each part's parameters; a tied matrix counts with the head."""
        counted: set[int] = set()
        sizes: dict[str, int] = {}
        for part in self.parts:
            own = {id(parameter): parameter.nbytes for parameter in part.parameters()}
            sizes[part.role] = sum(size for name, size in own.items() if name not in counted)
            counted |= own.keys()
        return sizes

    def get_input_embeddings(self) -> torch.nn.Module:
        """The client's word embeddings."""
        return self.client_head.model.get_submodule(self.client_head.layout.embedding)

    def get_output_embeddings(self) -> torch.nn.Module:
        """The client's output layer."""
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
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | PerTokenOutput:
        """
        As the whole model's.

        Args:
            input_ids (`torch.Tensor`, *optional*): Shape `(batch, sequence)`. They stay with the client.
            attention_mask (`torch.Tensor`, *optional*): Shape `(batch, past + sequence)`; sent as bits where it has
                zeros.
            position_ids (`torch.Tensor`, *optional*): Shape `(batch or 1, sequence)`; sent where they are not those
                that the model would give. ChatGLM-6B makes its own of the tokens.
            past_key_values ([`SplitCache`], *optional*): Of the tokens before.
            inputs_embeds (`torch.Tensor`, *optional*): Shape `(batch, sequence, hidden)`, in place of `input_ids`.
            labels (`torch.Tensor`, *optional*): Shape `(batch, sequence)`. They stay with the client.
            use_cache (`bool`, *optional*): Whether to make a cache where none is given. By default none is made,
                whatever the config says: the server would have to keep it.
            logits_to_keep (`int` or `torch.Tensor`, *optional*, defaults to `0`): As in the whole model.
            kwargs: `num_items_in_batch`, as the loss takes it; `fused_lm_head`, by which TRL's `SFTTrainer` asks for
                [`~split.per_token.PerTokenOutput`] in place of logits.

        Raises:
            ValueError: If the sequence has more tokens than the model has positions.
            TypeError: If an argument is given that a split model has not.
        """
        scores_targets = kwargs.pop("fused_lm_head", False)
        # Tokenizers give it to every model; most decoders, unlike GPT-2, leave it out.
        if "token_type_ids" in kwargs:
            if "token_type_ids" not in inspect.signature(self.client_tail.model.forward).parameters:
                del kwargs["token_type_ids"]
        loss_arguments = _loss_arguments(kwargs, packed=position_ids is not None)
        if attention_mask is not None and attention_mask.ndim != 2:
            raise ValueError(f"attention_mask is (batch, sequence), got {tuple(attention_mask.shape)}.")
        states = input_ids if inputs_embeds is None else inputs_embeds
        if states is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("Give either input_ids or inputs_embeds.")
        if use_cache and past_key_values is None:
            past_key_values = self.new_cache()
        seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        runner = self.client_head.layout.runner
        # Of sequences packed into one row each has positions of its own; runners count otherwise.
        if position_ids is None or runner is not None:
            self._check_length(seen + states.shape[1])
        else:
            self._check_length(int(position_ids.max()) + 1)
        if attention_mask is not None and bool(attention_mask.all()):
            attention_mask = None
        if position_ids is not None and attention_mask is None and _is_range(position_ids, seen):
            position_ids = None
        caches = (None, None) if past_key_values is None else (past_key_values.head, past_key_values.tail)
        caching = past_key_values is not None
        contexts = tokens = None
        if runner is not None:
            if input_ids is None:
                raise ValueError("This model's positions follow from its tokens: give input_ids.")
            tokens = input_ids
            if past_key_values is not None and past_key_values.tokens is not None:
                tokens = torch.cat((past_key_values.tokens, input_ids), dim=1)
            places = runner.places(self.config, tokens, Places(attention_mask, position_ids), seen)
            position_ids, contexts = places.position_ids, places.context_lengths
        if past_key_values is not None:
            past_key_values.begin(len(states))
        hidden = self.client_head(states, attention_mask, position_ids, caches[0], contexts, use_cache=caching).logits
        hidden = self.boundary.cross(
            hidden,
            attention_mask,
            position_ids,
            training=self.training,
            cache_id=None if past_key_values is None else past_key_values.number,
            seen=seen,
            context_lengths=contexts,
            num_targets=self._count_targets(labels, loss_arguments.get("shift_labels")),
        )
        output = self.client_tail(
            hidden,
            attention_mask,
            position_ids,
            caches[1],
            contexts,
            use_cache=caching,
            labels=None if scores_targets else labels,
            logits_to_keep=logits_to_keep,
            **({} if scores_targets else loss_arguments),
        )
        if scores_targets:
            return score_targets(output.logits, labels, **loss_arguments)
        if past_key_values is not None:
            past_key_values.end(len(states), seen + states.shape[1], tokens)
        return CausalLMOutputWithPast(loss=output.loss, logits=output.logits, past_key_values=past_key_values)

    def new_cache(self) -> SplitCache:
        """An empty cache of the three parts."""
        return SplitCache(self.client_head, self.client_tail, self.boundary)

    def generate(self, inputs: torch.Tensor | None = None, generation_config: Any = None, **kwargs: Any) -> Any:
        """
        `GenerationMixin.generate`, greedy or sampling, with a cache in every part. Text stays with the client.

        Raises:
            ValueError: If another way of generating is asked for.
        """
        settings, _ = self._prepare_generation_config(generation_config, **kwargs)
        mode = settings.get_generation_mode(kwargs.get("assistant_model"))
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            instead = "leave out what asks for it" if mode == GenerationMode.ASSISTED_GENERATION else "set num_beams=1"
            raise ValueError(f"A split model generates greedily or by sampling, not by {mode.value}: {instead}.")
        if settings.cache_implementation not in (None, "dynamic"):
            raise ValueError(f"A split model has a dynamic cache, not {settings.cache_implementation!r}.")
        if settings.use_cache and kwargs.get("past_key_values") is None:
            kwargs["past_key_values"] = self.new_cache()
        output = super().generate(inputs, generation_config, **kwargs)
        # Of a cache that was made here nothing is left, unless the output has it.
        kwargs.pop("past_key_values", None)
        self.boundary.flush()
        return output

    def _count_targets(self, labels: torch.Tensor | None, shifted: torch.Tensor | None) -> int | None:
        """Target tokens of a batch, where the server must know them."""
        if self.boundary.total_targets is None or not torch.is_grad_enabled():
            return None
        if shifted is None:
            if labels is None:
                raise ValueError("Clients that meet tell their target tokens: give labels.")
            # As Trainer counts them, which divides the loss by their number.
            shifted = labels[:, 1:] if LOSS_MAPPING.get(self.loss_type) is ForCausalLMLoss else labels
        return int((shifted != -100).sum())

    def _check_length(self, length: int) -> None:
        layout, prefix = self.client_head.layout, self.client_head.prefix
        positions = getattr(self.config, layout.max_positions, None)
        # Runners count no positions for a prefix.
        taken = 0 if prefix is None or layout.runner is not None else prefix.length
        if positions is not None and length + taken > positions:
            raise ValueError(
                f"A sequence of {length + taken} positions{' with its prefix' if taken else ''} came to a model of "
                f"{positions}: shorten it."
            )


def _num_blocks(config: PretrainedConfig, layout: Layout | None) -> int:
    return int(getattr(config, (layout or layout_of(config)).num_blocks))


def _wire_dtype(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return name if name in TRAVEL_DTYPES else "float32"


def _is_range(position_ids: torch.Tensor, start: int) -> bool:
    """Whether these are the positions that the model gives without being told."""
    expected = torch.arange(start, start + position_ids.shape[1], device=position_ids.device)
    return bool((position_ids == expected).all())


def _loss_arguments(kwargs: dict[str, Any], packed: bool) -> dict[str, Any]:
    """What of a call's other arguments is for the loss; everything else is refused."""
    without_effect = _WITHOUT_EFFECT + (_OF_PACKED if packed else ())
    left = {name: value for name, value in kwargs.items() if name not in without_effect and value is not None}
    for name in ("output_attentions", "output_hidden_states"):
        if left.pop(name, False):
            raise ValueError(f"{name}=True: the server's are not sent. Look into the unsplit model.")
    arguments: dict[str, Any] = {name: left.pop(name) for name in _FOR_THE_LOSS if name in left}
    if left:
        raise TypeError(f"A split model takes no {sorted(left)}: nothing that is not declared leaves the client.")
    return arguments
