"""Processors of tiny models that see or hear, made here: a tokenizer of letters and the model's own image processor."""

from __future__ import annotations

from typing import Any

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}{image}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WORDS = (
    "<|im_start|>", "<|im_end|>", "<image>", "<start_of_image>", "<end_of_image>", "<image_soft_token>", "[IMG]",
    "[IMG_BREAK]", "[IMG_END]", "<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>",
    "<|tile_y_separator|>",
)  # fmt: skip


def letters(special: tuple[str, ...] = _WORDS, **named: str) -> Any:
    """A fast tokenizer of bytes with the special tokens of chats and images."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<pad>", extra_special_tokens=list(special)
    )
    for name, word in named.items():
        setattr(tokenizer, name, word)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(word))
    return tokenizer


def llava() -> Any:
    from transformers import CLIPImageProcessor, LlavaProcessor

    tokenizer = letters(image_token="<image>")
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return LlavaProcessor(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=CHAT.replace("{image}", "<image>\n"),
    )  # fmt: skip


def gemma3() -> Any:
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = letters(**named)
    images = Gemma3ImageProcessor(size={"height": 32, "width": 32})
    return Gemma3Processor(
        images, tokenizer, image_seq_length=4, chat_template=CHAT.replace("{image}", "<start_of_image>")
    )


def llava_next() -> Any:
    from transformers import LlavaNextImageProcessor, LlavaNextProcessor

    side = {"height": 32, "width": 32}
    images = LlavaNextImageProcessor(
        size={"shortest_edge": 32}, crop_size=side, image_grid_pinpoints=[[32, 64], [64, 32], [64, 64]]
    )
    return LlavaNextProcessor(
        images, letters(image_token="<image>"), patch_size=8, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=CHAT.replace("{image}", "<image>\n"),
    )  # fmt: skip


def pixtral() -> Any:
    from transformers import PixtralImageProcessor, PixtralProcessor

    images = PixtralImageProcessor(size={"longest_edge": 64}, patch_size={"height": 16, "width": 16})
    return PixtralProcessor(
        images, letters(), patch_size=8, spatial_merge_size=2, chat_template=CHAT.replace("{image}", "[IMG]")
    )


def llama4() -> Any:
    from transformers import Llama4ImageProcessor, Llama4Processor

    images = Llama4ImageProcessor(size={"height": 32, "width": 32}, max_patches=4)
    return Llama4Processor(images, letters(), patch_size=8, chat_template=CHAT.replace("{image}", "<|image|>"))
