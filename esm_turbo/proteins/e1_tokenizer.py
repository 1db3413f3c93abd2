"""The tokenizer of E1, which transformers does not have."""

from __future__ import annotations

import os
from typing import Any, Self

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast
from transformers.utils import cached_file

from esm_turbo.files.families import FAMILIES

_WHERE = ("cache_dir", "local_files_only", "token", "revision", "subfolder")
_SPECIAL = ("cls_token", "eos_token", "pad_token", "mask_token")


class E1Tokenizer(PreTrainedTokenizerFast):
    """Residues to ids, one token each, between `<bos> 1` and `2 <eos>`; `?` is the mask.

    Published repositories hold the weights and `config.json` alone: without a `tokenizer.json` the vocabulary is that
    of every E1 model.
    """

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Self:
        """Load `tokenizer.json` from a folder or the hub, where there is one."""
        known = FAMILIES["E1"].vocabulary
        ids = {token: index for index, token in enumerate(known.tokens)}
        special = {name: getattr(known, name.removesuffix("_token")) for name in _SPECIAL} | {"unk_token": "X"}
        where = {name: value for name, value in kwargs.items() if name in _WHERE}
        file = cached_file(name_or_path, "tokenizer.json", _raise_exceptions_for_missing_entries=False, **where)
        if file is None:
            tokenizer = cls(tokenizer_object=Tokenizer(BPE(ids, merges=[], unk_token="X")), **special)
        else:
            tokenizer = super().from_pretrained(name_or_path, *args, **(special | kwargs))
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=" ".join([*known.before, "$A", *known.after]),
            special_tokens=[(token, ids[token]) for token in (*known.before, *known.after)],
        )
        return tokenizer
