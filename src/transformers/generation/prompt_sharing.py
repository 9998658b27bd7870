# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Prompt sharing: after a prefill on B rows, the prompt's keys and values stay stored once, for all N rows of an item.
`prompt_expansion="share"`, one more strategy beside those of [`PrefillMixin`].
"""

from typing import TYPE_CHECKING, Any

from ..cache_utils import DynamicCache, StaticCache
from ..prefix_sharing.caches import materialize_cache, share_cache, why_not_share
from ..utils import ModelOutput
from .prefill import PrefillMixin, outermost_caches


if TYPE_CHECKING:
    from .configuration_utils import GenerationConfig


class PromptSharingMixin(PrefillMixin):
    """The part of [`GenerationMixin`] that shares a prompt's cache among rows in place of repeating it."""

    def _choose_cache_expansion(
        self, requested: str, expand_size: int, generation_config: "GenerationConfig", model_kwargs: dict[str, Any]
    ) -> tuple[str, str]:
        if requested == "copy" or expand_size == 1:
            return super()._choose_cache_expansion(requested, expand_size, generation_config, model_kwargs)
        obstacle = self._why_not_share(generation_config, model_kwargs)
        if obstacle is None and requested == "auto" and generation_config.cache_implementation == "static":
            # Who asks for a static cache wants shapes that stay, also from one prompt to the next
            obstacle = "decoding would be compiled for the length of each prompt; ask for 'share' if that is fine"
        return ("share", "the prompt's cache can be shared") if obstacle is None else ("copy", obstacle)

    def _why_not_share(self, generation_config: "GenerationConfig", model_kwargs: dict[str, Any]) -> str | None:
        """Returns what stands in the way of storing the prompt's keys and values once, or `None` if nothing does."""
        if not generation_config.use_cache:
            return "there is no cache"
        if generation_config.output_attentions:
            return "attention weights are asked for"
        if (implementation := generation_config.cache_implementation) not in (None, "dynamic", "static"):
            return f"a {implementation!r} cache can't be shared"
        cache = model_kwargs.get("cache")
        if cache is None:
            if not self._supports_default_dynamic_cache():
                return "the model doesn't keep keys and values in a `DynamicCache`"
            # What `generate` is going to make. In an encoder-decoder model, cross-attention gets plain layers beside it
            config = self.config.get_text_config(decoder=True)
            cache = StaticCache(config, max_cache_len=1) if implementation == "static" else DynamicCache(config=config)
        return why_not_share(self, cache)

    def _expand_cache(self, cache: Any, expand_size: int, generation_config: "GenerationConfig") -> None:
        if generation_config.prompt_expansion == "share":
            share_cache(cache, expand_size, self)
        else:
            super()._expand_cache(cache, expand_size, generation_config)

    @staticmethod
    def _materialize_returned_cache(generation_config: "GenerationConfig", result: Any, cache: Any) -> None:
        """Gives a shared cache the layout of B * N rows if the caller gets it back."""
        if generation_config.prompt_expansion != "share":
            return
        returned = [result.get("cache")] if isinstance(result, ModelOutput) else []
        if getattr(cache, "_is_user_defined", False):
            returned.append(cache)
        for cache in outermost_caches(*returned):
            materialize_cache(cache)
