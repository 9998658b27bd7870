"""
The declared edits of upstream's files: everything in which a file of the built package differs from the pinned
release. Each one says why it is needed. Logic lives in the modules under `src/transformers/`, not here.
"""

from .codemod import (
    AddBase,
    AddImport,
    AddParameter,
    AddToDocstring,
    Edit,
    RedirectCall,
    ReplaceExpression,
    ReplaceStatement,
)


GENERATE = "GenerationMixin.generate"
SAMPLE = "GenerationMixin._sample"
BEAM_SEARCH = "GenerationMixin._beam_search"
PREFILL = "{} = self._prefill(input_ids, generation_config, model_kwargs, is_first_iteration=not generation_config.is_assistant)"

GENERATION_EDITS = [
    AddImport(
        path="generation/utils.py",
        after=".logits_process",
        statement="from .prefill import PrefillMixin, PrefillPlan, detach_from_caller, plan_prefill",
        reason="prefill before expansion",
    ),
    AddBase(
        path="generation/utils.py",
        scope="GenerationMixin",
        base="PrefillMixin",
        reason="models with a state of their own say how it is repeated; decoding loops of other people prefill once",
    ),
    ReplaceStatement(
        path="generation/utils.py",
        scope=GENERATE,
        old="batch_size = inputs_tensor.shape[0]",
        new="""
            batch_size = inputs_tensor.shape[0]
            plan = plan_prefill(self, decoding_method, generation_config, inputs_tensor, model_kwargs)
            if plan.num_sequences > 1:
                model_kwargs = detach_from_caller(model_kwargs)
        """,
        reason="the strategy is decided, or refused, before any forward pass; the caller's objects stay as they are",
    ),
    ReplaceStatement(
        path="generation/utils.py",
        scope=GENERATE,
        old="""
            model_kwargs = self._maybe_prepare_encoder_kwargs_for_generation(
                inputs_tensor, model_kwargs, model_input_name, generation_config
            )
        """,
        new="""
            if plan.equal_rows is None:
                model_kwargs = self._maybe_prepare_encoder_kwargs_for_generation(
                    inputs_tensor, model_kwargs, model_input_name, generation_config
                )
            else:
                plan, model_kwargs = plan.encode(
                    self, inputs_tensor, model_kwargs, model_input_name, generation_config
                )
        """,
        reason="prompts that are equal are encoded once",
    ),
    RedirectCall(
        path="generation/utils.py",
        scope=GENERATE,
        call="self._expand_inputs_for_generation",
        to="(plan.expand_prompts if plan.prefills_once else self._expand_inputs_for_generation)",
        reason="all inputs but the tokens are expanded after the prefill",
    ),
    ReplaceStatement(
        path="generation/utils.py",
        scope=GENERATE,
        old="""
            self._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        """,
        new="""
            self._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            if plan.prefills_once:
                decoding_method = plan.hand_to(decoding_method, model_kwargs, batch_size)
        """,
        reason="the decoding method follows the plan; a static cache that is initialized early has the prefill's rows",
    ),
    RedirectCall(
        path="generation/utils.py",
        scope=GENERATE,
        call="self._get_logits_processor",
        to="(self._get_logits_processor if plan.num_sequences == 1 else plan.logits_processors_of(self))",
        reason="processors run on expanded rows and take per-row facts (padding lengths) from `model_kwargs`",
    ),
    ReplaceStatement(
        path="generation/utils.py",
        scope=GENERATE,
        old="return result",
        new="""
            if plan.strategy == "share":
                plan.return_cache(self, result, model_kwargs.get("cache"))
            return result
        """,
        reason="a cache that the caller gets back has upstream's layout",
    ),
    *(
        edit
        for scope, name in ((SAMPLE, "outputs"), (BEAM_SEARCH, "model_outputs"))
        for edit in (
            AddParameter(
                path="generation/utils.py",
                scope=scope,
                parameter="prefill_plan: PrefillPlan | None = None",
                reason="`generate` hands its plan to the decoding method, where there is one",
            ),
            ReplaceStatement(
                path="generation/utils.py",
                scope=scope,
                old=PREFILL.format(name),
                new=f"""
                    if prefill_plan is None:
                        {PREFILL.format(name)}
                    else:
                        {name}, model_kwargs = prefill_plan.prefill(
                            self,
                            input_ids,
                            generation_config,
                            model_kwargs,
                            is_first_iteration=not generation_config.is_assistant,
                        )
                """,
                reason="the prompt is forwarded on B rows, then expanded",
            ),
        )
    ),
    AddImport(
        path="generation/configuration_utils.py",
        after="..utils",
        statement="from .prompt_expansion import validate_prompt_expansion",
        reason="validation of the `prompt_expansion` knob",
    ),
    AddToDocstring(
        path="generation/configuration_utils.py",
        scope="GenerationConfig",
        before="> Parameters for manipulation of the model output logits",
        text="""
            prompt_expansion (`str`, *optional*, defaults to `"auto"`):
                How a prompt becomes the rows of its beams, or of several returned sequences:
                - `"recompute"` repeats the prompt and forwards each copy.
                - `"copy"` forwards the prompt once and repeats its cache.
                - `"auto"` takes the cheapest way that works, and logs it with the reason at level info.
                A way that doesn't work here raises a `ValueError`.
        """,
        reason="the knob is documented where all others are",
    ),
    ReplaceStatement(
        path="generation/configuration_utils.py",
        scope="GenerationConfig.__init__",
        old='self.prefill_chunk_size = kwargs.pop("prefill_chunk_size", None)',
        new="""
            self.prefill_chunk_size = kwargs.pop("prefill_chunk_size", None)
            self.prompt_expansion = kwargs.pop("prompt_expansion", None)
        """,
        reason="the knob: how a prompt becomes several rows",
    ),
    ReplaceStatement(
        path="generation/configuration_utils.py",
        scope="GenerationConfig.validate",
        old="minor_issues = {}",
        new="""
            minor_issues = {}
            validate_prompt_expansion(self.prompt_expansion)
        """,
        reason="a wrong value is refused before any forward pass",
    ),
]

