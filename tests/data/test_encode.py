"""Ids made without masks and offsets are the tokenizer's own."""

from __future__ import annotations

import copy
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from cases import every_case
from toolkit.data.encode import Encoder, rust_tokenizer

TEXTS = [
    "the loss of a rank is reduced", "", " ", "Gradients, gradients; GRADIENTS!", "naïve Straße 東京 🏖️\n\ttab",
    "a</s>b <s> c", "step " * 300, "\u0000 \u200b", "e\u0301 é",
]  # fmt: skip


def _bpe() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    )
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def _wordpiece() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    made.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=special))
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]")


def _unigram() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.Unigram())
    made.normalizer, made.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>")
    made.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="</s>")


def _limited() -> PreTrainedTokenizerFast:
    """Its file says to cut and to pad, which a call of transformers' turns off."""
    made = _bpe()
    made.backend_tokenizer.enable_truncation(4)
    made.backend_tokenizer.enable_padding(length=9)
    return made


def _split() -> PreTrainedTokenizerFast:
    made = _bpe()
    made.split_special_tokens = True
    return made


@every_case("make", [_bpe, _wordpiece, _unigram, _limited, _split])
def test_ids_are_those_of_the_tokenizers_call(make: Any) -> None:
    tokenizer = make()
    encode = Encoder(copy.deepcopy(tokenizer))  # an own one: calls change what it cuts and pads
    assert rust_tokenizer(tokenizer) is not None
    expected = [tokenizer(text)["input_ids"] for text in TEXTS]
    assert [encode(text) for text in TEXTS] == expected
    assert [encode(text) for text in TEXTS] == expected
    assert max(map(len, expected)) > 9


def test_whoever_has_truncated_meanwhile_changes_nothing() -> None:
    tokenizer = _bpe()
    encode = Encoder(tokenizer)
    expected = encode(TEXTS[0])
    tokenizer(TEXTS[0], truncation=True, max_length=2)
    assert len(encode(TEXTS[0])) == len(expected) > 2


def test_a_tokenizer_with_code_of_its_own_runs_it() -> None:
    class Own(PreTrainedTokenizerFast):
        def _encode_plus(self, *args: Any, **kwargs: Any) -> Any:
            found = super()._encode_plus(*args, **kwargs)
            found["input_ids"] = [7, *found["input_ids"]]
            return found

    tokenizer = Own(tokenizer_object=_bpe().backend_tokenizer, eos_token="</s>")
    assert rust_tokenizer(tokenizer) is None
    encode = Encoder(tokenizer)
    assert [encode(text)[0] for text in TEXTS] == [7] * len(TEXTS)


def test_any_callable_is_called() -> None:
    encode = Encoder(lambda text, verbose: {"input_ids": [len(text)]})
    assert [encode(text) for text in ("a", "bc")] == [[1], [2]]