GUIDANCE_EDITS = [
    AddImport(
        path="generation/utils.py",
        after="..utils.generic",
        statement="from .beam_reordering import reorder_processors",
        reason="processors that keep a state per row must follow the beams",
    ),
    ReplaceStatement(
        path="generation/utils.py",
        scope=BEAM_SEARCH,
        old="cur_len = cur_len + 1",
        new="""
            reorder_processors(
                logits_processor, self._flatten_beam_dim(running_beam_indices[..., cur_len - decoder_prompt_len])
            )
            cur_len = cur_len + 1
        """,
        reason="classifier-free guidance keeps a private cache that upstream leaves in the order of the step before",
    ),
    AddImport(
        path="generation/logits_process.py",
        after="..utils.logging",
        statement="from .beam_reordering import ReorderedGuidanceMixin",
        reason="classifier-free guidance keeps a private cache that must follow the beams",
    ),
    AddBase(
        path="generation/logits_process.py",
        scope="UnbatchedClassifierFreeGuidanceLogitsProcessor",
        base="ReorderedGuidanceMixin",
        reason="classifier-free guidance keeps a private cache that must follow the beams",
    ),
]

GROUP_BEAM_SEARCH_EDITS = [
    AddImport(
        path="generation/utils.py",
        after=".configuration_utils",
        statement="from .group_beam_search import GroupBeamSearchMixin",
        reason="the mixin with the decoding method",
    ),
    AddBase(
        path="generation/utils.py",
        scope="GenerationMixin",
        base="GroupBeamSearchMixin",
        reason="every generative model can decode with diverse beam search",
    ),
    ReplaceExpression(
        path="generation/utils.py",
        old='"transformers-community/group-beam-search"',
        new='"_group_beam_search"',
        reason="groups of beams are decoded here, without remote code",
    ),
    ReplaceStatement(
        path="generation/utils.py",
        scope=GENERATE,
        old="generation_mode = generation_config.get_generation_mode(assistant_model)",
        new="""
            if generation_config.num_beam_groups != 1 or generation_config.diversity_penalty != 0:
                self._validate_beam_groups(generation_config, custom_generate, assistant_model, streamer)
            generation_mode = generation_config.get_generation_mode(assistant_model)
        """,
        reason="options that don't go together are refused before any forward pass",
    ),
]

# Caches that aren't made of layers: (file, import after which ours goes, class, mixin)
OTHER_CACHES = (
    ("models/reformer/modeling_reformer.py", "...utils", "ReformerDynamicCache", "CacheExpansionMixin"),
    ("models/xlstm/modeling_xlstm.py", "...utils", "xLSTMCache", "XLSTMCacheExpansionMixin"),
    (
        "models/kyutai_speech_to_text/modeling_kyutai_speech_to_text.py",
        "...cache_utils",
        "KyutaiSpeechToTextConv1dPaddingCache",
        "PaddingCacheExpansionMixin",
    ),
    (
        "models/voxtral_realtime/modeling_voxtral_realtime.py",
        "...cache_utils",
        "VoxtralRealtimeConv1dPaddingCache",
        "LayeredPaddingCacheExpansionMixin",
    ),
)

CACHE_EDITS = [
    AddImport(
        path="cache_utils.py",
        after=".utils",
        statement="""
            from .cache_expansion import (
                CacheExpansionMixin,
                LinearAttentionLayerExpansionMixin,
                QuantizedLayerExpansionMixin,
                StaticLayerExpansionMixin,
                check_layers,
                check_repeats,
                count_rows,
                layers_to_repeat,
                take_rows,
            )
        """,
        reason="the mixins that repeat the rows of a cache",
    ),
    AddBase(
        path="cache_utils.py",
        scope="CacheLayerMixin",
        base="CacheExpansionMixin",
        reason="every layer that can be reordered can be repeated",
    ),
    AddBase(
        path="cache_utils.py",
        scope="LinearAttentionCacheLayerMixin",
        base="CacheExpansionMixin",
        reason="every layer that can be reordered can be repeated",
    ),
    AddBase(
        path="cache_utils.py",
        scope="StaticLayer",
        base="StaticLayerExpansionMixin",
        reason="static buffers keep their address when they are reordered, and follow a change of the batch size",
    ),
    AddBase(
        path="cache_utils.py",
        scope="LinearAttentionLayer",
        base="LinearAttentionLayerExpansionMixin",
        reason="static states keep their address when they are reordered",
    ),
    AddBase(
        path="cache_utils.py",
        scope="BaseQuantizedLayer",
        base="QuantizedLayerExpansionMixin",
        reason="the rows of a quantized store are counted without dequantizing it",
    ),
    ReplaceExpression(
        path="cache_utils.py",
        scope="DynamicLayer.batch_repeat_interleave",
        old="self.get_seq_length() > 0",
        new="check_repeats(repeats) > 1 and count_rows(self.keys) is not None",
        reason="a wrong value is refused, one repeat copies nothing",
    ),
    ReplaceStatement(
        path="cache_utils.py",
        scope="DynamicIndexedLayer.batch_repeat_interleave",
        old="super().batch_repeat_interleave(repeats)",
        new="""
            if check_repeats(repeats) == 1:
                return
            super().batch_repeat_interleave(repeats)
        """,
        reason="one repeat copies nothing",
    ),
    ReplaceStatement(
        path="cache_utils.py",
        scope="StaticIndexedLayer.reorder_cache",
        old="self.indexer_keys = self.indexer_keys.index_select(0, beam_idx.to(self.indexer_keys.device))",
        new="self.indexer_keys = take_rows(self.indexer_keys, beam_idx)",
        reason="static buffers keep their address when they are reordered",
    ),
    ReplaceExpression(
        path="cache_utils.py",
        scope="DummyLayer.batch_repeat_interleave",
        old="...",
        new="check_repeats(repeats)",
        reason="a wrong value is refused",
    ),
    ReplaceExpression(
        path="cache_utils.py",
        scope="Cache.batch_repeat_interleave",
        old="range(len(self.layers))",
        new="layers_to_repeat(self, repeats)",
        reason="whatever can be refused is refused before the first layer is changed",
    ),
    ReplaceStatement(
        path="cache_utils.py",
        scope="EncoderDecoderCache.batch_repeat_interleave",
        old="self.check_dynamic_cache(self.batch_repeat_interleave.__name__)",
        new="check_layers(self, self.batch_repeat_interleave.__name__)",
        reason="static parts can be repeated, and both parts are checked before the first one is changed",
    ),
    ReplaceStatement(
        path="cache_utils.py",
        scope="EncoderDecoderCache.batch_select_indices",
        old="self.check_dynamic_cache(self.batch_select_indices.__name__)",
        new="check_layers(self, self.batch_select_indices.__name__)",
        reason="rows can be selected from static parts, and both parts are checked before the first one is changed",
    ),
    AddImport(
        path="models/minimax/modeling_minimax.py",
        after="...cache_utils",
        statement="from ...cache_expansion import MiniMaxCacheExpansionMixin, check_repeats",
        reason="the mixin that repeats the rows of this cache",
    ),
    AddBase(
        path="models/minimax/modeling_minimax.py",
        scope="MiniMaxCache",
        base="MiniMaxCacheExpansionMixin",
        reason="beam search left the recurrent states in their old order",
    ),
    ReplaceExpression(
        path="models/minimax/modeling_minimax.py",
        scope="MiniMaxCache.batch_repeat_interleave",
        old="range(len(self))",
        new="range(self.pad_linear_cache() if check_repeats(repeats) > 1 else 0)",
        reason="an attention layer may come last, a wrong value is refused, one repeat copies nothing",
    ),
    ReplaceExpression(
        path="models/minimax/modeling_minimax.py",
        scope="MiniMaxCache.batch_select_indices",
        old="range(len(self))",
        new="range(self.pad_linear_cache())",
        reason="an attention layer may come last",
    ),
    AddImport(
        path="models/minimax_m3_vl/modeling_minimax_m3_vl.py",
        after="...cache_utils",
        statement="from ...cache_expansion import check_repeats, take_rows",
        reason="repeating the rows of these cache layers",
    ),
    ReplaceStatement(
        path="models/minimax_m3_vl/modeling_minimax_m3_vl.py",
        scope="MiniMaxM3VLSparseCacheLayer.batch_repeat_interleave",
        old="super().batch_repeat_interleave(repeats)",
        new="""
            if check_repeats(repeats) == 1:
                return
            super().batch_repeat_interleave(repeats)
        """,
        reason="one repeat copies nothing",
    ),
    ReplaceStatement(
        path="models/minimax_m3_vl/modeling_minimax_m3_vl.py",
        scope="MiniMaxM3VLSparseStaticCacheLayer.reorder_cache",
        old="self.idx_keys = self.idx_keys.index_select(0, beam_idx.to(self.idx_keys.device))",
        new="self.idx_keys = take_rows(self.idx_keys, beam_idx)",
        reason="static buffers keep their address when they are reordered",
    ),
    AddImport(
        path="models/unlimited_ocr/modeling_unlimited_ocr.py",
        after="...cache_utils",
        statement="from ...cache_expansion import StaticReferenceWindowLayerExpansionMixin",
        reason="the mixin that repeats the rows of this cache layer",
    ),
    AddBase(
        path="models/unlimited_ocr/modeling_unlimited_ocr.py",
        scope="UnlimitedOcrStaticReferenceSlidingWindowLayer",
        base="StaticReferenceWindowLayerExpansionMixin",
        reason="its buffers are views of one, which reordering left behind",
    ),
    *(
        edit
        for path, after, cache, mixin in OTHER_CACHES
        for edit in (
            AddImport(
                path=path,
                after=after,
                statement=f"from ...cache_expansion import {mixin}",
                reason="the mixin that repeats the rows of this cache",
            ),
            AddBase(path=path, scope=cache, base=mixin, reason="the cache had no way to repeat its rows"),
        )
    ),
]

# Models that keep a state of their own: (folder, classes, mixin of `prefill_state`)
STATEFUL_MODELS = (
    ("blt", ("BltForCausalLM",), "WholePromptPrefillMixin"),
    ("cpmant", ("CpmAntForCausalLM",), "WholePromptPrefillMixin"),
    ("fuyu", ("FuyuForCausalLM",), "FuyuPrefillMixin"),
    ("gemma3n", ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"), "Gemma3nPrefillMixin"),
    ("gpt_neo", ("GPTNeoForCausalLM",), "DistanceInCachePrefillMixin"),
    ("glm_image", ("GlmImageForConditionalGeneration",), "GlmImagePrefillMixin"),
    ("idefics", ("IdeficsForVisionText2Text",), "IdeficsPrefillMixin"),
    ("kyutai_speech_to_text", ("KyutaiSpeechToTextForConditionalGeneration",), "StreamingAudioPrefillMixin"),
    ("moshi", ("MoshiForCausalLM", "MoshiForConditionalGeneration"), "WholePromptPrefillMixin"),
    ("nemotron_asr_streaming", ("NemotronAsrStreamingForRNNT",), "OwnDecoderStatePrefillMixin"),
    ("nllb_moe", ("NllbMoeForConditionalGeneration",), "NllbMoePrefillMixin"),
    ("openai", ("OpenAIGPTLMHeadModel",), "WholePromptPrefillMixin"),
    ("parakeet", ("ParakeetForRNNT",), "OwnDecoderStatePrefillMixin"),
    ("prophetnet", ("ProphetNetForCausalLM",), "WholePromptPrefillMixin"),
    ("qwen2_5_omni", ("Qwen2_5OmniTalkerForConditionalGeneration",), "TalkerPrefillMixin"),
    (
        "qwen3_omni_moe",
        ("Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration", "Qwen3OmniMoeTalkerForConditionalGeneration"),
        "TalkerPrefillMixin",
    ),
    ("recurrent_gemma", ("RecurrentGemmaForCausalLM",), "RecurrentGemmaPrefillMixin"),
    ("reformer", ("ReformerModelWithLMHead",), "ReformerPrefillMixin"),
    ("rwkv", ("RwkvForCausalLM",), "RwkvPrefillMixin"),
    ("vibevoice_asr", ("VibeVoiceAsrForConditionalGeneration",), "VibeVoiceAsrPrefillMixin"),
    ("voxtral_realtime", ("VoxtralRealtimeForConditionalGeneration",), "StreamingAudioPrefillMixin"),
    ("xlm", ("XLMWithLMHeadModel",), "WholePromptPrefillMixin"),
    ("xlnet", ("XLNetLMHeadModel",), "XLNetPrefillMixin"),
)

STATE_EDITS = [
    edit
    for folder, classes, mixin in STATEFUL_MODELS
    for edit in (
        AddImport(
            path=f"models/{folder}/modeling_{folder}.py",
            after="...generation",
            statement=f"from ...generation.prefill_state import {mixin}",
            reason="what the model carries from the prefill to decoding beside its cache",
        ),
        *(
            AddBase(
                path=f"models/{folder}/modeling_{folder}.py",
                scope=name,
                base=mixin,
                reason="the model says how this is repeated, or why it can't be",
            )
            for name in classes
        ),
    )
]

WHISPER_FILE = "models/whisper/generation_whisper.py"
WHISPER_GENERATE = "WhisperGenerationMixin.generate"

WHISPER_EDITS = [
    AddImport(
        path=WHISPER_FILE,
        after="...utils.deprecation",
        statement="from .segment_generation import SegmentGenerationMixin",
        reason="the mixin that decodes several sequences from one run of the encoder",
    ),
    AddBase(
        path=WHISPER_FILE,
        scope="WhisperGenerationMixin",
        base="SegmentGenerationMixin",
        reason="it runs the encoder once per segment of an audio",
    ),
    RedirectCall(
        path=WHISPER_FILE,
        scope=WHISPER_GENERATE,
        call="self._expand_variables_for_generation",
        to="self._expand_variables_per_sequence",
        arguments={"kwargs": "kwargs"},
        reason="`generate` expands the rows itself and forgets there how many sequences were asked for",
    ),
    RedirectCall(
        path=WHISPER_FILE,
        scope=WHISPER_GENERATE,
        call="self.generate_with_fallback",
        to="self._generate_rows_with_fallback",
        arguments={"current_segments": "current_segments"},
        reason="outputs of the encoder are kept while a row may need them, and rows that are equal are told apart",
    ),
    RedirectCall(
        path=WHISPER_FILE,
        scope="WhisperGenerationMixin.generate_with_fallback",
        call="super().generate",
        to="self._generate_segment",
        arguments={"row_indices": "[batch_idx_map[i] for i in fallback_index_map]", "seek": "seek"},
        reason="rows of one audio are decoded together: one run of the encoder, one beam search",
    ),
    RedirectCall(
        path=WHISPER_FILE,
        scope="WhisperGenerationMixin.generate_with_fallback",
        call="self._postprocess_outputs",
        to="self._postprocess_rows",
        arguments={"row_indices": "[batch_idx_map[i] for i in fallback_index_map]"},
        reason="token timestamps need the audio lengths of the rows that fell back, not of all rows",
    ),
    RedirectCall(
        path=WHISPER_FILE,
        scope=WHISPER_GENERATE,
        call="self._stack_split_outputs",
        to="self._stack_segment_outputs",
        reason="`scores` must keep one row per beam: `compute_transition_scores` selects them by `beam_indices`",
    ),
]

# Models that cache latents and expand them in each step: (model, attention module, arguments of its `expand_kv`)
LATENT_ATTENTION = (
    ("axk1", "AXK1Attention", "kv_nope, k_rot"),
    ("axk2", "AXK2Attention", "k_pass, k_rot"),
    ("bailing_hybrid", "BailingHybridAttention", "kv_nope, k_rot"),
    ("deepseek_v2", "DeepseekV2Attention", "k_nope, k_pe"),
    ("deepseek_v3", "DeepseekV3Attention", "kv_nope, k_rot"),
    ("deepseek_v32", "DeepseekV32Attention", "k_pass, k_rot"),
    ("dots3_note", "Dots3NoteTextAttention", "k_pass, k_rot"),
    ("glm4_moe_lite", "Glm4MoeLiteAttention", "kv_nope, k_rot"),
    ("glm5_next", "Glm5NextTextAttention", "k_pass, k_rot"),
    ("glm_moe_dsa", "GlmMoeDsaAttention", "k_pass, k_rot"),
    ("hy_v4", "HYV4Attention", "k_pass, k_rot"),
    ("hy_v4_vl", "HYV4VLAttention", "k_pass, k_rot"),
    ("kimi_linear", "KimiLinearAttention", "kv_nope, k_rot"),
    ("longcat_flash", "LongcatFlashMLA", "k_pass, k_rot"),
    ("minicpm3", "MiniCPM3Attention", "k_pass, k_rot"),
    ("mistral4", "Mistral4Attention", "k_pass, k_rot"),
    ("mistral_large4", "MistralLarge4TextAttention", "k_pass, k_rot"),
    ("youtu", "YoutuAttention", "kv_nope, k_rot"),
)

SHARE_EDITS = [
    AddToDocstring(
        path="generation/configuration_utils.py",
        scope="GenerationConfig",
        before='- `"auto"` takes the cheapest way that works, and logs it with the reason at level info.',
        text='- `"share"` forwards the prompt once and stores its keys and values once.',
        is_entry=False,
        reason="the knob is documented where all others are",
    ),
    AddImport(
        path="cache_utils.py",
        after=".utils",
        statement="from .prefix_sharing import private_index",
        reason="segmented states remember what they found out about the beam indices of a step",
    ),
    ReplaceStatement(
        path="cache_utils.py",
        scope="Cache.reorder_cache",
        old="self.layers[layer_idx].reorder_cache(beam_idx)",
        new="""
            beam_idx = private_index(beam_idx)
            self.layers[layer_idx].reorder_cache(beam_idx)
        """,
        reason="segmented states remember what they found out about the beam indices of a step",
    ),
    *(
        edit
        for model, attention, arguments in LATENT_ATTENTION
        for edit in (
            AddImport(
                path=f"models/{model}/modeling_{model}.py",
                after="...cache_utils",
                statement="from ...prefix_sharing import map_segments",
                reason="latents of a shared prompt are expanded once",
            ),
            ReplaceExpression(
                path=f"models/{model}/modeling_{model}.py",
                scope=f"{attention}.forward",
                old=f"self.expand_kv({arguments})",
                new=f"map_segments(self.expand_kv, {arguments})",
                reason="latents of a shared prompt are expanded once, in place of once per row",
            ),
        )
    ),
]

EDITS: list[Edit] = [
    *GENERATION_EDITS,
    *CACHE_EDITS,
    *STATE_EDITS,
    *GUIDANCE_EDITS,
    *WHISPER_EDITS,
    *GROUP_BEAM_SEARCH_EDITS,
    *SHARE_EDITS,
]
